"""The figures of report.html, drawn from the facts of a run."""

import itertools
from collections.abc import Iterable, Sequence
from html import escape

import numpy as np

from pipelinerl_core.report import charts
from pipelinerl_core.report.charts import MAX_POINTS, Axis, Lane, Point, Series, smooth, thinned, thousands
from pipelinerl_core.report.document import swaps_of, total_lags
from pipelinerl_core.report.facts import RunFacts
from pipelinerl_core.report.utilization import stretches, wait_seconds
from pipelinerl_core.run.records import Commit, EvalRecord

# Optimizer steps on the timeline: few enough for each pause to be visible.
_TIMELINE_STEPS = 10
_MAX_BARS = 30
_MIN_EVALUATIONS = 3
_EVAL_CSS = ("held", "train", "generate", "swap", "commit", "again")

_WHOLE_REWARD = ("reward/mean", "reward/std")

LEDGER_CSS = {
    "trained": "train",
    "masked_stale": "swap",
    "dropped_stale": "held",
    "filtered": "other",
    "failed": "bad",
    "quarantined": "bad",
    "superseded": "again",
    "in_flight": "generate",
    "ready": "wait",
}
"""Order and colour of the token classes; other classes are drawn after these."""


def reward_over_time(facts: RunFacts) -> str:
    """Reward and held-out accuracy against wall clock, with a gap where the run was down."""
    times = {step: commit.committed_at - facts.run.created_at for step, commit in facts.commits.items()}
    rewards = facts.mean_rewards()
    parts = [
        [(times[commit.step], rewards[commit.step]) for commit in part if commit.step in rewards]
        for part in stretches(list(facts.commits.values()))
    ]
    points = [point for part in parts for point in part]
    held_out = [(times[version], record) for version, record in facts.evals.items() if version in times]
    end = max((x for x, _ in [*points, *held_out]), default=1.0)
    unit, name = (1.0, "seconds") if end < 300 else (60.0, "minutes") if end < 18_000 else (3600.0, "hours")
    axis = Axis(f"wall clock, {name} since the run was created", low=0.0)
    scaled = [[(x / unit, y) for x, y in part] for part in parts]
    return _learning("Reward against wall clock", scaled, [(x / unit, record) for x, record in held_out], axis)


def reward_over_samples(facts: RunFacts) -> str:
    """Reward and held-out accuracy against rollouts trained."""
    totals: dict[int, float] = {0: 0.0}
    lengths = {step.step: len(step.lengths) for step in facts.steps}
    for step, commit in facts.commits.items():  # the rows of a step may be removed
        known = totals[max(totals)] + lengths.get(step, 0)
        totals[step] = commit.metrics.get("progress/samples", known) if step else 0.0
    points = [(totals[step], reward) for step, reward in facts.mean_rewards().items() if step in totals]
    held_out = [(totals[step], record) for step, record in facts.evals.items() if step in totals]
    axis = Axis("rollouts trained", text=thousands, low=0.0)
    return _learning("Reward against rollouts trained", [points], held_out, axis)


def lag_histogram(facts: RunFacts) -> str:
    """Share of the trained tokens per lag."""
    lags_L = total_lags(facts.steps)
    total = max(1, int(lags_L.sum()))
    bars = [
        (lag - 0.5, lag + 0.5, num / total, f"lag {lag}: {num:,} tokens ({num / total:.1%})")
        for lag, num in enumerate(lags_L.tolist())
    ]
    axis = Axis("lag, optimizer steps", is_whole=True)
    return charts.bar_chart("Lag of trained tokens", bars, axis, Axis("share", text=_percent), css="generate")


