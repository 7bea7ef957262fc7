"""The runs of a root for `pipelinerl serve`: their list, the page of each run, and all of them for Prometheus."""

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pipelinerl_core.errors import ConfigError, StoreError, StoreUnavailable
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.models.paths import resolve_model_path
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.report.live_page import PAGE_SHARE, LivePage
from pipelinerl_core.report.run_list import ListedRun, Wanted, list_runs, sorted_runs
from pipelinerl_core.report.runs_page import runs_page
from pipelinerl_core.report.samples import token_decoder
from pipelinerl_core.report.two_runs import two_runs_page
from pipelinerl_core.run.follow import RunFollower
from pipelinerl_core.run.locate import locate_run
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.telemetry.role_metrics import runs_exposition

LIST_SECONDS = 5.0
"""Largest age of the list; more if reading the list takes longer (PAGE_SHARE)."""
RECENT_SECONDS = 86_400.0
"""Prometheus sees a run that is not running for this time after its newest commit."""
_PAGES = 64
"""Runs whose objects stay in memory."""
_THREADS = 8


class RootPages:
    """The documents of all runs of a root. Thread-safe."""

    def __init__(self, root: ObjectStore) -> None:
        self._root = root
        self._pages: OrderedDict[str, LivePage] = OrderedDict()
        self._lock = threading.Lock()
        self._list_lock = threading.Lock()
        self._listed: list[ListedRun] = []
        self._next_list_at = 0.0

    def listed(self) -> Sequence[ListedRun]:
        """All runs, newest first. Raises StoreError."""
        with self._list_lock:
            if time.monotonic() >= self._next_list_at:
                begun = time.monotonic()
                self._listed = list_runs(self._root)
                ended = time.monotonic()
                self._next_list_at = ended + max(LIST_SECONDS, (ended - begun) / PAGE_SHARE)
            return self._listed

    def runs(self, wanted: Wanted, sort: str) -> list[ListedRun]:
        """The runs that match, in the order of a key of `run_list.SORTS`."""
        return sorted_runs([run for run in self.listed() if wanted.matches(run)], sort)

    def runs_page(self, wanted: Wanted, sort: str) -> str:
        return runs_page(self._root.url, self.runs(wanted, sort), wanted, sort)

    def run(self, name: str) -> LivePage:
        """The page of a run, by its id, or `latest`. Raises ConfigError if there is no such run, StoreError."""
        if "/" in name or name in (".", ".."):  # locate_run would open a path outside the root
            raise ConfigError(f"{name}: not a run id")
        url = locate_run(name, self._root.url, of_all=True)
        with self._lock:
            page = self._pages.get(url)
        if page is None:
            page = _open_page(url)
        with self._lock:
            page = self._pages.setdefault(url, page)
            self._pages.move_to_end(url)
            while len(self._pages) > _PAGES:
                self._pages.popitem(last=False)
        return page

    def two_runs_page(self, names: Sequence[str]) -> str:
        """Raises as `run`."""
        return two_runs_page([self.run(name).facts() for name in names], names)

    def exposition(self) -> bytes:
        """The metrics of the runs that are running or were recently. Raises StoreUnavailable."""
        statuses, unreadable = [], []
        with ThreadPoolExecutor(_THREADS) as pool:
            for name, status in pool.map(self._status, self._recent()):
                if status is None:
                    unreadable.append(name)
                else:
                    statuses.append(status)
        return runs_exposition(statuses, unreadable)

    def targets(self) -> list[dict[str, Any]]:
        """The document of /targets.json: the roles of these runs. Raises StoreError."""
        with ThreadPoolExecutor(_THREADS) as pool:
            parts = pool.map(lambda run: self.run(run.name).targets(), self._recent(with_unreadable=False))
            return [target for part in parts for target in part]

    def _recent(self, *, with_unreadable: bool = True) -> list[ListedRun]:
        since = time.time() - RECENT_SECONDS
        listed = [run for run in self.listed() if with_unreadable or run.state != "unreadable"]
        return [run for run in listed if run.state in ("running", "unreadable") or run.active_at >= since]

    def _status(self, run: ListedRun) -> tuple[str, dict[str, Any] | None]:
        if run.state == "unreadable":
            return run.run_id, None
        try:
            return run.run_id, self.run(run.name).status()
        except StoreUnavailable:
            raise
        except (StoreError, ConfigError):
            return run.run_id, None


def _open_page(url: str) -> LivePage:
    store = open_store(url)
    model = resolve_model_path(build_config(RunFollower(store).run.config).model.path)
    return LivePage(store, token_decoder(str(model)) if model else None)
