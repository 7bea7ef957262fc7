"""The stored prediction of a run beside what was measured."""

from typing import Any

from pipelinerl_core.run.records import PredictionRecord

_ROWS = (("steps_per_second", "steps per second", "{:.3g}"), ("mean_lag", "mean lag", "{:.2f}"))


def predicted(record: PredictionRecord | None, measured: dict[str, float | None]) -> dict[str, Any] | None:
    """{"source", "predicted", "measured"} for report.json; None without a prediction.

    measured: a value or None for each figure of the record.
    """
    if record is None:
        return None
    return {
        "source": record.source,
        "predicted": {key: getattr(record, key) for key, _, _ in _ROWS},
        "measured": measured,
    }


def predicted_table(prediction: dict[str, Any] | None) -> str:
    """The section of the page as HTML; empty without a prediction."""
    if prediction is None:
        return ""
    rows = "".join(
        f"<tr><td>{title}</td><td>{_text(prediction['predicted'][key], form)}</td>"
        f"<td>{_text(prediction['measured'][key], form)}</td></tr>"
        for key, title, form in _ROWS
    )
    head = "<tr><th></th><th>predicted</th><th>measured</th></tr>"
    return (
        f"<section><h2>Prediction</h2><p>In closed form, at the speeds of: {prediction['source']}. Swaps, commits "
        "and lengths of completions that change during training are left out; <code>pipelinerl simulate</code> has "
        f'them.</p><table class="ledger"><tbody>{head}{rows}</tbody></table></section>'
    )


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
