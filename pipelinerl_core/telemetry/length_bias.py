"""The length bias: compares the completion lengths of trained tokens with the lengths of generated tokens.

Means and shares are weighted by tokens: a completion of 100 tokens counts 100 times. Tokens in flight are left out,
because their completions have no length yet.
"""

from collections.abc import Mapping
from typing import Any

from pipelinerl_core.types import LengthTotals

Lengths = Mapping[str, LengthTotals]
"""Token class -> totals, as in a commit."""

METRIC_CLASSES = {
    "generated": "generated",
    "trained": "trained",
    "masked": "masked_stale",
    "dropped": "dropped_stale",
}
"""Last part of a metric name -> token class."""


def length_bias(lengths: Lengths) -> float | None:
    """Mean length of trained over generated tokens: below 1 long completions are lost. None before any training."""
    generated, trained = (lengths.get(name, LengthTotals()).mean_length for name in ("generated", "trained"))
    return trained / generated if trained is not None and generated else None


def length_metrics(now: Lengths, before: Lengths) -> dict[str, float | None]:
    """Metrics of a step, over the tokens booked between two reservations."""
    booked = {name: lengths - before.get(name, LengthTotals()) for name, lengths in now.items()}
    booked = {name: lengths for name, lengths in booked.items() if lengths.num_tokens > 0}
    values: dict[str, float | None] = {"length/bias": length_bias(booked)}
    for word, name in METRIC_CLASSES.items():
        lengths = booked.get(name, LengthTotals())
        values[f"length/mean_{word}"] = lengths.mean_length
        values[f"length/first_third_{word}"] = lengths.first_third_share
        values[f"length/last_third_{word}"] = lengths.last_third_share
    return values


def length_report(lengths: Lengths) -> dict[str, Any]:
    """The `length_bias` key of report.json and of `status --json`: {"bias", "classes": {class: figures}}."""
    classes = {
        name: {
            "num_tokens": totals.num_tokens,
            "mean_length": totals.mean_length,
            "first_third": totals.first_third_share,
            "last_third": totals.last_third_share,
        }
        for name, totals in lengths.items()
        if totals.num_tokens
    }
    return {"bias": length_bias(lengths), "classes": classes}


def length_line(report: Mapping[str, Any]) -> str:
    """One line. Example: mean length of 24.1 generated, 23.9 trained, 31.0 masked_stale; bias 0.99."""
    means = [f"{totals['mean_length']:.1f} {name}" for name, totals in report["classes"].items()]
    bias = "" if report["bias"] is None else f"; bias {report['bias']:.2f}"
    return f"mean length of {', '.join(means)}{bias}" if means else ""
