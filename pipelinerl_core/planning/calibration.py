"""Speeds of recorded runs, for a simulation of the same run or of changed settings on the same machines."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.planning.lengths import Lengths
from pipelinerl_core.planning.prediction import (
    INPUTS,
    MIN_STEPS,
    START_SHARE,
    SYNC_SECONDS,
    Prediction,
    named_bottleneck,
    shortened,
)
from pipelinerl_core.planning.simulator import Work, simulate
from pipelinerl_core.planning.speeds import Line, MeasuredSpeeds
from pipelinerl_core.report.advice import mean_delay_seconds
from pipelinerl_core.report.facts import RunFacts
from pipelinerl_core.report.utilization import (
    actor_use,
    pause_seconds,
    stretches,
    trainer_idle_fraction,
    wait_seconds,
)
from pipelinerl_core.run.records import Commit

_WIDE = 1.5
"""Ratio of the largest to the smallest observed load from which the fixed part of a time can be told apart."""
_CAUSES = ("engine", "window", "stale_wait")
_CORRECTIONS = 2
"""Simulations of the recorded settings that correct the time of a decode step."""
_MANY_GROUPS = 65_536
"""Recorded groups of which all steps are read; of more, every second, third, ... step."""
_FULL = 0.95
"""Share of the usable slots from which a simulated engine is always busy."""

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class EssAtLag:
    """Recorded steps of about the same mean lag."""

    lag: int
    """Mean lag of the trained tokens of a step, rounded."""
    steps: int
    ess: float
    """Mean `importance/ess` of these steps."""
    ess_sequence: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A recorded run: its configuration, its speeds and work, and what was measured."""

    config: RunConfig
    speeds: MeasuredSpeeds
    work: Work
    measured: Prediction | None = None
    cores: int = 0
    """Cores of the machine if engines and trainer computed on the CPU; 0: accelerators, or unknown."""
    origin: str = ""
    """Where the figures were measured."""
    ess_by_lag: tuple[EssAtLag, ...] = ()
    """Effective sample sizes of the recorded steps, by increasing lag."""
    other_speeds: MeasuredSpeeds | None = None
    """Speeds if engines and trainer compute at the same time and took turns in the recorded run, or the other way
    round; None: not measured, assumed equal."""

    def speeds_of(self, config: RunConfig) -> MeasuredSpeeds:
        """See `Source`: engines and trainer that compute at the same time share the cores."""
        speeds, takes_turns = self.speeds, self.config.takes_turns
        if self.other_speeds is not None and config.takes_turns != takes_turns:
            speeds, takes_turns = self.other_speeds, config.takes_turns
        measured = _crowding(self.config, self.cores, takes_turns=takes_turns)
        factor = _crowding(config, self.cores, takes_turns=config.takes_turns) / measured
        share = self.config.trainer.ranks / config.trainer.ranks
        return MeasuredSpeeds(decode=speeds.decode.times(factor), train=speeds.train.times(factor * share))

    def work_of(self, config: RunConfig) -> Work:
        return replace(self.work, lengths=self.work.lengths.scaled(1.0, config.rollouts.max_tokens))

    def sources_of(self, config: RunConfig) -> dict[str, str]:
        return dict.fromkeys(INPUTS, f"measured: {self.origin}")

    def warnings_of(self, config: RunConfig) -> list[str]:
        warnings = ["evaluations"]
        decode, slots = self.speeds.decode, config.engine.concurrency
        if slots > _WIDE * decode.highest:
            warnings.append(
                f"the time of a decode step of {slots} sequences (engine.concurrency), which is extrapolated: at "
                f"most {decode.highest:.0f} ran at once"
            )
        if config.placement.actors > self.config.placement.actors and not self.cores:
            warnings.append("a limit of cores or accelerators: each further actor is as fast as the recorded ones")
        changed = [name for name, value in _speed_settings(config).items()
                   if value != _speed_settings(self.config)[name]]  # fmt: skip
        if changed:
            warnings.append(f"{', '.join(changed)}, which the recorded run had otherwise: the speeds are its own")
        return warnings


def _speed_settings(config: RunConfig) -> dict[str, object]:
    """Settings on which speeds depend, and which no factor takes into account."""
    engine, learner, loss = config.engine, config.learner, config.loss
    return {
        "model.path": config.model.path, "learner.kind": learner.kind, "learner.lora_rank": learner.lora_rank,
        "engine.kind": engine.kind, "engine.tensor_parallel": getattr(engine, "tensor_parallel", 1),
        "engine.data_parallel": getattr(engine, "data_parallel", 1), "loss.teacher": loss.teacher,
        "loss.kl_coefficient": loss.kl_coefficient,
    }  # fmt: skip


