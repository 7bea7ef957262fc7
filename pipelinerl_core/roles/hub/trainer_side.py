"""Handles the trainer's requests at the hub: reservations, rows from memory or from segments, commits.

A trainer reserves a step, fetches its rows, trains and commits. The store is read outside the lock.
"""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping

from pipelinerl_core.data.segments import SegmentReader
from pipelinerl_core.errors import MissingObject, StoreUnavailable
from pipelinerl_core.interfaces import ObjectStore, RowSlice
from pipelinerl_core.ledger import ActorKey
from pipelinerl_core.messages import (
    Ack,
    Answer,
    Committed,
    Refused,
    Register,
    Reserve,
    Rows,
    RowsHeader,
)
from pipelinerl_core.roles.hub.state import HubState
from pipelinerl_core.run.history import counted_commit_keys, read_commit
from pipelinerl_core.types import GroupKey, GroupRef

logger = logging.getLogger(__name__)

# Longest wait of one reserve, which the trainer repeats. A longer wait would delay the end of the process.
_MAX_WAIT_SECONDS = 5.0


class TrainerRequests:
    """Answers the trainer.

    Raises Fenced for an old trainer epoch, SchemaMismatch for impossible group ids, MissingObject for rows that are
    not available (yet), and StoreUnavailable for commits that the store does not list.
    """

    def __init__(self, state: HubState, store: ObjectStore) -> None:
        self._state = state
        self._changed = state.changed
        self._ledger = state.ledger
        self._store = store
        self._segments = SegmentReader(store)
        self.has_registered = False
        """Whether a trainer has registered with this hub."""
        self.step_metrics: dict[str, float] = {}
        """Metrics of the newest commit."""

    def register(self, request: Register) -> None:
        """Register a trainer, after reading commits from the store that the ledger does not contain yet."""
        with self._changed:
            self._ledger.check_trainer(request.epoch)
            refs = (*request.reservation, *request.quarantined)
            self._state.check_groups([*(ref.group_id for ref in refs), *(fate.group_id for fate in request.fates)])
        self.read_missed_commits(request.committed_step)
        with self._changed:
            self.has_registered = True
            self._state.tokens = request.tokens or self._state.tokens
            self._ledger.register_trainer(
                request.epoch, request.step, request.reservation, request.quarantined, request.fates
            )
            self._ledger.announce(request.manifest)
            self._changed.notify_all()

    def read_missed_commits(self, step: int | None = None) -> None:
        """Read the commits up to `step` from the store that were not reported to this hub; None: up to the newest.

        Another hub may have announced them: it was live until this hub had read the store.
        """
        with self._changed:
            first = self._ledger.committed_step + 1
        if step is not None and step < first:
            return
        keys = counted_commit_keys(self._store)
        step = max(keys, default=-1) if step is None else step
        for missed in range(first, step + 1):
            if missed not in keys:
                raise StoreUnavailable(
                    f"{self._store.url}: the store lists no commit of step {missed}, but step {step} is committed"
                )
            commit = read_commit(self._store, keys[missed])
            with self._changed:
                # Earlier trainers' reservations of later steps may have groups and fates of this commit.
                self._ledger.adopt_trainer_epoch(commit.epoch)
                self._ledger.committed(missed, commit.fates, commit.manifest)
                self._state.drop_unneeded_rows()
            logger.info("commit of step %d was not reported to a hub; read from the store", missed)

    def reserve(self, request: Reserve) -> Iterator[tuple[Answer, RowSlice | None]]:
        """The groups of a step, or is_ready=False after the wait that the request names.

        With `request.with_rows`, rows in memory follow the answer, which saves the trainer a second request.
        """
        deadline = time.monotonic() + min(request.wait_seconds, _MAX_WAIT_SECONDS)
        with self._changed:
            self._state.check_groups(ref.group_id for ref in request.quarantined)
            self._ledger.expel(ActorKey(*actor) for actor in request.expelled)
            while True:
                answer = self._ledger.reserve(request.step, request.epoch, request.lost, request.quarantined)
                remaining = deadline - time.monotonic()
                if answer.is_ready or remaining <= 0 or self._state.is_stopping:
                    break
                self._state.awaited_step = request.step
                self._changed.wait(remaining)
                self._state.awaited_step = None
            taken = self._ledger.take_departures()
            self._state.drop_unneeded_rows()
            slices = self._in_memory(answer.groups) if request.with_rows and answer.is_ready else {}
        try:
            yield answer.model_copy(update={"re": request.id, "num_following": len(slices)}), None
            yield from self._rows(request.id, slices, {})
        finally:
            if taken:
                self._state.return_credit(taken)

    def _in_memory(self, groups: Iterable[GroupRef]) -> dict[GroupKey, RowSlice | None]:
        """The positions of the rows that are in memory, by group."""
        keys = ((ref.group_id, ref.attempt) for ref in groups)
        return {key: rows for key in keys if (rows := self._state.rows.find(key)) is not None}

    def send_rows(self, request: Rows) -> Iterator[tuple[Answer, RowSlice | None]]:
        """A header and a batch for each requested group, which must be reserved for the step."""
        with self._changed:
            unreserved = set(request.groups) - self._ledger.reserved(request.step)
            slices = {key: self._state.rows.find(key) for key in request.groups}
        if unreserved:
            detail = f"step {request.step}: groups {sorted(unreserved)[:8]} are not reserved"
            yield Refused(re=request.id, code="not_reserved", detail=detail), None
            return
        segments = {key: self._segment(key) for key, rows in slices.items() if rows is None}
        yield from self._rows(request.id, slices, segments)

    def _rows(
        self, re: int, slices: Mapping[GroupKey, RowSlice | None], segments: Mapping[GroupKey, tuple[str, int, int]]
    ) -> Iterator[tuple[Answer, RowSlice | None]]:
        for remaining, (key, rows) in zip(range(len(slices) - 1, -1, -1), slices.items(), strict=True):
            if rows is None:
                batch = self._segments.read_group(*segments[key], *key)
                rows = RowSlice(batch, 0, batch.num_rows)
            yield RowsHeader(re=re, group_id=key[0], attempt=key[1], remaining=remaining), rows

    def _segment(self, key: GroupKey) -> tuple[str, int, int]:
        """(actor, epoch, seq) of the segment with the rows of a group that is not in memory.

        Raises MissingObject until the actor has sealed the rows or sent them again.
        """
        with self._changed:
            segment = self._ledger.segment_of(*key)
        if segment is None:
            raise MissingObject(f"rows of group {key[0]} attempt {key[1]} have not arrived; ask again")
        (name, epoch), seq = segment
        return name, epoch, seq

    def committed(self, request: Committed) -> Answer:
        """Record a commit: remove its groups and announce its weight version."""
        with self._changed:
            self._ledger.check_trainer(request.epoch)
            self._state.check_groups(record.group_id for record in request.fates)
        self.read_missed_commits(request.step - 1)
        with self._changed:
            is_new = self._ledger.committed(request.step, request.fates, request.manifest)
            if is_new:
                self.step_metrics = dict(request.metrics)
            if request.is_last:
                self._ledger.is_draining = True
            self._state.drop_unneeded_rows()
            self._changed.notify_all()
        if is_new:
            self._state.request_sync()
        return Ack(re=request.id, note="" if is_new else "known")
