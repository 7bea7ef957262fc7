"""The rows that a step has trained: in batches/, and once they are compacted, in compacted/rollouts/ alone."""

import functools

import pyarrow as pa

from pipelinerl_core.data.compaction import CompactedRollouts, list_rollouts, read_batch
from pipelinerl_core.errors import BrokenRecord, MissingObject
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.run.records import Commit


class TrainedRows:
    """Reads the rows of commits; keeps the compacted object that it has read last."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._objects = list_rollouts(store)
        self._open = functools.lru_cache(1)(functools.partial(CompactedRollouts, store))
        self.num_files = 0
        self.num_bytes = 0
        """Of the batches that were read, without compacted objects."""

    def batches(self, commit: Commit) -> list[pa.RecordBatch]:
        """The rows of a commit, in training order, with the columns of BATCH_SCHEMA.

        Raises MissingObject, ChecksumMismatch or SchemaMismatch for a batch, BrokenRecord for a compacted object.
        """
        try:
            return self._batches(commit)
        except MissingObject:  # compacted since the listing
            self._objects = list_rollouts(self._store)
        try:
            return self._batches(commit)
        except MissingObject as error:
            rows_of = f"the rows of step {commit.step} are not in compacted/rollouts"
            raise MissingObject(f"{error}, and {rows_of}; store.keep_rows may have removed them") from None

    def _batches(self, commit: Commit) -> list[pa.RecordBatch]:
        if not commit.batches:
            return []
        holding = (steps for steps in self._objects if steps.epoch == commit.epoch and commit.step in steps.steps)
        if (steps := next(holding, None)) is not None:
            try:
                return [self._open(steps).trained(commit.step)]
            except BrokenRecord:  # compaction leaves batches beside a damaged object
                if not all(self._store.exists(entry.name) for entry in commit.batches):
                    raise
        rows = []
        for entry in commit.batches:
            rows += read_batch(self._store, entry)
            self.num_files += 1
            self.num_bytes += entry.size
        return rows
