"""The runs of a root for `pipelinerl serve`: their list, the page of each run, and all of them for Prometheus."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from pipelinerl_core.errors import ConfigError, MissingObject, StoreError, StoreUnavailable
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.report.live_page import PAGE_SHARE, LivePage
from pipelinerl_core.report.run_list import ListedRun, Wanted, list_runs, sorted_runs
from pipelinerl_core.report.runs_page import runs_page
from pipelinerl_core.report.samples import token_decoder
from pipelinerl_core.report.two_runs import two_runs_page
from pipelinerl_core.run.follow import RunFollower
from pipelinerl_core.run.hub_status import HubWatch
from pipelinerl_core.run.locate import locate_run
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.telemetry.role_metrics import runs_exposition

logger = logging.getLogger(__name__)
T = TypeVar("T")

LIST_SECONDS = 5.0
"""Largest age of the list; up to MOST_LIST_SECONDS if reading the list takes longer (PAGE_SHARE)."""
MOST_LIST_SECONDS = 60.0
RECENT_SECONDS = 86_400.0
"""Prometheus sees a run that is not running for this time after its newest commit."""
_PAGES = 64
"""Runs whose objects stay in memory."""
_THREADS = 8


class RootPages:
    """The documents of all runs of a root. Thread-safe."""

    def __init__(self, root: ObjectStore) -> None:
        self._root = root
        self._pages: dict[str, LivePage] = {}
        self._lock = threading.Lock()
        self._list_lock = threading.Lock()
        self._listed: list[ListedRun] | None = None
        self._watches: dict[str, HubWatch] = {}
        self._next_list_at = 0.0

    def listed(self) -> Sequence[ListedRun]:
        """All runs, newest first. While another thread reads the list, the earlier list. Raises StoreError."""
        if not self._list_lock.acquire(blocking=self._listed is None):
            assert self._listed is not None
            return self._listed
        try:
            if self._listed is None or time.monotonic() >= self._next_list_at:
                begun = time.monotonic()
                self._listed = list_runs(self._root, watches=self._watches)
                ended = time.monotonic()
                pause = min(max(LIST_SECONDS, (ended - begun) / PAGE_SHARE), MOST_LIST_SECONDS)
                self._next_list_at = ended + pause
                self._drop_pages({run.url: run.created_at for run in self._listed})
            return self._listed
        finally:
            self._list_lock.release()

    def _drop_pages(self, runs: Mapping[str, float]) -> None:
        """Forget the pages of runs that were removed or replaced, and beyond _PAGES those of old runs."""
        recent = {run.url for run in self._recent()}
        with self._lock:
            for url, page in list(self._pages.items()):
                is_beyond = len(self._pages) > _PAGES and url not in recent
                if runs.get(url) != page.created_at or is_beyond:
                    del self._pages[url]

    def runs(self, wanted: Wanted, sort: str) -> list[ListedRun]:
        """The runs that match, in the order of a key of `run_list.SORTS`."""
        return sorted_runs([run for run in self.listed() if wanted.matches(run)], sort)

    def runs_page(self, wanted: Wanted, sort: str) -> str:
        return runs_page(self._root.url, self.runs(wanted, sort), wanted, sort)

    def run(self, name: str) -> LivePage:
        """The page of a run, by its id, or `latest`. Raises ConfigError if there is no such run, StoreError."""
        if "/" in name or name.startswith("."):  # a path outside the root
            raise ConfigError(f"{name}: not a run id")
        url = locate_run(name, self._root.url, of_all=True) if name == "latest" else self._root.child(name).url
        with self._lock:
            page = self._pages.get(url)
        if page is None:
            page = _open_page(url)
        with self._lock:
            return self._pages.setdefault(url, page)

    def two_runs_page(self, names: Sequence[str]) -> str:
        """Raises as `run`."""
        return two_runs_page([self.run(name).facts() for name in names], names)

    def exposition(self) -> bytes:
        """The metrics of the runs that are running or were recently. Raises StoreUnavailable."""
        statuses, unreadable = [], []
        with ThreadPoolExecutor(_THREADS) as pool:
            for name, status in pool.map(self._status, self.recent()):
                if status is None:
                    unreadable.append(name)
                else:
                    statuses.append(status)
        return runs_exposition(statuses, unreadable)

    def targets(self) -> list[dict[str, Any]]:
        """The document of /targets.json: the roles of these runs. Raises StoreError."""
        with ThreadPoolExecutor(_THREADS) as pool:
            return [target for part in pool.map(self._targets, self.recent()) for target in part]

    def recent(self) -> list[ListedRun]:
        """The runs that are running or were recently, and those that cannot be read."""
        self.listed()
        return self._recent()

    def _recent(self) -> list[ListedRun]:
        since = time.time() - RECENT_SECONDS
        listed = self._listed or ()
        return [run for run in listed if run.state in ("running", "unreadable") or run.active_at >= since]

    def _status(self, run: ListedRun) -> tuple[str, dict[str, Any] | None]:
        """The name of the run in metrics, which is its directory (two copies of a run have one id); its status."""
        status = self._read(run, LivePage.status)
        if status is None:
            return run.name, None
        # A page that was just opened cannot know yet that a hub on another host is dead.
        state = status["state"] if run.state == "running" else run.state
        info = {"name": run.given_name, "owner": run.owner, "preset": run.preset}
        return run.name, {**status, "run_id": run.name, "state": state, "info": info}

    def _targets(self, run: ListedRun) -> list[dict[str, Any]]:
        return self._read(run, LivePage.targets) or []

    def _read(self, run: ListedRun, read: Callable[[LivePage], T]) -> T | None:
        """What `read` makes of the page of a run; None for a run that cannot be read: the other runs are scraped."""
        try:
            return None if run.state == "unreadable" else read(self.run(run.name))
        except StoreUnavailable:
            raise
        except (StoreError, ConfigError) as error:
            logger.warning("%s: %s", run.name, error)
            return None


def _open_page(url: str) -> LivePage:
    """Raises ConfigError if there is no such run, StoreError."""
    store = open_store(url)
    try:
        record = RunFollower(store).run
    except MissingObject:
        raise ConfigError(f"{url}: no such run") from None
    return LivePage(store, token_decoder(record.model_path))
