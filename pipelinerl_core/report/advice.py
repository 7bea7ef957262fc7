"""Finds the bottleneck of a run from its measured waiting times, and advises on settings.

The bottleneck is the side that the other side waits for. The hub measures the causes of the trainer's waiting:

    trainer waits   slots are empty     bottleneck
    little          yes, or paced       trainer
    little          little              balanced
    for engines     any                 engine
    at the window   yes                 window      (W = (max_lag + 1) * groups_per_step groups are outstanding)
    for old groups  any                 stale_wait
    conventional and april              turns       (these schedules wait by design; the advice names the cost)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any, Literal

from pipelinerl_core.config import RunConfig
from pipelinerl_core.config.rules import lag_of_full_engines
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.report.utilization import pause_seconds
from pipelinerl_core.run.records import Commit
from pipelinerl_core.telemetry.length_bias import Lengths, length_bias
from pipelinerl_core.types import LengthTotals

Bottleneck = Literal["trainer", "engine", "window", "stale_wait", "turns", "balanced"]

# A side that waits for at most this share of the time counts as busy.
_BUSY = 0.15
# Mean pause between decode steps above which an engine counts as slowed down by pacing.
_PACED_SECONDS = 0.001
# Share of the waiting at the window from which the window, not the engines, is the bottleneck.
_WINDOW_PART = 1 / 3
# Turns: a loss below this share of the time gets no advice.
_WORTH = 0.05
# Length bias (trained over generated mean length) below which the advice names the loss of long completions.
_BIASED = 0.9
# Share of the tokens of trained groups that the lag rule masks from which the advice names the settings.
_MASKED = 0.1
_NAMED_STEPS = 5
# Share of the trained tokens beyond a bound of the loss from which the advice names the bounds; GSPO's paper: 0.15.
_CLIPPED = 0.2
_CLIPPED_STEPS = 20
# Refused share of the tokens of long rollouts, and its multiple of the share of short ones, that the advice names.
_REFUSED = 0.05
_UNEVEN = 3.0
_KL_START = "policy/kl_start"
# Divergence per token up to which a policy counts as not moved, and the steps after which the advice says so. Twenty
# steps of AdamW with a rate of 1e-6 give 1e-5 and more.
_UNMOVED = 1e-7
_UNMOVED_STEPS = 5
_BOUNDS = ("clip_low", "clip_high", "ratio_min", "ratio_max", "divergence_max", "sequence_ratio_max",
           "negative_kl_max")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Measurements of a run; shares are of the span (utilization.py)."""

    trainer_idle: float
    """Share of the time that the trainer waited for groups."""
    actor_idle: float
    """Share of the slots that were empty."""
    delay_seconds: float = 0.0
    """Mean pause between two decode steps with which the engines keep the trainer's pace."""
    waits: Mapping[str, float] = field(default_factory=dict)
    """Cause -> share (utilization.wait_shares); empty if the hub did not measure causes."""
    spread: float | None = None
    """Longest over mean completion length, mean over groups."""


def mean_delay_seconds(commits: Sequence[Commit]) -> float:
    """Mean pause between two decode steps with which the actors keep the trainer's pace, weighted by tokens."""
    paused, num_tokens = 0.0, 0
    for before, now in pairwise(commits):
        for name, sample in now.actors.items():
            if (earlier := before.actors.get(name)) is not None:
                tokens = max(0, sample.num_sampled - earlier.num_sampled)
                paused, num_tokens = paused + tokens * pause_seconds(earlier, sample), num_tokens + tokens
    return paused / num_tokens if num_tokens else 0.0


def advice(evidence: Evidence | None, lengths: Lengths, config: Mapping[str, Any]) -> dict[str, str | None]:
    """{"bottleneck", "advice"} for report.json.

    Both are None if the run was too short (evidence None) or its configuration cannot be read.
    """
    run = _read(config)
    if evidence is None or run is None:
        return {"bottleneck": None, "advice": None}
    kind = bottleneck(evidence, takes_turns=run.takes_turns)
    sentences = [_ADVICE[kind](evidence, run), _length_advice(lengths, run), _masked_advice(lengths, run)]
    return {"bottleneck": kind, "advice": " ".join(filter(None, sentences))}


def quarantine_advice(commits: Sequence[Commit]) -> str:
    """The quarantined tokens, and where to look for the cause; empty without such tokens."""
    num_tokens = commits[-1].tokens.get("quarantined", 0) if commits else 0
    if not num_tokens:
        return ""
    steps = [commit.step for commit in commits if commit.metrics.get("train/quarantined_groups")]
    where = f" at step {', '.join(map(str, steps[:_NAMED_STEPS]))}{', ...' if len(steps) > _NAMED_STEPS else ''}"
    return (
        f"Loss or gradient was not finite{where if steps else ''}: {num_tokens:,} tokens were quarantined and other "
        "groups were trained. Their rows are in quarantined/. In the next run, set learner.lr or learner.clip_norm "
        "lower."
    )


