"""Copies a whole run to another root, also a live run, and checks the copy.

The order of the folders makes the copy of a live run consistent: checkpoints come before the commits, because a start
trains every batch after a checkpoint again and needs these commits; batches and rollouts come after the commits that
name them, and compacted objects after those that they replace. run.json is copied last, so that an incomplete copy is
not listed as a run. Every object is read back from the other root and its digest compared, because
a store's own digest does not exist in a directory and is no digest of the bytes for large objects on S3.

Objects by which a run looks live, and requests and notes that concern this place only, are not copied.
"""

import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from threading import Lock
from typing import Any

from pipelinerl_core.errors import ChecksumMismatch, ConfigError, MissingObject, PipelineRLError, StoreError
from pipelinerl_core.report.run_list import DAMAGE, Wanted
from pipelinerl_core.run.hub_status import HubWatch, read_hub_of_any_format
from pipelinerl_core.run.locate import refuse_if_live
from pipelinerl_core.run.reading import list_keys, parse_record
from pipelinerl_core.run.records import (
    BATCHES_PREFIX,
    COMMITS_PREFIX,
    COMPACTED_COMMITS_PREFIX,
    COMPACTED_ROLLOUTS_PREFIX,
    CONTROL_KEY,
    EVALS_PREFIX,
    GARBAGE_KEY,
    HUB_KEY,
    RENDEZVOUS_PREFIX,
    RETIRED_PREFIX,
    ROLES_PREFIX,
    RUN_KEY,
    EpochRecord,
)
from pipelinerl_core.storage.digests import digest
from pipelinerl_core.storage.exclusive import MARKS_PREFIX
from pipelinerl_core.storage.object_store import Store, open_store
from pipelinerl_core.tools.retention import (
    Advance,
    Removal,
    as_error,
    in_parallel,
    refuse_foreign,
    remove_runs,
    run_id_of,
)

_ORDER = (
    "checkpoints", COMMITS_PREFIX, COMPACTED_COMMITS_PREFIX, "epochs", "weights", "code", BATCHES_PREFIX, "rollouts",
    COMPACTED_ROLLOUTS_PREFIX, "partials", RETIRED_PREFIX, EVALS_PREFIX, "",
)  # fmt: skip
"""Folders in the order in which they are copied; "": everything else. Weights follow the commits closely: a live run
removes those of all but its newest versions."""
_CHECK = "check-"
"""Prefix of the key that tests whether two URLs name the same place."""
_LEFT_OUT = (
    HUB_KEY, CONTROL_KEY, GARBAGE_KEY, f"{ROLES_PREFIX}/", f"{RENDEZVOUS_PREFIX}/", "broadcasts/", f"{MARKS_PREFIX}/",
    _CHECK,
)  # fmt: skip
_SAME_PLACE = "--to: {url} is at this place already. Give another root"
_PASSES = 3
"""Over a folder of which the live run removes objects during the copy."""
_LARGE_BYTES = 32 << 20
"""Larger objects are copied one after the other: each is in memory as a whole."""


