"""When groups may be leased, when a step may be taken, in which order, and when engines stand still.

| schedule     | a group may be leased while                | a step may be taken when   | engines stand still      |
|--------------|--------------------------------------------|----------------------------|--------------------------|
| pipeline     | outstanding < W = (max_lag + 1) * N        | N groups are ready         | never                    |
| conventional | its phase of steps_per_phase * N lacks one | all that the phase still   | for want of groups       |
|              |                                            | trains is ready            |                          |
| april        | outstanding < alpha * N, none is reserved  | N groups are ready         | from N ready until they  |
|              |                                            |                            | have the new weights     |

A group is outstanding while it is leased, ready, or reserved for a step that is not committed. Whatever becomes of it
(trained, filtered, dropped, failed), it leaves and frees its place: nothing is cumulative. docs/scheduling.md derives
the bounds.
"""

import hashlib
import math
from dataclasses import dataclass
from typing import Protocol

from pipelinerl_core.config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCounts:
    """How many groups are where."""

    leased: int
    ready: int
    reserved: int
    committed_step: int
    """0 before the first step."""
    newest_version: int
    """Newest announced weights; 0 before the first."""

    @property
    def outstanding(self) -> int:
        """Groups that hold a place of the admission window."""
        return self.leased + self.ready + self.reserved


class Schedule(Protocol):
    """The decisions in which the schedules differ; everything else is the same for all."""

    def grantable_groups(self, counts: GroupCounts, engine_version: int) -> int:
        """Groups that an actor whose engine samples with `engine_version` may be granted now."""
        ...

    def needed_groups(self, step: int) -> int:
        """Ready groups with which the trainer may take this step."""
        ...

    def priority(self, step: int, deadline: int, group_id: int) -> tuple[int, int]:
        """Sort key of a ready group: the smallest ones are trained in this step."""
        ...

    def must_pause(self, counts: GroupCounts, engine_version: int) -> bool:
        """Whether an engine with weights `engine_version` must pause, its requests and their KV cache kept."""
        ...


class Pipeline:
    """Generation and training never wait for each other."""

    def __init__(self, config: RunConfig) -> None:
        self._num = config.trainer.groups_per_step
        self._window = config.window_groups

    def grantable_groups(self, counts: GroupCounts, engine_version: int) -> int:
        """Steps that the actor has not seen count like reserved ones.

        A group granted in the last free place waits for at most W - 1 others, hence is trained by step
        engine_version + 1 + max_lag: its oldest token then has a lag of max_lag.
        """
        unseen_steps = max(0, counts.committed_step - engine_version)
        return max(0, self._window - counts.outstanding - unseen_steps * self._num)

    def needed_groups(self, step: int) -> int:
        """N."""
        return self._num

    def priority(self, step: int, deadline: int, group_id: int) -> tuple[int, int]:
        """Earliest deadline first."""
        return deadline, group_id

    def must_pause(self, counts: GroupCounts, engine_version: int) -> bool:
        """Never."""
        return False


class Conventional:
    """All groups of steps_per_phase steps, then these steps, in turn."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._num = config.trainer.groups_per_step

    def grantable_groups(self, counts: GroupCounts, engine_version: int) -> int:
        """What the phase still lacks; an actor without the weights of its beginning waits for them."""
        if engine_version < counts.newest_version:
            return 0
        steps_left = self._steps_left(counts.committed_step + 1)
        return max(0, steps_left * self._num - counts.outstanding)

    def needed_groups(self, step: int) -> int:
        """Everything that the phase trains from this step on."""
        return self._steps_left(step) * self._num

    def priority(self, step: int, deadline: int, group_id: int) -> tuple[int, int]:
        """A shuffle by the run's seed, one per phase.

        The key is a function of the group alone, so a phase that is resumed half-way is split as it was begun.
        """
        text = f"{self._config.seed}/{self._config.phase_end(step)}/{group_id}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()), group_id

    def must_pause(self, counts: GroupCounts, engine_version: int) -> bool:
        """Never by order: while the trainer steps, there is nothing to generate."""
        return False

    def _steps_left(self, step: int) -> int:
        """Steps of the phase of `step` from it on."""
        return max(0, self._config.phase_end(step) - step + 1)


class April:
    """More groups than a step needs; at N the engines pause, and after the update the unfinished groups go on."""

    def __init__(self, config: RunConfig) -> None:
        self._num = config.trainer.groups_per_step
        self._most = math.ceil(config.schedule.alpha * self._num)

    def grantable_groups(self, counts: GroupCounts, engine_version: int) -> int:
        """Up to alpha * N outstanding groups after each announcement, for actors that have heard it."""
        if counts.reserved or engine_version < counts.newest_version:
            return 0
        return max(0, self._most - counts.outstanding)

    def needed_groups(self, step: int) -> int:
        """N."""
        return self._num

    def priority(self, step: int, deadline: int, group_id: int) -> tuple[int, int]:
        """Earliest deadline first."""
        return deadline, group_id

    def must_pause(self, counts: GroupCounts, engine_version: int) -> bool:
        """From the N-th ready group until the engine has the weights that came of it."""
        is_behind = engine_version < counts.newest_version
        return is_behind or counts.reserved > 0 or counts.ready >= self._num


_SCHEDULES: dict[str, type[Pipeline] | type[Conventional] | type[April]] = {
    "pipeline": Pipeline,
    "conventional": Conventional,
    "april": April,
}


def build_schedule(config: RunConfig) -> Schedule:
    """The schedule of a run."""
    return _SCHEDULES[config.schedule.kind](config)
