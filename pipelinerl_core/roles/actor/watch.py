"""Health, readiness, metrics and traces of an actor."""

import asyncio
import time
from collections.abc import Callable, Sequence

from pipelinerl_core.interfaces import Engine
from pipelinerl_core.messages import Answer, Lease, Refused, SwapRecord, SyncReply
from pipelinerl_core.roles.runtime.inference import HEARTBEAT_SECONDS, heartbeats
from pipelinerl_core.roles.runtime.monitor import RoleMonitor
from pipelinerl_core.roles.runtime.tracing import ActorTraces
from pipelinerl_core.types import GroupRef, Outcome, Rollout, SwapReport, WeightManifest

SILENCE_SECONDS = 10.0
"""An actor whose hub has not answered for longer is not ready."""


class ActorWatch:
    """Called on the actor's event loop; only `reason_not_ready` is called on other threads."""

    def __init__(
        self,
        monitor: RoleMonitor,
        engine: Engine,
        *,
        epoch: int,
        is_current: Callable[[], bool],
        num_tokens: Callable[[], int],
    ) -> None:
        """`is_current`: whether the engine has the newest weights, or any version after the initial version.

        num_tokens: tokens of completions so far.
        """
        self._num_tokens = num_tokens
        self._monitor = monitor
        self._epoch = monitor.facts["epoch"] = epoch
        self._engine = engine
        self._is_current = is_current
        self._synced_at = 0.0
        self._announced_at: dict[int, float] = {}
        self._manifest: WeightManifest | None = None
        tracer = monitor.tracer
        self._traces = None if tracer is None else ActorTraces(tracer, monitor.name, epoch)
        self._is_paused = False
        monitor.set_readiness_check(self.reason_not_ready)

    async def run(self) -> None:
        """Report heartbeats and the engine's load until cancelled."""
        metrics = self._monitor.metrics
        async with heartbeats(self._monitor, self._engine, is_paused=lambda: self._is_paused):
            while True:
                stats = self._engine.stats()
                metrics.set("actor_engine_running", stats.running)
                metrics.set("actor_engine_waiting", stats.waiting)
                metrics.set("actor_kv_usage", stats.kv_usage)
                metrics.set("actor_prefix_hit_share", stats.num_reused / max(1, stats.num_prefilled))
                await asyncio.sleep(HEARTBEAT_SECONDS)

    def reason_not_ready(self) -> str:
        """Why the actor is not ready; empty while the hub answers and announced weights are loaded."""
        if not self._synced_at:
            return "not registered at the hub yet"
        silent = time.monotonic() - self._synced_at
        if silent > SILENCE_SECONDS:
            return f"the hub has not answered for {silent:.0f} s"
        return "" if self._is_current() else "the newest weights are not loaded yet"

    def synced(self, reply: SyncReply, num_unsent: int) -> None:
        """The hub has answered a sync; `num_unsent` finished groups wait for credit."""
        self._synced_at = time.monotonic()
        self._is_paused = reply.state == "pause"
        self._monitor.metrics.set("actor_unsent_groups", num_unsent)
        if reply.manifest is not None and reply.manifest.version > self._engine.weight_version:
            self._manifest = reply.manifest
            self._announced_at.setdefault(reply.manifest.version, self._synced_at)

    def finished(self, lease: Lease, rollouts: Sequence[Rollout], leased_at: float) -> None:
        """The rollouts of a lease have ended; `leased_at`: when the lease was received, Unix seconds."""
        if self._traces is not None:
            self._traces.finished(lease, rollouts, leased_at, time.time())
        metrics = self._monitor.metrics
        num_errors = sum(rollout.outcome is Outcome.ERROR for rollout in rollouts)
        metrics.add("actor_rollouts_total", len(rollouts) - num_errors, "scored")
        metrics.add("actor_rollouts_total", num_errors, "error")
        metrics.add("actor_tokens_total", sum(rollout.num_tokens for rollout in rollouts))
        # Per group, not per rollout: thousands of rollouts per second end on a thread that also decodes.
        generation = max((rollout.finished_at - rollout.started_at for rollout in rollouts), default=0.0)
        scoring = max((rollout.scored_at - rollout.finished_at for rollout in rollouts), default=0.0)
        metrics.observe("actor_generation_seconds", max(0.0, generation))
        metrics.observe("actor_scoring_seconds", max(0.0, scoring))

    def answered(self, ref: GroupRef, answer: Answer) -> None:
        known = answer.code if isinstance(answer, Refused) else "accepted"
        label = known if known in ("accepted", "stale_lease") else "other"
        self._monitor.metrics.add("actor_groups_total", label=label)
        if self._traces is not None:
            self._traces.answered((ref.group_id, ref.attempt), known, time.time())

    def swapped(self, report: SwapReport) -> SwapRecord:
        """New weights are in the engine; returns the record that the actor sends to the hub."""
        self._monitor.metrics.observe("actor_swap_pause_seconds", report.pause_seconds)
        took_seconds = time.monotonic() - self._announced_at.get(report.version, time.monotonic())
        self._monitor.metrics.observe("actor_weight_update_seconds", took_seconds)
        self._announced_at = {version: at for version, at in self._announced_at.items() if version > report.version}
        swap = SwapRecord(
            actor=self._monitor.name,
            actor_epoch=self._epoch,
            version=report.version,
            at=time.time(),
            pause_seconds=report.pause_seconds,
            num_bytes=report.num_bytes,
            num_running=report.num_running,
            num_tokens=self._num_tokens(),
        )
        if self._traces is not None:
            is_known = self._manifest is not None and self._manifest.version == swap.version
            self._traces.swapped(swap, self._manifest if is_known else None, swap.at - took_seconds)
        return swap
