"""Writes the results of a comparison: comparison.json, .svg and .html under <root>/comparisons/<name>-<digest>/.

The files are rewritten after every run: an interrupted comparison shows the runs so far, and the next command reads
the durations of these runs.
"""

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pipelinerl_core.comparison.analysis import ComparedRun, compare, learning_curve, num_resumes, run_figures
from pipelinerl_core.comparison.budget import dropped_lines
from pipelinerl_core.comparison.figure import figure
from pipelinerl_core.comparison.page import page
from pipelinerl_core.comparison.plan import Plan, PlannedRun, accuracies_of, is_complete
from pipelinerl_core.errors import MissingObject, PipelineRLError
from pipelinerl_core.run.evaluations import best_version
from pipelinerl_core.run.follow import RunFollower
from pipelinerl_core.run.locate import root_url, run_url
from pipelinerl_core.run.records import REPORT_JSON_KEY, RUN_KEY
from pipelinerl_core.storage.object_store import open_store

JSON_KEY, SVG_KEY, HTML_KEY = "comparison.json", "comparison.svg", "comparison.html"


class RunsFailed(PipelineRLError):
    """At least one run of a comparison failed; the comparison contains the other runs."""


class Results:
    """Compares the complete runs of a plan and stores the comparison."""

    def __init__(self, plan: Plan, root: str, peers: Sequence[ComparedRun] = ()) -> None:
        """`peers`: runs of other libraries, compared as arms."""
        self._plan = plan
        self._peers = peers
        self._root = root_url(root)
        self.store = open_store(self._root).child(plan.key)
        self._spent: dict[str, float] = self._earlier_seconds()
        self._read: dict[str, ComparedRun] = {}
        self.failed: dict[str, str] = {}
        """run_id -> reason, for the runs that failed during this command."""

    def _earlier_seconds(self) -> dict[str, float]:
        try:
            runs = json.loads(self.store.get(JSON_KEY))["runs"]
        except MissingObject:
            return {}
        return {run["run_id"]: run["spent_seconds"] for run in runs if run["spent_seconds"] is not None}

    def spent(self) -> list[tuple[str, float]]:
        """(arm, seconds) of the runs with a recorded duration."""
        return [(run.arm, self._spent[run.run_id]) for run in self._plan.runs if run.run_id in self._spent]

    def add_seconds(self, run: PlannedRun, seconds: float) -> None:
        self._spent[run.run_id] = self._spent.get(run.run_id, 0.0) + seconds

    def write(self, dropped: list[PlannedRun]) -> dict[str, Any]:
        """Compare all complete runs; writes the three objects and returns comparison.json."""
        own = [run for run in map(self._compared, self._plan.runs) if run is not None]
        peers = self._peers
        runs = [*own, *peers]
        wanted = self._plan.wanted
        names = [*(arm.name for arm in wanted.arms), *dict.fromkeys(peer.arm for peer in peers)]
        document = {
            "name": self._plan.name,
            "digest": self._plan.digest,
            "url": self.store.url,
            "target": wanted.target,
            "margin": wanted.margin,
            "reference": self._plan.reference,
            "source": wanted.source,
            "overrides": list(wanted.overrides),
            "arms_settings": {arm.name: list(arm.overrides) for arm in wanted.arms},
            "machine": {"cores": os.cpu_count(), "system": platform.platform()},
            "dropped": dropped_lines(dropped, len(wanted.arms)),
            "dropped_runs": [run.run_id for run in dropped],
            "failed": self.failed,
            **compare(runs, names, self._plan.reference, wanted.target),
            "runs": [self._entry(run) for run in own],
            "peers": [self._peer_entry(peer) for peer in peers],
        }
        svg = figure(document, runs)
        self.store.put(JSON_KEY, json.dumps(document, indent=2, allow_nan=False).encode())
        self.store.put(SVG_KEY, svg.encode())
        self.store.put(HTML_KEY, page(document, svg).encode())
        return document

    def _peer_entry(self, peer: ComparedRun) -> dict[str, Any]:
        """A peer in comparison.json."""
        figures = run_figures(peer, self._plan.wanted.target)
        return {"arm": peer.arm, "seed": peer.seed, "figures": figures, "curve": _curve(peer)}

    def _compared(self, planned: PlannedRun) -> ComparedRun | None:
        """The records of a run; None if the run is not complete."""
        store = open_store(run_url(self._root, planned.run_id))
        if planned.run_id not in self._read:
            if not store.exists(RUN_KEY) or not is_complete(store, planned.config, self._plan.wanted.target):
                return None
            follower = RunFollower(store)
            follower.refresh()
            steps = planned.config.trainer.steps  # of this plan; the run may have been trained further
            evals = {version: record for version, record in follower.evals.items() if version <= steps}
            self._read[planned.run_id] = ComparedRun(
                arm=planned.arm,
                seed=planned.seed,
                run_id=planned.run_id,
                code_version=follower.run.code_version,
                is_emulated=planned.config.emulation.accelerators > 0,
                commits={step: commit for step, commit in follower.commits.items() if step <= steps},
                trained_to=max(follower.commits, default=0),
                accuracies=accuracies_of(evals),
                best=best_version(evals),
                report=json.loads(store.get(REPORT_JSON_KEY)),
            )
        return self._read[planned.run_id]

    def _entry(self, run: ComparedRun) -> dict[str, Any]:
        """A run in comparison.json."""
        figures = run_figures(run, self._plan.wanted.target)
        steps = next(planned.config.trainer.steps for planned in self._plan.runs if planned.run_id == run.run_id)
        return {
            "run_id": run.run_id,
            "arm": run.arm,
            "seed": run.seed,
            "ended": "last step" if max(run.commits) >= steps else "past the target",
            "trained_to": run.trained_to,
            "code_version": run.code_version,
            "emulated": run.is_emulated,
            "resumes": num_resumes(run.commits),
            "spent_seconds": self._spent.get(run.run_id),
            "figures": figures,
            "curve": _curve(run),
        }


def _curve(run: ComparedRun) -> list[dict[str, Any]]:
    return [asdict(point) for point in learning_curve(run)]
