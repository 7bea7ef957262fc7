"""A short run, replayed with another learning rate and studied with three arms: what is kept, logged and shown."""

import json
from pathlib import Path

import pytest
from mlflow import MlflowClient

from pipelinerl_core.comparison.whatif.run_arm import REPLAY_TAG
from pipelinerl_core.run.commits import read_commits
from pipelinerl_core.run.records import REPLAY_KEY
from pipelinerl_core.run.versions import stored_versions
from pipelinerl_core.storage.object_store import open_store
from tests.integration.browser import browser
from tests.integration.cli_case import nothing_is_left as nothing_is_left  # a fixture for every test
from tests.integration.cli_case import run_directories, start

# The first test may have to build the model.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

STEPS = 4
TINY = (f"trainer.steps={STEPS}", "trainer.groups_per_step=8", "engine.concurrency=32", "eval.num_prompts=40")
ARMS = ("--arm", "learner.lr=1e-3", "--arm", "loss.advantage=group_mean")

MEAN = "advantage-group-mean"
"""Name of the second arm."""


def finished(root: Path, *arguments: str) -> dict:
    assert start(root, *arguments).wait(600) == 0, (root / "stderr.txt").read_text()[-3000:]
    return json.loads((root / "stdout.txt").read_text())


def objects(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def check_page(url: str) -> None:
    with browser() as page:
        page.go(url)
        page.sees("lr-1e-3", MEAN, "Effective sample size", "within its limit")
        assert page.value("document.querySelectorAll('svg').length") == 4
        assert page.errors == []


def test_a_recorded_run_answers_what_if(tmp_path):
    finished(tmp_path, "train", "quickstart", *TINY)
    (run,) = run_directories(tmp_path)
    before = objects(run)

    replay = finished(tmp_path, "replay", "latest", "learner.lr=1e-3")
    assert [step["step"] for step in replay["steps"]] == list(range(1, STEPS + 1))
    assert replay["steps"][0]["loss"] == replay["steps"][0]["recorded_loss"], "of the weights before the first step"
    assert all(step["loss"] != step["recorded_loss"] for step in replay["steps"][1:])
    arm = open_store(replay["arms"]["lr-1e-3"]["url"])
    assert stored_versions(arm) == {STEPS}
    assert [point["version"] for point in replay["arms"]["lr-1e-3"]["accuracy"]] == [0, STEPS]
    weights_sha256 = read_commits(arm)[STEPS].weights_sha256
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("pipelinerl").experiment_id
    (logged,) = client.search_runs([experiment], f"tags.`{REPLAY_TAG}` = '{run.name}'")
    losses = [one.value for one in client.get_metric_history(logged.info.run_id, "train/loss")]
    assert losses == [step["loss"] for step in replay["steps"]]
    assert logged.data.metrics["eval/accuracy"] == replay["arms"]["lr-1e-3"]["accuracy"][-1]["accuracy"]

    study = finished(tmp_path, "study", "latest", *ARMS)
    assert study["exact"], "the recorded objective comes out bit for bit"
    assert list(study["arms"]) == ["recorded", "lr-1e-3", MEAN]
    recorded, own = read_commits(open_store(study["arms"]["recorded"]["url"])), read_commits(open_store(str(run)))
    for step in range(1, STEPS + 1):
        assert recorded[step].weights_sha256 == own[step].weights_sha256
        assert recorded[step].metrics["train/loss"] == own[step].metrics["train/loss"]
    # A = r - mean over the group, in place of r - mean over the 7 others: 7/8 of the recorded advantages.
    of_mean = read_commits(open_store(study["arms"][MEAN]["url"]))
    assert of_mean[1].metrics["train/loss"] == pytest.approx(own[1].metrics["train/loss"] * 7 / 8, rel=1e-4)
    assert study["arms"]["lr-1e-3"]["url"] == arm.url, "the arm of the replay is not trained again"
    assert study["arms"]["lr-1e-3"]["cpu_seconds"] == replay["arms"]["lr-1e-3"]["cpu_seconds"]
    assert objects(run) == before, "nothing of the recorded run has changed"

    arm.delete([REPLAY_KEY])  # as after a crash in the middle of the arm
    again = finished(tmp_path, "study", "latest", *ARMS)
    assert "3 arms, 2 of them already trained" in (tmp_path / "stderr.txt").read_text()
    assert read_commits(arm)[STEPS].weights_sha256 == weights_sha256
    assert again["ranking"] == study["ranking"]

    check_page(f"{study['url']}/whatif.html")

    listed = finished(tmp_path, "gc", "latest", "--whatif")["whatif"]
    assert any(REPLAY_KEY in key for key in listed)
    assert not any(path.is_file() for path in (tmp_path / "whatif").rglob("*"))
    assert (run / "weights").exists()
