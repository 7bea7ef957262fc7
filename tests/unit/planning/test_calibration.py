"""Calibration: a run that is simulated and recorded is predicted again; recorded runs of the repository are read.

Tests call the private parts of a calibration on made-up commits: a calibration itself reads whole recorded runs.
"""

import json
import tarfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.messages import Counters
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.planning import calibration
from pipelinerl_core.planning.calibration import Calibration, calibrate
from pipelinerl_core.planning.lengths import Lengths
from pipelinerl_core.planning.prediction import Prediction, predict
from pipelinerl_core.planning.simulator import Work, simulate
from pipelinerl_core.planning.speeds import Line, MeasuredSpeeds
from pipelinerl_core.planning.what_if import lines, recorded_document
from pipelinerl_core.report.advice import mean_delay_seconds
from pipelinerl_core.report.facts import collect
from pipelinerl_core.report.utilization import pause_seconds
from pipelinerl_core.storage.object_store import open_store

RUNS = Path(__file__).parents[2] / "golden" / "runs"
CONFIG = {
    "rollouts": {"group_size": 4},
    "trainer": {"groups_per_step": 8, "steps": 60},
    "engine": {"concurrency": 32, "pace": False},
    "schedule": {"max_lag": 4},
}
SPEEDS = MeasuredSpeeds(decode=Line(0.01, 1e-4, 8, 32), train=Line(0.05, 1e-4, 1000, 4000))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    place = tmp_path_factory.mktemp("recorded")
    with tarfile.open(RUNS / "embedded.tar.xz") as file:
        file.extractall(place, filter="data")
    return collect(open_store(str(place / "run")))


def commits_of(num, running, step_seconds, seconds=1.0):
    """An actor whose decode steps last step_seconds(running sequences)."""
    commits, tokens, busy = [], 0, 0.0
    for step in range(num):
        load = running[step % len(running)]
        tokens, busy = tokens + int(load * seconds / step_seconds(load)), busy + load * seconds
        sample = SimpleNamespace(
            at=step * seconds, num_sampled=tokens, running_seconds=busy, concurrency=64, counters=Counters()
        )
        commits.append(SimpleNamespace(step=step, actors={"actor-0/1": sample}, swaps=()))
    return commits


def test_the_fixed_part_of_a_decode_step_is_told_apart_if_the_load_varies():
    line = calibration._decode(commits_of(20, (8, 32), lambda load: 0.01 + 1e-3 * load))
    assert (line.fixed, line.each) == (pytest.approx(0.01, rel=0.02), pytest.approx(1e-3, rel=0.02))
    assert (line.lowest, line.highest) == (8, 32)
    line = calibration._decode(commits_of(20, (30, 32), lambda load: 0.01 + 1e-3 * load))
    assert line.fixed == 0
    assert line.at(31) == pytest.approx(0.041, rel=0.02)


def test_a_time_that_falls_with_the_load_counts_as_constant():
    line = calibration._line(np.array([10.0, 20.0, 30.0]), np.array([0.3, 0.2, 0.1]))
    assert (line.fixed, line.each) == (pytest.approx(0.2), 0)


def test_swaps_are_no_time_of_decode_steps():
    commits = commits_of(20, (16,), lambda load: 0.02)
    for commit in commits:
        commit.swaps = (SimpleNamespace(actor="actor-0", actor_epoch=1, pause_seconds=0.5, num_running=16),)
    assert calibration._decode(commits).at(8) == pytest.approx(0.02 * 8 / 8 * 0.5, rel=0.02)


def test_rollouts_that_were_not_computed_count_with_their_own_lengths():
    """Half of the rollouts failed at 2,000 tokens and taught nothing; the others have 200."""
    metrics = {"train/tokens": 4 * 220.0, "train/rollouts": 4, "train/computed_fraction": 0.5}
    assert calibration._row_tokens(SimpleNamespace(metrics=metrics)) == 8 * 220, "a run of an earlier version"
    metrics |= {"rollout/prompt_mean": 20.0, "rollout/length_mean": 1100.0}
    assert calibration._row_tokens(SimpleNamespace(metrics=metrics)) == 8 * 1120


