"""The write-ahead log of open groups: the tokens of rollouts that are not in a segment yet.

partials/<actor>/<epoch>/<seq>.arrow contains the tokens added to each open rollout since the previous flush.
An actor that continues a group reads the log of the group's previous holder and joins the rows by their offsets. The
writer removes a segment of the log once all groups in the segment are sealed; segments of dead actors stay.
"""

import dataclasses
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pyarrow as pa

from pipelinerl_core.algo.spans import clipped, joined
from pipelinerl_core.data.codec import (
    from_segment,
    list_column,
    record_batch,
    rows_of,
    span_column,
    spans_of,
    struct_column,
    structs_of,
    to_segment,
)
from pipelinerl_core.data.schema import COMPONENT_TYPE, ORIGIN_TYPE, PARTIAL_SCHEMA, conform
from pipelinerl_core.errors import MissingObject, SchemaMismatch, StoreError
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.run.reading import list_keys
from pipelinerl_core.run.records import partial_key, partial_prefix
from pipelinerl_core.types import FinishReason, GroupKey, Origin, Outcome, PartialRow, PreviousHolder, RewardComponent

logger = logging.getLogger(__name__)

_CACHED_LOGS = 16
# The groups of a dead actor are leased again within a few syncs; a live actor extends its log in the meantime.
_CACHE_SECONDS = 2.0

_SCALARS = ("group_id", "rollout_index", "attempt", "start", "finish_reason", "reward", "outcome")


def encode_partials(rows: Sequence[PartialRow]) -> pa.RecordBatch:
    """One record batch, PARTIAL_SCHEMA."""
    columns = {name: [getattr(row, name) for row in rows] for name in _SCALARS}
    columns["token_ids"] = list_column([row.token_ids for row in rows], np.int32)
    columns["rollout_logprobs"] = list_column([row.rollout_logprobs for row in rows], np.float32)
    columns["weight_spans"] = span_column([row.weight_spans for row in rows])
    columns["origins"] = struct_column([row.origins for row in rows], ORIGIN_TYPE)
    columns["reward_components"] = struct_column([row.reward_components for row in rows], COMPONENT_TYPE)
    columns["notes"] = [row.notes or None for row in rows]
    return record_batch(columns, PARTIAL_SCHEMA)


def decode_partials(batch: pa.RecordBatch) -> list[PartialRow]:
    """The rows of a batch, in the order they were written. Raises SchemaMismatch for invalid rows."""
    batch = conform(batch, PARTIAL_SCHEMA)
    columns = {name: batch.column(name).to_pylist() for name in _SCALARS}
    columns["token_ids"] = rows_of(batch.column("token_ids"))
    columns["rollout_logprobs"] = rows_of(batch.column("rollout_logprobs"))
    columns["weight_spans"] = spans_of(batch.column("weight_spans"))
    columns["origins"] = structs_of(batch.column("origins"), Origin)
    columns["reward_components"] = structs_of(batch.column("reward_components"), RewardComponent)
    columns["notes"] = [tuple(notes or ()) for notes in batch.column("notes").to_pylist()]
    try:
        return [_row(dict(zip(columns, values, strict=True))) for values in zip(*columns.values(), strict=True)]
    except ValueError as error:
        raise SchemaMismatch(f"partial rows have an unknown value or shape: {error}") from None


def join_rows(rows: Iterable[PartialRow]) -> dict[int, PartialRow]:
    """rollout_index -> one row from offset 0, joined from the rows of one attempt in written order.

    A row replaces all earlier tokens from the row's start on. A row after a gap is dropped.
    """
    known: dict[int, PartialRow] = {}
    for row in rows:
        before = known.get(row.rollout_index)
        have = 0 if before is None else len(before.token_ids)
        if row.start > have:
            continue
        known[row.rollout_index] = row if before is None or row.start == 0 else _extended(before, row)
    return known


class PartialLog:
    """Writes the log of one actor epoch. Not thread-safe."""

    def __init__(self, store: ObjectStore, *, actor: str, epoch: int) -> None:
        self._store = store
        self._actor = actor
        self._epoch = epoch
        self._seq = 0
        self._groups: dict[int, set[GroupKey]] = {}
        self._unwritten: list[PartialRow] = []

    def write(self, rows: Sequence[PartialRow]) -> None:
        """Write rows as one segment. After a StoreError the rows are written with the next call."""
        self._unwritten.extend(rows)
        if not self._unwritten:
            return
        try:
            data = to_segment([encode_partials(self._unwritten)])
            self._store.put(partial_key(self._actor, self._epoch, self._seq), data)
        except StoreError as error:
            logger.warning("the log of open groups was not written; the next flush writes it again: %s", error)
            return
        self._groups[self._seq] = {(row.group_id, row.attempt) for row in self._unwritten}
        self._unwritten = []
        self._seq += 1

    def forget(self, keys: Iterable[GroupKey]) -> None:
        """Drop groups from the log; segments without other groups are removed from the store."""
        closed = set(keys)
        self._unwritten = [row for row in self._unwritten if (row.group_id, row.attempt) not in closed]
        for groups in self._groups.values():
            groups -= closed
        empty = [seq for seq, groups in self._groups.items() if not groups]
        if not empty:
            return
        try:
            self._store.delete([partial_key(self._actor, self._epoch, seq) for seq in empty])
        except StoreError as error:
            logger.warning("old segments of the log of open groups were not removed: %s", error)
            return
        for seq in empty:
            del self._groups[seq]


