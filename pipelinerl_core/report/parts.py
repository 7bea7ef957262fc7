"""The parts of a mixture in report.json and report.html."""

import itertools
from collections.abc import Mapping
from html import escape
from typing import Any

from pipelinerl_core.report import charts
from pipelinerl_core.report.charts import Axis, Series, smooth, thinned
from pipelinerl_core.report.facts import RunFacts
from pipelinerl_core.report.markup import table_row
from pipelinerl_core.telemetry.parts import FATES, PREFIX, parts_of

_CSS = ("train", "held", "generate", "swap", "commit", "again", "wait", "other")
_WINDOW = 10


def parts_report(facts: RunFacts) -> dict[str, dict[str, Any]]:
    """Part -> its share of the groups, counts of groups by fate, first and last reward, length and accuracy.

    First and last are means over up to a tenth of the steps, as for the reward of the run. Empty without a mixture.
    """
    commits = list(facts.commits.values())
    figures: dict[str, dict[str, Any]] = {}
    for name, part in parts_of(facts.run.config, commits[-1].metrics if commits else {}).items():
        evals = list(facts.set_evals.get(name, {}).values())
        figures[name] = {
            "weight": part["weight"],
            **{f"groups_{fate}": int(part.get(f"groups_{fate}", 0)) for fate in FATES},
            **_first_and_last(facts, name, "reward"),
            **_first_and_last(facts, name, "length_mean"),
            "error_fraction": part.get("error_fraction"),
            "eval_first": evals[0].known_accuracy if evals else None,
            "eval_last": evals[-1].known_accuracy if evals else None,
            "eval_error": evals[-1].error if evals else "",
        }
    return figures


def _first_and_last(facts: RunFacts, name: str, key: str) -> dict[str, float | None]:
    values = [value for _, value in facts.metric(f"{PREFIX}{name}/{key}")]
    window = max(1, min(_WINDOW, len(values) // 10))
    return {
        f"{key}_{end}": sum(some) / len(some) if some else None
        for end, some in (("first", values[:window]), ("last", values[-window:]))
    }


def parts_section(facts: RunFacts, parts: Mapping[str, Mapping[str, Any]]) -> str:
    """A table of the parts and the curves of their rewards; empty without a mixture."""
    if not parts:
        return ""
    heads = ("part", "share", *FATES, "reward", "length", "held-out", "error")
    rows = [table_row((escape(head.replace("_", " ")) for head in heads), "th")]
    for (name, part), css in zip(parts.items(), itertools.cycle(_CSS), strict=False):
        cells = [
            f'<i class="key {css}"></i>{escape(name)}',
            f"{part['weight']:.1%}",
            *(f"{part[f'groups_{fate}']:,}" for fate in FATES),
            _change(part["reward_first"], part["reward_last"], ".3f"),
            _change(part["length_mean_first"], part["length_mean_last"], ".1f"),
            _change(part["eval_first"], part["eval_last"], ".1%"),
            escape(part["eval_error"]),
        ]
        rows.append(table_row(cells))
    return (
        "<section><h2>Mixture</h2><p>The parts of the mixture: share of the groups by weight, groups by fate, and "
        "the first and last mean of reward, length and held-out accuracy. Failed groups have fewer than two rewards; "
        "filtered groups have equal rewards.</p>"
        f'<table class="ledger"><tbody>{"".join(rows)}</tbody></table>'
        "<figure><figcaption>Reward per part, moving mean</figcaption>"
        f"{_curves(facts, parts)}</figure></section>"
    )


def _curves(facts: RunFacts, parts: Mapping[str, Any]) -> str:
    series = [
        Series(name, thinned(smooth(facts.metric(f"{PREFIX}{name}/reward"))), css)
        for name, css in zip(parts, itertools.cycle(_CSS), strict=False)
    ]
    return charts.line_chart("Reward per part", series, Axis("optimizer step", is_whole=True), Axis("reward"))


def _change(first: float | None, last: float | None, form: str) -> str:
    if first is None or last is None:
        return "&ndash;"
    return f"{first:{form}} &rarr; {last:{form}}"
