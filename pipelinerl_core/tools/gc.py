"""Garbage collection of a run's objects, also of a live run; the audit closes before and after (docs/storage.md).

The first call notes what is garbage in garbage.json; a later call removes what was noted and still is garbage. So one
wrong answer of a store cannot delete what a run needs. What killed writers and runs have left (`unfinished`, shared
memory) does not depend on such answers and is removed at once.

Detection of a live run is not reliable: the hub may be restarting, a clock may be behind, the store may be slow.
Therefore objects that a run may write when it continues from the newest commit are never garbage: objects of later
steps stay until the run has passed these steps. If the run is started during the collection, nothing is removed.

On a live run, decisions that are LIVE_MARGIN steps older than the newest commit define the garbage: these are final,
because at most two steps are uncommitted and a new trainer adopts every commit whose writer has continued. A live
trainer removes its checkpoints itself.
"""

import functools
import shlex
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pipelinerl_core.config import RunConfig
from pipelinerl_core.data.codec import from_segment
from pipelinerl_core.data.partials import decode_partials
from pipelinerl_core.data.segments import parse_rollout_key
from pipelinerl_core.errors import BrokenRecord, MissingObject, PipelineRLError, SchemaMismatch, StoreError
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.run.commits import read_all_commits
from pipelinerl_core.run.compacted import list_commits
from pipelinerl_core.run.context import open_run
from pipelinerl_core.run.history import lost_commits, read_epochs
from pipelinerl_core.run.hub_status import HubWatch, refuse_second_hub
from pipelinerl_core.run.locate import abandoned_shared_memory, remove_left_shared_memory, shared_memory_of
from pipelinerl_core.run.reading import list_keys, read_record
from pipelinerl_core.run.records import (
    GARBAGE_KEY,
    RETIRED_PREFIX,
    Commit,
    GarbageRecord,
    batch_key,
    checkpoint_prefix,
    complete_checkpoints,
    log_key,
    parse_retired_key,
)
from pipelinerl_core.run.versions import bases_of, first_of_every, remove_weights, retained, stored_versions
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.supervision.log_copies import read_copies

LIVE_MARGIN = 10
"""Steps between the newest commit of a live run and the commit that defines the garbage."""


class _Named(NamedTuple):
    """The objects that a commit names. A run may have too many commits to keep them in memory."""

    step: int
    epoch: int
    weights_key: str | None

    @classmethod
    def of(cls, commit: Commit) -> "_Named":
        key = commit.manifest.key if commit.manifest is not None else None
        return cls(commit.step, commit.epoch, key)


