"""Spans of actors and trainers (see telemetry/traces.py); created only if traces are enabled."""

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from pipelinerl_core.messages import Lease, SwapRecord
from pipelinerl_core.run.context import RunContext, log_directory
from pipelinerl_core.run.records import Commit
from pipelinerl_core.telemetry.traces import Event, SpanRef, Tracer, Value
from pipelinerl_core.types import GroupKey, Rollout, TrainingRow, WeightManifest

TRACED_ROLES = ("actor", "trainer")
"""The hub writes no spans: actors and trainer measure the requests to it."""
_RECENT_SWAPS = 256


def build_tracer(context: RunContext, role: str, name: str) -> Tracer | None:
    """The tracer of a role; None if tracking.traces=none or the role writes no spans.

    Raises ConfigError if spans cannot be sent.
    """
    tracking = context.config.tracking
    if tracking.traces == "none" or role not in TRACED_ROLES:
        return None
    from pipelinerl_core.telemetry.span_export import build_sink  # noqa: PLC0415  (OpenTelemetry takes long to import)

    sink = build_sink(
        tracking.traces,
        role=role,
        name=name,
        run_id=context.run_id,
        directory=log_directory(context.store.url, context.run_id),
        max_bytes=tracking.log_bytes,
    )
    return Tracer(context.run_id, tracking.trace_share, sink)


class ActorTraces:
    """Spans of groups, from lease to the hub's answer, and of swaps. Called on the actor's event loop."""

    def __init__(self, tracer: Tracer, actor: str, epoch: int) -> None:
        self._tracer = tracer
        self._actor: dict[str, Value] = {"actor": actor, "actor_epoch": epoch}
        self._swaps: deque[SwapRecord] = deque(maxlen=_RECENT_SWAPS)
        self._open: dict[GroupKey, tuple[float, float]] = {}

    def finished(self, lease: Lease, rollouts: Sequence[Rollout], leased_at: float, now: float) -> None:
        if not self._tracer.wants(lease.group_id):
            return
        self._open[lease.group_id, lease.attempt] = (leased_at, now)
        root = self._tracer.group(lease.group_id, lease.attempt)
        for rollout in rollouts:
            self._rollout(root, rollout)

    def answered(self, key: GroupKey, answer: str, now: float) -> None:
        """The hub has answered a group for the first time."""
        times = self._open.pop(key, None)
        if times is None:
            return
        group_id, attempt = key
        root = self._tracer.group(*key)
        named: dict[str, Value] = {"group_id": group_id, "attempt": attempt, "answer": answer, **self._actor}
        self._tracer.emit("send", self._tracer.group(*key, "send"), root, (times[1], now), named)
        self._tracer.emit("group", root, None, (times[0], now), named)

    def swapped(self, swap: SwapRecord, manifest: WeightManifest | None, announced_at: float) -> None:
        """The engine has swapped a version. announced_at: when the actor received the manifest, Unix seconds."""
        self._swaps.append(swap)
        if manifest is None:
            return
        version = swap.version
        ref = self._tracer.step(version, manifest.epoch, "swap", swap.actor, swap.actor_epoch)
        named: dict[str, Value] = {
            **self._actor,
            "step": version,
            "weight_version": version,
            "pause_seconds": swap.pause_seconds,
            "num_running": swap.num_running,
        }
        publish = self._tracer.step(version, manifest.epoch, "publish")
        self._tracer.emit("swap", ref, publish, (announced_at, swap.at), named)

    def _rollout(self, root: SpanRef, rollout: Rollout) -> None:
        key, index = (rollout.group_id, rollout.attempt), rollout.rollout_index
        named: dict[str, Value] = {
            "group_id": rollout.group_id,
            "attempt": rollout.attempt,
            "rollout_index": index,
            **self._actor,
        }
        first = {span.version: span.start for span in reversed(rollout.weight_spans)}
        swaps = tuple(
            Event(
                name="weights_swapped",
                at=swap.at,
                attributes={"weight_version": swap.version, "at_token": first.get(swap.version, -1)},
            )
            for swap in self._swaps
            if rollout.started_at < swap.at < rollout.finished_at
        )
        generated = {**named, "num_tokens": rollout.num_tokens, "finish_reason": str(rollout.finish_reason.value)}
        times = (rollout.started_at, rollout.finished_at)
        ref = self._tracer.group(*key, index, "generate")
        self._tracer.emit("generate", ref, root, times, generated, events=swaps)
        scored: dict[str, Value] = {**named, "outcome": str(rollout.outcome.value)}
        if rollout.reward is not None:
            scored["reward"] = rollout.reward
        times = (rollout.finished_at, rollout.scored_at)
        self._tracer.emit("reward", self._tracer.group(*key, index, "reward"), root, times, scored)


