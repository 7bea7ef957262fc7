"""Measure what the number of steps of a run costs its readers: seconds, peak memory and requests to the store.

Writes a run as it is after N steps: compacted commits and rollouts, the newest steps as they were written, a start of
hub, trainer and actors every 1,280 steps, 200 evaluations. Rows and metrics of 128 steps repeat. `hub`, `trainer` and
`flow` are what these read at a start; `import` is in the memory of all others, and torch, which a trainer loads too,
is in none.
"""

import argparse
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelinerl.flows.cli import app
from pipelinerl_core.data.codec import encode_batch, to_segment
from pipelinerl_core.data.compaction import SCHEMA
from pipelinerl_core.data.schema import SPAN_TYPE
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.messages import FateRecord
from pipelinerl_core.roles.hub.recovery import read_stored_state
from pipelinerl_core.run.compacted import StepRange
from pipelinerl_core.run.compaction import FILE_STEPS, MARGIN_STEPS
from pipelinerl_core.run.context import open_run
from pipelinerl_core.run.follow import RunFollower
from pipelinerl_core.run.history import read_commit, take_over
from pipelinerl_core.run.records import RUN_KEY, Commit, batch_key, commit_key, eval_key, life_key, retired_key
from pipelinerl_core.storage.digests import entry_of
from pipelinerl_core.storage.local import FileStore
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.telemetry.metrics import METRICS
from pipelinerl_core.tools.audit import Audit
from pipelinerl_core.types import TrainingRow
from tests.synthetic_run import (
    Shape,
    evaluation_record,
    make_commit,
    put_compacted,
    put_epoch,
    put_record,
    rows_of_step,
    trained_commit,
    write_run,
)

_SHAPE = Shape(steps=2 * FILE_STEPS, groups_per_step=2)
_START_STEPS = 10 * FILE_STEPS
_NUM_METRICS = 50
_RUN_ID = "synthetic"


