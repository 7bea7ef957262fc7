"""Compaction of rollouts: the rows that a run sampled, in Parquet objects of many steps (docs/storage.md).

compacted/rollouts/<first>-<last>.<k>.parquet has the rows of each group that the commits of these steps decided:
the trained rows of batches/, and from the segments the rows of groups that were filtered or dropped. Afterwards no
program needs these batches, nor the segments in which every group is decided by these commits:

    write   compacted/rollouts/<first>-<last>.<k>.parquet, unless the object exists
    delete  the batches of these steps
    delete  decided segments

A crash in between leaves batches and segments, which a later call deletes. If two processes compact at the same time,
each reads every segment before it writes, so that both write the same rows, or one of them ends with MissingObject.

If a batch is missing or damaged, the object of its steps is not written and the segments with their groups stay; each
later call tries again.
"""

import io
import logging
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelinerl_core.data.codec import from_segment
from pipelinerl_core.data.schema import BATCH_SCHEMA, ROLLOUT_SCHEMA, conform
from pipelinerl_core.data.segments import SegmentName, SegmentReader
from pipelinerl_core.errors import BrokenRecord, ChecksumMismatch, MissingObject, SchemaMismatch
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.run.compacted import StepRange, list_commits, read_range
from pipelinerl_core.run.history import counting, read_epochs
from pipelinerl_core.run.reading import list_keys
from pipelinerl_core.run.records import (
    BATCHES_PREFIX,
    COMPACTED_ROLLOUTS_PREFIX,
    Commit,
    commit_key,
    complete_checkpoints,
    parse_step_key,
    rollout_key,
)
from pipelinerl_core.storage.digests import read_verified
from pipelinerl_core.storage.keys import delete_with_folders
from pipelinerl_core.types import FileEntry, GroupKey

logger = logging.getLogger(__name__)

FILE_TOKENS = 16 << 20
"""Limit of completion tokens of an object with more than one step; in memory, about 20 bytes per token."""

_TRAINED_ONLY = BATCH_SCHEMA.names[len(ROLLOUT_SCHEMA.names) :]
SCHEMA = pa.schema(
    [
        *ROLLOUT_SCHEMA,
        *(BATCH_SCHEMA.field(name).with_nullable(name != "step") for name in _TRAINED_ONLY),
        pa.field(
            "fate",
            pa.string(),
            nullable=False,
            metadata={"description": "trained, filtered, dropped_stale, failed or quarantined."},
        ),
    ],
    metadata=BATCH_SCHEMA.metadata,
)
"""The columns of BATCH_SCHEMA; in rows that were not trained only `step`, of the commit that decided the group."""

_REPEATED = [name for name in SCHEMA.names if pa.types.is_string(SCHEMA.field(name).type)]


def list_rollouts(store: ObjectStore) -> list[StepRange]:
    """The objects of compacted rollouts, by first step."""
    return [StepRange.parse(key) for key in list_keys(store, COMPACTED_ROLLOUTS_PREFIX)]


class CompactedRollouts:
    """An object of compacted rollouts, in memory. Row groups have the rows of one step."""

    def __init__(self, store: ObjectStore, steps: StepRange) -> None:
        """Raises MissingObject, or BrokenRecord for a damaged object."""
        self.where = f"{store.url}/{steps.rollouts_key}"
        data = pa.BufferReader(store.get(steps.rollouts_key))
        with self._reading():
            self._file = pq.ParquetFile(data, page_checksum_verification=True)

    def read(self, columns: Sequence[str] = SCHEMA.names) -> pa.Table:
        """Some columns of all rows. Raises BrokenRecord."""
        with self._reading():
            return self._file.read(columns=columns, use_threads=False)

    def trained(self, step: int) -> pa.RecordBatch:
        """The rows that a step trained, in training order, as in its batch. Raises BrokenRecord."""
        with self._reading():
            schema, metadata = self._file.schema, self._file.metadata
            paths = [schema.column(number).path for number in range(len(schema))]
            bounds = [
                metadata.row_group(group).column(paths.index("step")).statistics
                for group in range(metadata.num_row_groups)
            ]
            groups = [group for group, bound in enumerate(bounds) if bound.min <= step <= bound.max]
            table = self._file.read_row_groups(groups, use_threads=False)
            table = table.filter((pc.field("step") == step) & (pc.field("fate") == "trained")).drop(["fate"])
            batches = table.replace_schema_metadata(BATCH_SCHEMA.metadata).combine_chunks().to_batches()
            if len(batches) != 1:
                raise ValueError(f"it has no trained row of step {step}")
        return conform(batches[0], BATCH_SCHEMA)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, AttributeError, pa.ArrowException) as error:  # no statistics: AttributeError
            raise BrokenRecord(f"{self.where} is damaged: {str(error).splitlines()[0]}") from None


