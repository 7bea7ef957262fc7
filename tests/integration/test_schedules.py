"""The three schedules with real roles: hub, trainer and actor as processes, six steps each."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipelinerl_core.run.history import counted_commit_keys, read_commit
from pipelinerl_core.run.records import Commit
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.weights.memory import shm_directory
from tests.integration.pipeline import (
    SIX_STEPS,
    committed_steps,
    make_run,
    role,
    start_role,
    trained_groups,
    trained_rows,
)
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 6
TWO_STEPS_A_PHASE = ("schedule.kind=conventional", "schedule.steps_per_phase=2", "schedule.max_lag=1")


@contextmanager
def begun(url: str, log: Path, *overrides: str) -> Iterator[None]:
    """A run with its hub and actor; the block adds the trainer."""
    make_run(url, *SIX_STEPS, *overrides)
    try:
        with role("hub", url, log), role("actor", url, log) as actor:
            yield
            actor.wait(timeout=60)  # drained
    finally:
        shutil.rmtree(shm_directory(Path(url).name), ignore_errors=True)


def train(url: str, *overrides: str) -> dict[int, Commit]:
    """A whole run; returns its commits by step."""
    log = Path(f"{url}.log")
    with begun(url, log, *overrides), role("trainer", url, log) as trainer:
        assert trainer.wait(timeout=120) == 0, log.read_text()[-3000:]
    return commits_of(url)


def commits_of(url: str) -> dict[int, Commit]:
    store = open_store(url)
    commits = {step: read_commit(store, key) for step, key in counted_commit_keys(store).items()}
    assert sorted(commits) == list(range(STEPS + 1))
    for commit in commits.values():
        if commit.step:
            tokens = commit.tokens
            assert tokens["generated"] == sum(number for name, number in tokens.items() if name != "generated")
    groups = trained_groups(url)
    assert len(groups) == len(set(groups)) == STEPS * 4
    return commits


def announced(commits: dict[int, Commit]) -> list[int]:
    return [step for step, commit in commits.items() if commit.manifest is not None]


def swapped(commits: dict[int, Commit]) -> set[int]:
    return {swap.version for commit in commits.values() for swap in commit.swaps}


def sampled_versions(url: str) -> dict[int, list[set[int]]]:
    """step -> the versions of each rollout that it trained."""
    rows = trained_rows(url, ["weight_spans"])
    return {
        step: [{span["version"] for span in row["weight_spans"]} for row in step_rows]
        for step, step_rows in rows.items()
    }


def test_without_lag_the_deterministic_pipeline_is_the_synchronous_run_bit_for_bit(tmp_path, prepared_model):
    exact = ("engine.deterministic=true", "schedule.max_lag=0")
    pipeline, synchronous = str(tmp_path / "schedules-pipeline"), str(tmp_path / "schedules-synchronous")
    actual = train(pipeline, *exact)
    expected = train(synchronous, *exact, "schedule.kind=conventional", "schedule.steps_per_phase=1")
    assert trained_rows(pipeline) == trained_rows(synchronous)  # tokens and log-probabilities among it
    for step in range(1, STEPS + 1):
        assert actual[step].metrics["train/loss"] == expected[step].metrics["train/loss"]
        assert actual[step].metrics["lag/max"] == expected[step].metrics["lag/max"] == 0
    assert [c.weights_digest for c in actual.values()] == [c.weights_digest for c in expected.values()]


def test_april_continues_unfinished_rollouts_under_the_next_weights_and_aborts_none(tmp_path, prepared_model):
    url = str(tmp_path / "schedules-april")
    # A decode step lasts 200 * 4e-4 s = 80 ms, so that the pause finds most groups unfinished.
    slow = ("emulation.accelerators=1", "emulation.token_seconds=4e-4", "emulation.train_token_seconds=4e-3")
    rules = ("engine.concurrency=32", "schedule.kind=april", "schedule.alpha=2", "schedule.max_lag=1")
    commits = train(url, *rules, *slow)
    assert announced(commits) == list(range(STEPS + 1))
    assert len(swapped(commits)) >= 3  # an actor that is behind takes the newest
    versions = sampled_versions(url)
    assert any(len(spans) >= 2 for rollouts in versions.values() for spans in rollouts)
    assert max(commits[step].metrics["lag/max"] for step in range(1, STEPS + 1)) == 1
    for rows in trained_rows(url, ["attempt", "finish_reason"]).values():
        assert {row["attempt"] for row in rows} == {0}
        assert {row["finish_reason"] for row in rows} <= {"stop", "length"}


@pytest.mark.campaign
def test_a_conventional_run_announces_ends_of_phases_and_survives_a_trainer_killed_within_a_phase(
    tmp_path, prepared_model
):
    url, log = str(tmp_path / "schedules-conventional"), tmp_path / "log"
    # A step that lasts about six seconds, so that the trainer is killed in the step it is to be killed in.
    slow = ("emulation.accelerators=1", "emulation.token_seconds=1e-6", "emulation.train_token_seconds=1.4e-2")
    with begun(url, log, *TWO_STEPS_A_PHASE, *slow):
        first = start_role("trainer", url, log)
        try:
            wait_for(lambda: committed_steps(url) >= 3, "step 3", seconds=150)
        finally:
            first.kill()
            first.wait(timeout=10)
        assert committed_steps(url) == 3, "killed too late: step 4 ends the phase"
        with role("trainer", url, log) as second:
            assert second.wait(timeout=300) == 0, log.read_text()[-3000:]
    commits = commits_of(url)
    assert announced(commits) == [0, 2, 4, 6]
    assert swapped(commits) == {2, 4}  # the run is over when 6 is announced
    for step, rollouts in sampled_versions(url).items():
        begun_with = (step - 1) // 2 * 2
        assert {frozenset(spans) for spans in rollouts} == {frozenset({begun_with})}
        assert commits[step].metrics["lag/max"] == step - 1 - begun_with
    epochs = [commits[step].epoch for step in range(STEPS + 1)]
    assert epochs == [epochs[0]] * 4 + [epochs[-1]] * 3  # steps 0 to 3 by the first trainer, 4 to 6 by the second