def test_a_recorded_run_gives_speeds_and_a_prediction(recorded):
    calibrated = calibrate(recorded)
    assert calibrated.config.engine.concurrency == 48
    assert calibrated.work.prompt_tokens == 7  # of 9, because a group trains its prompt once
    assert 0.001 < calibrated.speeds.decode_seconds(48) < 0.1
    assert calibrated.speeds.decode_seconds(0) == 0
    assert 0.005 < calibrated.speeds.train_seconds(1500) < 0.5
    assert calibrated.measured.steps_per_second > 1
    work = calibrated.work
    assert 0 < work.commit_seconds < 0.5
    assert 0 <= work.fetch_seconds < 0.5
    assert 0 <= work.snapshot_seconds < 0.5
    predicted = predict(calibrated, calibrated.config)
    assert 0 < predicted.mean_lag <= 4
    text = json.loads(json.dumps(recorded_document(calibrated, calibrated, None)))
    assert text["measured"]["steps_per_second"] == calibrated.measured.steps_per_second
    assert {row["source"] for row in text["inputs"]} == {f"measured: {calibrated.origin}"}
    assert lines(text)[1].startswith("steps per second")


def test_the_effective_sample_size_is_that_of_recorded_steps_by_their_lag(recorded):
    calibrated = calibrate(recorded)
    assert sum(row.steps for row in calibrated.ess_by_lag) == len(recorded.steps)
    assert [row.lag for row in calibrated.ess_by_lag] == sorted({row.lag for row in calibrated.ess_by_lag})
    first = next(step for step in recorded.steps if step.step == 1)
    assert set(np.flatnonzero(first.lags)) == {0}
    fresh = calibrated.ess_by_lag[0]
    assert fresh.lag == 0
    assert 0 < fresh.ess_sequence <= fresh.ess <= 1
    text = lines(recorded_document(calibrated, calibrated, None))
    assert sum("ess_sequence" in line for line in text) == 1