def read_batch(store: ObjectStore, entry: FileEntry) -> list[pa.RecordBatch]:
    """The rows of an object in batches/, with the columns of BATCH_SCHEMA.

    Raises MissingObject, ChecksumMismatch or SchemaMismatch.
    """
    batches = from_segment(read_verified(store, entry.name, entry), entry.name)
    return [conform(batch, BATCH_SCHEMA) for batch in batches]


def read_rollouts(store: ObjectStore, steps: StepRange, columns: Sequence[str] = SCHEMA.names) -> pa.Table:
    """Some columns of an object. Raises BrokenRecord for a damaged object."""
    return CompactedRollouts(store, steps).read(columns)


def compact_rollouts(store: ObjectStore, keep: int = 0) -> int:
    """Compact the rollouts of compacted commits, and delete their batches and decided segments.

    keep: `store.keep_rows`: removes the rows of other steps. Returns the number of new objects.

    Raises StoreError. The next call continues.
    """
    end = removed_through(store, keep, spare=1)
    objects, listing = list_rollouts(store), list_commits(store)
    counted = set(counting(listing.keys(), read_epochs(store)).values())
    files = [file for file in listing.files if counted.issuperset(file.commit_keys())]  # others were given up
    if end >= 0:
        store.delete([steps.rollouts_key for steps in objects if steps.last <= end])
        delete_with_folders(store, [key for key in list_keys(store, BATCHES_PREFIX) if parse_step_key(key)[0] <= end])
        objects, files = ([steps for steps in each if steps.last > end] for each in (objects, files))
    _delete_left_over(store, objects)
    written = {(step, steps.epoch) for steps in objects for step in steps.steps}
    left = [file for file in files if any((step, file.epoch) not in written for step in file.steps)]
    if not left:
        return 0
    segments = _Segments(store)
    num_objects = 0
    unwritten: set[GroupKey] = set()
    for steps in left:
        commits = read_range(store, steps)
        for part in _parts(commits):
            try:
                num_objects += _write(store, part, segments)
            except (MissingObject, ChecksumMismatch, SchemaMismatch) as error:
                where = f"steps {part[0].step} to {part[-1].step}"
                logger.warning("rollouts of %s are not compacted, their segments stay: %s", where, error)
                unwritten |= {(fate.group_id, fate.attempt) for commit in part for fate in commit.fates}
    segments.delete_decided(commits[-1], unwritten)
    logger.info("%d objects of compacted rollouts are written", num_objects)
    return num_objects


def removed_through(store: ObjectStore, keep: int, *, spare: int = 0) -> int:
    """The last step whose rows are removed: whole files of compacted commits, as far as `removable_through`."""
    through = removable_through(store, keep, spare=spare)
    if through < 0:
        return -1
    return max((file.last for file in list_commits(store).files if file.last <= through), default=-1)


def removable_through(store: ObjectStore, keep: int, *, spare: int = 0) -> int:
    """The last step whose rows `store.keep_rows` may remove; -1 for none.

    A start trains the rows after the newest checkpoint again, and if that is damaged, after the checkpoint before.
    spare: how many checkpoints before the newest must stay usable. Only checkpoints of counting commits are usable.
    """
    if not keep:
        return -1
    listing = list_commits(store)
    counted = counting(listing.keys(), read_epochs(store))
    # Listed twice, because one wrong listing may lack the older checkpoint.
    keys = {*list_keys(store, "checkpoints"), *list_keys(store, "checkpoints")}
    complete = [(ref.step, ref.epoch) for ref in complete_checkpoints(keys)]
    usable = sorted({step for step, epoch in complete if step > 0 and counted.get(step) == commit_key(step, epoch)})
    return max(-1, min(max(counted) - keep, usable[-1 - spare])) if len(usable) > spare else -1


def _delete_left_over(store: ObjectStore, objects: Sequence[StepRange]) -> None:
    """Delete the batches that a crash has left beside the object with their rows, if the object has the rows."""
    keys = list_keys(store, BATCHES_PREFIX)
    for steps in objects:
        left_over = {key: step for key in keys for step, epoch in [parse_step_key(key)]
                     if epoch == steps.epoch and step in steps.steps}  # fmt: skip
        if not left_over:
            continue
        try:
            compacted = CompactedRollouts(store, steps)
            for key, step in left_over.items():
                rows = sum(map(len, from_segment(store.get(key), key)))
                if compacted.trained(step).num_rows < rows:
                    raise BrokenRecord(f"{compacted.where} lacks rows of step {step}")
        except (BrokenRecord, SchemaMismatch, MissingObject) as error:
            logger.error(
                "batches of steps %d to %d stay beside their compacted rows: %s", steps.first, steps.last, error
            )
            continue
        delete_with_folders(store, sorted(left_over))