class PartialReader:
    """Reads the logs of the previous holders of a group, each segment once. Thread-safe."""

    def __init__(self, store: ObjectStore, *, clock: Callable[[], float] | None = None) -> None:
        """clock: replaces time.monotonic in tests."""
        self._store = store
        self._clock = clock or time.monotonic
        self._lock = threading.Lock()
        self._logs: OrderedDict[tuple[str, int], _InheritedLog] = OrderedDict()

    def read_continuations(self, group_id: int, holders: Sequence[PreviousHolder]) -> dict[int, PartialRow]:
        """rollout_index -> tokens from offset 0, from the first of `holders` whose log has rows of the rollout."""
        taken: dict[int, PartialRow] = {}
        for holder in holders:
            rows = self._rows(holder.actor, holder.epoch).get((group_id, holder.attempt), [])
            for index, row in join_rows(rows).items():
                taken.setdefault(index, _with_origin(row, holder))
        return taken

    def holders(self) -> dict[int, list[PreviousHolder]]:
        """group_id -> all holders whose log has rows of the group, newest attempt first. Reads every log."""
        previous: dict[int, list[PreviousHolder]] = {}
        names = {tuple(key.split("/")[1:3]) for key in list_keys(self._store, "partials")}
        for actor, epoch in sorted(names):
            for group_id, attempt in self._rows(actor, int(epoch)):
                previous.setdefault(group_id, []).append(PreviousHolder(actor, int(epoch), attempt))
        return {group_id: sorted(holders, key=lambda h: -h.attempt) for group_id, holders in previous.items()}

    def _rows(self, actor: str, epoch: int) -> dict[GroupKey, list[PartialRow]]:
        since = self._clock() - _CACHE_SECONDS
        with self._lock:
            log = self._logs.setdefault((actor, epoch), _InheritedLog(self._store, partial_prefix(actor, epoch)))
            self._logs.move_to_end((actor, epoch))
            while len(self._logs) > _CACHED_LOGS:
                self._logs.popitem(last=False)
        return log.rows(since, self._clock)


class _InheritedLog:
    """The log of one actor epoch, as far as this process has read the log. Thread-safe."""

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._lock = threading.Lock()  # threads that ask for the same log wait for one reading
        self._listed_at = -math.inf
        self._seen: set[str] = set()
        self._rows: dict[GroupKey, list[PartialRow]] = {}

    def rows(self, since: float, clock: Callable[[], float]) -> dict[GroupKey, list[PartialRow]]:
        """All rows by group, in written order, from a listing that is not older than `since`.

        Reads only segments that no earlier call has read. Raises StoreError; the next call continues from there.
        """
        with self._lock:
            if self._listed_at < since:
                listed_at = clock()
                for key in list_keys(self._store, self._prefix):
                    if key not in self._seen:
                        self._read(key)
                        self._seen.add(key)
                self._listed_at = listed_at
            return {key: list(rows) for key, rows in self._rows.items()}

    def _read(self, key: str) -> None:
        try:
            rows = [row for batch in from_segment(self._store.get(key), key) for row in decode_partials(batch)]
        except (SchemaMismatch, MissingObject) as error:
            logger.warning("unreadable segment of the log skipped; its tokens are sampled again: %s", error)
            return
        for row in rows:
            self._rows.setdefault((row.group_id, row.attempt), []).append(row)


def _row(values: dict[str, object]) -> PartialRow:
    for name, kind in (("finish_reason", FinishReason), ("outcome", Outcome)):
        if values[name] is not None:
            values[name] = kind(str(values[name]))
    row = PartialRow(**values)  # type: ignore[arg-type]
    ends = [row.start, *(span.end for span in row.weight_spans)]
    starts = [*(span.start for span in row.weight_spans), row.end]
    if ends != starts or len(row.rollout_logprobs) != len(row.token_ids):
        raise ValueError(f"tokens, log-probabilities and spans of group {row.group_id} differ in length")
    return row


def _extended(before: PartialRow, row: PartialRow) -> PartialRow:
    """The first `row.start` tokens of `before`, followed by the tokens of `row`."""
    return dataclasses.replace(
        row,
        start=0,
        token_ids=np.concatenate([before.token_ids[: row.start], row.token_ids]),
        rollout_logprobs=np.concatenate([before.rollout_logprobs[: row.start], row.rollout_logprobs]),
        weight_spans=tuple(joined(clipped(before.weight_spans, row.start), row.weight_spans)),
        notes=(*before.notes, *row.notes),
    )


def _with_origin(row: PartialRow, holder: PreviousHolder) -> PartialRow:
    """The row with `holder` added as the origin of the tokens after those of earlier origins."""
    own = len(row.token_ids) - sum(origin.num_tokens for origin in row.origins)
    if own <= 0:
        return row
    return dataclasses.replace(row, origins=(*row.origins, Origin(holder.actor, holder.epoch, own)))
