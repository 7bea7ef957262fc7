"""The rows that a step has trained: in batches/, and once they are compacted, in compacted/rollouts/ alone."""

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelinerl_core.data.codec import from_segment
from pipelinerl_core.data.compaction import list_rollouts, open_rollouts
from pipelinerl_core.data.schema import BATCH_SCHEMA, conform
from pipelinerl_core.errors import BrokenRecord, MissingObject
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.run.compacted import StepRange
from pipelinerl_core.run.records import Commit
from pipelinerl_core.storage.digests import read_verified


class TrainedRows:
    """Reads the rows of commits; keeps the compacted object that it has read last."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._objects = list_rollouts(store)
        self._opened: tuple[StepRange, pq.ParquetFile] | None = None
        self.num_files = 0
        self.num_bytes = 0
        """Of the batches that were read, without compacted objects."""

    def batches(self, commit: Commit) -> list[pa.RecordBatch]:
        """The rows of a commit, in training order, with the columns of BATCH_SCHEMA.

        Raises MissingObject, ChecksumMismatch or SchemaMismatch for a batch, BrokenRecord for a compacted object.
        """
        if not commit.batches:
            return []
        if (rows := self._compacted(commit)) is not None:
            return [rows]
        try:
            return self._read(commit)
        except MissingObject as error:  # compacted since the listing
            self._objects = list_rollouts(self._store)
            if (rows := self._compacted(commit)) is None:
                rows_of = f"the rows of step {commit.step} are not in compacted/rollouts"
                raise MissingObject(f"{error}, and {rows_of}; store.keep_rows may have removed them") from None
            return [rows]

    def _read(self, commit: Commit) -> list[pa.RecordBatch]:
        rows = []
        for entry in commit.batches:
            data = read_verified(self._store, entry.name, entry)
            rows += [conform(batch, BATCH_SCHEMA) for batch in from_segment(data, entry.name)]
            self.num_files += 1
            self.num_bytes += len(data)
        return rows

    def _compacted(self, commit: Commit) -> pa.RecordBatch | None:
        """The rows of a commit in compacted rollouts; None if they are not compacted. Raises BrokenRecord."""
        holding = (steps for steps in self._objects if steps.epoch == commit.epoch and commit.step in steps.steps)
        steps = next(holding, None)
        if steps is None:
            return None
        if self._opened is None or self._opened[0] != steps:
            self._opened = steps, open_rollouts(self._store, steps)
        where = f"{self._store.url}/{steps.rollouts_key}"
        try:
            file = self._opened[1]
            table = file.read_row_groups(_row_groups(file, commit.step), use_threads=False)
            table = table.filter((pc.field("step") == commit.step) & (pc.field("fate") == "trained"))
            batches = table.select(BATCH_SCHEMA.names).cast(BATCH_SCHEMA).combine_chunks().to_batches()
        except (OSError, ValueError, pa.ArrowException) as error:
            raise BrokenRecord(f"{where} is damaged: {str(error).splitlines()[0]}") from None
        if len(batches) != 1:
            raise BrokenRecord(f"{where} has no trained row of step {commit.step}")
        return batches[0]


def _row_groups(file: pq.ParquetFile, step: int) -> list[int]:
    """The row groups with rows of a step; each has rows of one step."""
    paths = [file.schema.column(number).path for number in range(len(file.schema))]
    column = paths.index("step")
    groups = range(file.num_row_groups)
    return [group for group in groups if file.metadata.row_group(group).column(column).statistics.min == step]