def _row_tokens(commit: Commit) -> float:
    """Tokens of all rollouts of a step, prompts included. In runs from before rollout/prompt_mean, the rollouts that
    were not computed count as the others."""
    metrics = commit.metrics
    share = metrics.get("train/computed_fraction") or 1.0
    if "rollout/prompt_mean" in metrics and "rollout/length_mean" in metrics:
        num_rollouts = metrics.get("train/rollouts", 0.0) / share
        return num_rollouts * (metrics["rollout/prompt_mean"] + metrics["rollout/length_mean"])
    return metrics.get("train/tokens", 0.0) / share


def calibrate(facts: RunFacts, *others: RunFacts, cores: int = 0) -> Calibration:
    """Speeds and work of a recorded run. Raises ConfigError if the run has too few steps for a measurement.

    others: runs of the same model on the same machines with other loads, from which the fixed part of a decode step
    and of an optimizer step can be told apart.
    """
    config = build_config(facts.run.config)
    commits = facts.trained_commits
    if len(commits) < MIN_STEPS or not facts.steps:
        raise ConfigError(f"{facts.run.run_id}: {len(commits)} steps are too few, at least {MIN_STEPS} are needed")
    skip = max(1, int(START_SHARE * len(commits)))
    kept = commits[skip:]
    steps = [step for step in facts.steps if step.step >= kept[0].step]
    parts = [kept, *(other.trained_commits[1:] for other in others)]
    decode = _decode(*parts)
    if decode is None:
        raise ConfigError(f"{facts.run.run_id}: no actor has reported two samples. Calibrate from a longer run")
    trained = [commit for part in parts for commit in part]
    train = _line(
        np.array([_row_tokens(commit) for commit in trained]),
        np.array([commit.computed_at - commit.reserved_at for commit in trained]),
    )
    lengths = np.concatenate([step.lengths for step in steps])
    every = 1 + sum(len(step.sizes) for step in facts.steps) // _MANY_GROUPS
    groups = [group[group > 0].tolist() for step in facts.steps[::every] for group in step.groups if group.any()]
    if not groups:
        raise ConfigError(f"{facts.run.run_id}: no completion has a token. Calibrate from another run")
    measured = {step.step for step in steps}
    tokens = sum(_row_tokens(commit) for commit in kept if commit.step in measured)
    swaps = [swap.pause_seconds for commit in kept for swap in commit.swaps]
    commit_seconds = float(np.median([commit.committed_at - commit.computed_at for commit in kept]))
    work = Work(
        lengths=Lengths.of_groups(groups),
        prompt_tokens=round(max(0.0, tokens - float(lengths.sum())) / len(lengths)),
        swap_seconds=float(np.mean(swaps)) if swaps else 0.0,
        commit_seconds=commit_seconds,
        publish_seconds=max(0.0, _swap_delay(commits) - commit_seconds),
        fetch_seconds=_fetch_seconds(kept),
        snapshot_seconds=_snapshot_seconds(kept),
        sync_seconds=SYNC_SECONDS,
        arrival_seconds=max(0.0, float(np.mean([step.scoring_seconds for step in steps]))),
        equal_share=_equal_share(kept) if config.rollouts.filter_zero_variance else 0.0,
    )
    figures, speeds = _measured(facts, config, kept), MeasuredSpeeds(decode=decode, train=train)
    speeds, usable = _corrected(shortened(config), speeds, work, kept, figures)
    return Calibration(
        config=config,
        speeds=speeds,
        work=replace(work, usable_slots=usable),
        measured=figures,
        cores=cores,
        origin=facts.run.run_id,
        ess_by_lag=_ess_by_lag(facts),
    )


def _crowding(config: RunConfig, cores: int, *, takes_turns: bool) -> float:
    """Factor by which processes that compute at the same time slow each other down on this many cores."""
    if not cores:
        return 1.0
    busy = config.placement.actors + (0 if takes_turns else config.trainer.ranks)
    return max(1.0, busy * config.placement.threads / cores)


def _corrected(
    config: RunConfig,
    speeds: MeasuredSpeeds,
    work: Work,
    commits: Sequence[Commit],
    figures: Prediction,
) -> tuple[MeasuredSpeeds, float]:
    """(speeds, usable slots): scale the time of a decode step until simulated sequences take as long per token as the
    recorded sequences, and the slots until as many are in use.

    The load of a sample is a mean over time. If few sequences run at the end of a phase, this mean is not the load
    of most decode steps. Slots of a recorded engine are empty for moments even if the engine always has work: if the
    engine is paced or limits the run, and is never idle in the simulation.
    """
    measured, usable = _seconds_per_token(commits), 1.0
    has_work = config.paces_engines or figures.bottleneck == "generation"
    for _ in range(_CORRECTIONS if measured else 0):
        run = simulate(config, speeds, replace(work, usable_slots=usable))
        if has_work and run.busy_slots > _FULL * usable:
            usable = min(1.0, figures.busy_slots)
        speeds = replace(speeds, decode=speeds.decode.times(measured / run.seconds_per_token))
    return speeds, usable


