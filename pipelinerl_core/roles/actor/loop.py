"""The actor's loops: lease groups, sample them on one engine, send them, and swap new weights in meanwhile.

    hub --leases, newest version--> sync ----> groups in flight ----> finished groups --> hub (memory)
                                     |               ^                      |
                                     v               | engine.generate      +-----------> segments (store)
                                   swap --> engine --+

| loop  | consumes          | waits for                        | unblocked by                    |
|-------|-------------------|----------------------------------|---------------------------------|
| sync  | engine statistics | its interval, or starving slots  | the hub's answer                |
| swap  | newest manifest   | a version newer than the engine's| sync                            |
| group | one lease         | slots, then the scorer           | engine, reward children         |
| send  | finished groups   | credit                           | sync (credit is level-triggered)|
| seal  | finished groups   | store.segment_seconds            | the clock                       |
| report| sealed segments   | the hub's answer                 | a hub                           |
| log   | growth of groups  | store.partial_seconds            | the clock                       |
| turns | the GPU's turn    | the trainer's wish for the GPU   | the end of the trainer's turn   |
"""

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import psutil

from pipelinerl_core.channel.refusals import Next, after, error_of
from pipelinerl_core.config import RunConfig
from pipelinerl_core.data.segments import SegmentWriter
from pipelinerl_core.errors import (
    ChecksumMismatch,
    ConfigError,
    EngineError,
    HubUnavailable,
    MissingObject,
    RunOver,
    StoreUnavailable,
    SwapError,
)
from pipelinerl_core.interfaces import Engine, ObjectStore, Subscriber
from pipelinerl_core.messages import (
    Answer,
    Counters,
    Group,
    Lease,
    LeaseRef,
    Refused,
    Register,
    SwapRecord,
    Sync,
    SyncReply,
)
from pipelinerl_core.roles.actor.broadcast_subscriber import BroadcastSubscriber
from pipelinerl_core.roles.actor.evaluating import ActorEvaluation
from pipelinerl_core.roles.actor.finished_group import FinishedGroup, finished_group
from pipelinerl_core.roles.actor.log import GroupLog
from pipelinerl_core.roles.actor.sealing import Sealer
from pipelinerl_core.roles.actor.watch import ActorWatch
from pipelinerl_core.roles.runtime.gpu_turns import ActorTurns
from pipelinerl_core.roles.runtime.hub_link import HubLink
from pipelinerl_core.roles.runtime.monitor import RoleMonitor
from pipelinerl_core.rollouts.error_budget import ErrorBudgets
from pipelinerl_core.rollouts.pace import Pacer
from pipelinerl_core.rollouts.player import Player
from pipelinerl_core.rollouts.runner import GroupRunner
from pipelinerl_core.types import WeightManifest

logger = logging.getLogger(__name__)

# The actor stops after so many failed swaps in a row.
_SWAP_ATTEMPTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorParts:
    """The objects that an actor is built from."""

    engine: Engine
    players: Mapping[str, Player]
    """By part of the mixture; of a run without a mixture by ""."""
    subscriber: Subscriber
    segments: SegmentWriter
    store: ObjectStore
    """The run's store; the log of open groups is written there."""
    broadcasts: BroadcastSubscriber | None = None
    """Only with weights.transport=nccl."""
    evaluation: ActorEvaluation | None = None
    """Only with evaluations during training on actors."""
    turns: ActorTurns | None = None
    """Only with placement.share_gpu=turns."""


