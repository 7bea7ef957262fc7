"""Selection and removal of whole runs.

A removal deletes run.json last and the commits before it, so that an interrupted removal leaves a run that is listed
and can be removed by its name.

One wrong listing of commits makes a run older or stopped. Therefore a run that conditions have selected is read again
right before its removal, with the checks of gc.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from pipelinerl_core.errors import ConfigError, MissingObject, PipelineRLError, StoreError
from pipelinerl_core.report.run_list import DAMAGE, Wanted, age, list_run, list_runs
from pipelinerl_core.run.commits import read_all_commits
from pipelinerl_core.run.hub_status import HubWatch, read_hub_of_any_format, refuse_second_hub
from pipelinerl_core.run.locate import (
    LATEST_KEY,
    local_directory,
    locate_run,
    remember_latest,
    remove_left_shared_memory,
)
from pipelinerl_core.run.reading import list_keys, read_record
from pipelinerl_core.run.records import (
    COMMITS_PREFIX,
    COMPACTED_COMMITS_PREFIX,
    HUB_KEY,
    REPORT_JSON_KEY,
    RESUME_KEY,
    RUN_KEY,
    STARTS_KEY,
    RunRecord,
    is_run_key,
)
from pipelinerl_core.storage.digests import digest
from pipelinerl_core.storage.local import FileStore
from pipelinerl_core.storage.object_store import Store, open_store

logger = logging.getLogger(__name__)

_STARTING_KEYS = (STARTS_KEY, RESUME_KEY)
"""A start or `resume` writes these before the hub takes its epoch."""
_LAST = (*_STARTING_KEYS, "epochs/", f"{COMPACTED_COMMITS_PREFIX}/", f"{COMMITS_PREFIX}/", RUN_KEY)
"""Prefixes of the keys that a removal deletes last, in this order."""
_STARTING_SECONDS = 120.0
"""A run that has no epoch and is younger may be starting: its hub takes its epoch after some seconds."""
_STARTED_SECONDS = 600.0
"""A start may load a model for so long before its hub."""
_EVALUATING_SECONDS = 3600.0
"""The flow of a run may evaluate the last version for so long before it writes the report."""
_DELETED_AT_ONCE = 256
"""Objects between two checks that the run was not started."""
_THREADS = 8

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
R = TypeVar("R")
Advance = Callable[[int], None]
"""Called with the number of objects or bytes that were done since the last call."""


def in_parallel(act: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """The results in order, from eight threads. After an error or an interrupt no further item begins."""
    threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="retention")
    try:
        yield from threads.map(act, items)
    finally:
        threads.shutdown(cancel_futures=True)


def attempt_each(act: Callable[[K], R], items: Iterable[K]) -> tuple[dict[K, R], dict[K, PipelineRLError]]:
    """Item -> result of `act`, and item -> error; the error of one item does not end the others."""

    def attempt(item: K) -> R | PipelineRLError:
        try:
            return act(item)
        except PipelineRLError as error:
            return error
        except DAMAGE as error:
            return as_error(error)

    named = list(items)
    pairs = list(zip(named, in_parallel(attempt, named), strict=True))
    results = {item: result for item, result in pairs if not isinstance(result, PipelineRLError)}
    return results, {item: result for item, result in pairs if isinstance(result, PipelineRLError)}


def as_error(error: Exception) -> PipelineRLError:
    """An error of one run, which does not end the others."""
    return error if isinstance(error, PipelineRLError) else PipelineRLError(f"{type(error).__name__}: {error}")


def run_id_of(url: str) -> str:
    """The id of the run at a URL."""
    return url.rpartition("/")[2]


def select_runs(
    root: str, names: Sequence[str], wanted: Wanted, *, only_own: bool = False
) -> tuple[list[str], dict[str, PipelineRLError]]:
    """URLs of the named runs, else of the wanted runs of a root; and errors: names without a run, unreadable runs.

    Whether an unreadable run is wanted cannot be decided, so that it is selected only by its name or its state.
    only_own: `latest` is never the run of another user. Raises ConfigError if the root is no directory.
    """
    if names:
        located, errors = attempt_each(lambda name: locate_run(name, root, only_own=only_own), dict.fromkeys(names))
        return list(dict.fromkeys(located.values())), errors
    directory = local_directory(root)
    if directory is not None and not directory.is_dir():
        raise ConfigError(f"the root {root} is no directory")
    is_decided = wanted.state == "unreadable"
    runs = list_runs(open_store(root), wanted=wanted, with_unreadable=not is_decided)
    left_out = (
        {} if is_decided else {run.url: StoreError(f"unreadable: {run.problem}") for run in runs if run.problem}
    )
    return [run.url for run in runs if run.url not in left_out], {**left_out}


class StoppedRun:
    """Checks that a run is not live, and later that the run was not started in the meantime."""

    def __init__(self, store: Store) -> None:
        """Raises ConfigError if the run is live or may be starting."""
        self._store = store
        self._epochs = list_keys(store, "epochs")  # a hub takes its epoch long before its first heartbeat
        self._starts = _starts(store)
        self._watch = HubWatch(store, read=read_hub_of_any_format)
        refuse_second_hub(store, ConfigError, watch=self._watch)
        if not self._epochs and _age_seconds(store) < _STARTING_SECONDS:
            raise ConfigError(
                f"{store.url}: the run was created a moment ago and may be starting; try again in two minutes"
            )
        run = list_run(store)
        is_new = run is not None and run.state == "finished" and time.time() - run.active_at < _EVALUATING_SECONDS
        if run is not None and is_new and _reported_step(store) < run.step:
            raise ConfigError(
                f"{store.url}: the last step was committed a moment ago and the run has no report: its flow may be "
                "evaluating; try again when it has its report, or in an hour"
            )
        if _seconds_without_hub(store) < _STARTED_SECONDS:
            raise ConfigError(
                f"{store.url}: the run was started a moment ago and has no hub yet; try again in ten minutes"
            )

    def check(self) -> None:
        """Raise ConfigError or PipelineRLError if the run was started since."""
        refuse_second_hub(self._store, ConfigError, watch=self._watch)
        if list_keys(self._store, "epochs") != self._epochs or _starts(self._store) != self._starts:
            raise PipelineRLError(f"{self._store.url}: the run was started meanwhile; it is not removed")


def _reported_step(store: Store) -> int:
    """The last step in report.json; -1 without a report that can be read."""
    try:
        return int(json.loads(store.get(REPORT_JSON_KEY))["steps"])
    except (MissingObject, ValueError, KeyError, TypeError):
        return -1


def _starts(store: Store) -> list[str]:
    """Digests of the objects that a start writes before it has an epoch."""
    digests = []
    for key in _STARTING_KEYS:
        try:
            digests.append(digest(store.get(key)))
        except MissingObject:
            digests.append("")
    return digests


def _seconds_without_hub(store: Store) -> float:
    """Seconds since a start from which no hub has come yet; infinite if there is none."""
    started_at = store.written_at(STARTS_KEY)
    has_hub = store.written_at(HUB_KEY) >= started_at
    return math.inf if has_hub or not started_at else time.time() - started_at


def refuse_foreign(store: Store, keys: Iterable[str]) -> None:
    """Raise ConfigError for links that listings do not follow, and for another run inside the run."""
    if isinstance(store, FileStore) and (link := store.find_link()) is not None:
        raise ConfigError(f"{link} is a link that listings do not follow: name its target, or replace it by files")
    if inner := next((key for key in keys if key.endswith(f"/{RUN_KEY}")), None):
        raise ConfigError(f"{store.url} has another run inside, {inner}: move it to another place first")


def _age_seconds(store: Store) -> float:
    try:
        return time.time() - read_record(store, RUN_KEY, RunRecord).created_at
    except StoreError:  # an unreadable run
        return _STARTING_SECONDS


class Removal:
    """What the removal of a run will free, and the removal."""

    def __init__(self, url: str, wanted: Wanted | None = None) -> None:
        """List the objects; nothing is removed. wanted: the conditions that have selected the run.

        Raises ConfigError if the run is live, has a link to a directory, or has another run inside.
        """
        self.url = url
        self.store = open_store(url)
        self._wanted = wanted
        listed = self.store.sizes("")
        refuse_foreign(self.store, listed)
        self._run = StoppedRun(self.store)
        self._unfinished = self.store.unfinished()
        self.sizes: Mapping[str, int] = {key: size for key, size in listed.items() if is_run_key(key)}
        """Key -> bytes of each object of the run."""
        self.kept = sorted(listed.keys() - self.sizes.keys())
        """Objects that are not the run's; they stay."""
        self._origin = origin_of(self.store)

    def document(self) -> dict[str, Any]:
        """The run, and what its removal frees, with leftovers of unfinished writes, as JSON values."""
        return {
            "run_id": run_id_of(self.url),
            "url": self.url,
            "num_objects": len(self.sizes) + len(self._unfinished),
            "num_bytes": sum(self.sizes.values()) + sum(self._unfinished.values()),
            **self._origin,
            "kept": self.kept,
        }

    def remove(self, advance: Advance) -> None:
        """Delete the run, and its shared memory on this host. advance: gets numbers of objects.

        Raises ConfigError or PipelineRLError if the run was started since, PipelineRLError if objects have changed
        since or the conditions do not hold any more; run.json is there then.
        """
        self._run.check()
        if self._wanted:
            self._refuse_unwanted(self._wanted)
        if self._own_sizes() != self.sizes:
            raise PipelineRLError(f"{self.url}: objects have changed since they were listed; nothing was removed")
        remove_left_shared_memory(self.store, run_id_of(self.url))
        self.store.discard(self._unfinished)
        advance(len(self._unfinished))
        last = [key for prefix in _LAST for key in self.sizes if key.startswith(prefix)]
        keys = sorted(self.sizes.keys() - set(last))
        for at in range(0, len(keys), _DELETED_AT_ONCE):
            self._run.check()
            for _ in in_parallel(lambda key: self.store.delete([key]), keys[at : at + _DELETED_AT_ONCE]):
                advance(1)
        self._run.check()
        left = self._own_sizes()
        if new := sorted(key for key, size in left.items() if self.sizes.get(key) != size):
            raise PipelineRLError(f"{self.url}: {new[0]} was written during the removal: remove the run again")
        for key in last:
            self.store.delete([key])
            advance(1)
        if isinstance(self.store, FileStore):
            self.store.remove_empty("")

    def _own_sizes(self) -> dict[str, int]:
        return {key: size for key, size in self.store.sizes("").items() if is_run_key(key)}

    def _refuse_unwanted(self, wanted: Wanted) -> None:
        """Raise PipelineRLError if the conditions do not hold when the commits are listed again, without a gap."""
        run = list_run(self.store, read_all_commits(self.store))
        if run is None or run.problem or not wanted.matches(run):
            state = "is missing" if run is None else f"is {run.state}, last active {age(run.active_at) or 'never'}"
            raise PipelineRLError(
                f"{self.url}: the run {state}, so that the conditions do not hold; nothing was removed. "
                "The store may have answered wrongly: try again, or name the run"
            )


