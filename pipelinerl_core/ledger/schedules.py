"""The schedules: when groups may be leased, when a step may be reserved, in which order, and when engines pause.

A group is outstanding while it is leased, ready, or reserved for a step that is not committed. Every fate (trained,
filtered, dropped, failed, quarantined) ends that state and frees the group's slot in the window: no count is
cumulative. docs/scheduling.md has the table of the schedules and derives the bounds.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from pipelinerl_core.config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCounts:
    """The number of groups in each state, with the newest step and version."""

    leased: int
    ready: int
    reserved: int
    committed_step: int
    """0 before the first step."""
    newest_version: int
    """Newest announced weights; 0 before the first."""

    @property
    def outstanding(self) -> int:
        """Groups that count towards the admission window."""
        return self.leased + self.ready + self.reserved


class Schedule(ABC):
    """The decisions in which the schedules differ.

    By default, a step takes N groups, the earliest deadline first, and no engine pauses.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._num = config.trainer.groups_per_step

    @abstractmethod
    def grantable_groups(self, counts: GroupCounts, engine_version: int) -> int:
        """How many groups may be granted now to an actor whose engine has weights `engine_version`."""

    def needed_groups(self, step: int) -> int:
        """How many ready groups the trainer needs to reserve this step."""
        return self._num

    def priority(self, step: int, deadline: int, group_id: int) -> tuple[int, int]:
        """Sort key of a ready group: the smallest ones are trained in this step."""
        return deadline, group_id

    def must_pause(self, counts: GroupCounts, engine_version: int) -> bool:
        """Whether an engine with weights `engine_version` must pause; it keeps its requests and their KV cache."""
        return False


class Pipeline(Schedule):
    """Generation and training never wait for each other."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self._window = config.window_groups

    def grantable_groups(self, counts: GroupCounts, engine_version: int) -> int:
        """Steps whose weights the actor does not have count like reserved steps.

        The last granted group waits for at most W - 1 other groups. The group is therefore trained by step
        engine_version + 1 + max_lag, where its oldest token has a lag of max_lag.
        """
        unseen_steps = max(0, counts.committed_step - engine_version)
        return max(0, self._window - counts.outstanding - unseen_steps * self._num)


class Conventional(Schedule):
    """Alternates between generating the groups of steps_per_phase steps and training these steps.

    Engines never pause: while the trainer trains a phase, no group is leased.
    """

    def grantable_groups(self, counts: GroupCounts, engine_version: int) -> int:
        """Groups missing for the phase; 0 for an actor without the weights from the start of the phase."""
        if engine_version < counts.newest_version:
            return 0
        steps_left = self._steps_left(counts.committed_step + 1)
        return max(0, steps_left * self._num - counts.outstanding)

    def needed_groups(self, step: int) -> int:
        return self._steps_left(step) * self._num

    def priority(self, step: int, deadline: int, group_id: int) -> tuple[int, int]:
        """A random order of the groups of a phase, derived from the seed of the run.

        The key depends on the group and phase only, so a resumed phase has the same order.
        """
        text = f"{self._config.seed}/{self._config.phase_end(step)}/{group_id}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()), group_id

    def _steps_left(self, step: int) -> int:
        """Steps from `step` to the end of its phase."""
        return max(0, self._config.phase_end(step) - step + 1)


class April(Schedule):
    """Leases more groups than a step needs. Engines pause at N ready groups and continue after the weight update."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self._most = math.ceil(config.schedule.alpha * self._num)

    def grantable_groups(self, counts: GroupCounts, engine_version: int) -> int:
        """Up to alpha * N outstanding groups after each announcement, for actors with the announced weights."""
        if counts.reserved or engine_version < counts.newest_version:
            return 0
        return max(0, self._most - counts.outstanding)

    def must_pause(self, counts: GroupCounts, engine_version: int) -> bool:
        """From the N-th ready group until the engine has the weights of the next step."""
        is_behind = engine_version < counts.newest_version
        return is_behind or counts.reserved > 0 or counts.ready >= self._num


SCHEDULES: dict[str, type[Schedule]] = {
    "pipeline": Pipeline,
    "conventional": Conventional,
    "april": April,
}


def build_schedule(config: RunConfig) -> Schedule:
    """The schedule of a run."""
    return SCHEDULES[config.schedule.kind](config)
