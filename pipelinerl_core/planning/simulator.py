"""A whole run on simulated time: the real ledger and schedule, simulated engines and a simulated trainer.

The ledger decides, as in a run, which groups are leased, when a step is taken, which groups the step trains and which
tokens are too old. Time moves from event to event:

    the next turn of an engine ends         the group may be complete and arrive at the ledger
    or begins                               tool_seconds after the end of the turn before
    an optimizer step ends                  the step is committed after commit_seconds, and its version is announced
    an engine swaps                         publish_seconds after the announcement
    an engine syncs                         at the next multiple of sync_seconds after an event that may admit groups
                                            or pause the engine; a paced engine at every multiple
    the trainer asks again                  schedule.stale=wait has held the step back for wait_seconds
    a machine is preempted                  its role ends and comes back, as docs/planning.md says

With the default times of 0, messages take no time, and an engine is not paced.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count

import numpy as np

from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.ledger import ActorKey, Arrival, GroupSummary, Ledger
from pipelinerl_core.messages import Reserved, Sync
from pipelinerl_core.planning.lengths import Lengths
from pipelinerl_core.planning.simulated_engine import GroupWork, SimulatedEngine, Speeds
from pipelinerl_core.rollouts.pace import Pacer
from pipelinerl_core.supervision.run_roles import TRAINER_STOP_SECONDS
from pipelinerl_core.types import GroupRef, WeightManifest

# Lengths are drawn for this many rollouts at once.
_DRAWN = 1 << 16


@dataclass(frozen=True, slots=True, order=True)
class Preemption:
    """The machine of a role (actor-<index>, trainer or hub) ends, and a machine is back later."""

    seconds: float
    role: str
    away_seconds: float
    notice_seconds: float = 0.0
    """Time from SIGTERM to the end; 0: no SIGTERM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The generated and trained tokens, and the times that `Speeds` does not have."""

    lengths: Lengths
    """Lengths of completions."""
    prompt_tokens: int = 0
    """Tokens of a prompt, which are trained with every completion."""
    prefill_token_seconds: float = 0.0
    """Time per prompt token for which an engine stops its decode steps."""
    swap_seconds: float = 0.0
    """Time for which a swap stops an engine."""
    publish_seconds: float = 0.0
    """Time from the announcement of a version to the swap."""
    commit_seconds: float = 0.0
    """Time from the end of an optimizer step to its commit and the announcement of its version."""
    fetch_seconds: float = 0.0
    """Time in which the trainer gets the rows of the groups of a step."""
    snapshot_seconds: float = 0.0
    """Time from the end of an optimizer step to the request for the next groups."""
    turn_seconds: float = 0.0
    """With placement.share_gpu=turns: time per step for moving state between the GPU and the host's memory."""
    arrival_seconds: float = 0.0
    """Time from the last token of a group to its arrival: scoring and sending."""
    sync_seconds: float = 0.0
    """Interval between two syncs of an engine; 0: at once, and without pace."""
    cache_tokens: float = math.inf
    """Tokens of prompts and completions that the KV cache of an actor holds. A sequence reserves all its tokens."""
    actor_speeds: tuple[float, ...] = ()
    """Speed of each actor's decode steps relative to `Speeds`; empty: 1 for all."""
    preemptions: tuple[Preemption, ...] = ()
    start_seconds: float = 0.0
    """Time in which a started process loads code, model and weights."""
    turns: int = 1
    """Turns of an episode; its tokens are divided equally."""
    tool_seconds: float = 0.0
    """Time between two turns, in which the environment works and the sequence leaves its slot."""
    usable_slots: float = 1.0
    """Share of the slots that a busy engine keeps in use: some wait for new sequences."""
    equal_share: float = 0.0
    """Share of the groups whose rewards are all equal; filtered with rollouts.filter_zero_variance."""

    def __post_init__(self) -> None:
        """Raises ConfigError for numbers without meaning."""
        times = (
            self.prompt_tokens, self.prefill_token_seconds, self.swap_seconds, self.publish_seconds,
            self.commit_seconds, self.fetch_seconds, self.snapshot_seconds, self.arrival_seconds, self.sync_seconds,
            self.tool_seconds, self.turns - 1, self.start_seconds, self.turn_seconds,
        )  # fmt: skip
        if min(times) < 0 or not 0 <= self.equal_share < 1:
            raise ConfigError(
                f"tokens and times {times} must be 0 or more, and equal_share={self.equal_share:g} at least 0 and "
                "below 1: a run whose groups are all filtered never trains"
            )
        if any(speed <= 0 for speed in self.actor_speeds):
            raise ConfigError(f"speeds of actors {self.actor_speeds}: each must be above 0")
        if self.prompt_tokens + self.lengths.longest > self.cache_tokens:
            raise ConfigError(
                f"one sequence of {self.prompt_tokens} + {self.lengths.longest} tokens does not fit the KV cache of "
                f"an actor, {max(0, int(self.cache_tokens))} tokens. Raise engine.tensor_parallel or lower "
                "rollouts.max_tokens"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """An optimizer step."""

    at: float
    """Time of the commit, seconds since the start of the run."""
    tokens: int
    """Completion tokens of its groups, masked ones included."""
    live_tokens: int
    """Trained tokens that are not masked."""
    lag_tokens: int
    """Sum of their lags."""
    max_lag: int
    """Largest lag of all tokens, optimizer steps."""
    wait_seconds: float
    """Time for which the trainer had no groups before the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """The result of a simulation. Means leave out the first `skip` steps, in which the engines start."""

    steps: tuple[SimulatedStep, ...]
    tokens: dict[str, int]
    """Tokens by class, as the ledger counts them."""
    busy_slots: float
    """Share of the slots that were in use, over the whole run."""
    waited_for_cache: float = 0.0
    """Share of the engines' time in which a slot was free and a sequence waited for space in the KV cache."""
    seconds_per_token: float = 0.0
    """Time of running sequences per sampled token, without the pauses of a paced engine."""
    delay_seconds: float = 0.0
    """Mean pause of a paced engine after a decode step."""

    def throughput(self, skip: int) -> float:
        """Trained completion tokens per second."""
        return sum(step.tokens for step in self.steps[skip:]) / self._seconds(skip)

    def waiting(self, skip: int) -> float:
        """Share of the time for which the trainer had no groups."""
        return sum(step.wait_seconds for step in self.steps[skip:]) / self._seconds(skip)

    def mean_lag(self, skip: int) -> float:
        """Mean lag of the trained tokens, optimizer steps."""
        steps = self.steps[skip:]
        return sum(step.lag_tokens for step in steps) / max(1, sum(step.live_tokens for step in steps))

    def max_lag(self, skip: int) -> int:
        """Largest lag of a token, optimizer steps."""
        return max(step.max_lag for step in self.steps[skip:])

    def _seconds(self, skip: int) -> float:
        if not 0 < skip < len(self.steps):
            raise ConfigError(f"{len(self.steps)} simulated steps, of which {skip} are left out. Simulate more steps")
        return self.steps[-1].at - self.steps[skip - 1].at


def simulate(config: RunConfig, speeds: Speeds, work: Work) -> SimulatedRun:
    """Simulate all steps of a configuration. Raises ConfigError if the run cannot be simulated or cannot go on."""
    if config.engine.kv == "drain":
        raise ConfigError("engine.kv=drain is not simulated. Set engine.kv=keep")
    return _Simulation(config, speeds, work).run()


class _Simulation:
    """The state of one simulation."""

    def __init__(self, config: RunConfig, speeds: Speeds, work: Work) -> None:
        self._config = config
        self._speeds = speeds
        self._work = work
        self._now = 0.0
        self._random = np.random.default_rng(config.seed)
        self._drawn: list[list[int]] = []  # lengths of groups, the next one last
        self._num_drawn = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()  # events at the same time keep their order
        self._steps: list[SimulatedStep] = []
        self._summaries: dict[int, GroupSummary] = {}  # of groups that were ready
        self._is_training = False
        self._has_trainer = True  # which takes further steps
        self._ended = Counter[str]()  # processes of each role that have ended
        self._checkpointed_at = 0.0
        self._replay_seconds = 0.0  # of the steps since the newest checkpoint
        self._hub_until = 0.0  # the hub is away until then
        self._next_step = 1
        self._idle_since = 0.0
        self._asked_again_for = 0  # step whose second request is scheduled
        self._has_pauses = config.schedule.leases_more
        self._ledger = Ledger(config, clock=lambda: self._now)
        self._ledger.committed(0, (), _manifest(0))
        self._engines = [
            SimulatedEngine(
                ActorKey(f"actor-{number}", 1),
                slots=max(1, round(work.usable_slots * config.engine.concurrency)),
                group_size=config.rollouts.group_size,
                speeds=speeds,
                prefill_seconds=work.prompt_tokens * work.prefill_token_seconds,
                prompt_tokens=work.prompt_tokens,
                cache_tokens=work.cache_tokens,
                speed=work.actor_speeds[number] if number < len(work.actor_speeds) else 1.0,
                turns=work.turns,
                tool_seconds=work.tool_seconds,
            )
            for number in range(config.placement.actors)
        ]
        self._away: set[int] = set()  # numbers of preempted actors
        self._open: dict[int, GroupWork] = {}  # groups of preempted actors
        self._pacers = [Pacer(config.trainer.groups_per_step) for _ in self._engines]
        self._is_paced = config.paces_engines and work.sync_seconds > 0
        self._num_ticks = 0  # scheduled syncs of paced engines, which cause no progress of their own
        self._sum_of_delays, self._num_delays = 0.0, 0
        self._sent: list[dict[str, GroupWork]] = [{} for _ in self._engines]  # by lease: groups that have not arrived
        self._syncing: set[int] = set()  # engines whose next sync is scheduled
        self._wakes = [math.inf] * len(self._engines)  # time of the next event of each engine
        self._refused = dict.fromkeys(range(len(self._engines)))  # engines that need groups, in order

    def run(self) -> SimulatedRun:
        for engine in self._engines:
            self._ledger.register_actor(engine.key)
        self._ledger.register_trainer(1)
        for number in range(len(self._engines)):
            self._sync(number)
            self._tick(number)
        for preemption in self._work.preemptions:
            ends = {"trainer": self._trainer_stops, "hub": self._hub_ends}.get(preemption.role, self._actor_ends)
            self._at(max(0.0, preemption.seconds - preemption.notice_seconds), partial(ends, preemption))
        while not self._ledger.is_done:
            if len(self._events) <= self._num_ticks:
                raise ConfigError(
                    f"the simulated run stops after step {self._ledger.committed_step}: no engine may generate, and "
                    "the trainer lacks groups"
                )
            self._now, _, event = heapq.heappop(self._events)
            event()
        slot_seconds = self._now * self._config.engine.concurrency * len(self._engines)
        return SimulatedRun(
            steps=tuple(self._steps),
            tokens=self._ledger.tokens(),
            busy_slots=sum(engine.busy_slot_seconds for engine in self._engines) / slot_seconds,
            waited_for_cache=sum(engine.cache_wait_seconds for engine in self._engines)
            / (self._now * len(self._engines)),
            seconds_per_token=sum(engine.busy_slot_seconds - engine.paced_seconds for engine in self._engines)
            / max(1, sum(engine.num_tokens for engine in self._engines)),
            delay_seconds=self._sum_of_delays / max(1, self._num_delays),
        )

    def _at(self, time: float, event: Callable[[], None], *, role: str = "", needs_hub: bool = False) -> None:
        """Schedule an event, unless the process of `role` ends before; needs_hub: not while the hub is away."""
        num_ended = self._ended[role]

        def happen() -> None:
            if needs_hub and self._now < self._hub_until:
                self._at(self._hub_until, happen)
            elif self._ended[role] == num_ended:
                event()

        heapq.heappush(self._events, (time, next(self._numbers), happen))

    def _back_at(self, event: Preemption) -> float:
        return event.seconds + event.away_seconds + self._work.start_seconds

    def _actor_ends(self, event: Preemption) -> None:
        number = int(event.role.partition("-")[2])
        engine = self._engines[number]
        engine.advance(self._now)
        for work in self._sent[number].values():
            self._add(engine, work)
        self._sent[number].clear()
        log_seconds = self._config.store.log_seconds("")
        works = engine.end(0.0 if event.notice_seconds else log_seconds / 2)
        if log_seconds:
            self._open |= {work.grant.group_id: work for work in works}
        self._away.add(number)
        self._ended[event.role] += 1
        self._wake(number)
        self._request_step()
        free_at = self._now + (0.0 if event.notice_seconds else self._config.placement.lease_seconds)
        self._at(free_at, partial(self._ledger.bye, engine.key), needs_hub=True)
        self._at(free_at, self._lease, needs_hub=True)
        self._at(self._back_at(event), partial(self._actor_returns, number), role=event.role, needs_hub=True)

    def _actor_returns(self, number: int) -> None:
        engine = self._engines[number]
        engine.advance(self._now)
        engine.restart(ActorKey(engine.key.name, engine.key.epoch + 1), self._ledger.newest_version)
        self._ledger.register_actor(engine.key)
        self._away.discard(number)
        self._sync(number)
        self._lease()

    def _lease(self) -> None:
        """Let every engine that was refused groups sync."""
        for number in list(self._refused):
            self._sync_soon(number)

    def _sync_soon(self, number: int) -> None:
        """Sync at the next multiple of the interval; the engines' syncs are evenly spread over the interval."""
        interval = self._work.sync_seconds
        if not interval:
            self._sync(number)
        elif number not in self._syncing:
            self._syncing.add(number)
            offset = interval * number / len(self._engines)
            syncs = math.floor((self._now - offset) / interval) + 1
            self._at(offset + interval * syncs, partial(self._sync, number))

    def _tick(self, number: int) -> None:
        """Sync a paced engine, and schedule its next sync."""
        if not self._is_paced:
            return
        engine, interval = self._engines[number], self._work.sync_seconds
        engine.advance(self._now)
        delay_seconds = self._pacers[number].update(self._ledger.num_ready, interval)
        engine.set_pace(delay_seconds)
        self._sum_of_delays += delay_seconds
        self._num_delays += 1
        self._wake(number)
        self._num_ticks += 1

        def again() -> None:
            self._num_ticks -= 1
            self._tick(number)

        self._at(self._now + interval, again)

    def _sync(self, number: int) -> None:
        """Request the groups that an engine needs, and schedule its next event."""
        self._refused.pop(number, None)
        self._syncing.discard(number)
        engine = self._engines[number]
        engine.advance(self._now)
        if number in self._away:
            return
        if self._has_pauses:
            engine.set_paused(self._ledger.must_pause(engine.version))
        want = engine.wanted_groups
        if want and self._now < self._hub_until:
            self._refused[number] = None
        elif want:
            message = Sync(
                boot_id="0",
                engine_version=engine.version,
                running=engine.num_running,
                waiting=engine.num_waiting,
                concurrency=self._config.engine.concurrency,
                want=want,
                leases=(*engine.works, *self._sent[number]),
                num_tokens=engine.num_tokens,
                running_seconds=engine.busy_slot_seconds,
            )
            granted = self._ledger.sync(engine.key, message).leases
            for grant in granted:
                if grant.group_id in self._open:
                    engine.resume(grant, self._open.pop(grant.group_id))
                else:
                    engine.take(grant, self._draw())
            if len(granted) < want:
                self._refused[number] = None
        self._wake(number)

    def _wake(self, number: int) -> None:
        """Schedule the next end of a sequence, unless it is scheduled already."""
        time = self._engines[number].next_end
        if time != self._wakes[number]:
            self._wakes[number] = time
            if time < math.inf:
                self._at(time, partial(self._sequence_ends, number, time))

    def _sequence_ends(self, number: int, time: float) -> None:
        if self._wakes[number] != time:
            return  # the engine was stopped, or runs other sequences
        self._wakes[number] = math.inf
        engine = self._engines[number]
        engine.advance(time)
        complete = engine.end_sequences()
        self._sent[number].update((work.grant.lease_id, work) for work in complete)
        if complete and (self._work.arrival_seconds or time < self._hub_until):
            arrive = partial(self._arrive, number, complete)
            self._at(time + self._work.arrival_seconds, arrive, role=engine.key.name, needs_hub=True)
        elif complete:
            self._arrive(number, complete)
        if engine.wanted_groups and number not in self._refused:
            self._sync(number)
        else:
            self._wake(number)

    def _arrive(self, number: int, complete: list[GroupWork]) -> None:
        outstanding = self._ledger.counts.outstanding
        for work in complete:
            del self._sent[number][work.grant.lease_id]
            self._add(self._engines[number], work)
        self._request_step()
        if self._ledger.counts.outstanding < outstanding:  # a group was filtered or dropped
            self._lease()
        self._pause()

    def _add(self, engine: SimulatedEngine, work: GroupWork) -> None:
        grant, size = work.grant, self._config.rollouts.group_size
        versions = engine.tokens_by_version(work)
        summary = GroupSummary(
            ref=GroupRef(
                group_id=grant.group_id,
                attempt=grant.attempt,
                actor=engine.key.name,
                actor_epoch=engine.key.epoch,
                num_rollouts=size,
                num_tokens=sum(versions.values()),
                origins=work.origins,
            ),
            rewards=self._rewards(size),
            tokens_by_version=versions,
        )
        if self._ledger.add_group(summary, grant.lease_id) is Arrival.READY:
            self._summaries[grant.group_id] = summary

    def _rewards(self, size: int) -> tuple[float, ...]:
        is_equal = self._work.equal_share > 0 and self._random.random() < self._work.equal_share
        return (0.0,) * size if is_equal else (1.0, *(0.0,) * (size - 1))

    def _draw(self) -> list[int]:
        """Lengths of a group."""
        if not self._drawn:
            size = self._config.rollouts.group_size
            num = max(1, _DRAWN // size)
            self._drawn = self._work.lengths.draw(self._random, num, size, self._num_drawn)[::-1].tolist()
        self._num_drawn += 1
        return self._drawn.pop()

    def _swap(self, number: int, version: int) -> None:
        engine = self._engines[number]
        if version <= engine.version:
            return
        engine.advance(self._now)
        engine.swap(version, self._work.swap_seconds)
        self._pause()
        self._sync(number)

    def _pause(self) -> None:
        """Pause or continue engines as the schedule says."""
        if not self._has_pauses:
            return
        for number, engine in enumerate(self._engines):
            if self._ledger.must_pause(engine.version) != engine.is_paused:
                self._sync_soon(number)

    def _request_step(self) -> None:
        step = self._next_step
        is_free = self._has_trainer and not self._is_training and self._now >= self._hub_until
        if not is_free or step > self._config.trainer.steps or not self._ledger.is_due(step):
            return
        answer = self._ledger.reserve(step, 1 + self._ended["trainer"])
        if not answer.is_ready:
            if self._asked_again_for < step:
                self._asked_again_for = step
                self._at(self._now + self._config.schedule.wait_seconds, self._request_step)
            return
        self._is_training = True
        fetch_seconds = self._work.fetch_seconds
        waited = self._now - self._idle_since + fetch_seconds
        num_tokens = sum(ref.num_tokens + ref.num_rollouts * self._work.prompt_tokens for ref in answer.groups)
        seconds = self._speeds.train_seconds(num_tokens)
        if self._config.gpu_turns:
            seconds += self._work.turn_seconds
            for number, engine in enumerate(self._engines):
                engine.advance(self._now)
                engine.rest(fetch_seconds + seconds, self._work.prefill_token_seconds)
                self._wake(number)
        computed = partial(self._computed, step, answer, waited, seconds)
        self._at(self._now + fetch_seconds + seconds, computed, role="trainer")

    def _computed(self, step: int, answer: Reserved, waited: float, seconds: float) -> None:
        """An optimizer step ends: its commit follows, and the trainer requests the next groups."""
        trained = [self._summaries[ref.group_id] for ref in answer.groups]
        lags = [(step - 1 - v, num) for summary in trained for v, num in summary.tokens_by_version.items()]
        live = [(lag, num) for lag, num in lags if lag <= self._config.schedule.max_lag]  # others are masked
        self._steps.append(
            SimulatedStep(
                at=self._now,
                tokens=sum(num for _, num in lags),
                live_tokens=sum(num for _, num in live),
                lag_tokens=sum(lag * num for lag, num in live),
                max_lag=max(lag for lag, _ in lags),
                wait_seconds=waited,
            )
        )
        self._next_step = step + 1
        commit = partial(self._commit, step, answer, seconds)
        self._at(self._now + self._work.commit_seconds, commit, role="trainer", needs_hub=True)
        self._at(self._now + self._work.snapshot_seconds, self._next_request, role="trainer")

    def _next_request(self) -> None:
        self._is_training, self._idle_since = False, self._now
        outstanding = self._ledger.counts.outstanding
        self._request_step()
        if self._ledger.counts.outstanding < outstanding:  # a group was dropped
            self._lease()

    def _commit(self, step: int, answer: Reserved, seconds: float) -> None:
        """A step is committed: the window admits groups, and the version is announced."""
        self._replay_seconds += seconds
        if self._now - self._checkpointed_at >= self._config.checkpoint.every_seconds:
            self._replay_seconds, self._checkpointed_at = 0.0, self._now
        is_published = self._config.publishes(step)
        self._ledger.committed(step, answer.decided, _manifest(step) if is_published else None)
        if is_published:
            for number in range(len(self._engines)):
                self._at(self._now + self._work.publish_seconds, partial(self._swap, number, step))
        self._lease()
        self._pause()

    def _hub_ends(self, event: Preemption) -> None:
        self._hub_until = max(self._hub_until, self._back_at(event))
        self._at(self._hub_until, self._request_step)
        self._at(self._hub_until, self._lease)

    def _trainer_stops(self, event: Preemption) -> None:
        """After SIGTERM the trainer takes no further step, and ends within TRAINER_STOP_SECONDS."""
        self._has_trainer = False
        ends_at = min(event.seconds, self._now + TRAINER_STOP_SECONDS)
        self._at(ends_at, partial(self._trainer_ends, event), role="trainer")

    def _trainer_ends(self, event: Preemption) -> None:
        """Steps that are not committed are lost."""
        self._ended["trainer"] += 1
        self._next_step = self._ledger.committed_step + 1
        del self._steps[self._next_step - 1 :]
        self._at(self._back_at(event) + self._replay_seconds, self._trainer_returns, role="trainer", needs_hub=True)

    def _trainer_returns(self) -> None:
        self._ledger.register_trainer(1 + self._ended["trainer"])
        self._has_trainer, self._checkpointed_at = True, self._now
        self._next_request()


def _manifest(version: int) -> WeightManifest:
    return WeightManifest(version=version, epoch=1, files=(), key=None, shm=None, host="", published_at=0.0)