def unmoved_advice(commits: Sequence[Commit], config: Mapping[str, Any]) -> str:
    """That the policy is still that of version 0, and the key to change; empty if it has moved or is not measured."""
    measured = [(commit.step, commit.metrics[_KL_START]) for commit in commits if _KL_START in commit.metrics]
    learner = config.get("learner", {})
    least = _UNMOVED_STEPS + int(learner.get("warmup_steps", 0))
    if not measured or measured[-1][0] < least or measured[-1][1] > _UNMOVED:
        return ""
    step, divergence = measured[-1]
    return (
        f"The policy has not moved: after {step} steps its divergence from version 0 is {divergence:.1g} nats per "
        f"token ({_KL_START}). Set learner.lr higher (now {learner.get('lr', '?')})."
    )


def refused_advice(commits: Sequence[Commit], config: Mapping[str, Any]) -> str:
    """How many more tokens of long than of short rollouts the newest steps refuse, and the keys, without a full stop;
    empty if the shares are similar or small."""
    names = ("train/long_refused_fraction", "train/short_refused_fraction", "lag/long_mean", "lag/short_mean")
    means, run = [_newest_mean(commits, name) for name in names], _read(config)
    known = [mean for mean in means if mean is not None]
    if run is None or len(known) < len(names) or known[0] < max(_REFUSED, _UNEVEN * known[1]):
        return ""
    long, short, long_lag, short_lag = known
    wider = f"{_bounds(run)} wider, or " if _bounds(run) else ""
    return (
        f"the lag rule or a bound of the loss refuses {long:.0%} of the tokens of long rollouts and {short:.0%} of "
        f"short ones, so the run learns from short ones (mean lag {long_lag:.1f} and {short_lag:.1f} steps). Set "
        f"{wider}schedule.max_lag higher (now {run.schedule.max_lag}) if train/masked_stale_tokens is above 0"
    )


def clipped_advice(commits: Sequence[Commit], config: Mapping[str, Any]) -> str:
    """The share of the tokens of the newest steps that the bounds of the loss cut, and the keys of the bounds,
    without a full stop; empty if the share is small."""
    key, run = "importance/ratio_clipped_fraction", _read(config)
    share = _newest_mean(commits, key)
    if run is None or share is None or share <= _CLIPPED:
        return ""
    bounds = f"wider bounds, {_bounds(run)}, until the share is a few percent, or " if _bounds(run) else ""
    return (
        f"{share:.0%} of the trained tokens are beyond a bound of loss.kind={run.loss.kind} ({key}), where they have "
        f"no or a smaller gradient. Set {bounds}schedule.max_lag lower (now {run.schedule.max_lag})"
    )


def _bounds(run: RunConfig) -> str:
    """Example: loss.clip_low (now 0.2), loss.clip_high (now 0.2)."""
    loss = run.loss
    return ", ".join(f"loss.{name} (now {getattr(loss, name):g})" for name in _BOUNDS if getattr(loss, name, 0))


def _newest_mean(commits: Sequence[Commit], name: str) -> float | None:
    """Mean of a metric over the newest steps that have it."""
    values = [commit.metrics[name] for commit in commits[-_CLIPPED_STEPS:] if name in commit.metrics]
    return fmean(values) if values else None


def bottleneck(evidence: Evidence, *, takes_turns: bool) -> Bottleneck:
    """The bottleneck by the table of this module."""
    if takes_turns:
        return "turns"
    if evidence.trainer_idle <= _BUSY:
        held_back = evidence.actor_idle > _BUSY or evidence.delay_seconds > _PACED_SECONDS
        return "trainer" if held_back else "balanced"
    causes = {cause: evidence.waits.get(cause, 0.0) for cause in ("engine", "window", "stale_wait")}
    total = sum(causes.values())
    if not total:  # not measured
        return "window" if evidence.actor_idle > _BUSY else "engine"
    if causes["stale_wait"] > total / 2:
        return "stale_wait"
    return "window" if causes["window"] >= _WINDOW_PART * (causes["engine"] + causes["window"]) else "engine"