def length_histogram(facts: RunFacts) -> str:
    """Rollouts per completion length."""
    lengths = np.concatenate([step.lengths for step in facts.steps]) if facts.steps else np.empty(0, dtype=np.int64)
    if not len(lengths):
        return charts.bar_chart("Completion length", [], Axis(""), Axis(""), css="generate")
    width = max(1, -(-int(lengths.max() - lengths.min() + 1) // _MAX_BARS))
    counts, edges = np.histogram(lengths, bins=np.arange(lengths.min(), lengths.max() + width + 1, width))
    bars = [
        (left, right, num, f"{left:g} to {right - 1:g} tokens: {num:,} rollouts")
        for left, right, num in zip(edges.tolist(), edges[1:].tolist(), counts.tolist(), strict=False)
    ]
    axis = Axis("completion tokens", text=thousands, is_whole=True)
    return charts.bar_chart("Completion length", bars, axis, Axis("rollouts", text=thousands), css="generate")


def swap_pauses(facts: RunFacts) -> str:
    """Pause of the engine at every swap, in milliseconds."""
    swaps = swaps_of(list(facts.commits.values()))
    points = [(swap.at - facts.run.created_at, swap.pause_seconds * 1000) for swap in swaps]
    axis = Axis("seconds since the run was created", text=thousands)
    series = [Series("pause, ms", _worst(points), "swap", kind="dots")]
    return charts.line_chart("Swap pauses", series, axis, Axis("milliseconds", text=lambda y: f"{y:g} ms", low=0.0))


def reward_components(facts: RunFacts) -> str:
    """Moving mean of each component of the reward per step, with a legend; empty for a reward that is one number."""
    names = sorted(
        {name for commit in facts.trained_commits for name in commit.metrics if name.startswith("reward/")}
    )
    curves = {name.removeprefix("reward/"): facts.metric(name) for name in names if name not in _WHOLE_REWARD}
    if not curves:
        return ""
    colours = list(zip(curves, itertools.cycle(_EVAL_CSS), strict=False))
    series = [Series(name, thinned(smooth(curves[name])), css) for name, css in colours]
    legend = " ".join(f'<i class="key {css}"></i>{escape(name)}' for name, css in colours)
    axis = _reward_axis("component", [y for points in curves.values() for _, y in points])
    chart = charts.line_chart("Components of the reward", series, Axis("optimizer step", is_whole=True), axis)
    return (
        "<figure><figcaption>Components of the reward, without weights, moving mean</figcaption>"
        f'<p class="legend">{legend}</p>{chart}</figure>'
    )


def policy_curves(facts: RunFacts) -> str:
    """Entropy, completion length and divergence from the start, those that the run has."""
    means = facts.means("rollout/length_mean", lambda step: step.lengths)
    curves = {
        "Entropy of the policy, nats per token": facts.metric("policy/entropy"),
        "Completion length, mean tokens": [(float(step), mean) for step, mean in means.items()],
        "Divergence from version 0, nats per token": facts.metric("policy/kl_start"),
    }
    figures = []
    for title, points in curves.items():
        if points:
            series = [Series(title, thinned(points), "train", kind="faint")]
            series.append(Series(title, thinned(smooth(points)), "train"))
            chart = charts.line_chart(title, series, Axis("optimizer step", is_whole=True), Axis(title, low=0.0))
            figures.append(f"<figure><figcaption>{title}</figcaption>{chart}</figure>")
    return "".join(figures)


def effective_sample_size(facts: RunFacts) -> str:
    """ESS per step."""
    points = facts.metric("importance/ess")
    low = min(0.8, min((y for _, y in points), default=0.8))
    series = [Series("ESS", thinned(points), "train")]
    return charts.line_chart(
        "Effective sample size", series, Axis("optimizer step", is_whole=True), Axis("ess", low=low, high=1.0)
    )


def ledger_over_steps(facts: RunFacts) -> str:
    """Share of the tokens generated so far per class, at the reservation of each step."""
    commits = [commit for commit in facts.trained_commits if commit.tokens.get("generated")]
    commits = [*commits[: -1 : max(1, -(-len(commits) // MAX_POINTS))], *commits[-1:]]
    names = {name for commit in commits for name, num in commit.tokens.items() if num} - {"generated"}
    order = [name for name in LEDGER_CSS if name in names] + sorted(names - LEDGER_CSS.keys())
    layers = [
        (
            name,
            LEDGER_CSS.get(name, "other"),
            [commit.tokens.get(name, 0) / commit.tokens["generated"] for commit in commits],
        )
        for name in order
    ]
    axis = Axis("optimizer step", is_whole=True)
    share = Axis("share", text=lambda value: f"{value:.0%}")
    return charts.area_chart(
        "Token ledger over steps", [float(commit.step) for commit in commits], layers, axis, share
    )


def timeline(facts: RunFacts) -> str:
    """A lane per role for some steps in the middle of the run."""
    commits = facts.trained_commits
    if len(commits) < 2:
        return '<p class="empty">The timeline needs two committed steps.</p>'
    first = max(0, (len(commits) - _TIMELINE_STEPS) // 2)
    shown = commits[first : first + _TIMELINE_STEPS + 1]
    zero, start, end = facts.run.created_at, shown[0].reserved_at, shown[-1].committed_at
    lanes = [
        _actor_lane(facts, actor, start, end)
        for actor in sorted({key.rpartition("/")[0] for commit in commits for key in commit.actors})
    ]
    lanes += [_trainer_lane(shown, zero), _commit_lane(shown, zero)]
    return charts.lane_chart("Timeline", lanes, (start - zero, end - zero))


def _actor_lane(facts: RunFacts, actor: str, start: float, end: float) -> Lane:
    zero = facts.run.created_at
    swaps = [
        swap for swap in swaps_of(list(facts.commits.values())) if swap.actor == actor and start <= swap.at <= end
    ]
    intervals = [(start - zero, end - zero, "generate", f"{actor} generates")]
    intervals += [
        (
            swap.at - swap.pause_seconds - zero,
            swap.at - zero,
            "swap",
            f"swap to version {swap.version}: {swap.pause_seconds * 1000:.1f} ms, {swap.num_running} in flight",
        )
        for swap in swaps
    ]
    labels = [(swap.at - zero, f"v{swap.version}") for swap in swaps]
    return Lane(actor, intervals, labels if len(labels) <= 2 * _TIMELINE_STEPS else ())


def _trainer_lane(shown: Sequence[Commit], zero: float) -> Lane:
    intervals = []
    for previous, commit in zip([None, *shown], shown, strict=False):
        wait = wait_seconds(commit, previous)
        begin, ready, done = commit.reserved_at - wait - zero, commit.reserved_at - zero, commit.computed_at - zero
        intervals.append((begin, ready, "wait", f"waits {wait:.2f} s for the groups of step {commit.step}"))
        intervals.append((ready, done, "train", f"step {commit.step}: {done - ready:.2f} s"))
    labels = [((commit.reserved_at + commit.computed_at) / 2 - zero, f"step {commit.step}") for commit in shown]
    return Lane("trainer", intervals, labels)


def _commit_lane(shown: Sequence[Commit], zero: float) -> Lane:
    intervals = [
        (
            commit.computed_at - zero,
            commit.committed_at - zero,
            "commit",
            f"version {commit.step}: published and committed in {commit.committed_at - commit.computed_at:.2f} s",
        )
        for commit in shown
    ]
    return Lane("publish", intervals)


def evaluations(facts: RunFacts) -> str:
    """Accuracy against the weight version, one line per set and kind of completion; empty below three evaluations."""
    own = list(facts.evals.values())
    curves = {
        "held-out prompts": _accuracies(own),
        "greedy": [(record, record.greedy) for record in own if record.greedy is not None],
        "best of the samples": [(record, record.best) for record in own if record.best is not None],
        **{name: _accuracies(records.values()) for name, records in facts.set_evals.items()},
    }
    if max(map(len, curves.values())) < _MIN_EVALUATIONS:
        return ""
    legend, series = [], []
    for (name, curve), css in zip(curves.items(), itertools.cycle(_EVAL_CSS), strict=False):
        points = [(float(record.version), value) for record, value in curve]
        intervals = [_interval(record) if value == record.accuracy else None for record, value in curve]
        if points:
            series += [Series(name, points, css), Series(name, points, css, kind="ring", intervals=intervals)]
            legend.append(f'<i class="key {css}"></i>{escape(name)}')
    heights = [y for line in series for _, y in line.points]
    chart = charts.line_chart(
        "Accuracy by version", series, Axis("weight version", is_whole=True), _reward_axis("accuracy", heights)
    )
    return f'<div><p class="legend">{" ".join(legend)}</p><figure>{chart}</figure></div>'


def _accuracies(records: Iterable[EvalRecord]) -> list[tuple[EvalRecord, float]]:
    """The records with an accuracy: an evaluation whose completions have all failed has none."""
    return [(record, record.accuracy) for record in records if record.known_accuracy is not None]


def _reward_axis(label: str, values: Sequence[float]) -> Axis:
    """From 0 to 1 if all values are in this range."""
    unit_range = bool(values) and min(values) >= 0 and max(values) <= 1
    return Axis(label, low=0.0, high=1.0) if unit_range else Axis(label)


def _interval(record: EvalRecord) -> tuple[float, float] | None:
    return None if record.low is None or record.high is None else (record.low, record.high)


def _learning(
    title: str, parts: Sequence[Sequence[Point]], held_out: Sequence[tuple[float, EvalRecord]], axis: Axis
) -> str:
    """parts: points of the reward; between two parts, the lines have a gap. held_out: x and evaluation."""
    series = [Series("reward", thinned(points), "train", kind="faint") for points in parts]
    series += [Series("reward", thinned(smooth(points)), "train") for points in parts]
    held_out = [(x, record) for x, record in held_out if record.known_accuracy is not None]
    accuracies = [(x, record.accuracy) for x, record in held_out]
    intervals = [_interval(record) for _, record in held_out]
    series.append(Series("held-out accuracy", accuracies, "held"))
    series.append(Series("held-out accuracy", accuracies, "held", kind="ring", intervals=intervals))
    values = [y for points in [*parts, accuracies] for _, y in points]
    return charts.line_chart(title, series, axis, _reward_axis("reward", values))


def _worst(points: Sequence[Point]) -> list[Point]:
    """At most MAX_POINTS: the highest point of each interval, so that outliers remain."""
    stride = max(1, -(-len(points) // MAX_POINTS))
    return [
        max(points[start : start + stride], key=lambda point: point[1]) for start in range(0, len(points), stride)
    ]


def _percent(value: float) -> str:
    return f"{value * 100:g}%"