class Actor:
    """Works on leases until the hub requests a drain or `stop` is set."""

    def __init__(
        self,
        config: RunConfig,
        parts: ActorParts,
        *,
        run_id: str,
        name: str,
        epoch: int,
        link: Callable[[Callable[[], Register]], HubLink],
        monitor: RoleMonitor | None = None,
        tokens: Mapping[str, str] | None = None,
    ) -> None:
        """tokens: `Register.tokens`; None: the hub does not compare them."""
        self._config = config
        self._engine = parts.engine
        self._subscriber = parts.subscriber
        self._broadcasts = parts.broadcasts
        self._evaluation = parts.evaluation
        self._turns = parts.turns
        self._episode_counts = [player.counts for player in parts.players.values() if player.counts is not None]
        self._runner = GroupRunner(parts.players, actor=name)
        self._log = GroupLog(
            config, parts.store, parts.engine, self._runner, actor=name, epoch=epoch,
            seal=lambda: self._sealer.seal(everything=True),
        )  # fmt: skip
        self._run_id = run_id
        self._name = name
        self._epoch = epoch
        self._tokens = dict(tokens or {})
        self._link = link(self._registration)
        self._sealer = Sealer(parts.segments, self._link, actor=name, epoch=epoch, forget=self._log.forget)
        self._leases: dict[str, Lease] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._unsent: asyncio.Queue[FinishedGroup] = asyncio.Queue()
        # Syncs are the actor's heartbeat: their thread is shared with no other work, which a slow store may block.
        self._sync_thread = ThreadPoolExecutor(1, thread_name_prefix="sync")
        self._sync_now = asyncio.Event()
        self._newest: WeightManifest | None = None
        self._unreadable = -1
        self._newer = asyncio.Event()
        self._swaps: list[SwapRecord] = []
        self._credit = 0
        self._credit_granted = asyncio.Event()
        self._sync_seconds = 0.05
        self._errors = ErrorBudgets(list(parts.players))
        self._pacer = Pacer(config.trainer.groups_per_step)
        self._paced_at = time.monotonic()
        self._paced_tokens = self._most_sampled = 0
        self._paced_seconds = 0.0
        self._process = psutil.Process()
        monitor = monitor or RoleMonitor("actor", name, run_id)
        self._watch = ActorWatch(
            monitor, parts.engine, epoch=epoch, is_current=self._is_current, num_tokens=self._num_tokens
        )

    async def run(self, stop: threading.Event) -> None:
        """Run until drained or stopped. The log then holds the unfinished groups, for another actor to continue."""
        loop = asyncio.get_running_loop()
        self._link.on_sync_now = lambda: _call_soon(loop, self._sync_now.set)
        self._link.is_cancelled = stop.is_set
        try:
            if not await self._connect(stop):
                return
            async with asyncio.TaskGroup() as tasks:
                loops = [
                    tasks.create_task(loop)
                    for loop in (
                        self._swap_loop(),
                        self._send_loop(),
                        self._sealer.run(self._config.store.segment_seconds),
                        self._sealer.report(),
                        self._log.run(),
                        self._watch.run(),
                        *([self._turns.run(self._engine)] if self._turns is not None else []),
                    )
                ]
                try:
                    await self._sync_loop(tasks, stop)
                except (HubUnavailable, EngineError):
                    await self._log.flush()
                    raise
                await self._log.flush()  # another actor continues the open groups from the log
                if self._evaluation is not None:
                    self._evaluation.cancel()
                for task in (*loops, *self._tasks.values()):
                    task.cancel()
        finally:
            if self._broadcasts is not None:
                await self._broadcasts.close()
            await self._sealer.close()
            self._log.close()
            self._sync_thread.shutdown(wait=False, cancel_futures=True)
            await asyncio.to_thread(self._link.close)

    async def _connect(self, stop: threading.Event) -> bool:
        """Register with the hub; False if the run is over, or if `stop` was set before a hub answered."""
        try:
            await asyncio.get_running_loop().run_in_executor(self._sync_thread, self._link.connect)
        except RunOver as over:
            logger.info("%s", over)
            return False
        except HubUnavailable:
            if not stop.is_set():
                raise
            return False
        return True

    async def _sync_loop(self, tasks: asyncio.TaskGroup, stop: threading.Event) -> None:
        loop = asyncio.get_running_loop()
        want = 0  # request no lease before the newest weights are loaded
        while not stop.is_set():
            self._sync_now.clear()  # an event from here on triggers the next sync
            try:
                reply = await loop.run_in_executor(self._sync_thread, self._exchange, self._sync(want))
            except RunOver as over:
                logger.info("%s: %d leases dropped", over, len(self._leases))
                return
            except HubUnavailable:
                if stop.is_set():
                    return
                raise
            if reply is None:
                continue
            self._watch.synced(reply, self._unsent.qsize())
            self._take_versions(reply)
            self._engine.set_paused(reply.state == "pause")
            if reply.state == "drain":
                logger.info("the hub requests a drain: %d leases dropped", len(self._leases))
                return
            self._take_leases(reply, tasks)
            if reply.evaluates and self._evaluation is not None:
                self._evaluation.consider(tasks)
            for group in self._sealer.groups_to_send_again():
                self._unsent.put_nowait(group)
            await self._next_sync()
            self._check_failures()
            want = self._want() if self._is_current() else 0

    def _check_failures(self) -> None:
        """Raises EngineError if the engine has ended for good: another start has a new engine. Raises ConfigError,
        after which no start follows, if too many rollouts fail."""
        if failure := self._engine_failure():
            raise EngineError(failure)
        if self._errors.is_spent:
            raise ConfigError(
                f"over 20 % of the last 200 rollouts failed; first: {self._errors.first_error}. Correct the code "
                "and start a new run; if a service was unavailable, resume the run"
            )

    def _engine_failure(self) -> str:
        """Why the engine has ended for good; empty while it serves requests."""
        return getattr(self._engine, "failure", "")

    def _exchange(self, message: Sync) -> SyncReply | None:
        """Send a sync, on the thread of the syncs; None if the hub did not know this actor, which registers again."""
        reply = self._link.request(message)
        if isinstance(reply, Refused):
            if after(reply) is not Next.REGISTER:
                raise error_of(reply)
            with contextlib.suppress(HubUnavailable):  # the next sync reconnects
                self._link.register_again()
            return None
        assert isinstance(reply, SyncReply)
        return reply

    def _sync(self, want: int) -> Sync:
        stats = self._engine.stats()
        memory = self._process.memory_info()
        return Sync(
            boot_id=self._link.boot_id,
            engine_version=self._engine.weight_version,
            running=stats.running,
            waiting=stats.waiting,
            concurrency=stats.slots,
            want=want,
            leases=tuple(self._leases),
            num_tokens=self._num_tokens(),
            running_seconds=stats.running_seconds,
            swaps=tuple(self._swaps),
            counters=Counters(
                cpu_seconds=time.process_time(),
                rss_bytes=memory.rss,
                reward_errors=self._errors.num_errors,
                unsent_groups=self._unsent.qsize(),
                step_delay_seconds=self._pacer.delay_seconds,
                paced_seconds=self._paced_seconds,
                emulation_overrun_seconds=stats.overrun_seconds,
                unreadable_version=self._unreadable,
                broadcast_group=0 if self._broadcasts is None else self._broadcasts.group,
                **self._episode_counters(),
            ),
        )

    def _num_tokens(self) -> int:
        """Tokens of completions so far: sampled, and given by environments. Those of evaluations are left out."""
        return self._num_sampled() + sum(counts.given for counts in self._episode_counts)

    def _num_sampled(self) -> int:
        evaluated = 0 if self._evaluation is None else self._evaluation.num_tokens
        self._most_sampled = max(self._most_sampled, self._engine.stats().num_tokens - evaluated)
        return self._most_sampled

    def _episode_counters(self) -> dict[str, int]:
        totals: Counter[str] = Counter()
        for counts in self._episode_counts:
            totals.update(asdict(counts))
        return {f"environment_{name}_tokens": number for name, number in totals.items()}

    async def _next_sync(self) -> None:
        """Wait for the sync interval, or less if slots are about to run empty or the hub has sent SyncNow."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._sync_now.wait(), timeout=self._sync_seconds)

    def _want(self) -> int:
        """Groups to request: enough waiting sequences for the slots that become free until the next answer."""
        stats = self._engine.stats()
        group_size = self._config.rollouts.group_size
        ahead = max(group_size, stats.slots // 2)
        return max(0, math.ceil((stats.slots + ahead - stats.running - stats.waiting) / group_size))

    def _is_current(self) -> bool:
        return self._newest is None or self._engine.weight_version > 0 or self._newest.version == 0

    def _take_versions(self, reply: SyncReply) -> None:
        self._sync_seconds = reply.sync_seconds
        self._credit = reply.credit
        if self._config.paces_engines:
            self._set_pace(reply.ready_groups)
        if self._credit > 0:
            self._credit_granted.set()
        self._swaps = [swap for swap in self._swaps if swap.version > reply.swaps_acknowledged]
        if reply.manifest is not None and self._is_wanted(reply.manifest):
            self._newest = reply.manifest
            self._newer.set()
        if reply.manifest is not None and self._broadcasts is not None:
            self._broadcasts.join(reply.manifest)

    def _set_pace(self, ready_groups: int) -> None:
        """Adapt the pause between decode steps, and count the pauses so far, summed over the running sequences."""
        now, num_tokens = time.monotonic(), self._num_sampled()
        self._paced_seconds += self._pacer.delay_seconds * (num_tokens - self._paced_tokens)
        self._engine.set_pace(self._pacer.update(ready_groups, now - self._paced_at))
        self._paced_at, self._paced_tokens = now, num_tokens

    def _is_wanted(self, manifest: WeightManifest) -> bool:
        if self._broadcasts is not None:
            return self._broadcasts.should_swap(manifest, self._engine.weight_version)
        return manifest.version > self._engine.weight_version

    def _take_leases(self, reply: SyncReply, tasks: asyncio.TaskGroup) -> None:
        for lease_id in reply.stop_leases:
            self._leases.pop(lease_id, None)
            task = self._tasks.get(lease_id)
            if task is not None:
                task.cancel()
        for lease in reply.leases:
            if lease.lease_id not in self._leases:
                self._leases[lease.lease_id] = lease
                self._tasks[lease.lease_id] = tasks.create_task(self._work(lease))

    async def _work(self, lease: Lease) -> None:
        leased_at = time.time()
        try:
            rollouts = await self._runner.run(lease, await self._log.restore(lease))
        finally:
            self._tasks.pop(lease.lease_id, None)
        if self._engine_failure():  # not the group's end: another actor continues it from the log
            self._sync_now.set()
            return
        self._errors.add(rollouts)
        self._watch.finished(lease, rollouts, leased_at)
        group = finished_group(self._run_id, lease, rollouts, actor=self._name, epoch=self._epoch)
        self._sealer.add(group)
        self._unsent.put_nowait(group)
        if self._engine.stats().waiting < lease.group_size:
            self._sync_now.set()

    async def _send_loop(self) -> None:
        while True:
            groups = [await self._unsent.get()]
            await self._credit_granted.wait()
            while len(groups) < self._credit and not self._unsent.empty():
                groups.append(self._unsent.get_nowait())
            self._credit -= len(groups)
            if self._credit <= 0:
                self._credit_granted.clear()
            # One call for all groups: a turn of the event loop takes a decode step, so a turn per group is too slow.
            try:
                answers = await asyncio.to_thread(self._send, groups)
            except (HubUnavailable, RunOver):  # the sync loop handles the error; the groups are sent again
                for group in groups:
                    self._unsent.put_nowait(group)
                await asyncio.sleep(self._sync_seconds)
                continue
            for group, answer in zip(groups, answers, strict=True):
                self._note_sent(group, answer)

    def _send(self, groups: list[FinishedGroup]) -> list[Answer]:
        """Send groups, on a thread of its own; the hub's answers in the same order."""
        return self._link.request_all(
            [(Group(lease_id=group.lease_id, ref=group.ref, seq=group.seq), group.rows) for group in groups]
        )

    def _note_sent(self, group: FinishedGroup, answer: Answer) -> None:
        group.is_sent = True
        self._watch.answered(group.ref, answer)
        self._leases.pop(group.lease_id, None)
        if not isinstance(answer, Refused):
            self._sealer.confirm(group)
            return
        if after(answer) is not Next.DROP:
            raise error_of(answer)
        logger.warning("group %d attempt %d: %s", group.ref.group_id, group.ref.attempt, answer.detail)
        self._sealer.drop(group)

    def _registration(self) -> Register:
        """The message for the hub; the link calls this on its own thread at every connection."""
        if self._link.registered is not None:
            self._sealer.must_send_again = True
        held = [
            LeaseRef(group_id=lease.group_id, attempt=lease.attempt, lease_id=lease.lease_id)
            for lease in list(self._leases.values())
        ]
        offered = [offer for offer in self._sealer.lease_refs() if offer.lease_id not in self._leases]
        leases = (*held, *offered)
        return Register(role="actor", name=self._name, epoch=self._epoch, tokens=self._tokens, leases=leases)

    async def _swap_loop(self) -> None:
        failures = 0  # in a row
        while True:
            await self._newer.wait()
            self._newer.clear()
            manifest = self._newest
            if manifest is None or not self._is_wanted(manifest):
                continue
            try:
                update = self._broadcasts.update(manifest) if self._broadcasts is not None else None
                if update is None:
                    update = await asyncio.to_thread(self._subscriber.fetch, manifest)
            except (MissingObject, ChecksumMismatch) as error:
                if manifest.version != self._unreadable:
                    logger.warning("weights of version %d cannot be read: %s", manifest.version, error)
                self._unreadable = manifest.version  # the next sync reports this: the trainer publishes again
                await asyncio.sleep(self._sync_seconds)
                continue
            except StoreUnavailable as error:  # the next answer to a sync names the newest version again
                logger.warning("weights of version %d are not read yet: %s", manifest.version, error)
                continue
            try:
                report = await self._engine.swap(update)
            except SwapError as error:
                # The engine keeps its version; the next answer to a sync names the newest version again.
                failures += 1
                if failures == _SWAP_ATTEMPTS:
                    raise
                logger.warning("%s", error)
                continue
            del update  # an engine that has copied the weights needs their file no longer
            failures, self._unreadable = 0, -1
            self._sync_now.set()  # the hub may wait for this swap before it ends a pause or grants leases
            self._swaps.append(self._watch.swapped(report))


def _call_soon(loop: asyncio.AbstractEventLoop, action: Callable[[], object]) -> None:
    """Schedule `action` from another thread; no effect if the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(action)
