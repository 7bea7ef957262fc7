"""Compacted commits: many commits of one trainer epoch in one Parquet object, instead of one object each.

compacted/commits/<first>-<last>.<k>.parquet contains the commits of steps first to last of trainer epoch k. The name
says which commits exist, so that a listing is enough to select the commits that count (run/history.py). A compacted
commit keeps its key, commits/<step>.<k>.json.

Order of reading: originals are listed before compacted objects. A compacted object is stored before its originals are
deleted, so that one of the two listings contains each commit.
"""

import io
import re
from collections.abc import Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from pipelinerl_core.errors import BrokenRecord, MissingObject
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.run.reading import list_keys, parse_record
from pipelinerl_core.run.records import (
    COMMITS_PREFIX,
    COMPACTED_COMMITS_PREFIX,
    COMPACTED_ROLLOUTS_PREFIX,
    Commit,
    commit_key,
    parse_commit_key,
)

SCHEMA = pa.schema(
    [
        pa.field("step", pa.int64(), nullable=False),
        pa.field("epoch", pa.int64(), nullable=False),
        pa.field("reserved_at", pa.float64(), nullable=False),
        pa.field("computed_at", pa.float64(), nullable=False),
        pa.field("committed_at", pa.float64(), nullable=False),
        pa.field("weights_digest", pa.string(), nullable=False),
        pa.field("metrics", pa.map_(pa.string(), pa.float64()), nullable=False),
        pa.field("record", pa.string(), nullable=False, metadata={"description": "the JSON object as written"}),
    ]
)

_REPEATED = ["metrics.key_value.key"]
_NAME = re.compile(r"(\d{8})-(\d{8})\.(\d+)\.parquet")


class StepRange(NamedTuple):
    """Steps `first` to `last` of a trainer epoch, of which a compacted object has the commits, or the rollouts."""

    first: int
    last: int
    epoch: int

    @property
    def commits_key(self) -> str:
        return f"{COMPACTED_COMMITS_PREFIX}/{self._name}"

    @property
    def rollouts_key(self) -> str:
        """Key of the compacted rollouts (data/compaction.py)."""
        return f"{COMPACTED_ROLLOUTS_PREFIX}/{self._name}"

    @property
    def steps(self) -> range:
        return range(self.first, self.last + 1)

    @property
    def _name(self) -> str:
        return f"{self.first:08d}-{self.last:08d}.{self.epoch}.parquet"

    @classmethod
    def parse(cls, key: str) -> "StepRange":
        """The inverse of the keys. Raises BrokenRecord for another name."""
        match = _NAME.fullmatch(key.rpartition("/")[2])
        if match is None:
            raise BrokenRecord(f"{key} is not the name of a compacted object")
        return cls(*map(int, match.groups()))

    def commit_keys(self) -> list[str]:
        return [commit_key(step, self.epoch) for step in self.steps]


class CommitListing(NamedTuple):
    """All commits in the store, whether or not they count."""

    originals: list[str]
    files: list[StepRange]

    def keys(self) -> list[str]:
        return sorted({*self.originals, *(key for file in self.files for key in file.commit_keys())})


def list_commits(store: ObjectStore) -> CommitListing:
    """List originals, then compacted objects."""
    originals = list_keys(store, f"{COMMITS_PREFIX}/")
    return CommitListing(originals, [StepRange.parse(key) for key in list_keys(store, COMPACTED_COMMITS_PREFIX)])


def encode_commits(records: Sequence[bytes], commits: Sequence[Commit]) -> bytes:
    """A compacted object. records: the commits as they were written."""
    columns = {name: [getattr(commit, name) for commit in commits] for name in SCHEMA.names[:-2]}
    columns["metrics"] = [list(commit.metrics.items()) for commit in commits]
    columns["record"] = [record.decode() for record in records]
    sink = io.BytesIO()
    table = pa.table(columns, schema=SCHEMA)
    pq.write_table(table, sink, compression="zstd", use_dictionary=_REPEATED, write_page_checksum=True)
    return sink.getvalue()


def decode_commits(data: bytes, file: StepRange, where: str) -> dict[str, Commit]:
    """Key -> commit, of a compacted object. Raises BrokenRecord for damaged or missing rows.

    where: location of the object, for errors.
    """
    try:
        source = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        records = source.read(columns=["record"], use_threads=False).column("record").to_pylist()
    except (OSError, pa.ArrowException, KeyError) as error:
        raise BrokenRecord(f"{where} is damaged: {str(error).splitlines()[0]}") from None
    commits = [parse_record(record.encode(), where, Commit) for record in records]
    if [(commit.step, commit.epoch) for commit in commits] != [parse_commit_key(key) for key in file.commit_keys()]:
        raise BrokenRecord(f"{where} does not contain the commits in its name")
    return dict(zip(file.commit_keys(), commits, strict=True))


def read_range(store: ObjectStore, steps: StepRange) -> list[Commit]:
    """The commits of a compacted object. Raises StoreError."""
    where = f"{store.url}/{steps.commits_key}"
    return list(decode_commits(store.get(steps.commits_key), steps, where).values())


def read_compacted(store: ObjectStore, key: str) -> Commit:
    """Read a commit from the compacted object that contains it. Raises MissingObject if there is none.

    Listed twice, because one wrong listing must not end a role: the commit may be listed, and compacted since.
    """
    step, epoch = parse_commit_key(key)
    for _ in range(2):
        for file in list_commits(store).files:
            if file.epoch == epoch and step in file.steps:
                return read_range(store, file)[step - file.first]
    raise MissingObject(f"no object {key!r} in {store.url}")
