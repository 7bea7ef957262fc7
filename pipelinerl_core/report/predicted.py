"""The stored prediction of a run beside what was measured, and its advice."""

from typing import Any

from pipelinerl_core.run.records import PredictionRecord

_CLOSE = 0.25
"""Largest relative error of the predicted steps per second of the own settings at which the model may advise."""
_WORTH = 1.1
"""Smallest predicted ratio of an advised setting."""
_ROWS = (("steps_per_second", "steps per second", "{:.3g}"), ("mean_lag", "mean lag", "{:.2f}"),
         ("trainer_idle", "trainer waits", "{:.0%}"), ("busy_slots", "slots in use", "{:.0%}"))  # fmt: skip


def predicted(record: PredictionRecord | None, measured: dict[str, float | None]) -> dict[str, Any] | None:
    """{"source", "predicted", "measured", "error", "changes"} for report.json; None without a prediction.

    measured: a value or None for each figure of the record. error: predicted over measured steps per second - 1.
    """
    if record is None:
        return None
    speed = measured["steps_per_second"]
    return {
        "source": record.source,
        "predicted": {key: getattr(record, key) for key, _, _ in _ROWS},
        "measured": measured,
        "error": record.steps_per_second / speed - 1 if speed else None,
        "changes": [change.model_dump() for change in record.changes],
    }


def model_advice(found: dict[str, Any] | None) -> str:
    """The best setting of the model; empty if the prediction of the run's own settings was over 25 % wrong."""
    if found is None or found["error"] is None or abs(found["error"]) > _CLOSE:
        return ""
    best = max(found["changes"], key=lambda change: float(change["ratio"]), default=None)
    if best is None or best["ratio"] < _WORTH:
        return ""
    return (
        f"With {best['setting']} the model predicts {best['ratio']:.1f} times the steps per second (its prediction "
        f"of this run was {found['error']:+.0%} off)."
    )


def predicted_table(found: dict[str, Any] | None) -> str:
    """The section of the page as HTML; empty without a prediction."""
    if found is None:
        return ""
    rows = "".join(
        f"<tr><td>{title}</td><td>{_text(found['predicted'][key], form)}</td>"
        f"<td>{_text(found['measured'][key], form)}</td></tr>"
        for key, title, form in _ROWS
    )
    head = "<tr><th></th><th>predicted</th><th>measured</th></tr>"
    return (
        f"<section><h2>Prediction</h2><p>A simulation of this run at the speeds of: {found['source']}. Lengths of "
        "completions that change during training are not known to it.</p>"
        f'<table class="ledger"><tbody>{head}{rows}</tbody></table></section>'
    )


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