def _trainer(evidence: Evidence, run: RunConfig) -> str:
    text = f"The trainer is the bottleneck: {_waited(evidence)}"
    if evidence.delay_seconds > _PACED_SECONDS:
        text += (
            f", and the engines paused {evidence.delay_seconds * 1e3:.1f} ms after each decode step to wait for it"
        )
    text += ". More actors do not speed up the run; a faster trainer does"
    if evidence.actor_idle > _BUSY:
        text += f", up to {1 / max(0.01, 1 - evidence.actor_idle):.1f} times as fast"
    actors = run.placement.actors
    fewer = math.ceil(actors * (1 - evidence.actor_idle))
    return f"{text}. {_set('placement.actors', fewer, actors)} is enough." if 0 < fewer < actors else f"{text}."


def _engine(evidence: Evidence, run: RunConfig) -> str:
    actors, faster = run.placement.actors, 1 / max(0.01, 1 - evidence.trainer_idle)
    more = max(actors + 1, math.ceil(actors * faster))
    wider = run.model_copy(update={"placement": run.placement.model_copy(update={"actors": more})})
    lag = lag_of_full_engines(wider, evidence.spread or 1.0)
    window = f" with {_set('schedule.max_lag', lag, run.schedule.max_lag)}" if lag > run.schedule.max_lag else ""
    return (
        f"Generation is the bottleneck: {_waited(evidence)}. The trainer would be busy all the time with "
        f"generation {faster:.1f} times as fast: set {_set('placement.actors', more, actors)}{window} if there are "
        f"cores for them, or raise engine.concurrency (now {run.engine.concurrency})."
    )


def _window(evidence: Evidence, run: RunConfig) -> str:
    spread, rules = evidence.spread or 1.0, run.schedule
    text = f"The admission window is the bottleneck: {_waited(evidence)}. "
    lag = lag_of_full_engines(run, spread)
    if lag > rules.max_lag:
        return (
            f"{text}Set {_set('schedule.max_lag', lag, rules.max_lag)}: {_lag_arithmetic(run, spread)}. Or lower "
            f"engine.concurrency (now {run.engine.concurrency})."
        )
    if run.environment.path:
        key = run.environment.width_key
        now = getattr(run.environment, key)
        return (
            f"{text}schedule.max_lag={rules.max_lag} is enough for full engines, so the episodes of the window "
            f"wait for their environment. Set {_set(f'environment.{key}', 2 * now, now)} if cores are idle, or make "
            "the environment faster."
        )
    pace = "" if run.engine.pace else "engine.pace=true, or "
    return (
        f"{text}schedule.max_lag={rules.max_lag} is enough for full engines ({_lag_arithmetic(run, spread)} = {lag})"
        f", so finished groups that arrived in bursts filled the window. Set {pace}"
        f"{_set('schedule.max_lag', rules.max_lag + 1, rules.max_lag)}."
    )


def _stale_wait(evidence: Evidence, run: RunConfig) -> str:
    lag = max(lag_of_full_engines(run, evidence.spread or 1.0), run.schedule.max_lag + 1)
    return (
        f"Waiting for old groups is the bottleneck: {_waited(evidence)}. Set "
        f"{_set('schedule.max_lag', lag, run.schedule.max_lag)}, or schedule.stale=mask to train without their "
        "oldest tokens."
    )


def _balanced(evidence: Evidence, run: RunConfig) -> str:
    return f"Trainer and engines are both busy: {_waited(evidence)}."


def _turns(evidence: Evidence, run: RunConfig) -> str:
    tail = evidence.waits.get("window", 0.0)
    # Shares of the time: the engines with full slots, and the trainer.
    bound = 1 / max(evidence.trainer_idle - tail, 1 - evidence.trainer_idle, 0.01)
    help_ = ""
    if tail > _WORTH:
        help_ = _longer_phase(tail, run) if run.schedule.has_phases else _more_groups(tail, evidence, run)
    return (
        f"schedule.kind={run.schedule.kind} takes turns by design: {_waited(evidence)}.{help_} "
        f"schedule.kind=pipeline keeps the slots full and overlaps the turns: at most {bound:.1f} times as fast, "
        "where each side keeps the speed it has in its turn."
    )


def _longer_phase(tail: float, run: RunConfig) -> str:
    steps, max_lag = run.schedule.steps_per_phase, run.schedule.max_lag
    lag = f" with {_set('schedule.max_lag', 2 * steps - 1, max_lag)}" if 2 * steps - 1 > max_lag else ""
    return (
        f" {tail:.0%} of the time was lost to empty slots while the last rollouts of a phase ended; "
        f"{_set('schedule.steps_per_phase', 2 * steps, steps)}{lag} about halves that."
    )


