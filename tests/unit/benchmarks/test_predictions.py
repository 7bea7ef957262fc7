"""The comparison of predictions with runs: its table and figure, and the closed form that it has beside them."""

import pytest

from benchmarks.predictions import SETTINGS, errors, figure, spread, table
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.planning.closed_form import run_estimate
from pipelinerl_core.planning.lengths import Lengths
from pipelinerl_core.planning.simulator import Work
from pipelinerl_core.planning.speeds import Line, MeasuredSpeeds

SPEEDS = MeasuredSpeeds(decode=Line(0.01, 0.001, 1, 64), train=Line(0.0, 1e-4, 1, 1000))
SMALL = ["rollouts.group_size=4", "trainer.groups_per_step=8", "engine.concurrency=32"]


def configuration(name, predicted, *measured):
    values = {"steps_per_second": predicted, "mean_lag": 1.0}
    others = {"simulated": values, "closed_form": {**values, "steps_per_second": 2 * predicted}}
    runs = [{"steps_per_second": speed, "mean_lag": 2.0} for speed in measured]
    return {"name": name, "calibrated": "quickstart", **others, "calibration_run": values, "runs": runs}


def result(*configurations):
    return {"cores": 2, "load_average": 0.1, "machine": "x86_64", "settings": [], "configurations": configurations}


def test_an_error_is_that_of_the_mean_of_the_repeats():
    document = result(configuration("a", 1.0, 0.75, 0.85), configuration("b", 0.5, 0.5, 0.5), configuration("c", 1.0))
    assert errors(document, "simulated", "steps_per_second") == pytest.approx([0.25, 0.0])
    assert errors(document, "closed_form", "steps_per_second") == pytest.approx([1.5, 1.0])
    assert spread(document["configurations"][0], "steps_per_second") == pytest.approx(0.85 / 0.75 - 1)
    text = table(document)
    assert "| a | quickstart | 1 | 0.75, 0.85 | +25% | 13% | +150% | +25% | 1.00 | 2.00, 2.00 | -50% |" in text
    assert "| c | quickstart | 1 | - |" in text
    assert "steps/s, simulator: median error 12%, worst 25%" in text


def test_the_figure_has_a_point_of_each_source_for_each_configuration_that_ran():
    drawn = figure(result(configuration("a", 1.0, 0.8), configuration("b", 0.5, 0.5), configuration("c", 1.0)))
    assert drawn.startswith("<svg xmlns=")
    assert drawn.count("<circle") == 6


def test_the_closed_form_of_a_pipeline_is_the_longer_of_generation_and_training():
    config = load_config("quickstart", SMALL)
    work = Work(lengths=Lengths.of([10]), prompt_tokens=10)
    # A step has 32 rollouts of 10 tokens. Generation: 10 decode steps of 32 sequences, 0.042 s each; training: 640
    # tokens of 1e-4 s. The staleness is C M / B + rho with C = B and M = 1.
    rate, staleness = run_estimate(config, SPEEDS, work)
    assert rate == pytest.approx(1 / 0.42)
    assert staleness == pytest.approx(1 + 0.064 / 0.42)


def test_the_closed_form_of_phases_is_the_sum_and_a_full_engine_takes_slotfuls():
    config = load_config("quickstart", [*SMALL, "schedule.kind=conventional", "schedule.steps_per_phase=2"])
    work = Work(lengths=Lengths.of([10]), prompt_tokens=10)
    # 64 sequences in 32 slots: two slotfuls of 10 decode steps for two optimizer steps.
    rate, lag = run_estimate(config, SPEEDS, work)
    assert rate == pytest.approx(1 / (0.42 + 0.064))
    assert lag == 0.5


def test_every_setting_is_valid():
    kinds = [load_config(setting.preset, setting.overrides()).schedule.kind for setting in SETTINGS]
    assert len(kinds) >= 8
    assert set(kinds) == {"pipeline", "conventional", "april"}
