"""The figures of a comparison: time and samples until the target, ratios between arms, and their spread over seeds.

Pure functions from commits, evaluations and reports to JSON values. A ratio is computed per seed, because both arms
of a seed start with the same weights and prompts, and then averaged. Time starts at commit 0, when the first actor
could start.
"""

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipelinerl_core.report.utilization import whole_phases
from pipelinerl_core.run.records import Commit

REWARD_STEPS = 10
"""Number of steps over which the training reward is averaged to decide whether a run may stop."""

MAX_OVERRUN_SHARE = 0.02
"""Share of a run's time by which real work may exceed the emulated duration without a note in the results."""

RATIOS = ("time_to_target_seconds", "samples_to_target", "rollouts_per_second")
"""Figures that are divided by the figure of the reference arm."""
# 97.5th percentile of Student's t distribution with 1, 2, ... degrees of freedom; with more, the last is on the safe
# side.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)

# Name of a figure -> path in report.json.
_FROM_REPORT = {
    "tokens_per_second": ("tokens_per_second",),
    "reward_last": ("reward_last",),
    "ess_mean": ("ess_mean",),
    "lag_mean": ("lag", "mean"),
    "lag_max": ("lag", "max"),
    "trainer_idle_fraction": ("trainer_idle_fraction",),
    "actor_idle_fraction": ("actor_idle_fraction",),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ComparedRun:
    """The records of one arm with one seed."""

    arm: str
    seed: int
    run_id: str
    code_version: str
    """Empty for a reference library."""
    is_emulated: bool
    commits: Mapping[int, Commit]
    accuracies: Mapping[int, float]
    """Version -> held-out accuracy."""
    report: Mapping[str, Any]
    """report.json."""
    trained_to: int = 0
    """The newest step; greater than the last of `commits` if the run was trained further since."""
    best: int | None = None
    """The version of `best_version`; None: that with the highest accuracy, for evaluations without intervals."""


@dataclass(frozen=True, slots=True)
class EvaluatedVersion:
    """A point of the learning curve."""

    version: int
    seconds: float
    samples: int
    accuracy: float


def has_reached(rewards: Sequence[float], level: float) -> bool:
    """Whether the mean of any REWARD_STEPS successive rewards is at least `level`."""
    windows = (rewards[end - REWARD_STEPS : end] for end in range(REWARD_STEPS, len(rewards) + 1))
    return any(statistics.fmean(window) >= level for window in windows)


def rewards_of(commits: Mapping[int, Commit]) -> list[float]:
    """Training reward of every step with a reward, in order."""
    return [
        commits[step].metrics["reward/mean"] for step in sorted(commits) if "reward/mean" in commits[step].metrics
    ]


def active_seconds(commits: Mapping[int, Commit]) -> dict[int, float]:
    """Step -> seconds from commit 0 to the step's commit, without the time between a stop and a resume.

    The step after a resume counts with the mean duration of the other steps. If this is the first step, its time
    starts when the trainer began to wait for groups. Example: commits at 0, 10, 12, 500 (after a resume) and 502
    seconds result in 0, 10, 12, 14, 16.
    """
    ordered = [commits[step] for step in sorted(commits)]
    pairs = list(itertools.pairwise(ordered))
    steady = [after.committed_at - before.committed_at for before, after in pairs if before.epoch == after.epoch]
    usual = statistics.fmean(steady[1:] or steady) if steady else 0.0
    seconds = {ordered[0].step: 0.0} if ordered else {}
    for before, after in pairs:
        if before.epoch == after.epoch:
            passed = after.committed_at - before.committed_at
        elif before.step == 0:
            waited = after.metrics.get("time/reserve_wait_seconds", 0.0)
            passed = after.committed_at - after.reserved_at + waited
        else:
            passed = usual
        seconds[after.step] = seconds[before.step] + passed
    return seconds


def num_resumes(commits: Mapping[int, Commit]) -> int:
    """Number of restarts of the trainer between commits."""
    epochs = [commits[step].epoch for step in sorted(commits)]
    return sum(before != after for before, after in itertools.pairwise(epochs))


def overrun_share(run: ComparedRun) -> float:
    """Share of the run's time by which real work exceeded the emulated durations; 0 for a run without emulation."""
    emulation = run.report.get("emulation") or {}
    seconds = max(active_seconds(run.commits).values(), default=0.0)
    overrun = emulation.get("decode_overrun_seconds", 0.0) + emulation.get("train_overrun_seconds", 0.0)
    return float(overrun / seconds) if seconds else 0.0


def samples_by_step(commits: Mapping[int, Commit]) -> dict[int, int]:
    """Step -> total number of trained rollouts."""
    return {step: int(commits[step].metrics.get("progress/samples", 0)) for step in sorted(commits)}


def learning_curve(run: ComparedRun) -> list[EvaluatedVersion]:
    """The evaluated versions of a run, in order."""
    seconds, samples = active_seconds(run.commits), samples_by_step(run.commits)
    return [
        EvaluatedVersion(
            version=version,
            seconds=seconds[version],
            samples=samples[version],
            accuracy=run.accuracies[version],
        )
        for version in sorted(run.accuracies)
        if version in seconds
    ]


def first_crossing(points: Sequence[tuple[float, float]], level: float) -> float | None:
    """x at which y first reaches a level, with linear interpolation; None if y stays below the level.

    Example: (0, 0.2), (10, 0.4), (20, 0.6) reach 0.5 at 15.
    """
    before: tuple[float, float] | None = None
    for x, y in points:
        if y >= level:
            return x if before is None else before[0] + (x - before[0]) * (level - before[1]) / (y - before[1])
        before = (x, y)
    return None


def run_figures(run: ComparedRun, target: float) -> dict[str, float | None]:
    """All figures of one run; None for an undefined figure. target: 0: no target, and no figures of the target."""
    curve = learning_curve(run)
    seconds = active_seconds(run.commits)
    last = max(run.commits, default=0)
    samples = samples_by_step(run.commits)

    def at_target(x_of: Callable[[EvaluatedVersion], float]) -> float | None:
        return first_crossing([(x_of(point), point.accuracy) for point in curve], target) if target else None

    kl = [commit.metrics["importance/kl"] for commit in run.commits.values() if "importance/kl" in commit.metrics]
    return {
        "time_to_target_seconds": at_target(lambda point: point.seconds),
        "samples_to_target": at_target(lambda point: float(point.samples)),
        "samples_per_second": samples[last] / seconds[last] if seconds.get(last) else None,
        "rollouts_per_second": _steady_rate(run.commits, samples, seconds),
        **step_costs(run.commits, seconds),
        **{key: _nested(run.report, path) for key, path in _FROM_REPORT.items()},
        "kl_mean": statistics.fmean(kl) if kl else None,
        # Without a target the last step is evaluated; its accuracy is unknown if all completions failed.
        "last_accuracy": run.accuracies.get(last) if not target else curve[-1].accuracy if curve else None,
        "best_accuracy": run.accuracies[run.best]
        if run.best is not None
        else max((point.accuracy for point in curve), default=None),
        "steps": float(last),
        "seconds": seconds.get(last),
    }


def step_costs(commits: Mapping[int, Commit], seconds: Mapping[int, float]) -> dict[str, float | None]:
    """Per step, in the whole phases after the first: seconds, and CPU seconds of all engines and of the trainer.

    CPU seconds are None if a role was restarted, because its counter restarts at 0.
    """
    keys = ("step_seconds", "engine_cpu_seconds", "trainer_cpu_seconds")
    steady = _steady(commits)
    if len(steady) < 2:
        return dict.fromkeys(keys)
    first, end = steady[0], steady[-1]
    num_steps = end.step - first.step
    engines = None
    if first.actors and first.actors.keys() == end.actors.keys():
        engines = sum(
            end.actors[key].counters.cpu_seconds - first.actors[key].counters.cpu_seconds for key in end.actors
        )
    trainer = None
    if first.epoch == end.epoch and "time/cpu_seconds" in first.metrics and "time/cpu_seconds" in end.metrics:
        trainer = end.metrics["time/cpu_seconds"] - first.metrics["time/cpu_seconds"]
    totals = (seconds[end.step] - seconds[first.step], engines, trainer)
    return {key: None if total is None else total / num_steps for key, total in zip(keys, totals, strict=True)}


def spread(by_seed: Mapping[int, float | None]) -> dict[str, Any]:
    """Mean, sample standard deviation and range over the seeds with a value; std needs two values.

    half_width: of the 95 % confidence interval of the mean (Student's t); needs two values.
    """
    values = [value for value in by_seed.values() if value is not None]
    std = statistics.stdev(values) if len(values) > 1 else None
    return {
        "mean": statistics.fmean(values) if values else None,
        "std": std,
        "half_width": None if std is None else _T[min(len(values) - 1, len(_T)) - 1] * std / len(values) ** 0.5,
        "low": min(values, default=None),
        "high": max(values, default=None),
        "by_seed": {str(seed): value for seed, value in by_seed.items()},
    }


def ratio(arm: Mapping[str, Any], other: Mapping[str, Any], figure: str) -> dict[str, Any]:
    """Spread of arm / other, computed per seed; a seed that lacks one of the two values has no ratio."""
    values = {}
    for seed, value in arm[figure]["by_seed"].items():
        base = other[figure]["by_seed"].get(seed)
        values[int(seed)] = value / base if value is not None and base else None
    return spread(values)


def difference(arm: Mapping[str, Any], other: Mapping[str, Any], figure: str) -> dict[str, Any]:
    """Spread of arm - other, computed per seed; a seed that lacks one of the two values has no difference."""
    pairs = {int(seed): (value, other[figure]["by_seed"].get(seed)) for seed, value in arm[figure]["by_seed"].items()}
    return spread({seed: None if None in pair else pair[0] - pair[1] for seed, pair in pairs.items()})


def counted_seeds(runs: Sequence[ComparedRun], arms: Sequence[str]) -> list[int]:
    """The seeds that all arms have run, so that all means use the same seeds; if there are none, the first seed."""
    seeds = list(dict.fromkeys(run.seed for run in runs))
    present = {(run.arm, run.seed) for run in runs}
    return [seed for seed in seeds if all((arm, seed) in present for arm in arms)] or seeds[:1]


def compare(runs: Sequence[ComparedRun], arms: Sequence[str], reference: str, target: float) -> dict[str, Any]:
    """{"seeds", "emulated", "arms": {name: figures over seeds, over_reference, ...}, ...}, in the order of `arms`.

    over_reference: for RATIOS, an arm's figure divided by the figure of the reference arm. For the time to the
    target, a ratio of 2 means that the reference arm needed half the time. minus_reference: the arm's last accuracy
    minus that of the reference arm. An arm without a run, for example because all its runs failed, is left out.
    left_out: arm -> its seeds, for the arms without a run with one of `seeds`.
    """
    arms = [arm for arm in arms if any(run.arm == arm for run in runs)]
    seeds = counted_seeds(runs, arms)
    table: dict[str, dict[str, Any]] = {}
    for name in arms:
        own = {run.seed: run for run in runs if run.arm == name and run.seed in seeds}
        figures = {seed: run_figures(run, target) for seed, run in own.items()}
        if figures:
            keys = next(iter(figures.values()))
            table[name] = {key: spread({seed: values[key] for seed, values in figures.items()}) for key in keys}
            table[name]["emulated"] = any(run.is_emulated for run in own.values())
    if reference in table:
        for entry in table.values():
            entry["over_reference"] = {key: ratio(entry, table[reference], key) for key in RATIOS}
            entry["minus_reference"] = difference(entry, table[reference], "last_accuracy")
    return {
        "seeds": seeds,
        "emulated": any(run.is_emulated for run in runs),
        "overrun": {run.run_id: share for run in runs if (share := overrun_share(run)) > MAX_OVERRUN_SHARE},
        "resumed": sum(num_resumes(run.commits) for run in runs),
        "code_versions": sorted({run.code_version for run in runs if run.code_version}),
        "left_out": {name: [run.seed for run in runs if run.arm == name] for name in arms if name not in table},
        "arms": table,
    }


def _steady(commits: Mapping[int, Commit]) -> Sequence[Commit]:
    """The trained commits by step, without the beginning of the first and the end of the last phase."""
    return whole_phases([commits[step] for step in sorted(commits) if step > 0])


def _steady_rate(
    commits: Mapping[int, Commit], samples: Mapping[int, int], seconds: Mapping[int, float]
) -> float | None:
    """Trained rollouts per second after the first steady commit; None for fewer than two."""
    steady = [commit.step for commit in _steady(commits)]
    if not steady or seconds[steady[-1]] <= seconds[steady[0]]:
        return None
    return (samples[steady[-1]] - samples[steady[0]]) / (seconds[steady[-1]] - seconds[steady[0]])


def _nested(report: Mapping[str, Any], path: Sequence[str]) -> float | None:
    value: Any = report
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return None if value is None else float(value)