def _seconds_per_token(commits: Sequence[Commit]) -> float:
    """Time of running sequences per sampled token, without the pauses of paced engines; 0 without samples."""
    busy, tokens = 0.0, 0
    for before, now in pairwise(commits):
        for name, sample in now.actors.items():
            if (earlier := before.actors.get(name)) is not None and sample.num_sampled > earlier.num_sampled:
                sampled = sample.num_sampled - earlier.num_sampled
                busy += sample.running_seconds - earlier.running_seconds - sampled * pause_seconds(earlier, sample)
                tokens += sampled
    return busy / tokens if tokens else 0.0


def _decode(*runs: Sequence[Commit]) -> Line | None:
    """Time of a decode step: running sequences over tokens per second, between two samples of an actor."""
    loads, seconds = [], []
    for before, now in (pair for commits in runs for pair in pairwise(commits)):
        for name, sample in now.actors.items():
            earlier = before.actors.get(name)
            tokens = sample.num_sampled - earlier.num_sampled if earlier else 0
            if earlier is None or tokens <= 0 or sample.at <= earlier.at:
                continue
            busy = sample.running_seconds - earlier.running_seconds - _paused_seconds(now, name)
            if busy <= 0:
                continue
            loads.append(busy / (sample.at - earlier.at))
            seconds.append(max(0.1 * busy / tokens, busy / tokens - pause_seconds(earlier, sample)))
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


def _swap_delay(commits: Sequence[Commit]) -> float:
    """Median time from the end of a step to the swap of its version."""
    computed = {commit.step: commit.computed_at for commit in commits}
    times = [
        swap.at - computed[swap.version]
        for commit in commits
        for swap in commit.swaps
        if swap.version in computed and swap.at >= computed[swap.version]
    ]
    return float(np.median(times)) if times else 0.0


def _fetch_seconds(commits: Sequence[Commit]) -> float:
    """Median wait of the trainer for which the hub has no cause: messages and rows."""
    times = []
    for before, now in pairwise(commits):
        caused = sum(now.waits.get(name, 0.0) - before.waits.get(name, 0.0) for name in _CAUSES)
        times.append(max(0.0, wait_seconds(now, before) - caused))
    return float(np.median(times)) if times and commits[-1].waits else 0.0


def _snapshot_seconds(commits: Sequence[Commit]) -> float:
    """Median time from the end of a step to the request for the next groups."""
    times = [
        now.reserved_at - wait_seconds(now, before) - before.computed_at
        for before, now in pairwise(commits)
        if before.epoch == now.epoch
    ]
    return max(0.0, float(np.median(times))) if times else 0.0


def _equal_share(commits: Sequence[Commit]) -> float:
    """Share of the tokens in groups that were filtered."""
    first, last = commits[0].tokens, commits[-1].tokens
    grown = {name: last.get(name, 0) - first.get(name, 0) for name in ("filtered", "trained")}
    return grown["filtered"] / sum(grown.values()) if sum(grown.values()) else 0.0


def _ess_by_lag(facts: RunFacts) -> tuple[EssAtLag, ...]:
    """Effective sample sizes of all steps; nothing is extrapolated, because no law of ESS over lag is known."""
    sizes: dict[int, list[tuple[float, float]]] = {}
    for step in facts.steps:
        metrics, num_tokens = facts.commits[step.step].metrics, int(step.lags.sum())
        if num_tokens and "importance/ess" in metrics and "importance/ess_sequence" in metrics:
            lag = round(float(step.lags @ np.arange(len(step.lags))) / num_tokens)
            sizes.setdefault(lag, []).append((metrics["importance/ess"], metrics["importance/ess_sequence"]))
    means = {lag: np.mean(values, axis=0).tolist() for lag, values in sorted(sizes.items())}
    return tuple(EssAtLag(lag, len(sizes[lag]), *mean) for lag, mean in means.items())


def _measured(facts: RunFacts, config: RunConfig, commits: Sequence[Commit]) -> Prediction:
    numbers = {commit.step for commit in commits}
    lags = [step.lags for step in facts.steps if step.step in numbers]
    parts, idle, use = stretches(commits), trainer_idle_fraction(commits), actor_use(commits)
    num_steps = sum(len(part) - 1 for part in parts)
    if not num_steps or idle is None or use is None:
        raise ConfigError(f"{facts.run.run_id}: no two steps in a row were measured. Calibrate from a longer run")
    # To the end of the last step: its commit has the last checkpoint, which in a short run is a large part.
    seconds = sum(part[-1].computed_at - part[0].computed_at for part in parts)
    busy_slots = 1 - use.idle_fraction
    return Prediction(
        steps_per_second=num_steps / seconds,
        mean_lag=sum(float((lag * np.arange(len(lag))).sum()) for lag in lags)
        / max(1, sum(int(lag.sum()) for lag in lags)),
        trainer_idle=idle,
        busy_slots=busy_slots,
        bottleneck=named_bottleneck(
            config, trainer_idle=idle, busy_slots=busy_slots, delay_seconds=mean_delay_seconds(commits)
        ),
    )
