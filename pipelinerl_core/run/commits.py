"""The commits of a run that count, read when they are used and kept within a limit of memory."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping

from pipelinerl_core.errors import MissingObject, StoreUnavailable
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.run.compacted import CommitListing, StepRange, decode_commits, list_commits
from pipelinerl_core.run.history import counted_by_hub, counting, read_epochs, refuse_missing, refuse_shrunk
from pipelinerl_core.run.reading import read_record
from pipelinerl_core.run.records import Commit, EpochRecord, parse_commit_key

_DECODED_FILES = 4
"""Compacted objects of which the parsed commits are in memory."""
_FILE_BYTES = 128 << 20
"""Limit of compacted objects in memory as they are stored, so that most readers that pass over the commits several
times read each object once."""


class Commits(Mapping[int, Commit]):
    """Step -> commit that counts, by step. Reading an item may read the store. Not thread-safe."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.epochs: list[EpochRecord] = []
        """Every start of hub and trainer, as `read_commits` found them."""
        self._keys: dict[int, str] = {}
        self._originals: dict[str, Commit] = {}
        self._files: list[StepRange] = []
        self._file_of: dict[str, StepRange] = {}
        self._decoded: OrderedDict[StepRange, dict[str, Commit]] = OrderedDict()
        self._bytes: OrderedDict[StepRange, bytes] = OrderedDict()

    def select(self, chosen: Mapping[int, str], listing: CommitListing) -> None:
        """Set the commits that count: step -> key, by step, of commits in `listing`."""
        self._keys = dict(chosen)
        self._find_files(listing)

    @property
    def keys_by_step(self) -> Mapping[int, str]:
        """Step -> key of its commit."""
        return self._keys

    def newest(self, num: int) -> list[Commit]:
        return [self[step] for step in list(self._keys)[-num:]]

    def __getitem__(self, step: int) -> Commit:
        """Raises KeyError for a step without a commit, StoreError if the commit cannot be read."""
        key = self._keys[step]
        if key in self._originals:
            return self._originals[key]
        if key not in self._file_of:
            try:
                self._originals[key] = read_record(self._store, key, Commit)
                return self._originals[key]
            except MissingObject:  # compacted since the listing
                self._find_files(list_commits(self._store))
                if key not in self._file_of:
                    raise
        return self._read_file(self._file_of[key])[key]

    def __iter__(self) -> Iterator[int]:
        return iter(self._keys)

    def __reversed__(self) -> Iterator[int]:
        return reversed(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def _find_files(self, listing: CommitListing) -> None:
        if listing.files != self._files:
            self._files = listing.files
            self._file_of = {key: file for file in listing.files for key in file.commit_keys()}
            self._originals = {key: commit for key, commit in self._originals.items() if key not in self._file_of}

    def _read_file(self, file: StepRange) -> dict[str, Commit]:
        if file in self._decoded:
            self._decoded.move_to_end(file)
            return self._decoded[file]
        data = self._bytes.get(file)
        if data is None:
            data = self._bytes[file] = self._store.get(file.commits_key)
            while sum(map(len, self._bytes.values())) > _FILE_BYTES and len(self._bytes) > 1:
                self._bytes.popitem(last=False)
        commits = self._decoded[file] = decode_commits(data, file, f"{self._store.url}/{file.commits_key}")
        while len(self._decoded) > _DECODED_FILES:
            self._decoded.popitem(last=False)
        return commits


def read_commits(store: ObjectStore) -> Commits:
    """The commits that count."""
    return _selected(store, list_commits(store))  # listed before the epochs (see `counting`)


def read_all_commits(store: ObjectStore) -> Commits:
    """The commits that count, without a gap. Raises StoreUnavailable if the store lists fewer than before.

    Listed twice, because one wrong listing must not lose steps; a third time, because a trainer may adopt a commit
    between the listing and the reading of the epochs.
    """
    counted, known = counted_by_hub(store), _steps_of(list_commits(store))
    for is_last in (False, True):
        listing = list_commits(store)  # before the epochs (see `counting`)
        commits = _selected(store, listing)
        try:
            refuse_shrunk(store, _steps_of(listing), known)
            refuse_missing(store, commits.keys_by_step, commits.epochs, counted)
            break
        except StoreUnavailable:
            if is_last:
                raise
    return commits


def _steps_of(listing: CommitListing) -> set[int]:
    keys = listing.keys()
    return {parse_commit_key(key)[0] for key in keys}


def _selected(store: ObjectStore, listing: CommitListing) -> Commits:
    commits = Commits(store)
    commits.epochs = read_epochs(store)
    commits.select(counting(listing.keys(), commits.epochs), listing)
    return commits
