"""Writes and reads segments: the log of finished groups in the object store.

A segment is immutable and has one writer. All rows of a group are adjacent in one segment. A record batch contains
many groups, because buffers of a few kilobytes compress worse and ten times slower.
"""

import functools
import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa

from pipelinerl_core.data.checks import check_groups, split_groups
from pipelinerl_core.data.codec import flat_list, from_segment, origins_in, to_segment
from pipelinerl_core.errors import MissingObject, SchemaMismatch
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.run.reading import list_keys
from pipelinerl_core.run.records import rollout_key
from pipelinerl_core.types import GroupKey, GroupRef

CACHED_SEGMENTS = 8
"""Segments that a reader keeps in memory; the rows of a step are in a few recent segments."""

_BATCH_BYTES = 16 << 20  # of one record batch


class SealedSegment(NamedTuple):
    """A segment that is in the store."""

    seq: int
    groups: tuple[GroupKey, ...]


class SegmentName(NamedTuple):
    """The parts of a segment's key."""

    actor: str
    epoch: int
    seq: int


class _Pending(NamedTuple):
    data: bytes
    groups: tuple[GroupKey, ...]


def parse_rollout_key(key: str) -> SegmentName:
    """Parse the key of a segment. Raises ValueError for any other key."""
    kind, actor, epoch, name = key.split("/")
    if kind != "rollouts" or not name.endswith(".arrow"):
        raise ValueError(f"{key!r} is no rollout segment")
    return SegmentName(actor, int(epoch), int(name.removesuffix(".arrow")))


class SegmentWriter:
    """Collects finished groups of one actor epoch and seals them as segments 0, 1, 2, ... Safe between threads."""

    def __init__(
        self,
        store: ObjectStore,
        actor: str,
        epoch: int,
        run_id: str,
        *,
        max_seconds: float,
        max_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._actor = actor
        self._epoch = epoch
        self._run_id = run_id
        self._max_seconds = max_seconds
        self._max_bytes = max_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._sealing = threading.Lock()
        self._open: list[tuple[GroupKey, pa.RecordBatch]] = []
        self._open_bytes = 0
        self._opened_at = 0.0
        self._pending: _Pending | None = None
        self._seq = 0

    def append(self, batch: pa.RecordBatch, ref: GroupRef) -> None:
        """Add the rows of one finished group. Raises SchemaMismatch if the rows do not match `ref` or this run."""
        check_groups([ref], batch)
        run_id = batch.column("run_id")[0].as_py()
        if (ref.actor, ref.actor_epoch, run_id) != (self._actor, self._epoch, self._run_id):
            raise SchemaMismatch(
                f"group {ref.group_id} belongs to run {run_id!r}, actor {ref.actor!r}, epoch {ref.actor_epoch}; this "
                f"log belongs to run {self._run_id!r}, actor {self._actor!r}, epoch {self._epoch}"
            )
        with self._lock:
            if not self._open:
                self._opened_at = self._clock()
            self._open.append(((ref.group_id, ref.attempt), batch))
            self._open_bytes += batch.get_total_buffer_size()

    def seal_due(self) -> SealedSegment | None:
        """Seal if the oldest unsealed group is `max_seconds` old or `max_bytes` are unsealed; else return None."""
        with self._lock:
            age_seconds = self._clock() - self._opened_at if self._open else 0.0
            is_due = bool(self._open) and (age_seconds >= self._max_seconds or self._open_bytes >= self._max_bytes)
        return self.seal() if is_due or self._pending else None

    def seal(self) -> SealedSegment | None:
        """Write all unsealed groups as one segment; None if there are none.

        After a StoreError the segment stays pending: the next call writes the same bytes under the same key, because
        the failed write may have succeeded.
        """
        with self._sealing:
            if self._pending is None:
                with self._lock:
                    taken, self._open, self._open_bytes = self._open, [], 0
                if not taken:
                    return None
                data = to_segment(_joined([batch for _, batch in taken]))
                self._pending = _Pending(data, tuple(group for group, _ in taken))
            self._store.put(rollout_key(self._actor, self._epoch, self._seq), self._pending.data)
            sealed = SealedSegment(self._seq, self._pending.groups)
            self._pending = None
            self._seq += 1
            return sealed


class SegmentReader:
    """Reads groups back from segments. Safe between threads."""

    def __init__(self, store: ObjectStore, *, cached_segments: int = CACHED_SEGMENTS) -> None:
        self._store = store
        self._load = functools.lru_cache(cached_segments)(functools.partial(_read_segment, store))

    def segments(
        self, low_water: Mapping[str, int] | None = None, retired: Container[tuple[str, int]] = ()
    ) -> list[SegmentName]:
        """All segments in the store, oldest first in each actor epoch; lists the store once.

        `low_water` maps "<actor>/<epoch>" to the lowest seq that is still needed; earlier segments are left out, and
        all segments of `retired` actor epochs.
        """
        names = [parse_rollout_key(key) for key in list_keys(self._store, "rollouts")]
        marks = low_water or {}
        needed = (name for name in names if (name.actor, name.epoch) not in retired)
        return sorted(name for name in needed if name.seq >= marks.get(f"{name.actor}/{name.epoch}", 0))

    def groups_in(self, key: str) -> list[GroupRef]:
        """The groups of one segment, in the order in which they finished."""
        name = parse_rollout_key(key)
        refs = []
        for (group_id, attempt), batch in self._load(key).items():
            offsets, _ = flat_list(batch.column("completion_token_ids"))
            refs.append(
                GroupRef(
                    group_id=group_id,
                    attempt=attempt,
                    actor=name.actor,
                    actor_epoch=name.epoch,
                    num_rollouts=batch.num_rows,
                    num_tokens=int(offsets[-1] - offsets[0]),
                    origins=origins_in(batch),
                )
            )
        return refs

    def read_group(self, actor: str, epoch: int, seq: int, group_id: int, attempt: int) -> pa.RecordBatch:
        """The rows of one group; MissingObject if the segment, or the group in it, does not exist."""
        key = rollout_key(actor, epoch, seq)
        groups = self._load(key)
        if (group_id, attempt) not in groups:
            raise MissingObject(f"{key} has no group {group_id} attempt {attempt}, only {sorted(groups)[:8]}")
        return groups[group_id, attempt]


def _joined(groups: Sequence[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """Concatenate the rows of groups into few record batches."""
    parts: list[list[pa.RecordBatch]] = []
    num_bytes = 0
    for rows in groups:
        size = rows.get_total_buffer_size()
        if not parts or num_bytes + size > _BATCH_BYTES:
            parts.append([])
            num_bytes = 0
        parts[-1].append(rows)
        num_bytes += size
    return [pa.concat_batches(part) for part in parts]


def _read_segment(store: ObjectStore, key: str) -> dict[GroupKey, pa.RecordBatch]:
    groups: dict[GroupKey, pa.RecordBatch] = {}
    for raw in from_segment(store.get(key), key):
        for batch in _groups(raw, key):
            groups[batch.column("group_id")[0].as_py(), batch.column("attempt")[0].as_py()] = batch
    return groups


def _groups(batch: pa.RecordBatch, key: str) -> list[pa.RecordBatch]:
    """The checked rows of each group in a record batch."""
    try:
        return split_groups(batch)
    except SchemaMismatch as error:
        raise SchemaMismatch(f"{key}: {error}") from None
