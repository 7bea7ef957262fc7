"""The stored prediction in the report: beside the measurement, and as advice only if it was close."""

import pytest

from pipelinerl_core.report.predicted import model_advice, predicted, predicted_table
from pipelinerl_core.run.records import PredictedChange, PredictionRecord

RECORD = PredictionRecord(
    source="first 10 steps of the run", steps_per_second=1.2, mean_lag=2.0, trainer_idle=0.4, busy_slots=0.9,
    bottleneck="generation", changes=(PredictedChange(setting="placement.actors=2", ratio=1.62),),
)  # fmt: skip


def found(speed, record=RECORD):
    return predicted(record, {"steps_per_second": speed, "mean_lag": 1.5, "trainer_idle": 0.5, "busy_slots": None})


def test_the_error_is_that_of_the_steps_per_second():
    assert found(1.0)["error"] == pytest.approx(0.2)
    assert found(None)["error"] is None
    assert predicted(None, {}) is None


def test_the_model_advises_only_if_its_prediction_of_the_run_was_close():
    assert model_advice(found(1.0)) == (
        "With placement.actors=2 the model predicts 1.6 times the steps per second (its prediction of this run was "
        "+20% off)."
    )
    assert model_advice(found(0.9)) == ""
    assert model_advice(found(2.0)) == ""
    assert model_advice(found(None)) == ""
    assert model_advice(None) == ""


def test_a_change_that_is_hardly_faster_is_no_advice():
    small = RECORD.model_copy(update={"changes": (PredictedChange(setting="placement.actors=2", ratio=1.05),)})
    assert model_advice(found(1.0, small)) == ""
    assert model_advice(found(1.0, RECORD.model_copy(update={"changes": ()}))) == ""


def test_the_table_shows_both_and_a_missing_figure():
    table = predicted_table(found(1.0))
    assert "<td>steps per second</td><td>1.2</td><td>1</td>" in table
    assert "<td>slots in use</td><td>90%</td><td>-</td>" in table
    assert predicted_table(None) == ""
