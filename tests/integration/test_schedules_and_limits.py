"""Schedules, sweeps and limits on a Prefect server with a worker."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.integration.pipeline import assert_closes, committed_steps
from tests.integration.prefect_server import Prefect, await_, postgres

pytestmark = [pytest.mark.slow, pytest.mark.campaign, pytest.mark.timeout(1800)]

ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
SMALL = ["trainer.groups_per_step=4", "engine.concurrency=16", "eval.num_prompts=0"]
LIMIT, NUM_RUNS = 2, 6


@pytest.fixture(scope="module")
def prefect(tmp_path_factory: pytest.TempPathFactory, prepared_model: Path) -> Iterator[Prefect]:
    home = tmp_path_factory.mktemp("prefect")
    with postgres() as database:
        server = Prefect(home, database)
        try:
            server.start()
            yield server
        finally:
            server.stop()


def test_a_cron_starts_a_run_each_minute_until_it_is_switched_off(prefect, tmp_path):
    parameters = {"root": str(tmp_path), "overrides": SMALL, "preset": "quickstart", "settings": {"steps": 2}}
    (deployment,) = prefect.ask("/deployments/filter", {"deployments": {"name": {"any_": ["nightly"]}}})
    body = [{"active": True, "schedule": {"cron": "* * * * *", "timezone": "UTC"}, "parameters": parameters}]
    prefect.ask(f"/deployments/{deployment['id']}/schedules", body)
    run_id = await_(lambda: [run["id"] for run in prefect.runs() if run["state_type"] == "RUNNING"], "a run", 180)[0]
    started = prefect.run(run_id)
    assert started["auto_scheduled"]
    assert started["expected_start_time"][17:19] == "00", "at the beginning of a minute"
    prefect.command("deployment", "schedule", "clear", "train/nightly", "--accept-yes")
    await_(lambda: prefect.run(run_id)["state_type"] in ENDED, "the end of the run", 300)
    assert prefect.run(run_id)["state_type"] == "COMPLETED", prefect.log_tail()
    (url,) = (url for url in tmp_path.glob("*-*") if url.name == prefect.run(run_id)["name"])
    assert committed_steps(str(url)) == 2
    assert_closes(str(url))


def test_a_sweep_of_six_runs_under_a_limit_of_two(prefect, tmp_path, prepared_model):
    prefect.command("work-pool", "set-concurrency-limit", "control", str(LIMIT + 1))  # the sweep has a slot, too
    before = {run["id"] for run in prefect.runs()}

    def start(*grid: str) -> None:
        overrides = [*SMALL, "trainer.steps=1", f"model.path={prepared_model}"]
        parameters = {"root": str(tmp_path), "overrides": overrides, "grid": grid, "limit": NUM_RUNS}
        words = (word for name, value in parameters.items() for word in ("-p", f"{name}={_text(value)}"))
        prefect.command("deployment", "run", "sweep/sweep", *words)

    with pytest.raises(subprocess.CalledProcessError):
        start("learner.lrs=1e-5,1e-4", "seed=0,1")
    start("learner.lr=1e-5,1e-4,1e-3", "seed=0,1")
    (parent,) = [run["id"] for run in prefect.runs() if run["id"] not in before]
    most = 0

    def children() -> list[dict]:
        return [run for run in prefect.runs() if run["id"] not in before | {parent}]

    def has_ended() -> bool:
        nonlocal most
        most = max(most, sum(run["state_type"] in ("PENDING", "RUNNING") for run in children()))
        return prefect.run(parent)["state_type"] in ENDED

    await_(has_ended, "the end of the sweep", 1500)
    assert prefect.run(parent)["state_type"] == "COMPLETED", prefect.log_tail()
    assert [run["state_type"] for run in children()] == ["COMPLETED"] * NUM_RUNS
    assert most == LIMIT
    links = {prefect.ask(f"/task_runs/{run['parent_task_run_id']}")["flow_run_id"] for run in children()}
    assert links == {parent}

    assert_results(prefect, parent, tmp_path)
    prefect.set_state(parent, type="SCHEDULED", name="AwaitingRetry")  # the button Retry
    await_(lambda: prefect.run(parent)["run_count"] == 2, "the retry", 120)
    await_(lambda: prefect.run(parent)["state_type"] in ENDED, "the end of the retry", 300)
    assert prefect.run(parent)["state_type"] == "COMPLETED", prefect.log_tail()
    assert len(children()) == NUM_RUNS, "no run is repeated"
    prefect.command("work-pool", "clear-concurrency-limit", "control")


def assert_results(prefect: Prefect, parent: str, root: Path) -> None:
    """A table, a figure, an artifact of the flow run and one parent in MLflow."""
    directory = Path(prefect.run(parent)["labels"]["pipelinerl.url"].removeprefix("file://"))
    document = json.loads((directory / "comparison.json").read_text())
    assert list(document["arms"]) == ["learner.lr=1e-5", "learner.lr=1e-4", "learner.lr=1e-3"]
    assert document["seeds"] == [0, 1]
    assert document["arms"]["learner.lr=1e-4"]["reward_last"]["half_width"] is not None
    assert "<svg" in (directory / "comparison.html").read_text()
    (artifact,) = prefect.ask("/artifacts/filter", {"flow_runs": {"id": {"any_": [parent]}}})
    assert "| learner.lr=1e-3 |" in artifact["data"]
    client = MlflowClient(tracking_uri=f"sqlite:///{root}/mlflow.db")
    experiment = client.get_experiment_by_name("pipelinerl").experiment_id
    (run,) = client.search_runs([experiment], "tags.`pipelinerl.run_id` LIKE 'quickstart-%'")
    assert len(client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{run.info.run_id}'")) == NUM_RUNS
    assert "learner.lr 1e-3/reward_last" in run.data.metrics


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
