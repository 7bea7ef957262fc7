"""What happens to a run after its last commit: the Prefect server dies, a worker with another root retries it."""

import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.integration.cli_case import committed, run_directories
from tests.integration.pipeline import ROOT, assert_closes
from tests.integration.prefect_server import Prefect, await_, kill_tree

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

STEPS = 3
SMALL = [f"trainer.steps={STEPS}", "trainer.groups_per_step=8", "engine.concurrency=32", "eval.num_prompts=8"]


@pytest.fixture
def prefect(tmp_path):
    (tmp_path / "prefect").mkdir()
    server = Prefect(tmp_path / "prefect")
    try:
        await_(server.is_healthy, "the Prefect server", 120)
        yield server
    finally:
        server.stop()


def test_a_prefect_server_that_dies_after_the_last_commit_fails_no_run(prefect, tmp_path, prepared_model):
    root = tmp_path / "runs"
    # The client repeats a request once, not for a minute: each of its waits at the end of the process is shorter.
    environment = {**prefect.environment, "PREFECT_CLIENT_MAX_RETRIES": "1"}
    command = [sys.executable, "-m", "pipelinerl.flows.cli", "train", "quickstart", *SMALL, "--root", str(root)]
    with (tmp_path / "stdout").open("w") as out, (tmp_path / "stderr").open("w") as errors:
        train = subprocess.Popen([*command, "--json"], env=environment, cwd=ROOT, stdout=out, stderr=errors)
    try:
        await_(lambda: committed(root) == STEPS, "the last commit", 400)
        kill_tree(prefect.processes[0].pid)
        assert train.wait(400) == 0
    finally:
        train.kill()
        train.wait(10)
    said = (tmp_path / "stderr").read_text()
    assert "Traceback" not in said
    assert "the Prefect server does not answer: the flow run has no end there" in said
    (run,) = run_directories(root)
    assert f"artifacts of the flow run failed; `pipelinerl resume {run.name}` repeats this: " in said
    assert json.loads((tmp_path / "stdout").read_text()) == json.loads((run / "report.json").read_text())
    assert (run / "report.html").exists()
    assert mlflow_runs(root / "mlflow.db") == [(run.name, "FINISHED")]
    assert_closes(str(run))


def mlflow_runs(database: Path) -> list[tuple[str, str]]:
    """Name and status of every MLflow run."""
    with closing(sqlite3.connect(database)) as connection:
        return connection.execute("select name, status from runs").fetchall()


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["a directory", pytest.param("s3", marks=pytest.mark.s3)])
def test_a_retry_on_a_worker_with_another_root_uses_the_root_of_the_first_start(
    prefect, tmp_path, prepared_model, request, kind
):
    first = tmp_path / "first" if kind == "a directory" else request.getfixturevalue("s3_url")
    aws = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    prefect.environment |= {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30", **aws}
    prefect.deploy()

    def change_worker(root: object) -> None:
        for worker in prefect.processes[1:]:
            kill_tree(worker.pid)
            worker.wait(10)
        prefect.environment["PIPELINERL_ROOT"] = str(root)
        prefect.processes[1:] = [prefect.spawn("worker", "start", "--pool", "control")]

    def retry() -> str:
        """State of the flow run at the end of its next start."""
        count = prefect.run(job)["run_count"]
        prefect.set_state(job, type="SCHEDULED", name="AwaitingRetry")
        return wait_for_end(count + 1)

    def wait_for_end(run_count: int) -> str:
        def has_ended() -> bool:
            run = prefect.run(job)
            return run["run_count"] == run_count and run["state_type"] in ("COMPLETED", "FAILED", "CRASHED")

        await_(has_ended, f"the end of start {run_count}", 400)
        return str(prefect.run(job)["state_type"])

    change_worker(first)
    overrides = json.dumps([*SMALL, f"tracking.mlflow_uri=sqlite:///{tmp_path}/mlflow.db"])
    prefect.command("deployment", "run", "train/quickstart", "-p", f"overrides={overrides}")
    job = await_(prefect.runs, "the flow run", 60)[0]["id"]
    assert wait_for_end(1) == "COMPLETED", prefect.log_tail()
    run = prefect.run(job)
    assert run["parameters"]["root"] == (f"file://{first}" if kind == "a directory" else first)
    known = mlflow_runs(tmp_path / "mlflow.db")
    assert known == [(run["name"], "FINISHED")]

    change_worker(tmp_path / "second")
    assert retry() == "COMPLETED", prefect.log_tail()
    assert not (tmp_path / "second").exists()
    assert_closes(f"{first}/{run['name']}")
    assert mlflow_runs(tmp_path / "mlflow.db") == known

    if kind == "a directory":
        shutil.move(first, tmp_path / "of-another-host")
        assert retry() == "FAILED"
        message = prefect.run(job)["state"]["message"]
        assert f"ConfigError: file://{first}/{run['name']}: an earlier start of this flow run" in message
        assert f"host {socket.gethostname()} has no run.json" in message
        assert not first.exists()
        assert not (tmp_path / "second").exists()
        assert mlflow_runs(tmp_path / "mlflow.db") == known