def _parts(commits: Sequence[Commit]) -> Iterator[list[Commit]]:
    """Consecutive commits whose groups have FILE_TOKENS tokens together."""
    part: list[Commit] = []
    num_tokens = 0
    for commit in commits:
        added = sum(fate.num_tokens for fate in commit.fates)
        if part and num_tokens + added > FILE_TOKENS:
            yield part
            part, num_tokens = [], 0
        part.append(commit)
        num_tokens += added
    yield part


def _write(store: ObjectStore, commits: Sequence[Commit], segments: "_Segments") -> bool:
    """Write the object of consecutive commits and delete their batches; returns False if the object exists."""
    key = StepRange(commits[0].step, commits[-1].step, commits[0].epoch).rollouts_key
    if store.exists(key):
        return False
    sink = io.BytesIO()
    num_rows = 0
    with pq.ParquetWriter(
        sink, SCHEMA, compression="zstd", use_dictionary=_REPEATED, write_page_checksum=True
    ) as writer:
        for commit in commits:
            batches = [batch for entry in commit.batches for batch in read_batch(store, entry)]
            trained = [_as_rows(batch, commit.step, "trained") for batch in batches]
            rows = pa.Table.from_batches([*trained, *segments.untrained(commit, _short_groups(trained))], SCHEMA)
            num_rows += len(rows)
            if len(rows):
                writer.write_table(rows, row_group_size=len(rows))
    data = pa.py_buffer(sink.getbuffer())
    # The batches are deleted only if the rows can be read back.
    written = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True).read(use_threads=False)
    if len(written) != num_rows:
        raise BrokenRecord(f"{store.url}/{key}: the rows cannot be read back")
    if store.exists(key):  # another process may have written the object and deleted segments in the meantime
        return False
    store.put(key, memoryview(data))
    delete_with_folders(store, [entry.name for commit in commits for entry in commit.batches])
    return True


def _short_groups(trained: Sequence[pa.RecordBatch]) -> set[int]:
    """The trained groups with fewer rows than rollouts: the others have no reward."""
    sizes: dict[int, int] = {}
    numbers: Counter[int] = Counter()
    for batch in trained:
        groups = batch["group_id"].to_pylist()
        numbers.update(groups)
        sizes |= dict(zip(groups, batch["group_size"].to_pylist(), strict=True))
    return {group_id for group_id, size in sizes.items() if numbers[group_id] < size}


def _as_rows(batch: pa.RecordBatch, step: int, fate: str) -> pa.RecordBatch:
    known = {"step": pa.repeat(pa.scalar(step, pa.int64()), len(batch)), "fate": pa.repeat(fate, len(batch))}
    known = dict(zip(batch.schema.names, batch.columns, strict=True)) | known
    columns = [known.get(field.name, pa.nulls(len(batch), field.type)) for field in SCHEMA]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


class _Segments:
    """The segments in the store, and the groups in each."""

    def __init__(self, store: ObjectStore) -> None:
        """Read every segment."""
        self._store = store
        self._reader = SegmentReader(store)
        self._segment_of: dict[GroupKey, SegmentName] = {}
        self._groups_in: dict[SegmentName, set[GroupKey]] = {}
        # Listed twice, because one wrong listing may lack a segment. Its rows would be in no object, and a later call
        # would delete the segment.
        for name in sorted({*self._reader.segments(), *self._reader.segments()}):
            try:
                refs = self._reader.groups_in(rollout_key(*name))
            except SchemaMismatch as error:
                logger.warning("segment left out of the compacted rollouts: %s", error)
                continue
            self._groups_in[name] = {(ref.group_id, ref.attempt) for ref in refs}
            self._segment_of |= {(ref.group_id, ref.attempt): name for ref in refs}

    def untrained(self, commit: Commit, short: Set[int]) -> Iterator[pa.RecordBatch]:
        """The rows that the commit decided and did not train, as far as they are in segments: those of groups with
        another fate, and the rollouts of `short` trained groups that have no reward, with the fate failed."""
        for fate in commit.fates:
            name = self._segment_of.get((fate.group_id, fate.attempt))
            is_trained = fate.fate == "trained"
            if name is None or (is_trained and fate.group_id not in short):
                continue
            batch = conform(self._reader.read_group(*name, fate.group_id, fate.attempt), ROLLOUT_SCHEMA)
            if is_trained:
                batch = batch.filter(pc.equal(batch["outcome"], "error"))
            yield _as_rows(batch, commit.step, "failed" if is_trained else fate.fate)

    def delete_decided(self, commit: Commit, unwritten: Set[GroupKey]) -> None:
        """Delete the segments in which every group is decided as of a commit and none is `unwritten`."""
        is_open = set(commit.open_groups)
        decided = [
            name
            for name, groups in self._groups_in.items()
            if groups.isdisjoint(unwritten)
            and all(group_id < commit.next_group_id and group_id not in is_open for group_id, _ in groups)
        ]
        self._store.delete([rollout_key(*name) for name in decided])
