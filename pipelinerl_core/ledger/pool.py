"""The state of every group and the transitions between states; tokens move with their groups."""

from collections.abc import Iterable, Sequence

from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import StaleLease
from pipelinerl_core.ledger.groups import ActorKey, Arrival, GroupSummary, Reservation
from pipelinerl_core.ledger.leases import Leases
from pipelinerl_core.ledger.order import deadline, is_filtered
from pipelinerl_core.ledger.ready import ReadyGroups
from pipelinerl_core.ledger.schedules import Schedule
from pipelinerl_core.ledger.segments import SegmentIndex
from pipelinerl_core.ledger.tokens import UNKNOWN_ACTOR, TokenLedger
from pipelinerl_core.messages import FateRecord, LeaseRef
from pipelinerl_core.types import Fate, GroupRef


class GroupPool:
    """Every group below the frontier is leased, queued, ready, reserved, or decided: exactly one of these."""

    def __init__(self, config: RunConfig, *, boot_id: str, first_attempt: int) -> None:
        """`first_attempt`: number of this hub's first attempts; lower ones were granted by earlier hubs."""
        self._config = config
        self._first_attempt = first_attempt
        # Decided group -> the attempt that counted. For an absent group of this hub the first attempt counted; for an
        # absent group of an earlier hub the attempt is unknown.
        self._attempts: dict[int, int] = {}
        self._first_own_group = 0
        self._unattributed: dict[tuple[int, int], int] = {}  # decided groups with tokens of UNKNOWN_ACTOR -> tokens
        self._superseded: set[tuple[int, int]] = set()  # attempts already counted as superseded
        self.leases = Leases(
            lease_seconds=config.placement.lease_seconds, first_attempt=first_attempt, boot_id=boot_id
        )
        self.ready = ReadyGroups()
        self.reservations: dict[int, Reservation] = {}
        self.fates: list[FateRecord] = []
        """Untrained fates that are not yet part of a reservation."""
        self.tokens = TokenLedger()
        self.segments = SegmentIndex()
        self.next_group_id = 0
        self.num_filtered = 0
        """Groups filtered since the last reservation."""

    def start_at(self, group_id: int) -> None:
        """Set the frontier: groups below `group_id` were leased by earlier hubs."""
        self.next_group_id = self._first_own_group = group_id

    @property
    def num_reserved(self) -> int:
        return sum(len(reservation.refs) for reservation in self.reservations.values())

    def reservation_of(self, group_id: int) -> Reservation | None:
        """The reservation that holds a group; None if the group is not reserved."""
        for reservation in self.reservations.values():
            if group_id in reservation.refs:
                return reservation
        return None

    def is_open(self, group_id: int) -> bool:
        """Whether a group was leased and has no fate."""
        return (
            group_id in self.ready
            or self.leases.held(group_id) is not None
            or self.leases.is_queued(group_id)
            or self.reservation_of(group_id) is not None
        )

    def needs_rows(self, group_id: int, attempt: int) -> bool:
        """Whether the trainer may still request the rows of this attempt."""
        summary = self.ready.get(group_id)
        if summary is not None:
            return summary.ref.attempt == attempt
        reservation = self.reservation_of(group_id)
        return reservation is not None and reservation.refs[group_id].attempt == attempt

    def needed_rows(self) -> set[tuple[int, int]]:
        """(group_id, attempt) of all groups whose rows the trainer may still request."""
        needed = self.ready.keys()
        for reservation in self.reservations.values():
            needed.update((ref.group_id, ref.attempt) for ref in reservation.refs.values())
        return needed

    def holder(self, group_id: int, attempt: int) -> ActorKey | None:
        """The actor epoch that holds or delivered this attempt; None if it is neither leased, ready nor reserved."""
        lease = self.leases.held(group_id)
        if lease is not None:
            return lease.actor if lease.grant.attempt == attempt else None
        summary = self.ready.get(group_id)
        reservation = self.reservation_of(group_id)
        ref = summary.ref if summary is not None else reservation.refs[group_id] if reservation is not None else None
        return ActorKey(ref.actor, ref.actor_epoch) if ref is not None and ref.attempt == attempt else None

    def open_groups(self) -> tuple[int, ...]:
        """Leased, queued and ready groups, sorted."""
        return tuple(sorted([*self.leases.group_ids(), *self.ready]))

    def next_group(self) -> int:
        """The group to lease next: a queued group, else the next prompt."""
        queued = self.leases.first_queued()
        if queued is not None:
            return queued
        self.next_group_id += 1
        return self.next_group_id - 1

    def claim(self, lease: LeaseRef, actor: ActorKey, now: float) -> None:
        """Put a lease of an earlier hub into force again, unless the group is leased or decided."""
        if lease.attempt >= self._first_attempt:
            return
        self.extend_frontier(lease.group_id)
        if self.leases.is_queued(lease.group_id):
            self.leases.claim(lease, actor, now)

    def extend_frontier(self, group_id: int) -> None:
        """Queue all groups up to `group_id` that this hub does not know: an earlier hub leased them."""
        for unknown in range(self.next_group_id, group_id + 1):
            self.leases.queue(unknown)
        self.next_group_id = max(self.next_group_id, group_id + 1)

    def add(self, summary: GroupSummary, lease_id: str) -> Arrival:
        """Add a finished group. Raises StaleLease if its lease is not in force."""
        ref = summary.ref
        if self._is_known(summary):
            return Arrival.KNOWN
        if not self._may_deliver(summary, lease_id):
            self._supersede(summary)
            raise StaleLease(f"group {ref.group_id}: lease {lease_id} of {summary.actor} is not in force")
        self.extend_frontier(ref.group_id)
        self.leases.remove(ref.group_id)
        self.tokens.arrive_group(summary)
        if len(summary.rewards) < 2:
            self.decide(summary, Fate.FAILED)
            return Arrival.FAILED
        if is_filtered(summary, self._config):
            self.decide(summary, Fate.FILTERED)
            self.num_filtered += 1
            return Arrival.FILTERED
        self.ready.add(summary)
        return Arrival.READY

    def _is_known(self, summary: GroupSummary) -> bool:
        ref = summary.ref
        ready = self.ready.get(ref.group_id)
        if ready is not None:
            return ready.ref.attempt == ref.attempt
        reservation = self.reservation_of(ref.group_id)
        if reservation is not None:
            is_same = reservation.refs[ref.group_id].attempt == ref.attempt
            if is_same and ref.group_id not in reservation.summaries:
                reservation.summaries[ref.group_id] = summary
                self.tokens.lengths.arrive(summary.lengths)  # its tokens were counted with the reservation
            return is_same
        if ref.group_id >= self.next_group_id or self.is_open(ref.group_id):
            return False
        num_tokens = self._unattributed.pop((ref.group_id, ref.attempt), 0)
        self.tokens.assign(summary.actor, num_tokens)
        return self._counted_attempt(ref.group_id, ref.attempt) == ref.attempt

    def _counted_attempt(self, group_id: int, unknown: int) -> int:
        """The attempt with which a group was decided; `unknown` if an earlier hub leased the group."""
        own = self._first_attempt if group_id >= self._first_own_group else unknown
        return self._attempts.get(group_id, own)

    def _note_decided(self, group_id: int, attempt: int) -> None:
        """Store the attempt of a decided group, except the usual first attempt, so that memory stays bounded."""
        if attempt != self._first_attempt or group_id < self._first_own_group:
            self._attempts[group_id] = attempt

    def _may_deliver(self, summary: GroupSummary, lease_id: str) -> bool:
        group_id, attempt = summary.ref.group_id, summary.ref.attempt
        lease = self.leases.held(group_id)
        if lease is not None:
            return (
                lease.grant.lease_id == lease_id and lease.actor == summary.actor and lease.grant.attempt == attempt
            )
        is_free = self.leases.is_queued(group_id) or group_id >= self.next_group_id
        return is_free and attempt < self._first_attempt

    def _supersede(self, summary: GroupSummary) -> None:
        key = (summary.ref.group_id, summary.ref.attempt)
        if key not in self._superseded:
            self._superseded.add(key)
            self.tokens.refuse(summary)

    def drop_stale(self, step: int) -> None:
        """Decide the ready groups that are stale at a step; each group is checked once per step."""
        rules = self._config.schedule
        for summary in self.ready.find_stale(
            step, lambda g: deadline(g, step, max_lag=rules.max_lag, stale=rules.stale)
        ):
            self.decide(summary, Fate.DROPPED_STALE)

    def choose(self, step: int, schedule: Schedule) -> list[int]:
        """The ready groups with the highest priority for a step, sorted by group_id; call `drop_stale` first."""
        num = self._config.trainer.groups_per_step
        first = self.ready.first(num, lambda last, group_id: schedule.priority(step, last, group_id))
        return sorted(first)  # the same order of rows for all schedules

    def take_reserved(self, ref: GroupRef) -> GroupSummary | None:
        """Remove a group that a trainer has reserved from its current state; its summary if the rows are present.

        The trainer may commit the group, so the reservation has precedence over another attempt or lease.
        """
        self.extend_frontier(ref.group_id)
        self.leases.remove(ref.group_id)
        summary = self.ready.pop(ref.group_id)
        if summary is not None and summary.ref.attempt != ref.attempt:
            self.tokens.supersede(summary)
            summary = None
        if summary is None:
            self.tokens.arrive_ref(ref)
        return summary

    def return_groups(self, reservation: Reservation, group_ids: Iterable[int]) -> None:
        """Make groups of a reservation ready again; groups whose rows never arrived are queued."""
        for group_id in group_ids:
            ref = reservation.refs.pop(group_id)
            summary = reservation.summaries.pop(group_id, None)
            if summary is not None:
                self.ready.add(summary)
            else:
                self.tokens.arrive_ref(ref, -1)
                self.leases.queue(group_id, ref.attempt + 1)

    def requeue_lost(self, reservation: Reservation, group_ids: Iterable[int]) -> None:
        """Queue groups of a reservation whose rows cannot be read."""
        for group_id in group_ids:
            ref = reservation.refs.pop(group_id)
            summary = reservation.summaries.pop(group_id, None)
            if summary is not None:
                self._superseded.add((group_id, ref.attempt))
                self.tokens.supersede(summary)
            else:
                self.tokens.arrive_ref(ref, -1)
            self.leases.queue(group_id, ref.attempt + 1)

    def decide(self, summary: GroupSummary, fate: Fate) -> None:
        """Give an untrained fate to a group whose tokens have arrived."""
        self.ready.pop(summary.ref.group_id)
        self._decide(summary.ref, summary, fate)

    def _decide(self, ref: GroupRef, summary: GroupSummary | None, fate: Fate) -> None:
        """`summary`: None if the rows of the group are absent."""
        self._note_decided(ref.group_id, ref.attempt)
        if summary is None:
            self.tokens.decide_ref(ref, {fate.value: ref.num_tokens})
        else:
            self.tokens.decide_group(summary, fate.value)
        record = {"group_id": ref.group_id, "attempt": ref.attempt, "fate": fate.value, "num_tokens": ref.num_tokens}
        self.fates.append(FateRecord.model_validate(record))

    def quarantine(self, refs: Iterable[GroupRef]) -> bool:
        """Give groups that a trainer has reserved the fate `quarantined`; False if all of them are decided already.

        The rows of a group may be absent after a restart of the hub.
        """
        has_decided = False
        for ref in refs:
            reservation = self.reservation_of(ref.group_id)
            if reservation is not None:
                del reservation.refs[ref.group_id]
                summary = reservation.summaries.pop(ref.group_id, None)
            elif ref.group_id < self.next_group_id and not self.is_open(ref.group_id):
                continue
            else:
                summary = self.take_reserved(ref)
            self._decide(ref, summary, Fate.QUARANTINED)
            has_decided = True
        return has_decided

    def train(self, reservation: Reservation, group_id: int, tokens: TokenLedger) -> None:
        """Count the tokens of a reserved group as trained in `tokens`, the token ledger or a copy of it."""
        ref = reservation.refs[group_id]
        summary = reservation.summaries.get(group_id)
        if summary is None:
            tokens.decide_ref(ref, {"trained": ref.num_tokens})
        else:
            tokens.train_group(summary, reservation.step, self._config.schedule.max_lag)

    def decide_by_commit(self, record: FateRecord, step: int) -> None:
        """Decide a group by a commit whose reservation an earlier hub made."""
        group_id, attempt = record.group_id, record.attempt
        if group_id < self.next_group_id and not self.is_open(group_id):
            return
        self.extend_frontier(group_id)
        self.leases.remove(group_id)
        summary = self.ready.pop(group_id)
        self._note_decided(group_id, attempt)
        if summary is not None and summary.ref.attempt == attempt:
            if record.fate == "trained":
                self.tokens.train_group(summary, step, self._config.schedule.max_lag)
            else:
                self.tokens.decide_group(summary, record.fate)
            return
        if summary is not None:
            self.tokens.supersede(summary)
        self._unattributed[group_id, attempt] = record.num_tokens
        self.tokens.arrive(UNKNOWN_ACTOR, record.num_tokens)
        self.tokens.decide(UNKNOWN_ACTOR, {record.fate: record.num_tokens})

    def train_reserved(self, reservation: Reservation, fates: Sequence[FateRecord]) -> list[FateRecord]:
        """Decide groups of a reservation as trained; returns the fates of groups that it does not hold."""
        others = []
        for record in fates:
            ref = reservation.refs.get(record.group_id)
            if record.fate != "trained" or ref is None or ref.attempt != record.attempt:
                others.append(record)
                continue
            self.train(reservation, record.group_id, self.tokens)
            self._note_decided(record.group_id, record.attempt)
            del reservation.refs[record.group_id]
        return others