def origin_of(store: Store) -> dict[str, Any]:
    """Whose the run is, its state and its last activity, for the question before a removal."""
    run = list_run(store)
    if run is None:
        return {"owner": "", "state": "unreadable", "active_at": 0.0}
    return {"owner": run.owner, "state": run.state, "active_at": run.active_at}


def remove_runs(removals: Iterable[Removal], advance: Callable[[str, int], None]) -> dict[str, PipelineRLError]:
    """Remove runs one after the other: URL -> error of the runs that were not removed.

    advance: gets the id of a run and numbers of objects.
    """
    errors = {}
    for removal in removals:
        try:
            removal.remove(partial(advance, run_id_of(removal.url)))
        except (PipelineRLError, *DAMAGE) as error:
            errors[removal.url] = as_error(error)
            continue
        root = removal.url.rpartition("/")[0]
        try:
            update_latest(root)
        except (PipelineRLError, *DAMAGE) as error:
            logger.warning("%s is removed, but %s/%s is not set: %s", removal.url, root, LATEST_KEY, error)
    return errors


def update_latest(root: str) -> None:
    """If latest.json names a run that is not there, name the run that was created last; remove it without a run."""
    base = open_store(root)
    try:
        named = json.loads(base.get(LATEST_KEY))["run_id"]
        if base.exists(f"{named}/{RUN_KEY}"):
            return
    except MissingObject:
        return
    except (ValueError, KeyError, TypeError):
        named = ""
    newest = next((run for run in list_runs(base, limit=1) if run.created_at), None)
    if newest is None:
        base.delete([LATEST_KEY])
    else:
        remember_latest(newest.url)
