"""The ready groups, counted by actor, with the deadline of each group at the current step.

The hub checks for stale groups after every arrival. Only `first`, `keys` and the first check of a new step take time
proportional to the number of groups.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator

from pipelinerl_core.ledger.groups import ActorKey, GroupSummary


class ReadyGroups:
    """group_id -> summary of the groups whose rows have arrived and that are not reserved or decided."""

    def __init__(self) -> None:
        self._groups: dict[int, GroupSummary] = {}
        self._num_of: Counter[ActorKey] = Counter()  # without zeros: actor epochs that left take no memory
        self._departed: set[ActorKey] = set()
        self._step: int | None = None
        self._deadlines: dict[int, int] = {}  # group_id -> deadline at _step, of the groups that were checked
        self._unchecked: dict[int, None] = {}  # the other groups, in order of arrival

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[int]:
        return iter(self._groups)

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._groups

    def keys(self) -> set[tuple[int, int]]:
        """(group_id, attempt) of all ready groups."""
        return {(group_id, summary.ref.attempt) for group_id, summary in self._groups.items()}

    def get(self, group_id: int) -> GroupSummary | None:
        """The summary of a ready group; None if the group is not ready."""
        return self._groups.get(group_id)

    def num_of(self, actor: ActorKey) -> int:
        """Ready groups that an actor epoch delivered."""
        return self._num_of[actor]

    def add(self, summary: GroupSummary) -> None:
        group_id = summary.ref.group_id
        self._groups[group_id] = summary
        self._num_of[summary.actor] += 1
        self._unchecked[group_id] = None

    def take(self, group_id: int) -> GroupSummary:
        """Remove a group and return its summary; KeyError if the group is not ready."""
        summary = self.pop(group_id)
        if summary is None:
            raise KeyError(group_id)
        return summary

    def pop(self, group_id: int) -> GroupSummary | None:
        """Remove a group and return its summary; None if the group is not ready."""
        summary = self._groups.pop(group_id, None)
        if summary is None:
            return None
        actor = summary.actor
        self._num_of[actor] -= 1
        if not self._num_of[actor]:
            del self._num_of[actor]
        self._departed.add(actor)
        self._unchecked.pop(group_id, None)
        self._deadlines.pop(group_id, None)
        return summary

    def take_departures(self) -> set[ActorKey]:
        """The actors of groups that were removed since the last call."""
        departed, self._departed = self._departed, set()
        return departed

    def find_stale(self, step: int, deadline: Callable[[GroupSummary], int | None]) -> list[GroupSummary]:
        """Compute the deadline of each group that is not checked for a step; returns the stale groups.

        deadline: `ledger.order.deadline` of a group at the step; None if the group is stale. The caller must remove
        the stale groups.
        """
        if step != self._step:
            self._step, self._deadlines, self._unchecked = step, {}, dict.fromkeys(self._groups)
        stale = []
        for group_id in self._unchecked:
            summary = self._groups[group_id]
            group_deadline = deadline(summary)
            if group_deadline is None:
                stale.append(summary)
            else:
                self._deadlines[group_id] = group_deadline
        self._unchecked = {}
        return stale

    def first(self, num: int, priority: Callable[[int, int], tuple[int, int]]) -> list[int]:
        """The `num` groups, or fewer, with the smallest priority(deadline, group_id); call `find_stale` first."""
        keys = [(priority(deadline, group_id), group_id) for group_id, deadline in self._deadlines.items()]
        return [group_id for _, group_id in heapq.nsmallest(num, keys)]