class Archive:
    """The copy of a run at another root."""

    def __init__(self, url: str, to: str, *, removes: bool = False, wanted: Wanted | None = None) -> None:
        """List the objects; nothing is copied. to: URL of the other root. removes: the original is to be removed.

        wanted: the conditions that have selected the run. Raises ConfigError if the other root is the same root or
        inside a run, if a run that has gone on in another way is there, if the run has a link to a directory or
        another run inside, or, for a removal, if the run is live.
        """
        self.url = url
        self._source = open_store(url)
        self._target = open_store(to).child(run_id_of(url))
        if f"{self._target.url}/".startswith(f"{url}/"):
            raise ConfigError(_SAME_PLACE.format(url=url))
        _refuse_inside_run(to)
        refuse_foreign(self._source, self._source.list(""))
        self.removal = Removal(url, wanted) if removes else None
        self._is_live = HubWatch(self._source, read=read_hub_of_any_format).find_live() is not None
        _refuse_other_run(self._source, self._target)
        self.sizes: Mapping[str, int] = _listed(self._source)
        """Key -> bytes of each object of the copy; a live run has other objects later."""
        self.written: list[str] = []
        """Keys that `copy` has written; the other objects were there."""
        self.is_removed = False
        self._lock = Lock()
        self._is_listed = False

    def document(self) -> dict[str, Any]:
        """The run and its copy, as JSON values."""
        sizes = {"num_objects": len(self.sizes), "num_bytes": sum(self.sizes.values())}
        copy = {"copy": self._target.url, "num_written": len(self.written)}
        return {"run_id": run_id_of(self.url), "url": self.url, **copy, **sizes, "is_removed": self.is_removed}

    def copy(self, advance: Advance) -> None:
        """Copy and check the objects. advance: gets numbers of bytes. Can be repeated.

        Raises ConfigError if the run at the other root is live, ChecksumMismatch if an object differs in the copy,
        PipelineRLError if the objects of a stopped run change meanwhile.
        """
        refuse_if_live(self._target.url)
        self._refuse_same_place()
        there = {key: size for key, size in self._target.sizes("").items() if key != RUN_KEY}
        self._is_listed = self._target.exists(RUN_KEY)
        copied: dict[str, int] = {}
        for folder in _ORDER:
            self._copy_folder(folder, there, copied, advance)
        if not self._is_live and copied != {
            key: size for key, size in _listed(self._source).items() if key != RUN_KEY
        }:
            raise PipelineRLError(f"{self.url}: the objects of the run have changed during the copy: repeat it")
        self._copy_run_json(advance)
        self.sizes = {**copied, RUN_KEY: self.sizes.get(RUN_KEY, 0)}

    def check_removal(self) -> None:
        """Raise PipelineRLError if the original has an object that `copy` did not copy."""
        kept = self.removal.sizes if self.removal is not None else {}
        lacking = [key for key in kept if key not in self.sizes and not key.startswith(_LEFT_OUT)]
        if lacking:
            raise PipelineRLError(f"{self.url}/{lacking[0]} is not in the copy; nothing was removed: repeat the copy")

    def _refuse_same_place(self) -> None:
        """Raise ConfigError if both URLs name the same objects, such as through a link: a removal would lose them."""
        key = f"{_CHECK}{uuid.uuid4().hex}"
        self._target.put(key, b"")
        try:
            if self._source.exists(key):
                raise ConfigError(_SAME_PLACE.format(url=self.url))
        finally:
            self._target.delete([key])

    def _copy_folder(self, folder: str, there: Mapping[str, int], copied: dict[str, int], advance: Advance) -> None:
        """Copy the objects of a folder; again if the live run has removed some meanwhile, for their successors."""
        gone: set[str] = set()
        for _ in range(_PASSES):
            sizes = {key: size for key, size in _listed(self._source, folder).items() if key != RUN_KEY}
            # The newest first: of checkpoints, a live run removes the oldest.
            keys = sorted(sizes.keys() - copied.keys() - gone, reverse=True)
            small = [key for key in keys if sizes[key] <= _LARGE_BYTES]
            large = [key for key in keys if sizes[key] > _LARGE_BYTES]
            # Data before manifests, and whole versions before the differences from them.
            results = [self._copy_object(key, there, advance) for key in large]
            results += in_parallel(lambda key: self._copy_object(key, there, advance), small)
            done = dict(zip([*large, *small], results, strict=True))
            copied |= {key: size for key, size in done.items() if size is not None}
            gone |= {key for key, size in done.items() if size is None}
            if None not in done.values():
                return

    def _copy_run_json(self, advance: Advance) -> None:
        """Compare run.json if nothing was written, else write it."""
        known = {RUN_KEY: self._target.sizes("").get(RUN_KEY, -1)} if self._is_listed else {}
        self._copy_object(RUN_KEY, known, advance)

    def _unlist_target(self) -> None:
        """Remove run.json of an earlier copy before the first write: an interrupted copy is not listed as a run."""
        with self._lock:
            if self._is_listed:
                self._target.delete([RUN_KEY])
                self._is_listed = False

    def _copy_object(self, key: str, there: Mapping[str, int], advance: Advance) -> int | None:
        """Bytes of the object; None if a live run has removed the object since the listing."""
        try:
            data = self._source.get(key)
        except MissingObject:
            if not self._is_live:
                raise
            return None
        size, expected = len(data), digest(data)
        if there.get(key) != size or digest(self._target.get(key)) != expected:
            self._unlist_target()
            self._target.put(key, data)
            self.written.append(key)
            del data  # large objects: only one copy in memory
            if digest(self._target.get(key)) != expected:
                raise ChecksumMismatch(f"{self._target.url}/{key} does not read back as it was written")
        advance(size)
        return size


def archive_runs(archives: Iterable[Archive], advance: Callable[[str, int], None]) -> dict[str, PipelineRLError]:
    """Copy runs one after the other, and remove the originals that are to be removed: URL -> error.

    advance: gets the id of a run and numbers of bytes.
    """
    errors: dict[str, PipelineRLError] = {}
    for archive in archives:
        try:
            archive.copy(partial(advance, run_id_of(archive.url)))
            archive.check_removal()
        except (PipelineRLError, *DAMAGE) as error:
            errors[archive.url] = as_error(error)
            continue
        if archive.removal is not None:
            errors |= remove_runs([archive.removal], lambda *_: None)
            archive.is_removed = archive.url not in errors
    return errors


def _listed(store: Store, folder: str = "") -> dict[str, int]:
    return {key: size for key, size in store.sizes(folder).items() if not key.startswith(_LEFT_OUT)}


def _refuse_inside_run(root: str) -> None:
    """Raise ConfigError if a root is a run, or is inside of a run: a removal of that run would remove the copies."""
    url = open_store(root).url
    while url.partition("://")[2].strip("/"):
        with suppress(StoreError):  # a prefix above the root that this user may not list
            if open_store(url).exists(RUN_KEY):
                raise ConfigError(f"--to: {root} is inside the run {url}. Give another root")
        url = url.rpartition("/")[0]


def _refuse_other_run(source: Store, target: Store) -> None:
    """Raise ConfigError unless the run at `target` is missing, or an earlier or incomplete copy of `source`.

    A copy that was started has epochs that the source has not; the objects of both must not be mixed.
    """
    if target.exists(RUN_KEY) and target.get(RUN_KEY) != source.get(RUN_KEY):
        raise ConfigError(f"{target.url} is another run than {source.url}; archive to another root")
    own = list_keys(source, "epochs")
    for key in list_keys(target, "epochs"):
        data, own_data = target.get(key), source.get(key) if key in own else b""
        if data == own_data:
            continue
        record = parse_record(data, f"{target.url}/{key}", EpochRecord)
        started_at = parse_record(own_data, f"{source.url}/{key}", EpochRecord).started_at if own_data else None
        if not record.is_claim or record.started_at != started_at:  # a claim is written again after its adoption
            raise ConfigError(
                f"{target.url}: the run was started there after the copy, or {source.url} is older. Remove one of "
                "both with `pipelinerl rm`, or archive to another root"
            )
