"""A whole run whose engine is vLLM, and what becomes of it when engine cores are killed on the way. Real vLLM."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pipelinerl_core.run.history import counted_commit_keys, read_commit
from pipelinerl_core.storage.object_store import open_store
from tests.families import entries_of
from tests.integration.pipeline import ROOT, assert_closes, committed_steps, trained_groups
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

STEPS = 16
GROUPS = 16
SETTINGS = [
    "engine.kind=vllm",
    "engine.kv_gigabytes=0.25",
    f"trainer.steps={STEPS}",
    f"trainer.groups_per_step={GROUPS}",
    "engine.concurrency=64",
    "eval.num_prompts=40",
    "eval.every_steps=4",
    "eval.subset=16",
    "placement.lease_seconds=20",
]


def train(root: Path, *overrides: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    arguments = ["train", "quickstart", *SETTINGS, *overrides, "--root", str(root), "--json"]
    with (root / "stderr.log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "pipelinerl.flows.cli", *arguments],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip


def finished(command: subprocess.Popen[str], root: Path) -> dict[str, object]:
    """The report of a run that ended well."""
    try:
        output, _ = command.communicate(timeout=900)
    finally:
        if command.poll() is None:
            command.kill()
        command.wait(timeout=30)
    assert command.returncode == 0, (root / "stderr.log").read_text()[-3000:]
    return json.loads(output)


def check_report(report, run, steps=STEPS):
    assert report["steps"] == steps
    groups = trained_groups(str(run))
    assert len(groups) == len(set(groups)) == steps * GROUPS
    ledger = report["ledger"]
    assert ledger["generated"] == sum(tokens for name, tokens in ledger.items() if name != "generated")
    assert ledger["failed"] == 0
    assert_closes(str(run))


def vllm_processes():
    """vLLM's processes on this machine, those of other tests included."""
    return [p for p in psutil.process_iter(["name"]) if (p.info["name"] or "").startswith("VLLM")]


