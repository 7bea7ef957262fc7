"""Reads the objects of one run as Arrow, each when a query scans it.

Three sources have every row that is in the store. `stored_rows`: compacted/rollouts/, and batches/ of newer steps.
`segment_rows`: rollouts/, whose rows are either in batches/, too, or of groups that were not trained, or of groups
that no commit has decided. `group_fates` and `open_groups` tell these apart (views.py joins them).
"""

import functools
import io
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
from fsspec import AbstractFileSystem
from pyarrow.fs import FileSystem, FSSpecHandler, LocalFileSystem, PyFileSystem, SubTreeFileSystem

from pipelinerl_core.config import RunConfig
from pipelinerl_core.data.compaction import SCHEMA, list_rollouts, removed_through
from pipelinerl_core.data.schema import ROLLOUT_SCHEMA
from pipelinerl_core.errors import MissingObject
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.models.resolve import build_config, resume_config
from pipelinerl_core.report.run_list import list_run
from pipelinerl_core.run.commits import Commits, read_commits
from pipelinerl_core.run.context import resume_overrides
from pipelinerl_core.run.follow import RunFollower, commit_metrics
from pipelinerl_core.run.locate import local_directory
from pipelinerl_core.run.reading import list_keys, read_record
from pipelinerl_core.run.records import BATCHES_PREFIX, RUN_KEY, Commit, EvalRecord, RunRecord, commit_key
from pipelinerl_core.run.versions import is_stored, stored_weights

STORED_ROWS = pa.schema([field.with_nullable(True).remove_metadata() for field in SCHEMA])
"""The columns of compacted rollouts."""
SEGMENT_ROWS = pa.schema([field.with_nullable(True).remove_metadata() for field in ROLLOUT_SCHEMA])
_CACHED_OBJECTS = 4
"""Objects of a remote store in memory: a scan opens an object several times."""


