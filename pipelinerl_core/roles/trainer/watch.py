"""Health, readiness, metrics and traces of a trainer."""

import time
from collections.abc import Mapping, Sequence

from pipelinerl_core.roles.runtime.monitor import RoleMonitor
from pipelinerl_core.roles.runtime.tracing import TrainerTraces
from pipelinerl_core.run.records import Commit
from pipelinerl_core.types import TrainingRow


class TrainerWatch:
    """Called by the trainer's main loop; `committed` is called by the committing thread."""

    def __init__(self, monitor: RoleMonitor, epoch: int) -> None:
        self._monitor = monitor
        monitor.facts["epoch"] = epoch
        self._traces = None if monitor.tracer is None else TrainerTraces(monitor.tracer, epoch)
        self._checkpoint_at = time.monotonic()
        self._checkpoint_step = -1
        monitor.metrics.ask("trainer_checkpoint_age_seconds", lambda: time.monotonic() - self._checkpoint_at)

    def registered(self) -> None:
        """The model is loaded and the trainer is registered at the hub."""
        self._monitor.heartbeat("registered at the hub")
        self._monitor.set_readiness_check(lambda: "")

    def waiting(self, step: int) -> None:
        """The trainer requests the groups of a step; called at each request."""
        self._monitor.facts.update(step=step, weight_version=step - 1)
        self._monitor.heartbeat(f"waiting for the groups of step {step}")

    def computing(self, step: int) -> None:
        self._monitor.heartbeat(f"computing step {step}")

    def replayed(self, step: int, last: int) -> None:
        """A recorded step was trained again; `last` is the last step to be trained again."""
        self._monitor.heartbeat(f"trained step {step} again from its batch")
        is_last = step == last
        self._monitor.progress = "" if is_last else f"the trainer restarts: step {step + 1}/{last} is trained again"

    def computed(
        self, step: int, rows: Sequence[TrainingRow], metrics: Mapping[str, float], times: tuple[float, float, float]
    ) -> None:
        """A step has been computed from these rows, with these metrics of telemetry/metrics.py.

        times: start of the wait for groups, start and end of the computation, in Unix seconds.
        """
        if self._traces is not None:
            self._traces.computed(step, rows, metrics, times)
        self._monitor.heartbeat(f"step {step} is computed")
        exported = self._monitor.metrics
        exported.set("role_weight_version", step)
        exported.observe("trainer_step_seconds", metrics["time/compute_seconds"])
        exported.observe("trainer_wait_seconds", metrics["time/reserve_wait_seconds"])
        exported.add("trainer_tokens_total", sum(row.rollout.num_tokens for row in rows))
        for row in rows:
            oldest = min((span.version for span in row.rollout.weight_spans), default=step - 1)
            exported.observe("trainer_lag_steps", step - 1 - oldest)

    def quarantined(self, num_groups: int) -> None:
        """A step was not taken, and its groups are quarantined."""
        self._monitor.metrics.add("trainer_quarantined_groups_total", num_groups)

    def committed(self, commit: Commit) -> None:
        """A step is committed and announced."""
        self._monitor.metrics.observe("trainer_commit_seconds", commit.metrics.get("time/commit_seconds", 0.0))
        if self._traces is not None:
            self._traces.committed(commit)
        checkpoint = commit.checkpoint
        if checkpoint is not None and checkpoint.step > self._checkpoint_step:
            self._checkpoint_step, self._checkpoint_at = checkpoint.step, time.monotonic()