def engine_cores(command):
    """Engine cores of the actors of a run."""
    processes = []
    for process in psutil.Process(command.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "VLLM" in process.name() and "EngineCore" in process.name():
                processes.append(process)
    return processes


def left_over():
    """vLLM's processes whose run has ended: no test process is above them."""
    processes = []
    for process in vllm_processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            if not any("pytest" in " ".join(parent.cmdline()) for parent in process.parents()):
                processes.append(process)
    return processes


def end(command):
    """Of a test that has failed; whatever it started ends with it."""
    command.kill()
    command.wait(timeout=30)
    command.stdout.close()


@pytest.mark.campaign
def test_weights_are_broadcast_from_the_trainers_memory_and_a_killed_core_finds_its_way_back(
    tmp_path, prepared_model
):
    settings = ["weights.transport=nccl", "weights.durable_every=1000", "weights.broadcast_seconds=15"]
    command = train(tmp_path, *settings, "checkpoint.every_seconds=1000", "eval.num_prompts=0")
    try:
        wait_for(lambda: any(tmp_path.glob("quickstart-*/commits/*.json")), "commit 0", seconds=400)
        run = next(tmp_path.glob("quickstart-*"))
        wait_for(lambda: committed_steps(str(run)) >= 5, "step 5", seconds=400)
        (core,) = engine_cores(command)
        core.send_signal(signal.SIGKILL)
    except BaseException:
        end(command)
        raise
    check_report(finished(command, tmp_path), run)
    manifests = [json.loads(path.read_text())["manifest"] for path in sorted(run.glob("commits/*.json"))]
    broadcast = [manifest["version"] for manifest in manifests if manifest["is_broadcast"]]
    assert broadcast
    assert {manifest["key"] for manifest in manifests if manifest["is_broadcast"]} == {None}
    groups = {manifest["group"] for manifest in manifests if manifest["group"]}
    assert len(groups) >= 2  # the killed core was in one, the new one is in another
    wait_for(lambda: not left_over(), "the end of vLLM", seconds=120)


def test_a_run_with_vllm_swaps_in_the_middle_of_sequences_and_closes(tmp_path, prepared_model):
    command = train(tmp_path, "trainer.steps=5", "trainer.rescore_share=0.1", "eval.num_prompts=0")
    report = finished(command, tmp_path)
    check_report(report, next(tmp_path.glob("quickstart-*")), steps=5)
    assert report["num_swaps"] >= 1
    wait_for(lambda: not left_over(), "the end of vLLM", seconds=120)


@pytest.mark.campaign
def test_engine_cores_that_are_killed_cost_no_group_and_raise_no_alarm_of_rescoring(tmp_path, prepared_model):
    command = train(tmp_path, "trainer.ranks=2", "trainer.rescore_share=0.1")
    try:
        wait_for(lambda: any(tmp_path.glob("quickstart-*/commits/*.json")), "commit 0", seconds=400)
        run = next(tmp_path.glob("quickstart-*"))
        for step in (3, 10):
            wait_for(lambda at=step: committed_steps(str(run)) >= at, f"step {step}", seconds=400)
            wait_for(
                lambda: engine_cores(command), "an engine core", seconds=200
            )  # the one before may be starting still
            for process in engine_cores(command):
                with contextlib.suppress(psutil.NoSuchProcess):  # a worker goes with its core
                    process.send_signal(signal.SIGKILL)
    except BaseException:
        end(command)
        raise
    report = finished(command, tmp_path)
    check_report(report, run)
    assert report["multi_version_fraction"] > 0  # weights were swapped in the middle of sequences
    evaluated = [evaluation["version"] for evaluation in report["evaluations"]]
    assert any(0 < version < STEPS for version in evaluated), evaluated  # on the actor's engine, beside its groups
    assert report["num_swaps"] >= 3  # an actor that is behind takes the newest, and the last come too late
    wait_for(lambda: not left_over(), "the end of vLLM", seconds=120)
    store = open_store(str(run))
    rescored = [
        comparison
        for key in counted_commit_keys(store).values()
        for comparison in read_commit(store, key).rescored.values()
    ]
    assert sum(comparison.tokens for comparison in rescored) > 32
    assert not any(comparison.alarm for comparison in rescored)
    assert max(comparison.mismatch for comparison in rescored if comparison.mismatch is not None) < 1e-4


@pytest.mark.campaign
@pytest.mark.parametrize(("family", "transport"), [("qwen3_moe", "shm"), ("qwen3_moe", "nccl"), ("mixtral", "shm")])
def test_experts_are_swapped_resumed_and_replayed(tmp_path, family, transport):
    """The learner has the experts of a layer in one tensor, vLLM's files one expert in each."""
    model = tmp_path / family
    model.mkdir()
    (model / "config.json").write_text(json.dumps(entries_of(family)))
    settings = ["--tiny", f"model.path={model}", f"weights.transport={transport}", "eval.num_prompts=0",
                "trainer.groups_per_step=4", "engine.concurrency=16", "trainer.rescore_share=0.5",
                "weights.durable_every=2"]  # fmt: skip
    report = finished(train(tmp_path, *settings, "trainer.steps=6"), tmp_path)
    assert report["num_swaps"] >= 1
    run = next(tmp_path.glob("quickstart-*"))
    arguments = [sys.executable, "-m", "pipelinerl.flows.cli"]
    for verb in (["resume", str(run), "trainer.steps=10"], ["audit", str(run)], ["replay", str(run)]):
        ended = subprocess.run(
            [*arguments, *verb], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
        )
        assert ended.returncode == 0, ended.stderr[-3000:]
    store = open_store(str(run))
    commits = [read_commit(store, key) for key in counted_commit_keys(store).values()]
    assert max(commit.step for commit in commits) == 10
    rescored = [comparison for commit in commits for comparison in commit.rescored.values()]
    mismatches = [comparison.mismatch for comparison in rescored if comparison.mismatch is not None]
    assert mismatches  # of tokens that a later version than 0 has sampled, too
    assert max(mismatches) < 1e-4
    wait_for(lambda: not left_over(), "the end of vLLM", seconds=120)
