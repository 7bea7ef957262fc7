"""The ready groups: counted by actor, and looked at once per step for what may still be trained at it.

The hub asks after every group that arrives: only `first`, and the first look at a new step, take time in proportion
to the number of groups.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator

from pipelinerl_core.ledger.groups import ActorKey, GroupSummary


class ReadyGroups:
    """group_id -> summary of the groups whose rows are here and that nobody has taken."""

    def __init__(self) -> None:
        """Empty."""
        self._groups: dict[int, GroupSummary] = {}
        self._num_of: Counter[ActorKey] = Counter()
        self._left: Counter[ActorKey] = Counter()
        self._step: int | None = None
        self._deadlines: dict[int, int] = {}  # of the groups that were looked at for this step
        self._unchecked: dict[int, None] = {}  # the others, in order of arrival

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[int]:
        return iter(self._groups)

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._groups

    def keys(self) -> set[tuple[int, int]]:
        """(group_id, attempt) of all of them."""
        return {(group_id, summary.ref.attempt) for group_id, summary in self._groups.items()}

    def get(self, group_id: int) -> GroupSummary | None:
        """The summary of a ready group."""
        return self._groups.get(group_id)

    def num_of(self, actor: ActorKey) -> int:
        """Ready groups of one actor."""
        return self._num_of[actor]

    def add(self, summary: GroupSummary) -> None:
        """The group is ready."""
        group_id = summary.ref.group_id
        self._groups[group_id] = summary
        self._num_of[summary.actor] += 1
        self._unchecked[group_id] = None

    def take(self, group_id: int) -> GroupSummary:
        """The group is not ready any more; KeyError if it was not."""
        summary = self.pop(group_id)
        if summary is None:
            raise KeyError(group_id)
        return summary

    def pop(self, group_id: int) -> GroupSummary | None:
        """The group is not ready any more; None if it was not."""
        summary = self._groups.pop(group_id, None)
        if summary is None:
            return None
        actor = summary.actor
        self._num_of[actor] -= 1
        if not self._num_of[actor]:
            del self._num_of[actor]
        self._left[actor] += 1
        self._unchecked.pop(group_id, None)
        self._deadlines.pop(group_id, None)
        return summary

    def take_departures(self) -> "Counter[ActorKey]":
        """Groups of each actor that have left since the last call."""
        left, self._left = self._left, Counter()
        return left

    def take_stale(self, step: int, deadline: Callable[[GroupSummary], int | None]) -> list[GroupSummary]:
        """Ask for the deadline of each group at a step, once; those without one, which the caller has to take out."""
        if step != self._step:
            self._step, self._deadlines, self._unchecked = step, {}, dict.fromkeys(self._groups)
        stale = []
        for group_id in self._unchecked:
            summary = self._groups[group_id]
            last = deadline(summary)
            if last is None:
                stale.append(summary)
            else:
                self._deadlines[group_id] = last
        self._unchecked = {}
        return stale

    def first(self, num: int, priority: Callable[[int, int], tuple[int, int]]) -> list[int]:
        """The `num` groups of the first priority(deadline, group_id) among those that were looked at."""
        keys = [(priority(last, group_id), group_id) for group_id, last in self._deadlines.items()]
        return [group_id for _, group_id in heapq.nsmallest(num, keys)]