class Collector:
    """Finds the garbage of a run, class by class; keys sorted by name."""

    def __init__(self, store: ObjectStore, config: RunConfig, *, is_live: bool = False) -> None:
        """Read every commit. is_live: the run may continue during the collection."""
        self._store = store
        self._config = config
        self._is_live = is_live
        commits = read_all_commits(store)
        self.epochs = commits.epochs
        """Epochs that define the counting commits; a newer epoch invalidates the collection."""
        if lost := lost_commits(list_commits(store).keys(), self.epochs):
            audit = f"`pipelinerl audit {shlex.quote(store.url)}`"
            raise StoreError(f"{store.url}: nothing is removed: {lost[0]}. See {audit}")
        self._commit_keys = set(commits.keys_by_step.values())
        self._commits = [_Named.of(commit) for commit in commits.values()]
        last = next(iter(commits.newest(1)), None)
        self._is_done = last is not None and last.step == config.trainer.steps and not is_live
        self._end = last.step if last is not None else -1
        """Objects of later steps are not garbage."""
        if last is not None and is_live:
            self._end -= LIVE_MARGIN
            last = next((commits[step] for step in reversed(commits) if step <= self._end), None)
        self._open = set(last.open_groups) if last is not None else set()
        self._frontier = last.next_group_id if last is not None else 0
        self._low_water = dict(last.low_water) if last is not None else {}

    def orphans(self) -> list[str]:
        """Objects of passed steps that no counting commit refers to."""
        if self._end < 0:
            return []
        kept = {f"{commit.weights_key}/" for commit in self._commits}
        kept |= {f"{checkpoint_prefix(commit.step, commit.epoch)}/" for commit in self._commits}
        kept |= {f"{batch_key(commit.step, commit.epoch, rank=0).rpartition('/')[0]}/" for commit in self._commits}
        orphans = [key for key in list_keys(self._store, "commits") if key not in self._commit_keys]
        for prefix in ("batches", "weights", "checkpoints"):
            orphans += [key for key in list_keys(self._store, prefix) if f"{key.rpartition('/')[0]}/" not in kept]
        if not self._is_done:
            # Weights of the last step stay, too: a starting trainer, or an actor that cannot read the weights, makes
            # the trainer publish the version again under a key that no commit names.
            orphans = [key for key in orphans if _step_of(key) <= self._end - key.startswith("weights/")]
        return sorted(orphans)

    def checkpoints(self) -> list[str]:
        """Checkpoints that neither a start nor a replay needs."""
        if self._is_live:
            return []
        keys = list_keys(self._store, "checkpoints")
        made = [f"{checkpoint_prefix(commit.step, commit.epoch)}/" for commit in self._commits]  # by step
        complete = {f"{checkpoint_prefix(ref.step, ref.epoch)}/" for ref in complete_checkpoints(keys)}
        usable = [prefix for prefix in made if prefix in complete]
        kept = first_of_every(map(_step_of, usable), self._config.checkpoint.keep_every)
        kept_every = [prefix for prefix in usable if _step_of(prefix) in kept]
        # If rows were removed, a start cannot train from step 0 should the newest checkpoint be damaged.
        needs_one = self._is_done and not self._config.store.keep_rows
        removed = set(made) - {*made[:1], *kept_every, *usable[-1 if needs_one else -2 :]}
        return [key for key in keys if f"{key.rpartition('/')[0]}/" in removed]

    def weights(self) -> list[str]:
        """Weights of committed versions that the run does not retain."""
        durable = [commit for commit in self._commits if commit.weights_key is not None]
        newest = max((commit.step for commit in self._commits), default=-1)
        kept = retained(self._config, {*(commit.step for commit in durable), *stored_versions(self._store, newest)})
        keys = list_keys(self._store, "weights")
        kept |= bases_of(kept, keys)
        doomed = {f"{commit.weights_key}/" for commit in durable if commit.step not in kept}
        return [key for key in keys if f"{key.rpartition('/')[0]}/" in doomed]

    def partials(self) -> list[str]:
        """Logs without an open group."""
        keys = list_keys(self._store, "partials")
        return keys if self._is_done else [key for key in keys if not self._is_open(self._logged(key))]

    def logs(self) -> list[str]:
        """Copies of logs that a newer copy of the same role from another host follows.

        None of a live run: the clocks of its hosts may differ.
        """
        if self._is_live:
            return []
        copies = read_copies(self._store)
        newest = {copy.name: copy.host for copy in copies}
        return [log_key(copy.name, copy.host) for copy in copies if newest[copy.name] != copy.host]

    def rollouts(self) -> list[str]:
        """Segments in which every group is decided: below the low-water marks, and of retired actor epochs."""
        decided = []
        retired = {parse_retired_key(key) for key in list_keys(self._store, RETIRED_PREFIX)}
        for key in list_keys(self._store, "rollouts"):
            name = parse_rollout_key(key)
            mark = self._low_water.get(f"{name.actor}/{name.epoch}")
            is_retired = (name.actor, name.epoch) in retired
            if self._is_done or is_retired or (mark is not None and name.seq < mark):
                decided.append(key)
        return decided

    def _is_open(self, groups: Iterable[int]) -> bool:
        return any(group_id in self._open or group_id >= self._frontier for group_id in groups)

    def _logged(self, key: str) -> set[int]:
        try:
            batches = from_segment(self._store.get(key), key)
            return {row.group_id for batch in batches for row in decode_partials(batch)}
        except (SchemaMismatch, MissingObject):
            return set()  # an incomplete log, from which no actor can continue a group, or removed since the listing


def _step_of(key: str) -> int:
    """Step of a key <class>/<step>.<k>...; -1 for any other key."""
    digits = key.split("/")[1].partition(".")[0]
    return int(digits) if digits.isdecimal() else -1


