"""Leases: which actor may work on which group, and until when."""

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

from pipelinerl_core.ledger.groups import ActorKey, Grant
from pipelinerl_core.messages import LeaseRef
from pipelinerl_core.types import PreviousHolder

# Previous holders stored per group. An actor that died before its first write has no log, so more than one is kept.
_MAX_HOLDERS = 4


@dataclass(slots=True, eq=False)
class HeldLease:
    """A lease that is in force."""

    grant: Grant
    actor: ActorKey
    deadline_seconds: float
    is_claimed: bool
    """The lease was granted by an earlier hub and claimed at a registration; it is never sent to its holder again."""
    version: int | None
    """Weight version of the actor at the grant, a lower bound of all token versions of the group; None if unknown."""


class Leases:
    """Leases in force, and the queue of groups that wait for a new lease."""

    def __init__(self, *, lease_seconds: float, first_attempt: int, boot_id: str) -> None:
        """`first_attempt`: lowest attempt number of this hub; lower attempts were granted by earlier hubs."""
        self._lease_seconds = lease_seconds
        self._first_attempt = first_attempt
        self._boot_id = boot_id
        self._held: dict[int, HeldLease] = {}
        self._by_actor: dict[ActorKey, dict[str, HeldLease]] = {}
        self._queue: dict[int, int] = {}  # group_id -> attempt of its next lease
        self._queue_order: list[int] = []  # a heap of group ids; may contain ids that left the queue
        self._holders: dict[int, tuple[PreviousHolder, ...]] = {}  # of groups without a fate, newest first
        self._distrusted: set[ActorKey] = set()
        self._none_late_until = -math.inf  # no deadline is earlier

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def group_ids(self) -> list[int]:
        """Groups leased or queued."""
        return [*self._held, *self._queue]

    def held(self, group_id: int) -> HeldLease | None:
        return self._held.get(group_id)

    def is_queued(self, group_id: int) -> bool:
        return group_id in self._queue

    def num_held_by(self, actor: ActorKey) -> int:
        return len(self._by_actor.get(actor, ()))

    def first_queued(self) -> int | None:
        """The queued group that is leased next: the lowest group_id; None for an empty queue."""
        while self._queue_order and self._queue_order[0] not in self._queue:
            heapq.heappop(self._queue_order)
        return self._queue_order[0] if self._queue_order else None

    def queue(self, group_id: int, attempt: int | None = None) -> None:
        """Add a group to the queue; `attempt` is the number of its next attempt."""
        if group_id not in self._queue:
            heapq.heappush(self._queue_order, group_id)
        self._queue[group_id] = self._first_attempt if attempt is None else max(attempt, self._first_attempt)

    def grant(self, group_id: int, actor: ActorKey, now: float, *, version: int) -> Grant:
        """Lease a group to an actor with weights `version`: the next attempt of a queued group, else the first."""
        attempt = self._queue.pop(group_id, self._first_attempt)
        lease_id = f"{group_id}.{attempt}.{self._boot_id}"
        # Tokens of a previous holder may have any version: no lower bound is known.
        known = None if group_id in self._holders else version
        return self._hold(group_id, attempt, lease_id, actor, now, is_claimed=False, version=known)

    def add_previous_holders(self, group_id: int, holders: Iterable[PreviousHolder]) -> None:
        """Append holders, newest first, to the previous holders of a queued group."""
        if group_id in self._queue:
            known = self._holders.get(group_id, ())
            self._holders[group_id] = (*known, *(h for h in holders if h not in known))[:_MAX_HOLDERS]

    def claim(self, lease: LeaseRef, actor: ActorKey, now: float) -> None:
        """Put a lease of an earlier hub into force again."""
        self._queue.pop(lease.group_id, None)
        self._hold(lease.group_id, lease.attempt, lease.lease_id, actor, now, is_claimed=True, version=None)

    def oldest_versions(self) -> Iterable[int]:
        """The weight version at the grant of each lease in force, where known."""
        return (lease.version for lease in self._held.values() if lease.version is not None)

    def renew(self, actor: ActorKey, lease_ids: Iterable[str], now: float) -> tuple[list[Grant], list[str]]:
        """Renew the leases of an actor: (leases missing in `lease_ids`, ids in `lease_ids` that it does not hold)."""
        mine = self._by_actor.get(actor, {})
        listed = set(lease_ids)
        missing = []
        self._none_late_until = min(
            self._none_late_until, now + self._lease_seconds
        )  # the clock may have been set back
        for lease_id, lease in mine.items():
            if lease_id not in listed and lease.is_claimed:
                continue  # the group is finished: it arrives before the lease expires, or is lost
            lease.deadline_seconds = now + self._lease_seconds
            if lease_id not in listed:
                missing.append(lease.grant)
        return missing, sorted(listed - mine.keys())

    def remove(self, group_id: int) -> None:
        """Remove the lease or queue entry of a finished or decided group."""
        self._queue.pop(group_id, None)
        self._holders.pop(group_id, None)
        self._drop(group_id)

    def release(self, actor: ActorKey) -> list[int]:
        """Queue every group leased to an actor that has left; returns the groups."""
        group_ids = [lease.grant.group_id for lease in self._by_actor.get(actor, {}).values()]
        for group_id in group_ids:
            self._requeue(group_id)
        return group_ids

    def distrust(self, actor: ActorKey) -> None:
        """Keep the tokens of an actor epoch out of later leases: such a lease names neither the epoch as a previous
        holder nor a holder that has continued the tokens of the epoch. A lease that is held goes on."""
        self._distrusted.add(actor)
        for group_id, holders in list(self._holders.items()):
            oldest_first = takewhile(lambda holder: (holder.actor, holder.epoch) != actor, reversed(holders))
            self._holders[group_id] = tuple(oldest_first)[::-1]
            if not self._holders[group_id]:
                del self._holders[group_id]

    def expire(self, now: float) -> list[int]:
        """Queue every group whose lease has expired; returns the groups."""
        if now <= self._none_late_until:
            return []
        late = [group_id for group_id, lease in self._held.items() if lease.deadline_seconds < now]
        for group_id in late:
            self._requeue(group_id)
        deadlines = (lease.deadline_seconds for lease in self._held.values())
        self._none_late_until = min(deadlines, default=now + self._lease_seconds)
        return late

    def extend(self, seconds: float) -> None:
        """Move every deadline into the future."""
        for lease in self._held.values():
            lease.deadline_seconds += seconds

    def _hold(
        self,
        group_id: int,
        attempt: int,
        lease_id: str,
        actor: ActorKey,
        now: float,
        *,
        is_claimed: bool,
        version: int | None,
    ) -> Grant:
        deadline_seconds = now + self._lease_seconds
        grant = Grant(
            group_id=group_id,
            attempt=attempt,
            lease_id=lease_id,
            deadline_seconds=deadline_seconds,
            holders=self._holders.get(group_id, ()),
        )
        held = HeldLease(grant, actor, deadline_seconds, is_claimed, version)
        self._held[group_id] = held
        self._none_late_until = min(self._none_late_until, deadline_seconds)
        self._by_actor.setdefault(actor, {})[lease_id] = held
        return grant

    def _requeue(self, group_id: int) -> None:
        lease = self._drop(group_id)
        if lease is not None:
            self.queue(group_id, lease.grant.attempt + 1)
            if any((other.actor, other.epoch) in self._distrusted for other in lease.grant.holders):
                return  # the holder may have continued the tokens of such an epoch
            holder = PreviousHolder(lease.actor.name, lease.actor.epoch, lease.grant.attempt)
            others = [other for other in self._holders.get(group_id, ()) if other != holder]
            self._holders[group_id] = (holder, *others)[:_MAX_HOLDERS]

    def _drop(self, group_id: int) -> HeldLease | None:
        lease = self._held.pop(group_id, None)
        if lease is not None:
            mine = self._by_actor[lease.actor]
            del mine[lease.grant.lease_id]
            if not mine:
                del self._by_actor[lease.actor]
        return lease
