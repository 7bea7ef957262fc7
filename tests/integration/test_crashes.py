"""kill -9 of the trainer, of an actor and of the hub in the middle of a run: it ends with the same number of steps.

Nothing is trained twice, nothing between the first and the last trained group is forgotten, and a replay from the
recorded batches gives the same losses and the same weights.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pipelinerl_core.records import HubRecord
from tests.integration.pipeline import ROOT, assert_closes, committed_steps, trained_groups, wait_for

pytestmark = pytest.mark.slow

STEPS = 40


def role_processes(root: psutil.Process, role: str) -> list[psutil.Process]:
    """Processes below `root` that run a role."""
    found = []
    for process in root.children(recursive=True):
        try:
            if f"pipelinerl_core.roles.{role}" in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found


def kill_role(command: subprocess.Popen[str], role: str) -> int:
    """kill -9; returns the pid."""
    (process,) = role_processes(psutil.Process(command.pid), role)
    os.kill(process.pid, signal.SIGKILL)
    return process.pid


def wait_restarted(command: subprocess.Popen[str], role: str, old: int) -> None:
    def is_new() -> bool:
        found = role_processes(psutil.Process(command.pid), role)
        return bool(found) and found[0].pid != old

    wait_for(is_new, f"restart of the {role}", seconds=30)


@pytest.mark.timeout(600)
def test_killed_roles_are_restarted_and_a_replay_gives_the_same_losses(tmp_path, prepared_model):
    arguments = ["train", "quickstart", f"trainer.steps={STEPS}", "checkpoint.every_seconds=3", "eval.num_prompts=50"]
    arguments += ["placement.lease_seconds=4", "trainer.groups_per_step=8", "--root", str(tmp_path), "--json"]
    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    with (tmp_path / "stderr.log").open("w") as log:
        command = subprocess.Popen(
            [sys.executable, "-m", "flows.cli", *arguments],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
    try:
        wait_for(lambda: any(tmp_path.glob("quickstart-*/commits/*.json")), "commit 0", seconds=120)
        run = next(tmp_path.glob("quickstart-*"))
        for role, step in (("trainer", 8), ("actor", 16), ("hub", 24)):
            wait_for(lambda at=step: committed_steps(str(run)) >= at, f"step {step}", seconds=120)
            wait_restarted(command, role, kill_role(command, role))
        output, _ = command.communicate(timeout=300)
    finally:
        if command.poll() is None:
            command.kill()
        command.wait(timeout=20)
        if command.stdout is not None:
            command.stdout.close()
    assert command.returncode == 0, (tmp_path / "stderr.log").read_text()[-3000:]
    report = json.loads(output)
    assert report["steps"] == STEPS
    groups = trained_groups(str(run))
    assert len(groups) == len(set(groups)) == STEPS * 8
    ledger = report["ledger"]
    assert ledger["generated"] == sum(tokens for name, tokens in ledger.items() if name != "generated")
    assert_closes(str(run))
    replay(run)
    assert not leftovers(run)


def replay(run: Path) -> None:
    """All losses and weights equal."""
    printed = subprocess.run(
        [sys.executable, "-m", "pipelinerl_core.roles.replay", "--run", str(run), "--json"],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True, timeout=120,
        check=True,
    )  # fmt: skip
    document = json.loads(printed.stdout)
    assert document["all_equal"]
    assert [step["step"] for step in document["steps"]] == list(range(1, STEPS + 1))


def leftovers(run: Path) -> list[str]:
    """Processes that still name the run."""
    hub = HubRecord.model_validate_json((run / "hub.json").read_bytes())
    alive = [hub.boot_id] if psutil.pid_exists(hub.pid) else []
    for process in psutil.process_iter(["cmdline"]):
        if str(run) in " ".join(process.info["cmdline"] or []):
            alive.append(str(process.info["cmdline"]))
    return alive
