"""The trainer's side of the hub: reservations, rows from memory or their segment, commits.

A trainer reserves a step, fetches its rows, trains and commits. Reads from the store happen outside the lock.
"""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping

import pyarrow as pa

from pipelinerl_core.channel.bundles import BUNDLE_BYTES
from pipelinerl_core.data.codec import row_bytes
from pipelinerl_core.data.segments import SegmentReader
from pipelinerl_core.errors import MissingObject
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.messages import (
    Ack,
    Answer,
    Committed,
    Refused,
    Register,
    Reserve,
    Rows,
    RowsBundle,
    RowsHeader,
)
from pipelinerl_core.roles.hub.rows import Place
from pipelinerl_core.roles.hub.state import HubState
from pipelinerl_core.run.history import counted_commit_keys, read_commit, read_epochs
from pipelinerl_core.types import GroupKey, GroupRef

logger = logging.getLogger(__name__)

# A reserve is repeated anyway; longer waits would only delay the end of the process.
_MAX_WAIT_SECONDS = 5.0
MIN_RUN_BYTES = BUNDLE_BYTES // 4
"""Rows of several groups that lie side by side and have fewer bytes are copied into a bundle with others."""


class TrainerDesk:
    """Answers the trainer. Raises Fenced, SchemaMismatch for groups that cannot be, and MissingObject for commits or
    rows that are not there (yet).
    """

    def __init__(self, state: HubState, store: ObjectStore) -> None:
        self._state = state
        self._changed = state.changed
        self._ledger = state.ledger
        self._store = store
        self._segments = SegmentReader(store)
        self.has_met = False
        """Whether a trainer has registered with this hub."""
        self.step_metrics: dict[str, float] = {}
        """Of the newest commit."""

    def register(self, request: Register) -> None:
        """A trainer (re)appears; commits that no hub was told of are read from the store first."""
        with self._changed:
            self._ledger.check_trainer(request.epoch)
            self._state.check_groups(ref.group_id for ref in request.reservation)
        self._catch_up(request.committed_step)
        with self._changed:
            self.has_met = True
            self._ledger.register_trainer(request.epoch, request.step, request.reservation)
            self._ledger.announce(request.manifest)
            self._changed.notify_all()

    def _catch_up(self, step: int) -> None:
        """Take in commits that were written while no hub was told of them."""
        with self._changed:
            first = self._ledger.committed_step + 1
        if step < first:
            return
        keys = counted_commit_keys(self._store, read_epochs(self._store))
        for missed in range(first, step + 1):
            if missed not in keys:
                raise MissingObject(
                    f"commit of step {missed} is not in {self._store.url}, but step {step} is committed"
                )
            commit = read_commit(self._store, keys[missed])
            trained = [(record.group_id, record.attempt) for record in commit.fates if record.fate == "trained"]
            with self._changed:
                self._ledger.committed(missed, trained, commit.fates, commit.manifest)
                self._state.forget_rows()
            logger.info("step %d was committed without a word; read from the store", missed)

    def reserve(self, request: Reserve) -> Iterator[tuple[Answer, pa.RecordBatch | None]]:
        """The groups of a step, or, after the wait that the request names, that they are not ready.

        Rows that are at hand follow where the request says so: nobody waits for another message and its answer.
        """
        deadline = time.monotonic() + min(request.wait_seconds, _MAX_WAIT_SECONDS)
        with self._changed:
            while True:
                answer = self._ledger.reserve(request.step, request.epoch, request.lost)
                remaining = deadline - time.monotonic()
                if answer.is_ready or remaining <= 0 or self._state.is_stopping:
                    break
                self._state.awaited_step = request.step
                self._changed.wait(remaining)
                self._state.awaited_step = None
            taken = self._ledger.take_left()
            self._state.forget_rows()
            places = self._at_hand(answer.groups) if request.with_rows and answer.is_ready else {}
        try:
            yield answer.model_copy(update={"re": request.id, "num_following": len(places)}), None
            yield from self._runs_of(request.id, places, {})
        finally:
            if taken:
                self._state.return_credit(taken)

    def _at_hand(self, groups: Iterable[GroupRef]) -> dict[GroupKey, Place | None]:
        """Those whose rows are in memory. A reader can do nothing about the others yet but ask for them."""
        keys = ((ref.group_id, ref.attempt) for ref in groups)
        return {key: place for key in keys if (place := self._state.rows.place(key)) is not None}

    def send_rows(self, request: Rows) -> Iterator[tuple[Answer, pa.RecordBatch | None]]:
        """A header and a batch for each group that a step has reserved."""
        with self._changed:
            strange = set(request.groups) - self._ledger.reserved(request.step)
            places = {key: self._state.rows.place(key) for key in request.groups}
        if strange:
            detail = f"step {request.step}: groups {sorted(strange)[:8]} are not in its reservation; reserve again"
            yield Refused(re=request.id, code="not_reserved", detail=detail), None
            return
        segments = {key: self._segment(key) for key, place in places.items() if place is None}
        yield from self._runs_of(request.id, places, segments)

    def _runs_of(
        self, re: int, places: "Mapping[GroupKey, Place | None]", segments: Mapping[GroupKey, tuple[str, int, int]]
    ) -> Iterator[tuple[Answer, pa.RecordBatch]]:
        remaining = len(places)
        for run in _runs(places):
            remaining -= len(run)
            yield self._run(re, run, remaining, segments)

    def _run(
        self, re: int, run: "_Run", remaining: int, segments: Mapping[GroupKey, tuple[str, int, int]]
    ) -> tuple[Answer, pa.RecordBatch]:
        (key, first), (_, last) = run[0], run[-1]
        if first is None or last is None:
            rows = self._segments.read_group(*segments[key], *key)
        else:
            rows = Place(first.batch, first.start, last.start + last.num_rows - first.start).rows()
        if len(run) == 1:
            return RowsHeader(re=re, group_id=key[0], attempt=key[1], remaining=remaining), rows
        groups = tuple((*key, place.num_rows) for key, place in run if place is not None)
        return RowsBundle(re=re, groups=groups, remaining=remaining), rows

    def _segment(self, key: GroupKey) -> tuple[str, int, int]:
        """The segment of rows that left the memory, or came to an earlier hub.

        MissingObject until they are sealed, or sent again by their actor.
        """
        with self._changed:
            place = self._ledger.where(*key)
        if place is None:
            raise MissingObject(f"rows of group {key[0]} attempt {key[1]} have not arrived; ask again")
        (name, epoch), seq = place
        return name, epoch, seq

    def committed(self, request: Committed) -> Answer:
        """A step is committed: forget its groups, announce its version."""
        with self._changed:
            self._ledger.check_trainer(request.epoch)
            self._state.check_groups(group_id for group_id, _ in request.groups)
            self._state.check_groups(record.group_id for record in request.fates)
        self._catch_up(request.step - 1)
        with self._changed:
            is_new = self._ledger.committed(request.step, request.groups, request.fates, request.manifest)
            if is_new:
                self.step_metrics = dict(request.metrics)
            if request.is_last:
                self._ledger.is_draining = True
            self._state.forget_rows()
            self._changed.notify_all()
        if is_new:
            self._state.nudge()
        return Ack(re=request.id, note="" if is_new else "known")


_Run = list[tuple[GroupKey, Place | None]]


def _runs(places: Mapping[GroupKey, Place | None]) -> Iterator[_Run]:
    """The groups in their order; those whose rows lie side by side in the memory of one write together.

    They go on their way as they came, without being copied. Short runs do not: many writes cost more than a copy.
    """
    run: _Run = []
    for key, place in places.items():
        before = run[-1][1] if run else None
        if before is None or place is None or not place.follows(before):
            yield from _whole_or_apart(run)
            run = []
        run.append((key, place))
    yield from _whole_or_apart(run)


def _whole_or_apart(run: _Run) -> Iterator[_Run]:
    first = run[0][1] if run else None
    if len(run) > 1 and first is not None:
        num_rows = sum(place.num_rows for _, place in run if place is not None)
        if row_bytes(Place(first.batch, first.start, num_rows).rows()) >= MIN_RUN_BYTES:
            yield run
            return
    yield from ([one] for one in run)
