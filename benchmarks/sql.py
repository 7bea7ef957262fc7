"""SQL over a synthetic run: seconds and memory of queries over rollouts and over tokens (docs/sql.md).

The run is written as compaction writes it: Parquet objects of at most 16 million tokens, row groups of one step.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks import report
from pipelinerl_core.data.codec import list_column, span_column
from pipelinerl_core.data.compaction import FILE_TOKENS, SCHEMA
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.run.compacted import StepRange
from pipelinerl_core.run.records import RUN_KEY, Commit, RunRecord
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.types import WeightSpan
from tests.synthetic_run import put_compacted, put_epoch, put_record

QUERIES = {
    "reward by step": "select step, avg(reward), avg(num_tokens) from rollouts group by step order by step",
    "prompts that always fail": "select prompt_id, max(reward) as best from rollouts group by 1 having best = 0",
    "reward by a column of the task": "select task->>'level' as level, avg(reward) from rollouts group by 1",
    "one step": "select * from rollouts where step = 7",
    "text of 1,000 completions": "select completion from rollouts where step = 7",
    "search in all completions": "select count(*) from rollouts where completion like '%12.34%'",
    "tokens by version": "select version, count(*), avg(logprob) from tokens group by version order by version",
    "tokens by lag and advantage": "select lag, avg(advantage), count(*) from tokens where trained group by lag",
    "rarest 10 tokens": "select step, group_id, text, logprob from tokens order by logprob limit 10",
}
_CHILD = """
import resource, sys
from pipelinerl_core.report.query.database import Database, stores_of
def main():
    with Database(stores_of(sys.argv[1])) as database:
        num_rows = sum(batch.num_rows for batch in database.sql(sys.argv[2]))
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(used.ru_utime + used.ru_stime, used.ru_maxrss, num_rows)
main()
"""
_QUERY_SECONDS = 600
_ROWS_PER_STEP, _GROUP_SIZE, _EPOCH, _VOCABULARY = 1000, 8, 1, 16


def write_run(store: ObjectStore, num_rollouts: int, num_tokens: int) -> None:
    """A run of steps with 1,000 rollouts of `num_tokens` tokens each."""
    rng = np.random.default_rng(0)
    record = RunRecord(
        run_id="bench", created_at=0.0, code_version="bench", config=load_config("quickstart").model_dump(mode="json")
    )
    put_record(store, RUN_KEY, record)
    put_epoch(store, _EPOCH, "trainer", adopted_through=-1)
    num_steps = num_rollouts // _ROWS_PER_STEP
    per_file = max(1, min(128, FILE_TOKENS // (_ROWS_PER_STEP * num_tokens)))
    for first in range(1, num_steps + 1, per_file):
        steps = range(first, min(first + per_file, num_steps + 1))
        rows = (_rows(rng, step, num_tokens) for step in steps)
        put_compacted(store, StepRange(steps[0], steps[-1], _EPOCH), [_commit(step) for step in steps], rows)


def _commit(step: int) -> Commit:
    return Commit(
        run_id="bench", step=step, epoch=_EPOCH, batches=(), weights_digest=f"{step:064x}", manifest=None,
        checkpoint=None, reserved_at=step, computed_at=step + 0.5, committed_at=step + 0.6,
        metrics={"reward/mean": 0.5}, next_group_id=step * (_ROWS_PER_STEP // _GROUP_SIZE),
    )  # fmt: skip


def _rows(rng: np.random.Generator, step: int, num_tokens: int) -> pa.Table:
    """The rows of a step; a third of the rollouts continue under a second version."""
    num = _ROWS_PER_STEP
    groups = step * (num // _GROUP_SIZE) + np.arange(num) // _GROUP_SIZE
    spans = [
        (WeightSpan(step - 2, 0, num_tokens // 2), WeightSpan(step - 1, num_tokens // 2, num_tokens))
        if row % 3 == 0
        else (WeightSpan(step - 1, 0, num_tokens),)
        for row in range(num)
    ]
    ones = [np.ones(num_tokens, np.bool_)] * num
    columns = {
        "run_id": ["bench"] * num,
        "group_id": groups,
        "rollout_index": np.arange(num) % _GROUP_SIZE,
        "attempt": np.zeros(num, np.int32),
        "lease_id": [f"lease-{group}" for group in groups],
        "prompt_id": [f"{group % 5000:016x}" for group in groups],
        "source": ["sums"] * num,
        "env": ["sums"] * num,
        "task": [json.dumps({"answer": str(group % 97), "level": int(group % 5)}) for group in groups],
        "actor": [f"actor-{row % 4}" for row in range(num)],
        "group_size": np.full(num, _GROUP_SIZE),
        "prompt_token_ids": list_column(list(rng.integers(0, _VOCABULARY, (num, 12)).astype(np.int32)), np.int32),
        "completion_token_ids": list_column(
            list(rng.integers(0, _VOCABULARY, (num, num_tokens)).astype(np.int32)), np.int32
        ),
        "rollout_logprobs": list_column(
            list(-rng.exponential(size=(num, num_tokens)).astype(np.float32)), np.float32
        ),
        "weight_spans": span_column(spans),
        "loss_mask": list_column(ones, np.bool_),
        "loss_mask_trained": list_column(ones, np.bool_),
        "reward": rng.integers(0, 2, num).astype(np.float32),
        "outcome": ["scored"] * num,
        "finish_reason": ["stop"] * num,
        "temperature": np.ones(num),
        "top_p": np.ones(num),
        "seed": rng.integers(0, 2**62, num),
        "max_tokens": np.full(num, num_tokens),
        "started_at": np.full(num, float(step)),
        "finished_at": np.full(num, step + 1.0),
        "scored_at": np.full(num, step + 1.1),
        "step": np.full(num, step),
        "order": np.arange(num),
        "advantage": rng.normal(size=num).astype(np.float32),
        "loss_weight": np.full(num, 1 / (num * num_tokens), np.float32),
        "fate": ["trained"] * num,
    }
    arrays = [
        value if isinstance(value := columns.get(field.name), pa.Array)
        else pa.nulls(num, field.type) if value is None
        else pa.array(value, field.type)
        for field in SCHEMA
    ]  # fmt: skip
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def measure(url: str) -> list[dict[str, Any]]:
    """Each query as a command of its own: seconds and CPU seconds with the start of Python, peak memory, rows."""
    results = []
    for name, statement in QUERIES.items():
        command = [sys.executable, "-c", _CHILD, url, statement]
        begin = time.perf_counter()
        child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=_QUERY_SECONDS)
        cpu_seconds, memory, rows = child.stdout.split()
        seconds = time.perf_counter() - begin
        used = {"seconds": seconds, "cpu_seconds": float(cpu_seconds), "memory_mb": int(memory) / 1024}
        results.append({"query": name, "statement": statement, **used, "rows": int(rows)})
    return results


def main(arguments: list[str] | None = None) -> None:
    """Write the run, ask the queries, print a table or JSON."""
    parser = report.parser(__doc__)
    parser.add_argument("--rollouts", type=int, default=1_000_000, help="rollouts of the run; a multiple of 1,000")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a completion")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="bench-sql-") as directory:
        store = open_store(str(Path(directory) / "bench"))
        begin = time.perf_counter()
        write_run(store, options.rollouts, options.tokens)
        result = {
            **report.machine(),
            "rollouts": options.rollouts,
            "tokens": options.tokens,
            "writing_seconds": time.perf_counter() - begin,
            "bytes": sum(store.sizes("compacted").values()),
            "queries": measure(store.url),
        }
    report.write(result, _table, as_json=options.json)


def _table(result: dict[str, Any]) -> str:
    formats = {"query": "", "seconds": ".1f", "cpu_seconds": ".1f", "memory_mb": ",.0f", "rows": ","}
    rows = [[format(entry[name], form) for name, form in formats.items()] for entry in result["queries"]]
    title = (
        f"{result['rollouts']:,} rollouts of {result['tokens']} tokens, {result['bytes'] / 1e6:,.0f} MB stored; "
        f"{report.conditions(result)}"
    )
    header = ("query", "seconds", "CPU seconds", "memory, MB", "rows")
    return "\n".join([title, "", *report.markdown(header, rows)]) + "\n"


if __name__ == "__main__":
    main()
