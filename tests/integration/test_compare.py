"""Comparisons from the command line: real roles, early stop, Ctrl-C, and runs that are found again."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
from mlflow import MlflowClient

from pipelinerl_core.run.follow import RunFollower
from pipelinerl_core.run.versions import durable_versions
from pipelinerl_core.storage.object_store import open_store
from tests.integration.cli_case import START_SECONDS, STOP_SECONDS, children, committed, left_over, start
from tests.integration.cli_case import nothing_is_left as nothing_is_left  # a fixture for every test
from tests.waiting import wait_for

# The first test may have to build the model.
pytestmark = [pytest.mark.slow, pytest.mark.campaign, pytest.mark.timeout(1200)]

ARMS = ("--arm", "keep: engine.kv=keep", "--arm", "drain: engine.kv=drain", "--seeds", "0")
TINY = ("trainer.groups_per_step=16", "engine.concurrency=64", "eval.num_prompts=100", "trainer.steps=240")
# Untrained, the model has 0.2 already: ten steps are enough to be past this target.
COMPARE = ("compare", *ARMS, *TINY, "--target", "0.1", "--margin", "0")

FIGURES = {
    "time_to_target_seconds", "samples_to_target", "samples_per_second", "rollouts_per_second", "tokens_per_second",
    "ess_mean", "lag_mean", "lag_max", "kl_mean", "trainer_idle_fraction", "actor_idle_fraction", "best_accuracy",
    "last_accuracy", "reward_last", "steps", "seconds", "emulated", "over_reference", "minus_reference",
    "step_seconds", "engine_cpu_seconds", "trainer_cpu_seconds",
}  # fmt: skip


def finished(process: "subprocess.Popen[str]", root: Path) -> dict:
    assert process.wait(1000) == 0, (root / "stderr.txt").read_text()[-3000:]
    return json.loads((root / "stdout.txt").read_text())


def assert_mlflow_shows(root: Path, document: dict) -> None:
    """The runs lie below the comparison, with what people group them by and the axes that they are drawn over."""
    client = MlflowClient(tracking_uri=f"sqlite:///{root}/mlflow.db")
    experiment = client.get_experiment_by_name("pipelinerl").experiment_id
    (parent,) = client.search_runs([experiment], "tags.`pipelinerl.run_id` LIKE 'quickstart-%'")
    runs = client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'")
    tags = ("arm", "seed", "schedule", "engine", "preset", "comparison")
    run_tags = sorted(tuple(run.data.tags[name] for name in tags) for run in runs)
    assert run_tags == [(arm, "0", "pipeline", "embedded", "quickstart", "quickstart") for arm in ("drain", "keep")]
    assert "keep/time_to_target_seconds" in parent.data.metrics
    assert {"comparison.json", "comparison.svg"} <= {file.path for file in client.list_artifacts(parent.info.run_id)}
    for run in runs:
        steps = {point.step for point in client.get_metric_history(run.info.run_id, "eval/accuracy")}
        for axis in ("samples", "tokens", "seconds"):
            assert steps <= {point.step for point in client.get_metric_history(run.info.run_id, f"progress/{axis}")}
        assert {dataset_input.dataset.name for dataset_input in run.inputs.dataset_inputs} == {
            "sums",
            "sums-held-out",
        }
        table = client.download_artifacts(run.info.run_id, "rollouts.json", str(root))
        rows = json.loads(Path(table).read_text())["data"]
        assert len({(row[0], row[-3]) for row in rows}) == len(rows) > 8, "no row comes twice"


def test_a_comparison_survives_ctrl_c_stops_early_and_finds_its_runs_again(tmp_path):
    started = start(tmp_path, *COMPARE)
    wait_for(lambda: committed(tmp_path) >= 1, "step 1", START_SECONDS, process=started)
    pids = children(started)
    begun = time.monotonic()
    started.send_signal(signal.SIGINT)
    assert started.wait(90) == 130
    assert time.monotonic() - begun < STOP_SECONDS
    wait_for(lambda: not left_over(tmp_path, pids), "the end of every child", 10)
    assert "continue with the same command" in (tmp_path / "stderr.txt").read_text()

    document = finished(start(tmp_path, *COMPARE), tmp_path)
    assert document["resumed"] == 1
    assert [(run["arm"], run["seed"], run["ended"]) for run in document["runs"]] == [
        ("keep", 0, "past the target"),
        ("drain", 0, "past the target"),
    ]
    for run in document["runs"]:
        follower = RunFollower(open_store(str(tmp_path / run["run_id"])))
        follower.refresh()
        assert 10 <= max(follower.commits) < 240
        durable = durable_versions(follower.commits.values())
        assert list(follower.evals) == durable[:2], "two versions past the target are enough"
    for arm in ("keep", "drain"):
        assert document["arms"][arm].keys() == FIGURES
        assert document["arms"][arm]["time_to_target_seconds"]["mean"] == 0

    assert_mlflow_shows(tmp_path, document)

    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/commits/*")}
    again = finished(start(tmp_path, *COMPARE), tmp_path)
    assert "2 runs, 2 of them already done" in (tmp_path / "stderr.txt").read_text()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/commits/*")} == before
    assert again == document
    directory = Path(document["url"].removeprefix("file://"))
    assert json.loads((directory / "comparison.json").read_text()) == document
    assert "<svg" in (directory / "comparison.html").read_text()


def test_runs_of_a_sweep_run_two_at_a_time_stop_with_ctrl_c_and_are_continued(tmp_path, prepared_model):
    sweep = ("sweep", "quickstart", "learner.lr=1e-4,1e-3", f"model.path={prepared_model}", "--limit", "2")
    tiny = ("trainer.groups_per_step=4", "engine.concurrency=16", "eval.num_prompts=20", "trainer.steps=3")

    def num_committed() -> int:
        return len(list(tmp_path.glob("*/commits/00000000.*")))

    started = start(tmp_path, *sweep, *tiny, "seed=0")
    wait_for(lambda: num_committed() == 2, "two runs at the same time", START_SECONDS, process=started)
    assert not list(tmp_path.glob("*/report.json"))
    pids = children(started)
    started.send_signal(signal.SIGINT)
    assert started.wait(90) == 130
    wait_for(lambda: not left_over(tmp_path, pids), "the end of every child", 10)

    document = finished(start(tmp_path, *sweep, *tiny, "seed=0"), tmp_path)
    first = [(run["arm"], run["run_id"]) for run in document["runs"]]
    assert [arm for arm, _ in first] == ["learner.lr=1e-4", "learner.lr=1e-3"]
    assert {len(run["curve"]) for run in document["runs"]} <= {2, 3, 4}, "evaluated first, last and between"
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/commits/*")}
    more = finished(start(tmp_path, *sweep, *tiny, "seed=0,1"), tmp_path)
    assert "4 runs, 2 of them already done" in (tmp_path / "stderr.txt").read_text()
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert (more["url"], more["seeds"], len(more["runs"])) == (document["url"], [0, 1], 4)
    assert more["arms"]["learner.lr=1e-3"]["minus_reference"]["half_width"] is not None


@pytest.mark.campaign
def test_the_short_learning_benchmark_shows_that_the_pipeline_is_faster(tmp_path, prepared_model):
    document = finished(start(tmp_path, "bench", "learning", "--short", "eval.num_prompts=100"), tmp_path)
    assert document["emulated"]
    assert list(document["arms"]) == ["pipeline", "conventional-1"]
    assert all(entry.keys() == FIGURES for entry in document["arms"].values())
    assert document["claims"]["rollouts_of_one_step_a_phase"]["mean"] > 1.2
    assert document["arms"]["conventional-1"]["lag_max"]["mean"] == 0, "every token is of the newest version"
