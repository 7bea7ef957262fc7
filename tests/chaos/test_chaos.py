"""A fault at a random moment of a whole run; `make campaigns` has two more over S3, `make chaos` two hundred."""

import pytest

from tests.chaos.campaign import run_campaign

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CAMPAIGNS = {
    "file": ["disk full"],
    "s3": ["proxy answers HTML", "kill flow"],
}  # fmt: skip


# tests/simulation has each of these faults; test_cli_processes.py kills whole runs, test_s3_run.py has S3.
@pytest.mark.parametrize("store", ["file", pytest.param("s3", marks=pytest.mark.campaign)])
def test_a_run_survives_its_faults_and_closes(store, tmp_path, prepared_model, monkeypatch):
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "")  # restored afterwards, whatever the campaign sets
    outcome = run_campaign(tmp_path, store, CAMPAIGNS[store], seed=5, away_seconds=10, replays=store == "file")
    assert outcome.complaints == []
    assert [fault.name for fault in outcome.injected] == CAMPAIGNS[store]
    assert outcome.audit["groups"]["trained"] == 16 * outcome.steps
    assert (outcome.audit["lost"], outcome.audit["trained_twice"]) == (0, 0)
