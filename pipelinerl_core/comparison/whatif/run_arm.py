"""Carries out one arm of a what-if replay: train, evaluate, log to MLflow. A finished arm is left as it is."""

import logging
import time
from collections.abc import Callable, Mapping
from threading import Event

from pipelinerl_core.comparison.whatif.plan import PlannedArm, open_arm
from pipelinerl_core.errors import DeadlineExceeded, PipelineRLError
from pipelinerl_core.run.context import RunContext, log_directory
from pipelinerl_core.run.follow import Forwarder, RunFollower
from pipelinerl_core.run.history import read_epochs
from pipelinerl_core.run.mlflow_run import NoTracker, RunTracker, closing, run_tags, source_tags
from pipelinerl_core.run.reading import read_record
from pipelinerl_core.run.records import REPLAY_KEY, RUN_KEY, Commit, ReplayRecord, eval_key
from pipelinerl_core.run.versions import DUE, find_commits
from pipelinerl_core.supervision.run_roles import evaluate
from pipelinerl_core.supervision.tool_process import run_tool
from pipelinerl_core.telemetry.mlflow import MlflowTracker

logger = logging.getLogger(__name__)

REPLAY_TAG = "pipelinerl.replay_of"
"""Tag of the MLflow run of an arm: the id of the recorded run."""
_READ_SECONDS = 2.0
_STEP_SECONDS = 1800.0
"""Longest time without a trained step, the loading of the model included."""


def run_arm(
    planned: PlannedArm, *, flow_run_id: str = "", on_step: Callable[[Commit], None] = lambda commit: None
) -> None:
    """Train the arm if it is not trained, and evaluate the versions that are not evaluated.

    on_step: called with every new commit, on this thread. Raises PipelineRLError if a process fails,
    DeadlineExceeded if no step is trained for _STEP_SECONDS.
    """
    tracker, mlflow = _open_tracker(planned, flow_run_id)
    with closing(tracker):
        arm = open_arm(planned, mlflow)
        if not planned.is_trained:
            _train(planned, arm, on_step)
        _keep_evaluations(planned)
        if arm.config.eval.num_prompts and _needs_evaluation(arm):
            evaluate(arm, DUE, Event())
        # A new follower: a second start of the training has replaced the commits of the first.
        Forwarder(RunFollower(arm.store), tracker).refresh()


def _train(planned: PlannedArm, arm: RunContext, on_step: Callable[[Commit], None]) -> None:
    follower = RunFollower(arm.store)
    read_at = changed_at = time.monotonic()
    earlier = {one.epoch for one in read_epochs(arm.store)}

    def read() -> None:
        nonlocal read_at, changed_at
        now = time.monotonic()
        if now - read_at < _READ_SECONDS:
            return
        read_at = now
        for commit in follower.refresh().commits:
            if commit.epoch not in earlier:
                changed_at = now
                on_step(commit)
        if now - changed_at > _STEP_SECONDS:
            raise DeadlineExceeded(f"replay of {planned.name}: no step was trained for {_STEP_SECONDS:.0f} s")

    arguments = {"run": planned.original.store.url, "into": arm.store.url}
    log_path = log_directory(arm.store.url, arm.run_id) / "replay.log"
    code, _ = run_tool(planned.original, "replay", arguments, log_path=log_path, on_wait=read)
    if code != 0 or not planned.is_trained:
        raise PipelineRLError(f"the replay of {planned.name} ended with code {code}; see {log_path}")
    read_at = 0.0
    read()


def _keep_evaluations(planned: PlannedArm) -> None:
    """Copy the evaluations of weights that the arm shares with the run: before its first step, and if it is equal to
    the last bit, of every step."""
    record = read_record(planned.store, REPLAY_KEY, ReplayRecord)
    end = (record.first_difference or planned.origin.last + 1) - 1
    original = planned.original.store
    follower = RunFollower(original)
    follower.refresh()
    for name, evals in {"": follower.evals, **follower.set_evals}.items():
        for version, one in evals.items():
            key = eval_key(version, name)
            is_pinned = one.last_version in (-1, version)
            if version <= end and is_pinned and not planned.store.exists(key):
                planned.store.put(key, original.get(key))


def _needs_evaluation(arm: RunContext) -> bool:
    return any(not arm.store.exists(eval_key(commit.step)) for commit in find_commits(arm, DUE))


def _open_tracker(planned: PlannedArm, flow_run_id: str) -> tuple[RunTracker, tuple[str, str] | None]:
    """The MLflow run of an arm, beside the MLflow run of the recorded run, found again if it exists."""
    uri = planned.original.record.mlflow_uri
    if uri is None or planned.config.tracking.chosen_uri == "none":
        return NoTracker(), None
    tracker = MlflowTracker(
        uri,
        planned.config.tracking.experiment,
        f"{planned.original.run_id}.{planned.store.url.rpartition('/')[2]}",
        tags=_tags(planned, flow_run_id),
        config=planned.config.model_dump(mode="json"),
        is_required=not planned.store.exists(RUN_KEY),
    )
    return tracker, (uri, tracker.run_id)


def _tags(planned: PlannedArm, flow_run_id: str) -> Mapping[str, str]:
    return {
        **run_tags(planned.config),
        **source_tags(flow_run_id),
        "pipelinerl.url": planned.store.url,
        REPLAY_TAG: planned.original.run_id,
        "arm": planned.name,
    }
