"""The page of a live run: a status line, and the report, which is rendered again after new commits."""

import functools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from html import escape
from typing import Any

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.report.facts import RunCache, RunFacts, collect, own_copy, read_batch
from pipelinerl_core.report.html import page_of, served_styles
from pipelinerl_core.report.live_view import status_line, status_of
from pipelinerl_core.report.rollout_search import search
from pipelinerl_core.report.rollouts_page import Listing, WantedRollouts, listing_of, rollout_page, rollouts_page
from pipelinerl_core.report.samples import Decode
from pipelinerl_core.report.scrape_targets import role_progress, targets
from pipelinerl_core.report.trace import Place, TracedRun
from pipelinerl_core.run.follow import RunFollower
from pipelinerl_core.run.hub_status import HubWatch
from pipelinerl_core.run.records import Commit

STATUS_SECONDS = 1.0
"""Largest age of a status."""
PAGE_SHARE = 0.1
"""Largest share of the time spent on rendering a page."""
SCRIPT = """
let page = document.getElementById("live").dataset.page;
async function get(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(answer.status);
  return answer;
}
async function renew() {
  try {
    const status = await (await get("status.json")).json();
    if (status.page !== page) {
      const next = new DOMParser().parseFromString(await (await get(".")).text(), "text/html");
      document.querySelector("main").replaceWith(next.querySelector("main"));
      page = status.page;
    }
    document.getElementById("live").textContent = status.line;
  } catch (error) {
    document.getElementById("live").textContent = "the server of this page or its store does not answer";
  }
  setTimeout(renew, 2000);
}
setTimeout(renew, 2000);
"""
_LIVE = """<style>@CSS@</style>
<nav><a href="../../">all runs</a> &middot; <a href="rollouts">rollouts</a></nav>
<p id="live" data-page="@PAGE@">@LINE@</p>
<script>@SCRIPT@</script>
"""