class TrainerTraces:
    """Spans of steps and of their groups. Called by the main loop; `committed` by the committing thread."""

    def __init__(self, tracer: Tracer, epoch: int) -> None:
        self._tracer = tracer
        self._epoch = epoch
        self._waited_from: dict[int, float] = {}

    def computed(
        self, step: int, rows: Sequence[TrainingRow], metrics: Mapping[str, float], times: tuple[float, float, float]
    ) -> None:
        """A step was computed; times: start of the wait, start and end of the computation, in Unix seconds."""
        waited_from, reserved_at, computed_at = times
        self._waited_from[step] = waited_from
        groups: dict[GroupKey, list[TrainingRow]] = {}
        for row in rows:
            if self._tracer.wants(row.rollout.group_id):
                groups.setdefault((row.rollout.group_id, row.rollout.attempt), []).append(row)
        root = self._tracer.step(step, self._epoch)
        for key, group in groups.items():
            self._group(key, group, step, (reserved_at, computed_at))
        named: dict[str, Value] = {"step": step, "trainer_epoch": self._epoch}
        wait = self._tracer.step(step, self._epoch, "wait")
        self._tracer.emit("wait", wait, root, (waited_from, reserved_at), named)
        compute = self._tracer.step(step, self._epoch, "compute")
        computing = {**named, "reward_mean": metrics.get("reward/mean", 0.0), "loss": metrics.get("train/loss", 0.0)}
        links = tuple(self._tracer.group(*key) for key in groups)
        self._tracer.emit("compute", compute, root, (reserved_at, computed_at), computing, links=links)

    def committed(self, commit: Commit) -> None:
        """A step is committed and announced."""
        step, epoch = commit.step, commit.epoch
        root = self._tracer.step(step, epoch)
        named: dict[str, Value] = {"step": step, "trainer_epoch": epoch, "weight_version": step}
        began = commit.committed_at - commit.metrics.get("time/commit_seconds", 0.0)
        published_at = began + commit.metrics.get("weights/published_seconds", 0.0)
        if commit.manifest is not None:
            publish = {**named, "num_bytes": commit.manifest.num_bytes}
            ref = self._tracer.step(step, epoch, "publish")
            self._tracer.emit("publish", ref, root, (began, published_at), publish)
        ref = self._tracer.step(step, epoch, "commit")
        self._tracer.emit("commit", ref, root, (published_at, commit.committed_at), named)
        begun = self._waited_from.pop(step, commit.reserved_at)
        self._tracer.emit("step", root, None, (begun, commit.committed_at), named)

    def _group(self, key: GroupKey, rows: Sequence[TrainingRow], step: int, times: tuple[float, float]) -> None:
        root = self._tracer.group(*key)
        named: dict[str, Value] = {
            "group_id": key[0],
            "attempt": key[1],
            "step": step,
            "trainer_epoch": self._epoch,
            "num_rollouts": len(rows),
            "num_tokens": sum(row.rollout.num_tokens for row in rows),
            "num_trained_tokens": int(sum(np.sum(row.loss_mask) for row in rows)),
        }
        closed_at = max(row.rollout.scored_at for row in rows)
        ready = self._tracer.group(*key, step, self._epoch, "ready")
        self._tracer.emit("ready", ready, root, (closed_at, times[0]), named)
        ref = self._tracer.group(*key, step, self._epoch, "optimizer_step")
        links = (self._tracer.step(step, self._epoch),)
        self._tracer.emit("optimizer_step", ref, root, times, named, links=links)
