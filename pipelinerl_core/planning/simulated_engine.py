"""An engine on simulated time: slots, waiting sequences, decode steps, prefill, turns, pauses and swaps.

Between two events of an engine the number of running sequences is constant, and so is the time of a decode step. The
engine therefore moves from event to event, whatever the number of steps in between. Decode steps are counted as a
fraction: a sequence that is admitted in the middle of a step starts at once.
"""

import heapq
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from pipelinerl_core.ledger import ActorKey, Grant
from pipelinerl_core.types import Origin

# A sequence ends up to this share of a step early, because times are rounded.
_SAME_STEP = 1e-3


class Speeds(Protocol):
    """Times of the work of one actor and of the trainer; `emulation.accelerators.EmulatedSpeeds` is one."""

    def decode_seconds(self, num_running: int) -> float:
        """Time of a decode step of this many sequences on the accelerators of one actor."""

    def train_seconds(self, num_tokens: int) -> float:
        """Time of an optimizer step on this many tokens."""


@dataclass(slots=True, eq=False)
class GroupWork:
    """A leased group on an engine."""

    grant: Grant
    unfinished: int
    """Rollouts that have not ended."""
    sampled: list[tuple[float, int]] = field(default_factory=list)
    """(step at which sampling started, length) of the turns that have ended."""
    earlier: dict[int, int] = field(default_factory=dict)
    """Tokens by version that earlier engines sampled."""
    origins: tuple[Origin, ...] = ()
    """The same tokens by engine."""
    rest: "list[_Sequence]" = field(default_factory=list)
    """Sequences that another engine continues, after the end of this engine."""


@dataclass(frozen=True, slots=True)
class _Sequence:
    """A rollout before one of its turns."""

    turns: tuple[int, ...]
    """Lengths of the turns to come."""
    done: int
    """Tokens of earlier turns."""
    work: GroupWork