def test_the_time_of_decode_steps_agrees_with_the_recorded_sequences(recorded):
    """The corrected line gives the measured time of a running sequence per token."""
    calibrated = calibrate(recorded)
    kept = recorded.trained_commits[max(1, len(recorded.trained_commits) // 5) :]
    run = simulate(calibrated.config, calibrated.speeds, calibrated.work)
    assert run.seconds_per_token == pytest.approx(calibration._seconds_per_token(kept), rel=0.1)


def test_a_prediction_is_that_of_the_simulator_at_the_measured_speeds():
    config = build_config(CONFIG)
    work = Work(lengths=Lengths.uniform(64))
    calibrated = Calibration(config=config, speeds=SPEEDS, work=work)
    run = simulate(config, SPEEDS, work)
    assert predict(calibrated, config).mean_lag == run.mean_lag(12)
    twice = build_config({**CONFIG, "placement": {"actors": 2}, "schedule": {"max_lag": 8}})
    assert predict(calibrated, twice).steps_per_second > 1.3 * predict(calibrated, config).steps_per_second


def test_processes_that_compute_at_once_share_the_cores():
    """One trainer and one actor have a core each; with three actors, four processes share two cores."""
    calibrated = Calibration(
        config=build_config(CONFIG), speeds=SPEEDS, work=Work(lengths=Lengths.uniform(64)), cores=2
    )
    four = build_config({**CONFIG, "placement": {"actors": 3}, "schedule": {"max_lag": 12}})
    assert calibrated.speeds_of(calibrated.config) == SPEEDS
    assert calibrated.speeds_of(four).decode_seconds(10) == pytest.approx(2 * SPEEDS.decode_seconds(10))
    assert calibrated.speeds_of(four).train_seconds(1000) == pytest.approx(2 * SPEEDS.train_seconds(1000))


def test_schedules_that_take_turns_have_the_speeds_that_were_measured_in_turns():
    alone = MeasuredSpeeds(decode=Line(0.008, 1e-4, 8, 32), train=Line(0.03, 1e-4, 1000, 4000))
    config, work = build_config(CONFIG), Work(lengths=Lengths.uniform(64))
    calibrated = Calibration(config=config, speeds=SPEEDS, work=work, cores=1, other_speeds=alone)
    turns = build_config({**CONFIG, "schedule": {"kind": "conventional"}})
    assert calibrated.speeds_of(config) == SPEEDS
    assert calibrated.speeds_of(turns) == alone
    two = build_config({**CONFIG, "schedule": {"kind": "conventional"}, "placement": {"actors": 2}})
    assert calibrated.speeds_of(two).train_seconds(1000) == pytest.approx(2 * alone.train_seconds(1000))
    assert Calibration(config=config, speeds=SPEEDS, work=work).speeds_of(turns) == SPEEDS


def sampled(num_tokens, **counters):
    return SimpleNamespace(num_sampled=num_tokens, counters=Counters(**counters))


def test_the_pause_of_a_paced_engine_is_a_mean_over_tokens():
    before, after = sampled(100, step_delay_seconds=0.0, paced_seconds=1.0), sampled(300, paced_seconds=2.0)
    assert pause_seconds(before, after) == pytest.approx(0.005)
    assert pause_seconds(sampled(100), sampled(100, step_delay_seconds=0.02)) == 0.02
    commits = [
        SimpleNamespace(actors={"actor-0/1": before, "actor-1/1": sampled(0, paced_seconds=0.0)}),
        SimpleNamespace(actors={"actor-0/1": after, "actor-1/1": sampled(600, paced_seconds=0.0)}),
    ]
    assert mean_delay_seconds(commits) == pytest.approx(1.0 / 800)


@pytest.mark.parametrize("pace", [True, False])
def test_slots_that_stay_empty_beside_work_are_measured_if_the_engine_always_has_work(pace):
    """A simulated run with 90 % of its slots; the measured share is used if the engine cannot be idle."""
    config = build_config({**CONFIG, "engine": {"concurrency": 32, "pace": pace}})
    slow_trainer = MeasuredSpeeds(decode=Line(0.01, 1e-4, 8, 32), train=Line(0.2, 1e-4, 1000, 4000))
    work = Work(lengths=Lengths.uniform(64), sync_seconds=0.05)
    run = simulate(config, slow_trainer, replace(work, usable_slots=0.9))
    seen = Prediction(
        steps_per_second=1.0, mean_lag=1.0, trainer_idle=0.0, busy_slots=run.busy_slots, bottleneck="training"
    )
    commits = [SimpleNamespace(actors={"actor-0/1": sampled(1000 * step, paced_seconds=0.0)}) for step in range(3)]
    for step, commit in enumerate(commits):
        commit.actors["actor-0/1"].running_seconds = 1000 * step * run.seconds_per_token
    speeds, usable = calibration._corrected(config, slow_trainer, work, commits, seen)
    assert usable == pytest.approx(run.busy_slots if pace else 1.0)
    if pace:
        assert speeds.decode.at(29) == pytest.approx(slow_trainer.decode.at(29), rel=0.1)


def test_a_calibration_warns_of_extrapolation_and_omission():
    calibrated = Calibration(config=build_config(CONFIG), speeds=SPEEDS, work=Work(lengths=Lengths.uniform(64)))
    assert calibrated.warnings_of(calibrated.config) == ["evaluations"]
    wide = build_config({**CONFIG, "engine": {"concurrency": 128}, "schedule": {"max_lag": 8},
                         "placement": {"actors": 2}})  # fmt: skip
    texts = calibrated.warnings_of(wide)
    assert [text.partition(" ")[0] for text in texts] == ["evaluations", "the", "a"]


def test_a_short_run_is_refused_in_one_line(recorded):
    short = SimpleNamespace(run=recorded.run, steps=recorded.steps[:3], trained_commits=recorded.trained_commits[:3])
    with pytest.raises(ConfigError, match="3 steps are too few, at least 6 are needed"):
        calibrate(short)
