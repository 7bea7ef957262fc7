"""comparison.html: one self-contained page with the table, the figure and the runs of a comparison."""

import string
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from pipelinerl_core.comparison import table
from pipelinerl_core.comparison.figure import figure_title
from pipelinerl_core.report.markup import table_row, template


def page(document: Mapping[str, Any], figure: str) -> str:
    """HTML text of the page. `document` is comparison.json, `figure` comparison.svg."""
    return string.Template(template("comparison.html")).substitute(
        title=escape(figure_title(document)),
        css=template("report.css"),
        lead=escape(lead(document)),
        notes="".join(f"<li>{escape(line)}</li>" for line in table.notes(document)),
        caption=escape(table.caption(document)),
        table=_table(table.headers(document), table.rows(document)),
        figure=figure,
        runs="".join(_run_row(run, document["arms_settings"]) for run in document["runs"]),
    )


def lead(document: Mapping[str, Any]) -> str:
    """One sentence: the time to the target of every arm, divided by the time of the reference arm; without a target,
    the arm with the highest last accuracy, or without evaluations the highest reward."""
    reference = document["reference"]
    if not document["target"]:
        for key, figure in (("last_accuracy", "last accuracy"), ("reward_last", "reward at the end")):
            means = {name: entry[key]["mean"] for name, entry in document["arms"].items()}
            if known := {name: mean for name, mean in means.items() if mean is not None}:
                best = max(known, key=lambda name: known[name])
                spread = table.with_interval(document["arms"][best][key], "{:.3f}")
                return f"Highest {figure}: {best}, {spread}."
        return "No run has ended."
    parts = []
    for name, entry in document["arms"].items():
        ratio = entry.get("over_reference", {}).get("time_to_target_seconds", {}).get("mean")
        if name != reference and ratio is not None:
            parts.append(f"{name} {ratio:.2f}")
    if not parts:
        return f"No ratio yet: {reference} and another arm must both reach {document['target']:g}."
    return f"Time to {document['target']:g}, divided by the time of {reference}: {', '.join(parts)}."


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    body = "".join(table_row(map(escape, row)) for row in rows)
    return f"<thead>{table_row(map(escape, names), 'th')}</thead><tbody>{body}</tbody>"


def _run_row(run: Mapping[str, Any], settings: Mapping[str, Sequence[str]]) -> str:
    figures = run["figures"]
    name = escape(run["run_id"])
    cells = [
        f'<a href="../../{name}/report.html">{name}</a>',
        _number(figures["steps"], "{:.0f}"),
        _number(figures["seconds"], "{:.0f}"),
        _number(figures["last_accuracy"], "{:.3f}"),
        _number(figures["best_accuracy"], "{:.3f}"),
        escape(" ".join(settings[run["arm"]])),
    ]
    return table_row(cells)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