class LivePage:
    """The documents of one run. Thread-safe."""

    def __init__(self, store: ObjectStore, decode: Decode | None) -> None:
        """Raises MissingObject if there is no such run."""
        self._store = store
        self._decode = decode
        self._follower = RunFollower(store)
        self._hub = HubWatch(store)
        self._run_id = self._follower.run.run_id
        self.created_at = self._follower.run.created_at
        self._cache = RunCache()
        self._lock = threading.Lock()
        self._page_lock, self._browser_lock = threading.Lock(), threading.Lock()
        self._traced: TracedRun | None = None
        self._traced_at = 0.0
        self._status: dict[str, Any] = {}
        self._status_at = -STATUS_SECONDS
        self._body = ""
        self._page = ""
        self._next_page_at = 0.0

    def status(self) -> dict[str, Any]:
        """The status, at most STATUS_SECONDS old, with `line` (text) and `page`: step and evaluations of the page."""
        with self._lock:
            if time.monotonic() - self._status_at >= STATUS_SECONDS:
                self._follower.refresh()
                hub, progress = self._hub.look(), role_progress(self._store)
                status = status_of(self._follower, hub, progress, silent_seconds=self._hub.silent_seconds)
                is_due = not self._body or time.monotonic() >= self._next_page_at or status["state"] != "running"
                evaluated = f"/{status['evaluated_at']}" if status["evaluated_at"] else ""  # replaced by `evaluate`
                self._status = {
                    **status,
                    "line": f"{self._run_id}: {status['state']}, {status_line(status)}",
                    "page": f"{status['step']}/{status['num_evaluations']}{evaluated}" if is_due else self._page,
                }
                self._status_at = time.monotonic()
            return self._status

    def targets(self) -> list[dict[str, Any]]:
        """The document of /targets.json. Raises StoreError."""
        return targets(self._store)

    def facts(self) -> RunFacts:
        """The run as it is stored now. Raises StoreError."""
        with self._page_lock:
            return collect(self._store, self._cache)

    def rollouts_page(self, wanted: WantedRollouts) -> str:
        """The page of the rollouts of a step, two steps or all steps.

        Raises ConfigError if a step has no rollouts, StoreError. An error of a search is on the page.
        """
        wanted.check()
        with self._browsing() as run:
            steps = [step for step in run.follower.commits if step > 0]
        wanted = replace(wanted, step=wanted.step or str(max(steps, default=0)))
        named = [int(step) for step in (wanted.step, wanted.beside) if step not in ("", "all")]
        for step in named:
            if step not in steps:
                raise ConfigError(f"{self._run_id} has no trained step {step}" if steps else "no step is trained yet")
        listings, problem = [], ""
        if wanted.needs_search:
            try:
                listings = [self._search_listing(wanted)]
            except ConfigError as error:
                problem = str(error)
        else:
            decode = self._decode
            texts = None if decode is None else lambda ids: decode(ids.tolist())
            for step in named:
                rows = read_batch(self._store, self._commit(step))
                listings.append(listing_of(rows, replace(wanted, step=str(step)), texts))
        return rollouts_page(self._run_id, steps, listings, wanted, self._decode, problem)

    def _search_listing(self, wanted: WantedRollouts) -> Listing:
        matches = search(self._store, wanted)
        keys, rows = set(matches.keys), {}
        for step in sorted({step for step, _, _ in keys}):
            for row in read_batch(self._store, self._commit(step)):
                key = (row.step, row.group_id, row.rollout_index)
                if key in keys:
                    rows[key] = own_copy(row)  # not the arrays of the whole step
        title = "all steps" if wanted.step == "all" else f"step {int(wanted.step):,}"
        shown = [rows[key] for key in matches.keys if key in rows]
        sources = sorted({row.source for row in shown})
        return Listing(title, shown, matches.num_selected, f"{matches.num_selected:,} rollouts", sources)

    def _commit(self, step: int) -> Commit:
        """The commit of a step, which may be newer than the newest reading. Raises ConfigError if there is none."""
        with self._browsing() as run:
            if step not in run.follower.commits:
                run.refresh()
            if step not in run.follower.commits:
                raise ConfigError(f"{self._run_id} has no trained step {step}")
            return run.follower.commits[step]

    def rollout_page(self, place: Place, colours: str) -> str:
        """The page of a rollout. Raises ConfigError if there is no such rollout, StoreError."""
        with self._browsing() as run:
            return rollout_page(run, place, colours)

    @contextmanager
    def _browsing(self) -> Iterator[TracedRun]:
        """The run for the browser, not older than STATUS_SECONDS.

        The browser has a lock of its own: status and metrics do not wait for the requests of a reader.
        """
        with self._browser_lock:
            if self._traced is None:
                self._traced, self._traced_at = TracedRun(self._store), time.monotonic()
            elif time.monotonic() - self._traced_at >= STATUS_SECONDS:
                self._traced.refresh()
                self._traced_at = time.monotonic()
            yield self._traced

    def page(self) -> str:
        """The page; rendered again after new commits, within PAGE_SHARE of the time."""
        status = self.status()
        with self._page_lock:  # a long rendering holds back neither status nor metrics
            # A request may have waited for the rendering of another request.
            is_due = time.monotonic() >= self._next_page_at or status["state"] != "running"
            if not self._body or (self._page != status["page"] and is_due):
                begun = time.monotonic()
                self._body = page_of(self._store, collect(self._store, self._cache), self._decode, has_browser=True)
                self._page = status["page"]
                self._next_page_at = time.monotonic() + (time.monotonic() - begun) / PAGE_SHARE
            texts = {
                "@CSS@": served_styles(),
                "@SCRIPT@": SCRIPT,
                "@PAGE@": self._page,
                "@LINE@": escape(status["line"]),
            }
            live = functools.reduce(lambda html, text: html.replace(*text), texts.items(), _LIVE)
            return self._body.replace("<body>", f"<body>{live}", 1)
