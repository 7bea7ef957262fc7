"""Selection and removal of whole runs.

A removal deletes run.json last and the commits before it, so that an interrupted removal leaves a run that is listed
and selected as before, and can be repeated.
"""

import json
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from pipelinerl_core.errors import ConfigError, MissingObject, PipelineRLError, StoreError
from pipelinerl_core.report.run_list import Wanted, list_runs
from pipelinerl_core.run.hub_status import HubWatch, refuse_second_hub
from pipelinerl_core.run.locate import LATEST_KEY, locate_run, remember_latest, remove_left_shared_memory
from pipelinerl_core.run.reading import list_keys, read_record
from pipelinerl_core.run.records import COMMITS_PREFIX, COMPACTED_COMMITS_PREFIX, RUN_KEY, RunRecord
from pipelinerl_core.storage.local import FileStore
from pipelinerl_core.storage.object_store import Store, open_store

_LAST = ("epochs/", f"{COMPACTED_COMMITS_PREFIX}/", f"{COMMITS_PREFIX}/", RUN_KEY)
"""Prefixes of the keys that a removal deletes last, in this order."""
_STARTING_SECONDS = 120.0
"""A run that has no epoch and is younger may be starting: its hub takes its epoch after some seconds."""
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

    named = list(items)
    pairs = list(zip(named, in_parallel(attempt, named), strict=True))
    results = {item: result for item, result in pairs if not isinstance(result, PipelineRLError)}
    return results, {item: result for item, result in pairs if isinstance(result, PipelineRLError)}


def run_id_of(url: str) -> str:
    """The id of the run at a URL."""
    return url.rpartition("/")[2]


def select_runs(root: str, names: Sequence[str], wanted: Wanted) -> tuple[list[str], dict[str, PipelineRLError]]:
    """URLs of the named runs, else of the wanted runs of a root; and errors: names without a run, unreadable runs.

    Whether an unreadable run is wanted cannot be decided, so that it is selected only by its name or its state.
    """
    if names:
        located, errors = attempt_each(lambda name: locate_run(name, root), dict.fromkeys(names))
        return list(dict.fromkeys(located.values())), errors
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
        self._watch = HubWatch(store)
        refuse_second_hub(store, ConfigError, watch=self._watch)
        if not self._epochs and _age_seconds(store) < _STARTING_SECONDS:
            raise ConfigError(
                f"{store.url}: the run was created a moment ago and may be starting; try again in two minutes"
            )

    def check(self) -> None:
        """Raise ConfigError or PipelineRLError if the run was started since."""
        refuse_second_hub(self._store, ConfigError, watch=self._watch)
        if list_keys(self._store, "epochs") != self._epochs:
            raise PipelineRLError(f"{self._store.url}: the run was started meanwhile; nothing was removed")


def _age_seconds(store: Store) -> float:
    try:
        return time.time() - read_record(store, RUN_KEY, RunRecord).created_at
    except StoreError:  # an unreadable run
        return _STARTING_SECONDS


class Removal:
    """What the removal of a run will free, and the removal."""

    def __init__(self, url: str) -> None:
        """List the objects; nothing is removed. Raises ConfigError if the run is live."""
        self.url = url
        self.store = open_store(url)
        self._run = StoppedRun(self.store)
        self._unfinished = self.store.unfinished()
        self.sizes: Mapping[str, int] = self.store.sizes("")
        """Key -> bytes of each object."""

    def document(self) -> dict[str, Any]:
        """The run, and what its removal frees, with leftovers of unfinished writes, as JSON values."""
        return {
            "run_id": run_id_of(self.url),
            "url": self.url,
            "num_objects": len(self.sizes) + len(self._unfinished),
            "num_bytes": sum(self.sizes.values()) + sum(self._unfinished.values()),
        }

    def remove(self, advance: Advance) -> None:
        """Delete the run, and its shared memory on this host. advance: gets numbers of objects.

        Raises ConfigError or PipelineRLError if the run was started since, PipelineRLError if objects have appeared
        since; run.json is there then.
        """
        self._run.check()
        remove_left_shared_memory(self.store, run_id_of(self.url))
        self.store.discard(self._unfinished)
        advance(len(self._unfinished))
        last = [key for prefix in _LAST for key in self.sizes if key.startswith(prefix)]
        for _ in in_parallel(lambda key: self.store.delete([key]), sorted(self.sizes.keys() - set(last))):
            advance(1)
        if new := sorted(self.store.sizes("").keys() - self.sizes.keys()):
            raise PipelineRLError(f"{self.url}: {new[0]} was written during the removal: remove the run again")
        for key in last:
            self.store.delete([key])
            advance(1)
        if isinstance(self.store, FileStore):
            self.store.remove_empty("")


def remove_runs(removals: Iterable[Removal], advance: Callable[[str, int], None]) -> dict[str, PipelineRLError]:
    """Remove runs one after the other: URL -> error of the runs that were not removed.

    advance: gets the id of a run and numbers of objects.
    """
    errors = {}
    for removal in removals:
        try:
            removal.remove(partial(advance, run_id_of(removal.url)))
            update_latest(removal.url.rpartition("/")[0])
        except PipelineRLError as error:
            errors[removal.url] = error
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