class Garbage:
    """What a collection of one run removes, and the removal."""

    def __init__(
        self, store: ObjectStore, config: RunConfig, *, with_rollouts: bool, is_live: bool, now: bool
    ) -> None:
        """Find the garbage; nothing is removed.

        now: also what no earlier call has noted. Raises StoreUnavailable if a commit is missing.
        """
        self.url = store.url
        self._store = store
        self._is_live = is_live
        self._collector = collector = Collector(store, config, is_live=is_live)
        self.keys = {
            "orphans": collector.orphans(),
            "checkpoints": collector.checkpoints(),
            "weights": collector.weights(),
            "partials": collector.partials(),
            "logs": collector.logs(),
        }
        """Class -> keys that `remove` deletes."""
        if with_rollouts:
            self.keys["rollouts"] = collector.rollouts()
        self.noted: list[str] = []
        """Keys that the next call deletes if they still are garbage."""
        if not now:
            before = _read_noted(store)
            self.noted = sorted(key for keys in self.keys.values() for key in keys if key not in before)
            if not with_rollouts:  # a call without --rollouts does not look at segments
                self.noted += sorted(key for key in before if key.startswith("rollouts/"))
            self.keys = {name: [key for key in keys if key in before] for name, keys in self.keys.items()}
        self.unfinished = store.unfinished()
        """Name -> bytes of leftovers of unfinished writes."""

    def remove(self) -> None:
        """Delete `keys` and `unfinished`, and write `noted`. Raises PipelineRLError if a stopped run was started."""
        if not self._is_live:
            _refuse_started(self._store, self._collector)
        self._store.put(GARBAGE_KEY, GarbageRecord(at=time.time(), keys=tuple(self.noted)).model_dump_json().encode())
        for name, keys in self.keys.items():
            if name == "weights":
                remove_weights(self._store, keys)
            else:
                self._store.delete(keys)
        self._store.discard(self.unfinished)

    def classes(self) -> dict[str, list[str]]:
        """Class -> names of the objects that `remove` removes."""
        return {**self.keys, "unfinished": [*self.unfinished]}

    @functools.cached_property
    def num_bytes(self) -> dict[str, int]:
        """Class -> bytes that `remove` frees; lists the folders of these objects."""
        folders = {key.partition("/")[0] for keys in self.keys.values() for key in keys}
        sizes = {key: size for folder in folders for key, size in self._store.sizes(folder).items()}
        of_keys = {name: sum(sizes.get(key, 0) for key in keys) for name, keys in self.keys.items()}
        return {**of_keys, "unfinished": sum(self.unfinished.values())}

    def document(self) -> dict[str, Any]:
        """The run and what `remove` removes, as JSON values."""
        classes = self.classes()
        return {
            "run_id": self.url.rpartition("/")[2],
            "url": self.url,
            "num_objects": sum(map(len, classes.values())),
            "num_bytes": sum(self.num_bytes.values()),
            "bytes": self.num_bytes,
            **classes,
            "noted": self.noted,
        }


def find_garbage(url: str, *, with_rollouts: bool, now: bool) -> Garbage:
    """The garbage of the run at a URL, which may be live."""
    context = open_run(url)
    is_live = HubWatch(context.store).find_live() is not None
    garbage = Garbage(context.store, context.config, with_rollouts=with_rollouts, is_live=is_live, now=now)
    garbage.num_bytes  # noqa: B018 - the listings belong to the search
    return garbage


def collect(
    store: ObjectStore,
    config: RunConfig,
    *,
    with_rollouts: bool,
    dry_run: bool,
    is_live: bool = False,
    now: bool = False,
) -> dict[str, list[str]]:
    """Class -> removed keys (`dry_run`: garbage). `noted`: keys that the next call removes if they still are garbage.

    is_live: the run is live at the beginning. Otherwise PipelineRLError if the run is started; nothing is removed.
    now: remove all garbage at once. Raises StoreUnavailable if a commit is missing.
    """
    garbage = Garbage(store, config, with_rollouts=with_rollouts, is_live=is_live, now=now or dry_run)
    if not dry_run:
        garbage.remove()
    return {**garbage.classes(), "noted": garbage.noted}


def _read_noted(store: ObjectStore) -> set[str]:
    try:
        return set(read_record(store, GARBAGE_KEY, GarbageRecord).keys)
    except (MissingObject, BrokenRecord):  # then this call notes, and removes nothing
        return set()


def find_shared_memory(root: str) -> dict[str, int]:
    """Directory -> bytes of this host's shared memory, of killed runs under a root."""
    return {str(directory): _size_of(directory) for directory in abandoned_shared_memory(root)}


def delete_shared_memory(root: str, directories: Mapping[str, int]) -> dict[str, int]:
    """Remove results of `find_shared_memory` that no process has begun to use since; those that are gone."""
    base = open_store(root)
    for directory in directories:
        run_id = Path(directory).name.removeprefix(shared_memory_of("").name)
        with suppress(StoreError, OSError):  # a run that cannot be read keeps its directory
            remove_left_shared_memory(base.child(run_id), run_id)
    return {directory: size for directory, size in directories.items() if not Path(directory).exists()}


def _size_of(directory: Path) -> int:
    sizes = []
    for path in directory.rglob("*"):
        with suppress(OSError):
            sizes.append(path.lstat().st_size * path.is_file())
    return sum(sizes)


def _refuse_started(store: ObjectStore, collector: Collector) -> None:
    refuse_second_hub(store)
    if read_epochs(store) != collector.epochs:  # a hub takes its epoch long before its first heartbeat
        raise PipelineRLError(f"{store.url}: the run was started during the collection; nothing was removed")