class SimulatedEngine:
    """The engine of one actor."""

    def __init__(
        self,
        key: ActorKey,
        *,
        slots: int,
        group_size: int,
        speeds: Speeds,
        prefill_seconds: float,
        prompt_tokens: int = 0,
        cache_tokens: float = math.inf,
        speed: float = 1.0,
        turns: int = 1,
        tool_seconds: float = 0.0,
    ) -> None:
        """prefill_seconds: time for which the admission of one sequence stops the decode steps. speed: of the decode
        steps, relative to `speeds`. turns: of equal length, per rollout; tool_seconds: time between two turns, in
        which the sequence has no slot and no space in the KV cache. Later turns need no prefill."""
        self.key = key
        self.version = 0
        self.works: dict[str, GroupWork] = {}
        """Leased groups by lease_id."""
        self.busy_slot_seconds = 0.0
        """Integral of the running sequences; a pause of the schedule counts as idle, as in `interfaces.Engine`."""
        self.paced_seconds = 0.0
        """The part of this integral in the pauses between decode steps."""
        self.cache_wait_seconds = 0.0
        """Time in which a slot was free and a sequence waited for space in the KV cache."""
        self.is_paused = False
        """By the schedule."""
        self._prompt_tokens = prompt_tokens
        self._free_tokens = cache_tokens
        self._speed = speed
        self._delay_seconds = 0.0  # after each decode step
        self._slots = slots
        self._group_size = group_size
        self._speeds = speeds
        self._prefill_seconds = prefill_seconds
        self._turns, self._tool_seconds = turns, tool_seconds
        self._waiting: deque[_Sequence] = deque()
        self._running: list[tuple[float, int, _Sequence]] = []  # a heap of (last step, number, sequence)
        self._away: deque[tuple[float, _Sequence]] = deque()  # (time of the next turn, sequence), in order
        self._num_admitted = 0
        self._num_ended_tokens = 0
        self._sum_of_starts = 0.0  # over the running sequences, the steps at which they started
        self._now = 0.0
        self._steps = 0.0
        self._step_seconds = 1.0  # of the running sequences
        self._stopped_until = 0.0  # by prefill and swaps
        self._swap_steps = [0.0]  # step of the swap to each version of _versions
        self._versions = [0]

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_tokens(self) -> int:
        """Tokens sampled so far."""
        return self._num_ended_tokens + max(0, int(self.num_running * self._steps - self._sum_of_starts))

    @property
    def wanted_groups(self) -> int:
        """Groups to request, as in roles/actor/loop.py: the waiting sequences cover half of the slots."""
        ahead = max(self._group_size, self._slots // 2)
        missing = self._slots + ahead - self.num_running - self.num_waiting
        return max(0, math.ceil(missing / self._group_size))

    @property
    def next_end(self) -> float:
        """Time at which the next turn ends or begins; infinite while nothing runs."""
        begins = self._away[0][0] if self._away else math.inf
        if not self._running or self.is_paused:
            return begins
        steps = max(0.0, self._running[0][0] - self._steps)
        return min(begins, max(self._now, self._stopped_until) + steps * self._step_seconds)

    def advance(self, now: float) -> None:
        """Sample until `now`, which is not later than `next_end`."""
        self.busy_slot_seconds += 0 if self.is_paused else self.num_running * (now - self._now)
        if self._waiting and self.num_running < self._slots:
            self.cache_wait_seconds += now - self._now
        if not self.is_paused and self._running:
            seconds = now - max(self._now, self._stopped_until)
            steps = max(0.0, seconds) / self._step_seconds
            self._steps += steps
            self.paced_seconds += steps * self._delay_seconds * self.num_running
        self._now = now

    def take(self, grant: Grant, lengths: Iterable[int]) -> None:
        """Start the rollouts of a leased group."""
        work = GroupWork(grant, unfinished=self._group_size)
        self.works[grant.lease_id] = work
        for length in lengths:
            each, more = divmod(length, self._turns)
            turns = (each + 1,) * more + (each,) * (self._turns - more if each else 0)
            self._waiting.append(_Sequence(turns, 0, work))
        self._admit()

    def resume(self, grant: Grant, work: GroupWork) -> None:
        """Continue the rollouts of a group that `end` has returned from another engine."""
        now = GroupWork(grant, work.unfinished, earlier=work.earlier, origins=work.origins)
        self.works[grant.lease_id] = now
        self._waiting.extend(_Sequence(sequence.turns, sequence.done, now) for sequence in work.rest)
        self.stop(self._prefill_seconds * sum(sequence.done > 0 for sequence in work.rest))
        self._admit()

    def end(self, lost_seconds: float) -> list[GroupWork]:
        """End the groups, for other engines to `resume`, without the tokens of the last `lost_seconds`."""
        lost = lost_seconds / self._step_seconds if self._running else 0.0
        for last, _, sequence in self._running:
            start = last - sequence.turns[0]
            kept = max(0, int(self._steps - lost - start))
            self._free_tokens += self._prompt_tokens + sequence.done + sequence.turns[0]
            if kept:
                sequence.work.sampled.append((start, kept))
            turns = (sequence.turns[0] - kept, *sequence.turns[1:])
            sequence.work.rest.append(_Sequence(turns, sequence.done + kept, sequence.work))
        for sequence in (*self._waiting, *(sequence for _, sequence in self._away)):
            sequence.work.rest.append(sequence)
        works = list(self.works.values())
        for work in works:
            own = sum(length for _, length in work.sampled)
            work.earlier = self.tokens_by_version(work)
            work.origins = (*work.origins, Origin(self.key.name, self.key.epoch, own))
        self.works, self._running, self._sum_of_starts = {}, [], 0.0
        self._waiting.clear()
        self._away.clear()
        return works

    def restart(self, key: ActorKey, version: int) -> None:
        """Begin another life with these weights."""
        self.key, self._num_ended_tokens = key, 0
        self.swap(version, 0.0)

    def end_sequences(self) -> list[GroupWork]:
        """End the turns that have all their tokens, begin the turns that are due; returns the complete groups."""
        complete = []
        while self._away and self._away[0][0] <= self._now:
            self._waiting.append(self._away.popleft()[1])
        while self._running and self._running[0][0] <= self._steps + _SAME_STEP:
            last, _, sequence = heapq.heappop(self._running)
            work, length = sequence.work, sequence.turns[0]
            self._num_ended_tokens += length
            self._sum_of_starts -= last - length
            work.sampled.append((last - length, length))
            self._free_tokens += self._prompt_tokens + sequence.done + length
            if len(sequence.turns) > 1:
                following = _Sequence(sequence.turns[1:], sequence.done + length, work)
                self._away.append((self._now + self._tool_seconds, following))
                continue
            work.unfinished -= 1
            if not work.unfinished:
                complete.append(work)
                del self.works[work.grant.lease_id]
        self._admit()
        return complete

    def swap(self, version: int, seconds: float) -> None:
        """Sample with a newer version after a stop of `seconds`; running sequences continue."""
        self.version = version
        self._swap_steps.append(self._steps)
        self._versions.append(version)
        self.stop(seconds)

    def rest(self, seconds: float, token_seconds: float) -> None:
        """Give the GPU to the trainer for `seconds`, then compute the keys and values of running sequences again."""
        tokens = self.num_running * (self._prompt_tokens + self._steps) - self._sum_of_starts
        seconds += token_seconds * (tokens + sum(sequence.done for _, _, sequence in self._running))
        self.busy_slot_seconds -= 0 if self.is_paused else self.num_running * seconds
        self.stop(seconds)

    def set_pace(self, delay_seconds: float) -> None:
        self._delay_seconds = delay_seconds
        self._set_step_seconds()

    def set_paused(self, is_paused: bool) -> None:
        self.is_paused = is_paused

    def tokens_by_version(self, work: GroupWork) -> dict[int, int]:
        """Tokens of a complete group per version that sampled them."""
        counts = dict(work.earlier)
        first = bisect_right(self._swap_steps, min((start for start, _ in work.sampled), default=math.inf)) - 1
        ends = [*self._swap_steps[first + 1 :], math.inf]
        versions = self._versions[first:]
        for start, length in work.sampled:
            done = 0
            for end, version in zip(ends, versions, strict=True):
                until = length if end - start >= length else max(0, int(end - start))
                if until > done:
                    counts[version] = counts.get(version, 0) + until - done
                    done = until
                if done == length:
                    break
        return counts

    def _admit(self) -> None:
        while self._waiting and self.num_running < self._slots:
            sequence = self._waiting[0]
            needed = self._prompt_tokens + sequence.done + sequence.turns[0]
            if needed > self._free_tokens:
                break
            self._free_tokens -= needed
            self._waiting.popleft()
            self._num_admitted += 1
            self._sum_of_starts += self._steps
            heapq.heappush(self._running, (self._steps + sequence.turns[0], self._num_admitted, sequence))
            if not sequence.done:
                self.stop(self._prefill_seconds)
        self._set_step_seconds()

    def _set_step_seconds(self) -> None:
        self._step_seconds = self._speeds.decode_seconds(self.num_running) / self._speed + self._delay_seconds

    def stop(self, seconds: float) -> None:
        """Sample nothing for `seconds` more; running sequences continue afterwards."""
        self._stopped_until = max(self._stopped_until, self._now) + seconds
