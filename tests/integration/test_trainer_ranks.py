"""Whole runs whose trainer has two ranks: one is killed, one is stopped, and one machine less goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from pipelinerl_core.data.codec import decode_batch
from pipelinerl_core.data.trained import TrainedRows
from pipelinerl_core.models.resolve import resume_config
from pipelinerl_core.run.commits import read_commits
from pipelinerl_core.run.context import note_resume, open_run
from pipelinerl_core.run.drain import LOOK_SECONDS, ask_to_drain
from pipelinerl_core.run.history import read_epochs
from pipelinerl_core.storage.object_store import open_store
from tests.integration.pipeline import ROOT, assert_closes, committed_steps, make_run, role
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SMALL = [
    "trainer.groups_per_step=16", "engine.concurrency=64", "eval.num_prompts=0", "trainer.steps=9",
    "checkpoint.every_seconds=3600", "tracking.mlflow_uri=none",
]  # fmt: skip
RECOVERY_SECONDS = 30  # asked for; some ten times what it takes
PATIENCE_SECONDS = 120
MAX_LOG_RATIO = 1e-3


@contextmanager
def command(root: Path, *arguments: str) -> "Iterator[subprocess.Popen[bytes]]":
    """A `pipelinerl` command, killed at the end of the block if it still runs."""
    with (root / "output.txt").open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pipelinerl.flows.cli", *arguments, "--root", str(root)],
            cwd=ROOT,
            stdout=output,
            stderr=output,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(10)


def ranks_of(process: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    ranks = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "pipelinerl_core.roles.trainer.rank" in child.cmdline():
                ranks.append(child)
    return ranks


def only_run(root: Path) -> Path:
    wait_for(lambda: bool(list(root.glob("*/run.json"))), "a run", 120)
    return next(root.glob("*/run.json")).parent


def test_a_rank_dies_and_the_run_goes_on_then_with_one_rank(tmp_path: Path) -> None:
    learner = ["learner.kind=deepspeed", "learner.zero_stage=3", "weights.durable_every=12", "trainer.steps=12"]
    learner += ["trainer.groups_per_step=8", "store.trainer_logprobs=true"]
    with command(tmp_path, "train", "quickstart", "trainer.ranks=2", *SMALL, *learner) as train:
        run = only_run(tmp_path)
        wait_for(lambda: committed_steps(str(run)) >= 2, "step 2", 120)
        (rank,) = ranks_of(train)
        rank.kill()
        log = run / "logs" / "trainer.log"
        wait_for(lambda: "rank 1 of 2 was killed by signal 9" in log.read_text(), "the log's word", RECOVERY_SECONDS)
        step = committed_steps(str(run))
        wait_for(lambda: committed_steps(str(run)) > step, "the next step", 90)
        ranks = ranks_of(train)
        train.send_signal(signal.SIGINT)
        assert train.wait(120) == 130
    wait_for(lambda: not any(rank.is_running() for rank in ranks), "the end of the ranks", PATIENCE_SECONDS)
    assert "Traceback" not in log.read_text()

    one_rank = ["trainer.ranks=1", "learner.kind=torch"]
    with command(tmp_path, "resume", run.name, *one_rank) as end:
        assert end.wait(240) == 0, (tmp_path / "output.txt").read_text()[-3000:]
    assert committed_steps(str(run)) == 12
    assert_closes(str(run))
    assert largest_log_ratio_without_lag(str(run)) < MAX_LOG_RATIO
    assert arithmetic_of(str(run), "ranks") == [2, 2, 1]
    assert arithmetic_of(str(run), "kind") == ["deepspeed", "deepspeed", "torch"]
    assert "its weights differ from the committed weights by rounding, " in log.read_text()
    assert json.loads((run / "run.json").read_text())["config"]["trainer"]["ranks"] == 2  # written once


def largest_log_ratio_without_lag(url: str) -> float:
    """Of the tokens of all steps that the trained version sampled; rows of all ranks."""
    store = open_store(url)
    differences = []
    for step, commit in read_commits(store).items():
        rows = [row for batch in TrainedRows(store).batches(commit) for row in decode_batch(batch)]
        assert all(row.trainer_logprobs is not None for row in rows if row.advantage)
        differences += [
            np.abs(row.trainer_logprobs - row.rollout.rollout_logprobs)[row.rollout.loss_mask]
            for row in rows
            if row.trainer_logprobs is not None and {span.version for span in row.rollout.weight_spans} == {step - 1}
        ]
    return float(np.concatenate(differences).max())


def arithmetic_of(url: str, key: str) -> list[object]:
    """Of every start of the trainer."""
    return [epoch.arithmetic[key] for epoch in read_epochs(open_store(url)) if epoch.role == "trainer"]


@pytest.mark.campaign
def test_a_rank_that_stands_still_is_a_lost_rank(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/one"
    make_run(url, "trainer.ranks=2", *SMALL, "trainer.collective_seconds=45", "weights.durable_every=1")
    log = tmp_path / "log.txt"
    with role("hub", url, log), role("actor", url, log, "--name", "actor-0"):
        with role("trainer", url, log) as trainer:
            wait_for(lambda: committed_steps(url) >= 1, "step 1", 120)
            (rank,) = psutil.Process(trainer.pid).children()
            os.kill(rank.pid, signal.SIGSTOP)
            assert trainer.wait(300) == 1
            assert "a rank of the trainer is gone or silent" in log.read_text()
            wait_for(lambda: not rank.is_running(), "its end", PATIENCE_SECONDS)
        resumed = open_run(url)
        config = resume_config(resumed.config, ["trainer.ranks=1"])
        note_resume(replace(resumed, config=config), ["trainer.ranks=1"])
        with role("trainer", url, log) as trainer:
            assert trainer.wait(120) == 0
    assert arithmetic_of(url, "ranks") == [2, 1]
    assert "trained again on other hardware; the committed weights are loaded" in log.read_text()
    assert_closes(url)
    with role("replay", url, log, "--json") as replay:
        assert replay.wait(60) == 0
    assert '"verdict": "close"' in log.read_text()
    assert "DIFFERS" not in log.read_text()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("loss.kind=gspo", "a resume can change only"),
        ("trainer.ranks=0", "trainer.ranks=0"),
    ],
)
def test_a_resume_with_a_key_that_defines_the_run_is_refused(tmp_path: Path, override: str, words: str) -> None:
    make_run(f"file://{tmp_path}/one")
    with command(tmp_path, "resume", "one", override) as resumed:
        assert resumed.wait(60) == 2
    assert words in (tmp_path / "output.txt").read_text().splitlines()[-1]


@pytest.mark.campaign
def test_ranks_on_another_host_join_every_start_of_rank_0(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/one"
    two_hosts = ["placement.kind=work_pools", "placement.trainer_nodes=2", "placement.trainer_host=127.0.0.1"]
    divided = ["learner.kind=deepspeed", "learner.zero_stage=2", "checkpoint.every_seconds=0.5"]
    make_run(url, "trainer.ranks=2", *SMALL, "trainer.steps=20", *two_hosts, *divided)
    log = tmp_path / "log.txt"
    actor, others = ("actor", url, log, "--name", "actor-0"), ("trainer_node", url, log, "--node", "1")
    with role("hub", url, log), role(*actor), role(*others) as node:
        with role("trainer", url, log) as trainer:
            wait_for(lambda: committed_steps(url) >= 2, "step 2", 120)
            assert not psutil.Process(trainer.pid).children()
            (rank,) = psutil.Process(node.pid).children()
            trainer.kill()
        wait_for(lambda: not rank.is_running(), "the end of its other rank", PATIENCE_SECONDS)
        step = committed_steps(url)
        with role("trainer", url, log) as trainer:
            wait_for(lambda: committed_steps(url) >= step + 2, "two more steps", 120)
            (rank,) = psutil.Process(node.pid).children()
            rank.kill()
            assert trainer.wait(PATIENCE_SECONDS) == 1
        assert "a rank of the trainer is gone or silent" in log.read_text()
        with role("trainer", url, log) as trainer:
            assert trainer.wait(120) == 0
        assert node.wait(PATIENCE_SECONDS) == 0
    assert committed_steps(url) == 20
    assert_closes(url)
    newest = max((tmp_path / "one" / "checkpoints").iterdir())
    assert {path.name for path in newest.iterdir()} >= {"state-00001.safetensors", "state-1-00001.safetensors"}


@pytest.mark.campaign
def test_ranks_on_another_host_stay_until_rank_0_lets_them_go(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/one"
    two_hosts = ["placement.kind=work_pools", "placement.trainer_nodes=2", "placement.trainer_host=127.0.0.1"]
    make_run(url, "trainer.ranks=2", *SMALL, "trainer.steps=3000", *two_hosts)
    log = tmp_path / "log.txt"
    actor, others = ("actor", url, log, "--name", "actor-0"), ("trainer_node", url, log, "--node", "1")
    with role("hub", url, log), role(*actor), role(*others) as node, role("trainer", url, log) as trainer:
        wait_for(lambda: committed_steps(url) >= 2, "step 2", 120)
        (rank,) = psutil.Process(node.pid).children()
        trainer.send_signal(signal.SIGSTOP)  # rank 0 sees the wish later than everybody else
        ask_to_drain(open_store(url), by="this test")
        time.sleep(3 * LOOK_SECONDS)
        assert rank.is_running(), "rank 0 has not taken its last step"
        trainer.send_signal(signal.SIGCONT)
        assert trainer.wait(PATIENCE_SECONDS) == 0
        assert node.wait(PATIENCE_SECONDS) == 0
    assert "a rank of the trainer is gone or silent" not in log.read_text()
    assert_closes(url)