def write_long_run(store: ObjectStore, steps: int) -> None:
    """Write a run of these steps that `pipelinerl audit` passes; rows and metrics of 128 steps repeat."""
    rng = np.random.default_rng(0)
    record = write_run(store, _SHAPE)
    store.delete([*store.list("commits"), *store.list("batches"), *store.list("evals")])
    config = {**record.config, "trainer": {**record.config["trainer"], "steps": steps}}
    put_record(store, RUN_KEY, record.model_copy(update={"config": config}))
    patterns = [rows_of_step(rng, _SHAPE, FILE_STEPS + index) for index in range(FILE_STEPS)]
    encoded = [encode_batch(_RUN_ID, FILE_STEPS + index, rows) for index, rows in enumerate(patterns)]
    names = [name for name, metric in METRICS.items() if metric.group == "trainer" and "<" not in name][:_NUM_METRICS]
    noise = [dict(zip(names, rng.random(_NUM_METRICS).tolist(), strict=True)) for _ in patterns]
    totals, epoch = dict.fromkeys(("generated", "trained", "masked_stale", "in_flight", "failed"), 0), 0
    compacted = (steps + 1 - MARGIN_STEPS) // FILE_STEPS * FILE_STEPS
    for first in range(0, steps + 1, FILE_STEPS):
        if first % _START_STEPS == 0:
            epoch = _start(store, first)
        pairs = []
        for index in range(min(FILE_STEPS, steps + 1 - first)):
            step, rows = first + index, patterns[index] if first + index else []
            batch = _moved(encoded[index][: len(rows)], first - FILE_STEPS)
            key, data = batch_key(step, epoch, 0), to_segment([batch]) if first >= compacted else b""
            commit = _commit(step, epoch, rows, totals)
            metrics = {**noise[index], **commit.metrics}
            commit = commit.model_copy(update={"metrics": metrics, "batches": (entry_of(key, data),) if rows else ()})
            pairs.append((commit, batch))
            if first >= compacted:
                put_record(store, commit_key(step, epoch), commit)
                store.put(key, data)
        if first < compacted:
            rows_of_steps = (_compacted(batch) for _, batch in pairs if len(batch))
            held = StepRange(first, first + FILE_STEPS - 1, epoch)
            put_compacted(store, held, [commit for commit, _ in pairs], rows_of_steps)
    for version in range(0, steps + 1, max(1, steps // 200)):
        put_record(store, eval_key(version), evaluation_record(rng, version, version / steps))


def _start(store: ObjectStore, first: int) -> int:
    """Write what a start of hub, trainer and actors leaves before step `first`; returns the trainer's epoch."""
    epoch = 2 + 2 * (first // _START_STEPS)
    put_epoch(store, epoch - 1, "hub", first - 1)
    put_epoch(store, epoch, "trainer", first - 1, parent=epoch - 2 if first else None)
    for index in range(_SHAPE.num_actors):
        for key in (life_key, retired_key) if first else (life_key,):
            store.put(key(f"actor-{index}", epoch), b"")
    return epoch


def _moved(batch: pa.RecordBatch, steps: int) -> pa.RecordBatch:
    """The same rows in a later step, with later groups, and versions at least 0."""
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    spans = columns["weight_spans"]
    versions = pc.max_element_wise(pc.add(spans.values.field("version"), steps), 0)
    moved = [versions.cast(SPAN_TYPE.field("version").type), *spans.values.flatten()[1:]]
    columns["step"] = pc.add(columns["step"], steps)
    columns["group_id"] = pc.add(columns["group_id"], steps * _SHAPE.groups_per_step)
    columns["weight_spans"] = pa.ListArray.from_arrays(
        spans.offsets, pa.StructArray.from_arrays(moved, fields=list(SPAN_TYPE)), type=spans.type
    )
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=batch.schema)


def _compacted(batch: pa.RecordBatch) -> pa.Table:
    return pa.Table.from_batches([batch]).append_column("fate", [["trained"] * len(batch)]).cast(SCHEMA)


def _commit(step: int, epoch: int, rows: list[TrainingRow], totals: dict[str, int]) -> Commit:
    commit, before = make_commit(step, epoch=epoch), dict(totals)
    if not rows:
        return commit
    commit = trained_commit(commit, rows, _SHAPE, totals)
    num_groups, sizes = _SHAPE.groups_per_step, Counter[int]()
    for row in rows:
        sizes[(step - 1) * num_groups + row.rollout.group_id % num_groups] += row.rollout.num_tokens
    fates = (FateRecord(group_id=group, attempt=0, fate="trained", num_tokens=num) for group, num in sizes.items())
    return commit.model_copy(update={
        "fates": tuple(fates), "tokens": before, "next_group_id": step * num_groups,
        "actors": {f"{name.partition('/')[0]}/{epoch}": sample for name, sample in commit.actors.items()},
        "swaps": tuple(swap.model_copy(update={"actor_epoch": epoch}) for swap in commit.swaps),
    })  # fmt: skip


def _take_over(url: str) -> None:
    commits = take_over(open_store(url))[1]
    read_commit(open_store(url), commits[max(commits)])


READERS: dict[str, Callable[[str], object]] = {
    "import": str,
    "runs": lambda url: app(["runs", "--root", url.rpartition("/")[0]], standalone_mode=False),
    "status": lambda url: app(["status", url], standalone_mode=False),
    "report": lambda url: app(["report", url], standalone_mode=False),
    "audit": lambda url: Audit(open_run(url).store, open_run(url).config).run(),
    "hub": lambda url: read_stored_state(open_store(url)),
    "trainer": _take_over,
    "flow": lambda url: RunFollower(open_store(url)).refresh(),
}


def _counted(name: str, requests: Counter[str]) -> None:
    function = getattr(FileStore, name)

    def call(*arguments: Any, **keywords: Any) -> Any:
        requests[name] += 1
        return function(*arguments, **keywords)

    setattr(FileStore, name, call)


def main() -> None:
    """Write the run unless it is there, and run each reader in a process of its own."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks age", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("steps", type=int)
    parser.add_argument("root", type=Path, help="directory in which the run is written, unless it is there")
    parser.add_argument("readers", nargs="*", default=list(READERS), help=f"of {', '.join(READERS)}")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    run, requests = options.root.absolute() / _RUN_ID, Counter[str]()
    if not options.here:
        if not run.exists():
            write_long_run(open_store(str(run)), options.steps)
        sizes = [path.stat().st_size for path in run.rglob("*") if path.is_file()]
        sys.stderr.write(f"{len(sizes):,} objects of {sum(sizes) / 1e6:,.0f} MB\n")
        for reader in options.readers:
            own = [str(options.steps), str(options.root), reader, "--here"]
            command = [sys.executable, "-m", "benchmarks.age", *own]
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        return
    for name in ("list", "get", "put", "exists"):
        _counted(name, requests)
    begun = time.perf_counter()
    READERS[options.readers[0]](str(run))
    seconds = time.perf_counter() - begun
    (peak,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    megabytes = int(peak.split()[1]) * 1024 / 1e6
    sys.stderr.write(f"{options.readers[0]}: {seconds:.1f} s, {megabytes:.0f} MB, {dict(requests)}\n")


if __name__ == "__main__":
    main()
