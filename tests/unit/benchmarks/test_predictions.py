"""The comparison of predictions with runs: its table and figure."""

import pytest

from benchmarks.predictions import SETTINGS, errors, figure, spread, table
from pipelinerl_core.models.resolve import load_config


def configuration(name, predicted, *measured):
    values = {"steps_per_second": predicted, "mean_lag": 1.0}
    other = {**values, "steps_per_second": 2 * predicted}
    runs = [{"steps_per_second": speed, "mean_lag": 2.0} for speed in measured]
    return {"name": name, "calibrated": "quickstart", "simulated": values, "calibration_run": other, "runs": runs}


def result(*configurations):
    return {"cores": 2, "load_average": 0.1, "machine": "x86_64", "settings": [], "configurations": configurations}


def test_an_error_is_that_of_the_mean_of_the_repeats():
    document = result(configuration("a", 1.0, 0.75, 0.85), configuration("b", 0.5, 0.5, 0.5), configuration("c", 1.0))
    assert errors(document, "simulated", "steps_per_second") == pytest.approx([0.25, 0.0])
    assert errors(document, "calibration_run", "steps_per_second") == pytest.approx([1.5, 1.0])
    assert spread(document["configurations"][0], "steps_per_second") == pytest.approx(0.85 / 0.75 - 1)
    text = table(document)
    assert "| a | quickstart | 1 | 0.75, 0.85 | +25% | 13% | +150% | 1.00 | 2.00, 2.00 | -50% |" in text
    assert "| c | quickstart | 1 | - |" in text
    assert "steps/s, simulator: median error 12%, worst 25%" in text


def test_the_figure_has_a_point_of_each_source_for_each_configuration_that_ran():
    drawn = figure(result(configuration("a", 1.0, 0.8), configuration("b", 0.5, 0.5), configuration("c", 1.0)))
    assert drawn.startswith("<svg xmlns=")
    assert drawn.count("<circle") == 4


def test_every_setting_is_valid():
    kinds = [load_config(setting.preset, setting.overrides()).schedule.kind for setting in SETTINGS]
    assert len(kinds) >= 8
    assert set(kinds) == {"pipeline", "conventional", "april"}