class RunReader:
    """The objects of a run. Each method lists or reads the store once; `refresh` forgets what was read."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self._files = _files_of(store)

    def refresh(self) -> None:
        """Read the current state of the run from now on."""
        self.__dict__.pop("commits", None)

    @functools.cached_property
    def config(self) -> RunConfig:
        """The resolved configuration."""
        return resume_config(build_config(self._record.config), resume_overrides(self.store))

    @functools.cached_property
    def run_id(self) -> str:
        """The id in run.json, which every row has."""
        return self._record.run_id

    @functools.cached_property
    def _record(self) -> RunRecord:
        return read_record(self.store, RUN_KEY, RunRecord)

    @functools.cached_property
    def commits(self) -> Commits:
        """Step -> commit that counts."""
        return read_commits(self.store)

    def stored_rows(self) -> list[ds.Dataset]:
        """Datasets with the columns STORED_ROWS: the rows of compacted/rollouts/ and of the batches of newer steps.

        Raises MissingObject if the rows of a step are in neither, unless `store.keep_rows` has removed them.
        """
        checked = ds.ParquetFragmentScanOptions(page_checksum_verification=True)
        parquet, ipc = ds.ParquetFileFormat(default_fragment_scan_options=checked), ds.IpcFileFormat()
        fragments = []
        keys = self.commits.keys_by_step
        for steps in list_rollouts(self.store):
            counted = [step for step in steps.steps if keys.get(step) == commit_key(step, steps.epoch)]
            fragment = parquet.make_fragment(steps.rollouts_key, self._files)
            if len(counted) < len(steps.steps):  # a later epoch has trained the other steps again
                fragment = fragment.subset(ds.field("step").isin(counted))
            fragments.append(fragment)
        is_trained = ds.field("fate") == "trained"
        batches = [ipc.make_fragment(key, self._files, is_trained) for key in self._batch_keys()]
        return [
            ds.FileSystemDataset(parts, STORED_ROWS, file_format, self._files)
            for parts, file_format in ((fragments, parquet), (batches, ipc))
            if parts
        ]

    def segment_rows(self) -> list[ds.Dataset]:
        """Datasets with the columns SEGMENT_ROWS: all segments in the store."""
        ipc = ds.IpcFileFormat()
        segments = [ipc.make_fragment(key, self._files) for key in list_keys(self.store, "rollouts")]
        return [ds.FileSystemDataset(segments, SEGMENT_ROWS, ipc, self._files)] if segments else []

    def group_fates(self) -> pa.Table:
        """Groups that were decided by commits whose rows are not compacted."""
        fates = [
            {"run_id": self.run_id, "step": commit.step, **fate.model_dump(include={"group_id", "attempt", "fate"})}
            for commit in self._newer_commits()
            for fate in commit.fates
        ]
        kinds = {"run_id": pa.string(), "group_id": pa.int64(), "attempt": pa.int32(), "step": pa.int64()}
        return pa.Table.from_pylist(fates, pa.schema({**kinds, "fate": pa.string()}))

    def open_groups(self) -> pa.Table:
        """One row: the groups that no commit has decided, `open_groups` and all from `next_group_id` on."""
        last = next(iter(self.commits.newest(1)), None)
        row = {
            "run_id": self.run_id,
            "next_group_id": last.next_group_id if last else 0,
            "open_groups": list(last.open_groups) if last else [],
        }
        kinds = {"run_id": pa.string(), "next_group_id": pa.int64(), "open_groups": pa.list_(pa.int64())}
        return pa.Table.from_pylist([row], pa.schema(kinds))

    def _newer_commits(self) -> Iterator[Commit]:
        """The commits whose rows are not compacted and not removed."""
        compacted = {commit_key(step, steps.epoch) for steps in list_rollouts(self.store) for step in steps.steps}
        removed = removed_through(self.store, self.config.store.keep_rows)
        for step, key in self.commits.keys_by_step.items():
            if step > removed and key not in compacted:
                yield self.commits[step]

    def _batch_keys(self) -> list[str]:
        present = set(list_keys(self.store, BATCHES_PREFIX))
        named = [entry.name for commit in self._newer_commits() for entry in commit.batches]
        if missing := [key for key in named if key not in present]:
            raise MissingObject(f"{missing[0]} is not in {self.store.url}, and its rows are not compacted")
        return named

    def runs(self) -> Iterator[dict[str, Any]]:
        """One row: the run as `pipelinerl runs --json` has it."""
        listed = list_run(self.store)
        if listed is not None:
            yield listed.document()

    def steps(self) -> Iterator[dict[str, Any]]:
        """One row per committed step, with all metrics."""
        previous: Commit | None = None
        for commit in self.commits.values():
            yield {
                "run_id": self.run_id,
                **{name: getattr(commit, name) for name in ("step", "epoch", *_TIMES)},
                "seconds": commit.committed_at - previous.committed_at if previous else None,
                **{name: commit.tokens.get(name) for name in ("generated", "trained", "masked_stale")},
                "metrics": list(commit_metrics(commit, previous).items()),
            }
            previous = commit

    def versions(self) -> Iterator[dict[str, Any]]:
        """One row per weight version."""
        stored = stored_weights(self.store)
        for commit in self.commits.values():
            manifest = commit.manifest
            yield {
                "run_id": self.run_id,
                "version": commit.step,
                "epoch": commit.epoch,
                "digest": commit.weights_digest,
                "published_at": manifest.published_at if manifest else None,
                "num_bytes": manifest.num_bytes if manifest else None,
                "stored": is_stored(self.commits, commit.step, stored),
            }

    def swaps(self) -> Iterator[dict[str, Any]]:
        """One row per swap of an actor."""
        known: set[tuple[str, int, int]] = set()
        for commit in self.commits.values():
            for swap in commit.swaps:
                key = swap.actor, swap.actor_epoch, swap.version
                if key in known:  # a restarted hub does not know which swaps a commit has
                    continue
                known.add(key)
                yield {"run_id": self.run_id, "step": commit.step, "swapped_at": swap.at, **swap.model_dump()}

    def actors(self) -> Iterator[dict[str, Any]]:
        """One row per actor epoch and step."""
        for commit in self.commits.values():
            for name, sample in commit.actors.items():
                actor, _, epoch = name.rpartition("/")
                rescored = commit.rescored.get(name)
                yield {
                    "run_id": self.run_id,
                    "step": commit.step,
                    "actor": actor,
                    "actor_epoch": int(epoch),
                    "sampled_at": sample.at,
                    **sample.model_dump(exclude={"counters"}),
                    **{key: getattr(rescored, key, None) for key in ("mismatch", "stale_kv", "staleness", "alarm")},
                }

    def evaluations(self) -> Iterator[dict[str, Any]]:
        """One row per evaluated version and set."""
        follower = RunFollower(self.store)
        follower.refresh()
        records: list[Mapping[int, EvalRecord]] = [follower.evals, *follower.set_evals.values()]
        for record in (record for of_set in records for record in of_set.values()):
            values = record.model_dump(exclude={"samples", "components", "accuracy", "format_version"})
            yield {
                "run_id": self.run_id,
                **values,
                "accuracy": record.known_accuracy,
                "components": list(record.components.items()),
                "samples": json.dumps(record.samples, ensure_ascii=False),
            }


_TIMES = ("reserved_at", "computed_at", "committed_at")


class _StoreFiles(AbstractFileSystem):  # type: ignore[misc]
    """The objects of a store as files that are read whole, for pyarrow."""

    cachable = False

    def __init__(self, store: ObjectStore) -> None:
        super().__init__()
        self._get = functools.lru_cache(_CACHED_OBJECTS)(store.get)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Name, kind and bytes of an object."""
        return {"name": path, "type": "file", "size": len(self._get(path))}

    def _open(self, path: str, mode: str = "rb", **_: Any) -> io.BytesIO:
        return io.BytesIO(self._get(path))


def _files_of(store: ObjectStore) -> FileSystem:
    directory = local_directory(store.url)
    if directory is not None:
        return SubTreeFileSystem(str(directory), LocalFileSystem(use_mmap=True))
    return PyFileSystem(FSSpecHandler(_StoreFiles(store)))
