"""Speeds of a recorded run, for a simulation of the same run or of changed settings on the same machines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelinerl_core.config import RunConfig
from pipelinerl_core.config.load import stored_config
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.planning.lengths import Lengths
from pipelinerl_core.planning.simulator import SimulatedRun, Work, simulate
from pipelinerl_core.report.facts import RunFacts
from pipelinerl_core.report.utilization import actor_use, span_seconds, stretches, trainer_idle_fraction
from pipelinerl_core.run.records import Commit

MIN_STEPS = 6
"""Steps that a recorded run must have."""
_START_SHARE = 0.2
"""Share of the first steps that is left out: engines fill their slots, and libraries warm up."""
_SIMULATED_STEPS = 200
_WIDE = 1.5
"""Ratio of the largest to the smallest observed load from which the fixed part of a time can be told apart."""

_ROWS = {
    "steps_per_second": ("steps per second", ".3g"),
    "mean_lag": ("mean lag", ".2f"),
    "trainer_idle": ("trainer waits", ".0%"),
    "busy_slots": ("slots in use", ".0%"),
}

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Line:
    """A time that grows with its load: fixed + each * load seconds."""

    fixed: float
    each: float
    lowest: float
    highest: float
    """Loads that were observed; a time beyond them is extrapolated."""

    def at(self, load: float) -> float:
        """Seconds at a load."""
        return self.fixed + self.each * load


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSpeeds:
    """`Speeds` of a recorded run."""

    decode: Line
    """Time of a decode step by the running sequences of one actor."""
    train: Line
    """Time of an optimizer step by its tokens, prompts included."""

    def decode_seconds(self, num_running: int) -> float:
        """See `Speeds`."""
        return self.decode.at(num_running) if num_running else 0.0

    def train_seconds(self, num_tokens: int) -> float:
        """See `Speeds`."""
        return self.train.at(num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A recorded run: its configuration, its speeds and work, and what was measured."""

    config: RunConfig
    speeds: MeasuredSpeeds
    work: Work
    measured: "Prediction"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Figures of a run without its first steps."""

    steps_per_second: float
    mean_lag: float
    """Of the trained tokens, optimizer steps."""
    trainer_idle: float
    """Share of the time in which the trainer waited for groups."""
    busy_slots: float
    """Share of the slots that were in use."""


def calibrate(facts: RunFacts) -> Calibration:
    """Speeds and work of a recorded run. Raises ConfigError if the run has too few steps for a measurement."""
    config = stored_config(facts.run.config)
    commits = facts.trained_commits
    if len(commits) < MIN_STEPS or len(facts.steps) < MIN_STEPS:
        raise ConfigError(f"{facts.run.run_id}: {len(commits)} steps are too few, at least {MIN_STEPS} are needed")
    skip = max(1, int(_START_SHARE * len(commits)))
    kept, steps = commits[skip:], facts.steps[skip:]
    decode = _decode(kept)
    if decode is None:
        raise ConfigError(f"{facts.run.run_id}: no actor has reported two samples. Calibrate from a longer run")
    tokens = np.array([commit.metrics.get("train/tokens", 0.0) for commit in kept])
    seconds = np.array([commit.computed_at - commit.reserved_at for commit in kept])
    lengths = np.concatenate([step.lengths for step in steps])
    prompts = max(0.0, float(tokens.sum()) - float(lengths.sum())) / len(lengths)
    swaps = [swap.pause_seconds for commit in kept for swap in commit.swaps]
    return Calibration(
        config=config,
        speeds=MeasuredSpeeds(decode=decode, train=_line(tokens, seconds)),
        work=Work(
            lengths=Lengths.of(lengths[lengths > 0].tolist()),
            prompt_tokens=round(prompts),
            swap_seconds=float(np.mean(swaps)) if swaps else 0.0,
            publish_seconds=_publish_seconds(commits),
            equal_share=_equal_share(kept) if config.rollouts.filter_zero_variance else 0.0,
        ),
        measured=_measured(facts, kept),
    )


def predict(calibration: Calibration, config: RunConfig) -> Prediction:
    """Simulate a configuration at the speeds of a recorded run. Raises ConfigError as `simulate`."""
    trainer = config.trainer.model_copy(update={"steps": max(MIN_STEPS, min(config.trainer.steps, _SIMULATED_STEPS))})
    run: SimulatedRun = simulate(config.model_copy(update={"trainer": trainer}), calibration.speeds, calibration.work)
    skip = max(1, int(_START_SHARE * len(run.steps)))
    seconds = run.steps[-1].at - run.steps[skip - 1].at
    return Prediction(
        steps_per_second=(len(run.steps) - skip) / seconds,
        mean_lag=run.mean_lag(skip),
        trainer_idle=run.waiting(skip),
        busy_slots=run.busy_slots,
    )


def warnings(calibration: Calibration, config: RunConfig) -> list[str]:
    """What a prediction of `config` leaves out or extrapolates."""
    found = []
    decode, slots = calibration.speeds.decode, config.engine.concurrency
    if slots > _WIDE * decode.highest:
        found.append(
            f"the time of a decode step of {slots} sequences (engine.concurrency), which is extrapolated: at most "
            f"{decode.highest:.0f} ran at once"
        )
    if config.paces_engines:
        found.append("engine.pace=true: if the trainer is the bottleneck, the lag of the run is lower")
    if config.placement.actors > calibration.config.placement.actors:
        found.append("a limit of cores or accelerators: each further actor is as fast as the recorded ones")
    return found


def document(calibration: Calibration, changed: RunConfig | None) -> dict[str, Any]:
    """The figures for `--json`: measured, predicted, and predicted with changed settings."""
    rows = {"measured": calibration.measured, "predicted": predict(calibration, calibration.config)}
    if changed is not None:
        rows["changed"] = predict(calibration, changed)
    config = changed or calibration.config
    return {
        **{name: {key: getattr(row, key) for key in Prediction.__slots__} for name, row in rows.items()},
        "decode_seconds": {"fixed": calibration.speeds.decode.fixed, "per_sequence": calibration.speeds.decode.each},
        "train_seconds": {"fixed": calibration.speeds.train.fixed, "per_token": calibration.speeds.train.each},
        "warnings": warnings(calibration, config),
    }


def document_lines(found: Mapping[str, Any]) -> list[str]:
    """The figures as a table."""
    columns = [name for name in ("measured", "predicted", "changed") if name in found]
    lines = [f"{'':<18}" + "".join(f"{name:>12}" for name in columns)]
    for key, (title, form) in _ROWS.items():
        lines.append(f"{title:<18}" + "".join(f"{format(found[name][key], form):>12}" for name in columns))
    if "changed" in found:
        ratio = found["changed"]["steps_per_second"] / found["predicted"]["steps_per_second"]
        lines.append(f"with the changed settings {ratio:.2f} times the steps per second of the recorded settings")
    decode, train = found["decode_seconds"], found["train_seconds"]
    lines.append(
        f"measured: a decode step {1e3 * decode['fixed']:.3g} ms + {1e6 * decode['per_sequence']:.3g} us a sequence, "
        f"an optimizer step {1e3 * train['fixed']:.3g} ms + {1e6 * train['per_token']:.3g} us per token"
    )
    return [*lines, *(f"not simulated: {warning}" for warning in found["warnings"])]


def _decode(commits: Sequence[Commit]) -> Line | None:
    """Time of a decode step: running sequences over tokens per second, between two samples of an actor."""
    loads, seconds = [], []
    for before, now in pairwise(commits):
        for name, sample in now.actors.items():
            earlier = before.actors.get(name)
            tokens = sample.num_tokens - earlier.num_tokens if earlier else 0
            if earlier is None or tokens <= 0 or sample.at <= earlier.at:
                continue
            busy = sample.running_seconds - earlier.running_seconds - _paused_seconds(now, name)
            if busy <= 0:
                continue
            loads.append(busy / (sample.at - earlier.at))
            delay = sample.counters.get("step_delay_seconds", 0.0)  # with which the engine keeps the trainer's pace
            seconds.append(max(0.1 * busy / tokens, busy / tokens - delay))
    return _line(np.array(loads), np.array(seconds)) if loads else None


def _paused_seconds(commit: Commit, name: str) -> float:
    """Time of running sequences that swaps of an actor took, in sequences times seconds."""
    return sum(
        swap.pause_seconds * swap.num_running for swap in commit.swaps if f"{swap.actor}/{swap.actor_epoch}" == name
    )


def _line(loads: FloatArray, seconds: FloatArray) -> Line:
    """Least squares without a negative part; in proportion to the load if the loads hardly differ."""
    lowest, highest = float(loads.min()), float(loads.max())
    fixed, each = 0.0, float(seconds.sum() / max(loads.sum(), 1e-12))
    if highest > _WIDE * lowest:
        slope, start = np.polyfit(loads, seconds, 1)
        if slope > 0 and start > 0:
            fixed, each = float(start), float(slope)
        elif slope <= 0:
            fixed, each = float(seconds.mean()), 0.0
    return Line(fixed, each, lowest, highest)


def _publish_seconds(commits: Sequence[Commit]) -> float:
    """Mean time from the end of a step to the swap of its version."""
    computed = {commit.step: commit.computed_at for commit in commits}
    times = [
        swap.at - computed[swap.version]
        for commit in commits
        for swap in commit.swaps
        if swap.version in computed and swap.at >= computed[swap.version]
    ]
    return float(np.median(times)) if times else 0.0


def _equal_share(commits: Sequence[Commit]) -> float:
    """Share of the tokens in groups that were filtered."""
    first, last = commits[0].tokens, commits[-1].tokens
    grown = {name: last.get(name, 0) - first.get(name, 0) for name in ("filtered", "trained")}
    return grown["filtered"] / sum(grown.values()) if sum(grown.values()) else 0.0


def _measured(facts: RunFacts, commits: Sequence[Commit]) -> Prediction:
    numbers = {commit.step for commit in commits}
    lags = [step.lags for step in facts.steps if step.step in numbers]
    seconds, idle, use = span_seconds(commits), trainer_idle_fraction(commits), actor_use(commits)
    if seconds is None or idle is None or use is None:
        raise ConfigError(f"{facts.run.run_id}: no two steps in a row were measured. Calibrate from a longer run")
    num_steps = sum(len(part) - 1 for part in stretches(commits))
    return Prediction(
        steps_per_second=num_steps / seconds,
        mean_lag=sum(float((lag * np.arange(len(lag))).sum()) for lag in lags) / max(1, sum(map(np.sum, lags))),
        trainer_idle=idle,
        busy_slots=1 - use.idle_fraction,
    )
