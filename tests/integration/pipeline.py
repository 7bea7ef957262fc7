"""A whole run of real roles for tests: a small model, the hub as a process, the others where the test wants them."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from pipelinerl_core.config import RunConfig
from pipelinerl_core.data.codec import from_segment
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.run.context import open_run
from pipelinerl_core.run.history import counted_commit_keys, read_commit
from pipelinerl_core.run.user_code import store_code
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.tools.audit import Audit
from tests.builders import put_run

SIX_STEPS = (
    "trainer.steps=6",
    "trainer.groups_per_step=4",
    "rollouts.group_size=4",
    "rollouts.max_tokens=24",
    "engine.concurrency=16",
    "placement.lease_seconds=30",
    "eval.num_prompts=0",
)
"""Overrides of a run of six small steps."""
BIT_FOR_BIT = ("engine.deterministic=true", "schedule.max_lag=0")
"""Overrides that make the rows of a run a function of its configuration."""
TOKEN = "a-token-for-tests"
STALE_ACTOR = "tests.integration.stale_actor"
"""A role with a fault, for `start_role`."""
ROOT = Path(__file__).parents[2]


def make_run(url: str, *overrides: str) -> RunConfig:
    """Write run.json of a small run on the quickstart's model; returns its configuration."""
    config, store = load_config("quickstart", overrides), open_store(url)
    code = store_code(store, config)
    put_run(store, config, run_id=url.rstrip("/").rsplit("/", 1)[1], created_at=time.time(), code=code)
    return config


def start_role(role: str, url: str, log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """A role as a child process of this one, stderr appended to `log`."""
    environment = {
        **os.environ,
        "PIPELINERL_TOKEN": TOKEN,
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
    }
    module = {"replay": "tools.replay", "trainer_node": "roles.trainer.node"}.get(role, f"roles.{role}.main")
    module = STALE_ACTOR if role == STALE_ACTOR else f"pipelinerl_core.{module}"
    command = [sys.executable, "-m", module, "--run", url, *arguments]
    if role != "replay":
        command += ["--parent-pid", str(os.getpid())]
    with log.open("ab") as stream:
        return subprocess.Popen(command, env=environment, stderr=stream, stdout=stream, cwd=ROOT)


@contextmanager
def role(name: str, url: str, log: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """`start_role`, ended at the end of the block."""
    process = start_role(name, url, log, *arguments)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(timeout=60)


def committed_steps(url: str) -> int:
    """Newest committed step that counts, -1 before the first."""
    store = open_store(url)
    return max(counted_commit_keys(store), default=-1)


CONTENT = (
    "group_id",
    "rollout_index",
    "prompt_id",
    "prompt_token_ids",
    "completion_token_ids",
    "rollout_logprobs",
    "weight_spans",
    "loss_mask_trained",
    "reward",
    "advantage",
    "loss_weight",
    "seed",
)


def trained_rows(url: str, columns: Sequence[str] = CONTENT) -> dict[int, list[dict[str, object]]]:
    """step -> the rows it trained, in order, without what differs from run to run (times, lease ids, attempts)."""
    store = open_store(url)
    rows: dict[int, list[dict[str, object]]] = {}
    for step, key in counted_commit_keys(store).items():
        for entry in read_commit(store, key).batches:
            table = pa.Table.from_batches(from_segment(store.get(entry.name)))
            rows[step] = table.select(list(columns)).to_pylist()
    return rows


def trained_groups(url: str) -> list[int]:
    """group_id of every trained group, in order of the commits."""
    store = open_store(url)
    commits = [read_commit(store, key) for key in counted_commit_keys(store).values()]
    return [fate.group_id for commit in commits for fate in commit.fates if fate.fate == "trained"]


def assert_closes(url: str) -> dict[str, object]:
    """The audit of a run, which must close; its document."""
    run = open_run(url)
    document = Audit(run.store, run.config).run().document
    assert document["closes"], document["problems"]
    assert (document["lost"], document["trained_twice"]) == (0, 0)
    return document