def _more_groups(tail: float, evidence: Evidence, run: RunConfig) -> str:
    rules = run.schedule
    groups = run.rollouts.group_size * run.trainer.groups_per_step
    alpha = 1 + run.engine.concurrency * run.placement.actors * (evidence.spread or 1.0) / groups
    alpha = math.ceil(alpha * 10 - 1e-9) / 10
    text = f" {tail:.0%} of the time was lost to slots that were empty before a step had its groups"
    if alpha <= rules.alpha:
        return f"{text}."
    lag = math.ceil(alpha) - 1
    window = f" with {_set('schedule.max_lag', lag, rules.max_lag)}" if lag > rules.max_lag else ""
    return f"{text}; schedule.alpha={alpha:g} (now {rules.alpha:g}){window} keeps them full."


def _length_advice(lengths: Lengths, run: RunConfig) -> str:
    """Where long completions are lost, and the setting that keeps them; empty without a length bias."""
    bias = length_bias(lengths)
    if bias is None or bias >= _BIASED:
        return ""
    generated = lengths["generated"]
    remedies = {
        "masked_stale": f"schedule.max_lag higher (now {run.schedule.max_lag})",
        "dropped_stale": f"schedule.max_lag higher (now {run.schedule.max_lag}), or schedule.stale=mask",
        "superseded": f"placement.lease_seconds higher (now {run.placement.lease_seconds:g})",
        "failed": f"reward.timeout_seconds higher (now {run.reward.timeout_seconds:g}), and check the reward errors",
        "filtered": "rollouts.filter_zero_variance=false, or easier prompts",
    }
    text = (
        "Trained tokens come from shorter completions than generated ones (mean "
        f"{lengths['trained'].mean_length:.1f} against {generated.mean_length:.1f} tokens, {bias:.2f})"
    )
    mean = generated.mean_length or 0.0
    lost = {
        name: totals for name, totals in lengths.items() if name in remedies and (totals.mean_length or 0.0) > mean
    }
    if not lost:
        return f"{text}: the long completions have not been trained yet."
    worst = max(lost, key=lambda name: lost[name].num_tokens)
    share = lost[worst].num_tokens / generated.num_tokens
    return (
        f"{text}: {share:.0%} of the tokens ended as {worst}, from completions of "
        f"{lost[worst].mean_length:.1f}. Set {remedies[worst]}."
    )


_ADVICE: dict[Bottleneck, Callable[[Evidence, RunConfig], str]] = {
    "trainer": _trainer,
    "engine": _engine,
    "window": _window,
    "stale_wait": _stale_wait,
    "turns": _turns,
    "balanced": _balanced,
}
_CAUSE_TEXTS = {
    "engine": "for the engines",
    "window": "with slots empty for a full window",
    "stale_wait": "for groups that would become stale",
}


def _waited(evidence: Evidence) -> str:
    """Example: the trainer waited 31% of the time (28% for the engines, 3% with slots empty for a full window),
    2% of the slots were empty."""
    parts = [f"{evidence.waits.get(cause, 0.0):.0%} {text}" for cause, text in _CAUSE_TEXTS.items()]
    parts = [part for part in parts if not part.startswith("0%")]
    causes = f" ({', '.join(parts)})" if parts else ""
    return (
        f"the trainer waited {evidence.trainer_idle:.0%} of the time{causes}, {evidence.actor_idle:.0%} of the slots "
        "were empty"
    )


def _lag_arithmetic(run: RunConfig, spread: float) -> str:
    sequences = run.engine.concurrency * run.placement.actors
    step = f"({run.rollouts.group_size} * {run.trainer.groups_per_step})"
    return f"1 + ceil({sequences} sequences * {spread:.1f} longest over mean length / {step})"


def _set(key: str, value: int, now: int) -> str:
    return f"{key}={value} (now {now})"


def _masked_advice(lengths: Lengths, run: RunConfig) -> str:
    """The share of masked tokens, and what lowers it; empty if the share is small.

    The length bias does not show this loss: short rollouts of a group wait for the longest, so their tokens are
    masked too, and the bias may be above 1 while most tokens are lost.
    """
    masked, trained = (lengths.get(name, LengthTotals()).num_tokens for name in ("masked_stale", "trained"))
    if masked <= _MASKED * (masked + trained):
        return ""
    return (
        f"{masked / (masked + trained):.0%} of the tokens of trained groups were masked because of their lag, so the "
        "engines generated them in vain and the gradient is smaller. Set schedule.max_lag higher (now "
        f"{run.schedule.max_lag}), or engine.concurrency lower (now {run.engine.concurrency}), so that rollouts "
        "end earlier."
    )


def _read(config: Mapping[str, Any]) -> RunConfig | None:
    try:
        return build_config(config)
    except ConfigError:
        return None
