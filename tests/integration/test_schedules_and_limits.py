"""Schedules and limits on a Prefect server with a worker."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

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


def test_a_limit_of_two_holds_over_six_flow_runs(prefect, tmp_path):
    prefect.command("work-pool", "set-concurrency-limit", "control", str(LIMIT))
    before = {run["id"] for run in prefect.runs()}
    parameters = {"root": str(tmp_path), "overrides": SMALL, "settings": {"steps": 1}}
    for _ in range(NUM_RUNS):
        words = (word for name, value in parameters.items() for word in ("-p", f"{name}={_text(value)}"))
        prefect.command("deployment", "run", "train/quickstart", *words)
    most = 0

    def have_ended() -> bool:
        nonlocal most
        runs = [run for run in prefect.runs() if run["id"] not in before]
        most = max(most, sum(run["state_type"] in ("PENDING", "RUNNING") for run in runs))
        return sum(run["state_type"] in ENDED for run in runs) == NUM_RUNS

    await_(have_ended, "the end of six runs", 900)
    assert most == LIMIT
    states = [run["state_type"] for run in prefect.runs() if run["id"] not in before]
    assert states == ["COMPLETED"] * NUM_RUNS, prefect.log_tail()
    assert len([url for url in tmp_path.iterdir() if (url / "report.html").exists()]) == NUM_RUNS
    prefect.command("work-pool", "clear-concurrency-limit", "control")


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
