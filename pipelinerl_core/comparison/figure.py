"""The figure of a comparison: panels over wall clock, samples and steps, as a standalone SVG.

Thin lines are runs, thick lines the mean over seeds. Each arm has one colour, assigned in the order of the arms.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from typing import Any

from pipelinerl_core.comparison.analysis import ComparedRun, EvaluatedVersion, learning_curve
from pipelinerl_core.comparison.table import EMULATED, seeds_text
from pipelinerl_core.report import charts
from pipelinerl_core.report.charts import Axis, Point, Series, smooth, thousands
from pipelinerl_core.report.markup import template
from pipelinerl_core.run.records import Commit

NUM_COLOURS = 10
"""Classes arm0 to arm9 of templates/comparison.css."""

_PANEL_WIDTH, _PANEL_HEIGHT = 520.0, 230.0  # the view box of charts.line_chart
_GAP, _TITLE, _CAPTION = 24.0, 34.0, 18.0
_LEGEND_ROW, _LEGEND_COLUMN = 20.0, 266.0
_MARK, _CHARACTER = 18.0, 7.0
_COLUMNS = 2
# Steps at each side of a moving mean over steps, because values of single steps are noisy.
_SMOOTH_SIDE = 2


def figure(document: Mapping[str, Any], runs: Sequence[ComparedRun]) -> str:
    """comparison.svg."""
    arms = list(document["arms"])
    counted = [run for run in runs if run.seed in document["seeds"]]
    accuracy = partial(_accuracy, arms, counted, document["target"])
    ends = ("Last accuracy of each arm", _ends(document["arms"]))
    panels = [
        ("Accuracy against wall clock", accuracy(_SECONDS, lambda point: point.seconds)),
        ("Accuracy against samples", accuracy(_SAMPLES, lambda point: point.samples)) if document["target"] else ends,
        ("Mean reward per step", _per_step("reward", "reward/mean", arms, counted)),
        ("Effective sample size per step", _per_step("ESS", "importance/ess", arms, counted)),
        ("Mean lag per step", _per_step("lag", "lag/mean", arms, counted)),
        ("KL between behaviour and current policy", _per_step("KL, nats", "importance/kl", arms, counted)),
    ]
    panels = [(caption, panel) for caption, panel in panels if panel.startswith("<svg")]  # else there is no data
    width = _COLUMNS * _PANEL_WIDTH + (_COLUMNS - 1) * _GAP
    parts, legend_height = _legend(arms, width)
    top = _TITLE + legend_height
    for index, (caption, panel) in enumerate(panels):
        row, column = divmod(index, _COLUMNS)
        x = column * (_PANEL_WIDTH + _GAP)
        y = top + row * (_PANEL_HEIGHT + _CAPTION + _GAP)
        parts.append(f'<text class="caption" x="{x:g}" y="{y + 12:g}">{escape(caption)}</text>')
        parts.append(
            f'<svg x="{x:g}" y="{y + _CAPTION:g}" width="{_PANEL_WIDTH:g}" height="{_PANEL_HEIGHT:g}">{panel}</svg>'
        )
    height = top + -(-len(panels) // _COLUMNS) * (_PANEL_HEIGHT + _CAPTION + _GAP)
    title = figure_title(document)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="comparison" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{escape(title, quote=True)}"><style>{template("comparison.css")}</style>'
        f'<text class="title" x="0" y="18">{escape(title)}</text>{"".join(parts)}</svg>'
    )


def figure_title(document: Mapping[str, Any]) -> str:
    """Name, target and seeds; mentions emulated accelerators."""
    emulated = f", {EMULATED}" if document["emulated"] else ""
    target = f"target {document['target']:g}, " if document["target"] else ""
    return f"{document['name']}: {target}{seeds_text(document)}{emulated}"


def _legend(arms: Sequence[str], width: float) -> tuple[list[str], float]:
    """SVG elements of the colours and names of the arms in rows, and the height of the rows."""
    longest = max(map(len, arms), default=0)
    column_width = max(_LEGEND_COLUMN, _MARK + _CHARACTER * longest)
    per_row = max(1, int(width // column_width))
    parts = []
    for index, name in enumerate(arms):
        row, column = divmod(index, per_row)
        x, y = column * column_width, _TITLE + row * _LEGEND_ROW
        parts.append(f'<rect class="fill {_css(index)}" x="{x:g}" y="{y:g}" width="12" height="12" rx="2"/>')
        parts.append(f'<text class="legend" x="{x + _MARK:g}" y="{y + 10:g}">{escape(name)}</text>')
    return parts, -(-len(arms) // per_row) * _LEGEND_ROW + 10.0


def _css(index: int) -> str:
    return f"arm{index % NUM_COLOURS}"


def _accuracy(
    arms: Sequence[str],
    runs: Sequence[ComparedRun],
    target: float,
    x_axis: Axis,
    x_of: Callable[[EvaluatedVersion], float],
) -> str:
    series: list[Series] = []
    for index, arm in enumerate(arms):
        curves = [
            {point.version: (x_of(point), point.accuracy) for point in learning_curve(run)} for run in _own(arm, runs)
        ]
        if len(curves) > 1:
            series += [Series(arm, list(curve.values()), _css(index), kind="faint") for curve in curves]
        series.append(Series(arm, _mean_points(curves), _css(index)))
    end = max((x for curve in series for x, _ in curve.points), default=1.0)
    if target:
        series.insert(0, Series("target", [(0.0, target), (end, target)], "target", kind="faint"))
    return charts.line_chart(f"Accuracy against {x_axis.label}", series, x_axis, Axis("accuracy"))


def _ends(arms: Mapping[str, Mapping[str, Any]]) -> str:
    """The last accuracy of each arm with its interval, in the order of the legend."""
    series = []
    for index, (arm, entry) in enumerate(arms.items()):
        mean, half = entry["last_accuracy"]["mean"], entry["last_accuracy"]["half_width"]
        if mean is not None:
            interval = None if half is None else (mean - half, mean + half)
            series.append(Series(arm, [(index + 1.0, mean)], _css(index), kind="ring", intervals=[interval]))
    axis = Axis("arm, in the order of the legend", low=0.5, high=len(arms) + 0.5, is_whole=True)
    return charts.line_chart("Last accuracy of each arm", series, axis, Axis("accuracy"))


def _mean_points(curves: Sequence[Mapping[int, Point]]) -> list[Point]:
    """Mean point of each version that was evaluated with every seed."""
    shared = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    return [
        (statistics.fmean(curve[v][0] for curve in curves), statistics.fmean(curve[v][1] for curve in curves))
        for v in shared
    ]


def _per_step(label: str, key: str, arms: Sequence[str], runs: Sequence[ComparedRun]) -> str:
    series = []
    for index, arm in enumerate(arms):
        by_step: dict[int, list[float]] = {}
        for run in _own(arm, runs):
            for step, value in _metric(run.commits, key):
                by_step.setdefault(step, []).append(value)
        points = [(float(step), statistics.fmean(values)) for step, values in sorted(by_step.items())]
        series.append(Series(arm, smooth(points, _SMOOTH_SIDE), _css(index)))
    return charts.line_chart(f"{label} per step", series, Axis("optimizer step", is_whole=True), Axis(label))


def _own(arm: str, runs: Sequence[ComparedRun]) -> list[ComparedRun]:
    return [run for run in runs if run.arm == arm]


def _metric(commits: Mapping[int, Commit], key: str) -> list[tuple[int, float]]:
    return [(step, commit.metrics[key]) for step, commit in sorted(commits.items()) if key in commit.metrics]


_SECONDS = Axis("seconds since the first actor could start", text=thousands, low=0.0)
_SAMPLES = Axis("rollouts trained", text=thousands, low=0.0)
