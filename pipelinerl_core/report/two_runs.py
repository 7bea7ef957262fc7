"""Two runs side by side: figures, curves, and the settings in which they differ."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any
from urllib.parse import quote

from pipelinerl_core.report.charts import Axis, Point, Series, line_chart, smooth, thinned
from pipelinerl_core.report.document import report_of
from pipelinerl_core.report.facts import RunFacts
from pipelinerl_core.report.html import duration
from pipelinerl_core.report.markup import table_row
from pipelinerl_core.report.runs_page import document
from pipelinerl_core.telemetry.redact import flatten, redact

_COLOURS = ("train", "held")


def two_runs_page(facts: Sequence[RunFacts], directories: Sequence[str]) -> str:
    """The page of two runs. directories: under the root."""
    names = [run.run.run_id for run in facts]
    links = " ".join(
        f'<span><i class="key {css}"></i><a href="runs/{quote(directory)}/">{escape(name)}</a></span>'
        for name, directory, css in zip(names, directories, _COLOURS, strict=True)
    )
    main = (
        f'<header><p class="kicker"><a href=".">all runs</a></p><h1>Two runs</h1><p class="meta legend">{links}</p>'
        f"</header><section><h2>Figures</h2>{_figures(facts)}</section>"
        f"<section><h2>Learning</h2><p>Thick line: moving mean of the reward. Rings: held-out accuracy.</p>"
        f'<div class="pair">{"".join(_chart(facts, *axis) for axis in _AXES)}</div></section>'
        f"<section><h2>Settings that differ</h2>{_settings(facts)}</section>"
    )
    return document(" and ".join(names), main)


def _figures(facts: Sequence[RunFacts]) -> str:
    reports = [report_of(run) for run in facts]
    rows = [(label, *(_cell(report, find) for report in reports)) for label, find in _ROWS]
    return _table(("", *(run.run.run_id for run in facts)), rows, "two")


def _cell(report: Mapping[str, Any], find: Callable[[Mapping[str, Any]], str | None]) -> str:
    try:
        return find(report) or ""
    except TypeError:  # a figure that the run does not have is None
        return ""


_ROWS: tuple[tuple[str, Callable[[Mapping[str, Any]], str | None]], ...] = (
    ("steps", lambda report: f"{report['steps']:,}"),
    ("time since the start", lambda report: duration(report["wall_seconds"])),
    ("held-out, first version", lambda report: f"{report['eval_first']:.3f}"),
    ("held-out, last version", lambda report: f"{report['eval_last']:.3f}"),
    ("training reward, first steps", lambda report: f"{report['reward_first']:.3f}"),
    ("training reward, last steps", lambda report: f"{report['reward_last']:.3f}"),
    ("rollouts trained", lambda report: f"{report['samples']:,}"),
    ("tokens generated", lambda report: f"{report['ledger']['generated']:,}" if report["ledger"] else None),
    ("tokens per second", lambda report: f"{report['tokens_per_second']:,.0f}"),
    ("rollouts per second", lambda report: f"{report['rollouts_per_second']:,.1f}"),
    ("mean lag, steps", lambda report: f"{report['lag']['mean']:.2f}"),
    ("effective sample size", lambda report: f"{report['ess_mean']:.3f}"),
    ("actor slots idle", lambda report: f"{report['actor_idle_fraction']:.1%}"),
    ("trainer waiting", lambda report: f"{report['trainer_idle_fraction']:.1%}"),
    ("swap pause, median", lambda report: f"{report['swap_pause_seconds']['p50'] * 1000:.1f} ms"),
    ("completion length, median", lambda report: f"{report['completion_length']['median']:,.0f} tokens"),
)
_AXES: tuple[tuple[str, Axis, Callable[[RunFacts], Mapping[int, float]]], ...] = (
    (
        "Reward against optimizer steps",
        Axis("optimizer step", low=0.0, is_whole=True),
        lambda facts: {step: float(step) for step in facts.commits},
    ),
    (
        "Reward against wall clock",
        Axis("minutes since the run was created", low=0.0),
        lambda facts: {
            step: (commit.committed_at - facts.run.created_at) / 60 for step, commit in facts.commits.items()
        },
    ),
)
"""Title, x axis, and the x of each step."""


def _chart(
    facts: Sequence[RunFacts], title: str, axis: Axis, place: Callable[[RunFacts], Mapping[int, float]]
) -> str:
    series = []
    for run, css in zip(facts, _COLOURS, strict=True):
        at, name = place(run), run.run.run_id
        rewards: list[Point] = [(at[step], reward) for step, reward in run.mean_rewards().items() if step in at]
        held_out: list[Point] = [
            (at[version], record.accuracy)
            for version, record in run.evals.items()
            if version in at and record.known_accuracy is not None
        ]
        series += [
            Series(f"{name}: reward", thinned(rewards), css, kind="faint"),
            Series(f"{name}: reward", thinned(smooth(rewards)), css),
            Series(f"{name}: held-out accuracy", held_out, css, kind="ring"),
        ]
    chart = line_chart(title, series, axis, Axis("reward"))
    return f"<figure><figcaption>{title}</figcaption>{chart}</figure>"


def _settings(facts: Sequence[RunFacts]) -> str:
    configs = [redact(flatten(run.run.config)) for run in facts]
    keys = sorted(set[str]().union(*configs))
    rows = [(key, *(config.get(key, "") for config in configs)) for key in keys]
    differing = [row for row in rows if row[1] != row[2]]
    if not differing:
        return f"<p>None of the {len(keys)} settings.</p>"
    return _table(("", *(run.run.run_id for run in facts)), differing, "two settings")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], css: str) -> str:
    body = table_row(map(escape, heads), "th") + "".join(table_row(map(escape, row)) for row in rows)
    return f'<div class="wide-table"><table class="{css}"><tbody>{body}</tbody></table></div>'
