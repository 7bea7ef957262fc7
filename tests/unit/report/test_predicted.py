"""The stored prediction in the report, beside the measurement."""

from pipelinerl_core.report.predicted import predicted, predicted_table
from pipelinerl_core.run.records import PredictionRecord

RECORD = PredictionRecord(source="calibration of 2026-11-25 on this machine", steps_per_second=1.2, mean_lag=2.0)


def test_the_table_shows_both_and_a_missing_figure():
    table = predicted_table(predicted(RECORD, {"steps_per_second": 1.0, "mean_lag": None}))
    assert "<td>steps per second</td><td>1.2</td><td>1</td>" in table
    assert "<td>mean lag</td><td>2.00</td><td>-</td>" in table
    assert predicted_table(predicted(None, {})) == ""
