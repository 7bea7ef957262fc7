"""Every metric of a run, declared once; `python -m pipelinerl_core.tracking.metrics` prints docs/metrics.md.

A metric without a value at some step (no scored rollout, not a finite number) is left out there: it is never NaN.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pipelinerl_core.tracking import measures, prometheus, role_metrics
from pipelinerl_core.types import Outcome, StepStats, TrainingRow

Writer = Literal["trainer", "tracker", "system"]


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """What one metric means."""

    key: str
    unit: str
    reduction: str
    """What is reduced, and how, to the one number of a step."""
    sentence: str
    writer: Writer = "trainer"
    """trainer: part of the commit of the step; tracker: derived from commits and evaluations; system: of the machine,
    its key may hold a <role> or <index>."""


_ROLE_SENTENCE = "<role>: flow, hub, trainer, an actor's name or evaluator, with all processes below it."
_SYSTEM = (
    ("cpu_utilization_percentage", "%", "mean", "All cores of the host together."),
    ("system_memory_usage_megabytes", "MB", "value", "Of the host."),
    ("system_memory_usage_percentage", "%", "value", "Of the host."),
    ("<role>/cpu_utilization_percentage", "% of a core", "mean", _ROLE_SENTENCE),
    ("<role>/memory_usage_megabytes", "MB", "sum", "Resident; pages that processes share are counted in each."),
    ("gpu_<index>_utilization_percentage", "%", "value", "As nvidia-smi says."),
    ("gpu_<index>_memory_usage_megabytes", "MB", "value", "As nvidia-smi says."),
    ("gpu_<index>_memory_usage_percentage", "%", "value", "As nvidia-smi says."),
    ("gpu_<index>_power_usage_watts", "W", "value", "As nvidia-smi says."),
)

_LENGTH_SENTENCES = {
    "generated": "Length of the completions that the tokens which arrived come from; tokens in flight have none yet.",
    "trained": "The same for trained tokens; about the same number where no length is favoured.",
    "masked": "The same for tokens that the lag rule masked.",
    "dropped": "The same for tokens of groups given up by the lag rule.",
}


def _length_specs() -> list[MetricSpec]:
    specs = [
        MetricSpec(
            "length/bias",
            "ratio",
            "mean length of trained over generated tokens",
            "Below 1 long completions are lost on the way to the trainer. One step is noisy; the report has the run.",
            "tracker",
        )
    ]
    since = "tokens booked since the reservation before"
    for word, sentence in _LENGTH_SENTENCES.items():
        specs.append(MetricSpec(f"length/mean_{word}", "tokens", f"mean over {since}", sentence, "tracker"))
        for third in ("first", "last"):
            text = f"In the {third} third of their completion; a third of the tokens where no part is favoured."
            specs.append(MetricSpec(f"length/{third}_third_{word}", "share", f"share of {since}", text, "tracker"))
    return specs


_DIFFERENCE_SENTENCES = {
    "mismatch": "Tokens of lag 0 in rollouts without older tokens: the same weights, but engine and trainer differ.",
    "stale_kv": "Tokens of lag 0 after older ones of their rollout: mismatch, and with engine.kv=keep what comes of "
    "keys and values that older weights computed.",
    "staleness": "Tokens of lag 1 and more: mismatch, stale keys and values, and how far the policy moved since.",
}


def _difference_specs() -> list[MetricSpec]:
    specs = []
    for cause, sentence in _DIFFERENCE_SENTENCES.items():
        size = f"How far trainer and rollout log-probability are apart. {sentence}"
        specs.append(MetricSpec(f"{cause}/abs", "nats", "mean over such trained tokens", size))
        signed = "As importance/kl, which is the mean over all three kinds of token."
        specs.append(MetricSpec(f"{cause}/kl", "nats", "mean over the same tokens", signed))
    return specs


_DECLARED = (
    MetricSpec("reward/mean", "reward", "mean over scored rollouts", "Training reward of the step."),
    MetricSpec("reward/std", "reward", "population standard deviation over scored rollouts", "Spread of the reward."),
    MetricSpec("rollout/length_mean", "tokens", "mean over rollouts", "Completion length."),
    MetricSpec(
        "rollout/length_p995",
        "tokens",
        "99.5th percentile over rollouts",
        "Length of the longest completions; generate-then-train would wait for these.",
    ),
    MetricSpec(
        "lag/mean",
        "optimizer steps",
        "mean over trained tokens",
        "Age of the trained tokens: step n trains a token of version v at lag n - 1 - v. Tokens beyond "
        "schedule.max_lag are masked and not counted.",
    ),
    MetricSpec("lag/p99", "optimizer steps", "99th percentile over trained tokens", "Age of the oldest tokens."),
    MetricSpec("lag/max", "optimizer steps", "maximum over trained tokens", "Never above schedule.max_lag."),
    MetricSpec(
        "importance/ess",
        "share",
        "(sum w)^2 / (n sum w^2) over sampled tokens",
        "Effective sample size of the untruncated token ratios: 1 is on-policy.",
    ),
    MetricSpec("importance/ess_sequence", "share", "the same over rollouts", "A rollout's ratio is the product."),
    MetricSpec("importance/ratio_mean", "ratio", "mean over trained tokens", "Trainer over rollout probability."),
    MetricSpec(
        "importance/ratio_clipped_fraction",
        "share",
        "mean over trained tokens",
        "Tokens whose ratio the loss has truncated, clipped or refused.",
    ),
    MetricSpec(
        "importance/kl",
        "nats",
        "mean over trained tokens",
        "Rollout log-probability minus trainer log-probability: how far the policy moved since sampling (k1).",
    ),
    *_difference_specs(),
    MetricSpec("policy/entropy", "nats", "mean over sampled tokens", "Entropy of the trainer's distribution."),
    MetricSpec("policy/value_error", "1", "mean over trained tokens", "Squared error of the value head, if any."),
    MetricSpec("policy/kl_ref", "nats", "mean over trained tokens", "Divergence from loss.ref_model, if any (k3)."),
    MetricSpec("train/loss", "loss", "sum of loss_weight * loss over tokens", "The objective of the step."),
    MetricSpec("train/grad_norm", "norm", "global norm", "Before clipping."),
    MetricSpec("train/learning_rate", "rate", "value", "Learning rate of the step."),
    MetricSpec("train/tokens", "tokens", "sum", "Tokens of the forward pass, prompts included."),
    MetricSpec("train/trained_tokens", "tokens", "sum", "Completion tokens with a gradient."),
    MetricSpec("train/masked_stale_tokens", "tokens", "sum", "Sampled tokens that the lag rule masked."),
    MetricSpec("train/pack_fill", "share", "used over budget of the packs", "How full the forward passes were."),
    MetricSpec("train/num_packs", "packs", "count", "Forward passes of the step."),
    MetricSpec("time/compute_seconds", "seconds", "value", "Forward, backward and optimizer."),
    MetricSpec("time/reserve_wait_seconds", "seconds", "value", "How long the trainer waited for its groups."),
    MetricSpec("time/cpu_seconds", "seconds", "running total", "CPU time of the trainer's process."),
    MetricSpec(
        "time/commit_seconds", "seconds", "value", "From the end of compute to the commit: uploads and publication."
    ),
    MetricSpec(
        "rollouts/multi_version_fraction",
        "share",
        "mean over rollouts",
        "Rollouts whose tokens were sampled by two or more weight versions.",
    ),
    MetricSpec("rollouts/max_versions", "versions", "maximum over rollouts", "Most versions in one rollout."),
    MetricSpec(
        "rollouts/error_fraction",
        "share",
        "errors over all rollouts of the step's groups",
        "Rollouts that could not be scored; they have no reward and are not trained.",
    ),
    MetricSpec("progress/samples", "rollouts", "running total", "Rollouts trained so far; an x axis."),
    MetricSpec("progress/tokens", "tokens", "running total", "Completion tokens of these; an x axis."),
    MetricSpec("progress/seconds", "seconds", "value", "Wall clock since the run began; an x axis."),
    MetricSpec(
        "actor/running_mean",
        "sequences",
        "mean over the time between two reservations, summed over actors",
        "Sequences in flight.",
        "tracker",
    ),
    MetricSpec(
        "actor/tokens_per_second",
        "tokens/s",
        "tokens over the time between two reservations, summed over actors",
        "Speed of generation.",
        "tracker",
    ),
    MetricSpec(
        "swap/pause_seconds_max",
        "seconds",
        "maximum over the swaps reported since the commit before",
        "Longest time that an engine sampled nothing because of a swap.",
        "tracker",
    ),
    MetricSpec("weights/published_seconds", "seconds", "value", "Serialising and publishing the version."),
    MetricSpec(
        "weights/live_min",
        "version",
        "minimum over actors",
        "Oldest version that sampled at the reservation.",
        "tracker",
    ),
    MetricSpec(
        "weights/live_max",
        "version",
        "maximum over actors",
        "Newest version that sampled at the reservation.",
        "tracker",
    ),
    MetricSpec("weights/bytes", "bytes", "sum over files", "Size of the published version."),
    MetricSpec("tokens/generated", "tokens", "running total", "Completion tokens that actors sampled.", "tracker"),
    MetricSpec(
        "tokens/trained", "tokens", "running total", "Of these, with a gradient in a committed step.", "tracker"
    ),
    MetricSpec(
        "tokens/masked_stale", "tokens", "running total", "Masked by the lag rule in a trained group.", "tracker"
    ),
    MetricSpec("tokens/dropped_stale", "tokens", "running total", "In groups given up by the lag rule.", "tracker"),
    MetricSpec("tokens/filtered", "tokens", "running total", "In groups whose rewards were all equal.", "tracker"),
    MetricSpec("tokens/failed", "tokens", "running total", "In groups that could not be scored.", "tracker"),
    MetricSpec("tokens/superseded", "tokens", "running total", "Sampled again by a later attempt.", "tracker"),
    MetricSpec("tokens/in_flight", "tokens", "value", "In groups that are not finished.", "tracker"),
    MetricSpec("tokens/ready", "tokens", "value", "In finished groups that no commit has taken.", "tracker"),
    *_length_specs(),
    MetricSpec(
        "wait/engine_seconds",
        "seconds",
        "sum since the reservation before",
        "The trainer waited for groups that were being generated.",
        "tracker",
    ),
    MetricSpec(
        "wait/window_seconds",
        "seconds",
        "sum since the reservation before",
        "The trainer waited while slots stood empty that the schedule had no place for (weighted by their share).",
        "tracker",
    ),
    MetricSpec(
        "wait/stale_wait_seconds",
        "seconds",
        "sum since the reservation before",
        "Enough groups were ready, but schedule.stale=wait held the step back.",
        "tracker",
    ),
    MetricSpec(
        "wait/actors_seconds",
        "seconds",
        "sum over actors since the reservation before",
        "Engine time lost to slots that stood empty because no group was granted.",
        "tracker",
    ),
    MetricSpec(
        "eval/accuracy", "reward", "mean over held-out prompts", "One sample each; step = version.", "tracker"
    ),
    MetricSpec("eval/mean_tokens", "tokens", "mean over held-out prompts", "Length of the answers.", "tracker"),
    *(MetricSpec(f"system/{key}", unit, how, text, "system") for key, unit, how, text in _SYSTEM),
)

METRICS: dict[str, MetricSpec] = {spec.key: spec for spec in _DECLARED}


def step_metrics(
    stats: StepStats,
    rows: Sequence[TrainingRow],
    *,
    masked_stale: int,
    num_errors: int,
    reserve_wait_seconds: float,
    samples: int,
    tokens: int,
    seconds: float,
) -> dict[str, float]:
    """The metrics of a step that the trainer knows when it has computed it; the commit adds time/commit_seconds.

    `rows` are all rows of the step, `masked_stale` the sampled tokens that the lag rule masked in them, `num_errors`
    the rollouts of its groups without a reward. `samples` and `tokens` are running totals with this step, `seconds`
    the time since the run began.
    """
    scored = [row.rollout.reward for row in rows if row.rollout.outcome is Outcome.SCORED]
    rewards = np.array(scored, dtype=np.float64)
    lengths = np.array([row.rollout.num_tokens for row in rows], dtype=np.float64)
    versions = np.array([measures.num_versions(row.rollout.weight_spans) for row in rows])
    lags_L = measures.lag_counts(
        stats.step, (measures.tokens_by_version(row.rollout.weight_spans, row.loss_mask) for row in rows)
    )
    values = {
        "reward/mean": _mean(rewards),
        "reward/std": float(rewards.std()) if len(rewards) else None,
        "rollout/length_mean": _mean(lengths),
        "rollout/length_p995": measures.percentile(lengths, 99.5),
        "lag/mean": measures.mean_of_counts(lags_L),
        "lag/p99": measures.quantile_of_counts(lags_L, 0.99),
        "lag/max": measures.max_of_counts(lags_L),
        "train/trained_tokens": int(lags_L.sum()),
        "train/masked_stale_tokens": masked_stale,
        "time/reserve_wait_seconds": reserve_wait_seconds,
        "rollouts/multi_version_fraction": _mean(versions >= 2),
        "rollouts/max_versions": int(versions.max()) if len(versions) else None,
        "rollouts/error_fraction": num_errors / (len(rows) + num_errors) if len(rows) + num_errors else None,
        "progress/samples": samples,
        "progress/tokens": tokens,
        "progress/seconds": seconds,
    }
    return finite({**_learner_metrics(stats), **values})


def finite(values: Mapping[str, float | int | None]) -> dict[str, float]:
    """Only what is a finite number, as floats: JSON and MLflow have no NaN."""
    return {key: float(value) for key, value in values.items() if value is not None and math.isfinite(value)}


def _learner_metrics(stats: StepStats) -> dict[str, float | None]:
    return {
        "importance/ess": stats.ess,
        "importance/ess_sequence": stats.ess_sequence,
        "importance/ratio_mean": stats.ratio_mean,
        "importance/ratio_clipped_fraction": stats.ratio_clipped_fraction,
        "importance/kl": stats.kl,
        "mismatch/abs": stats.mismatch_abs,
        "mismatch/kl": stats.mismatch_kl,
        "stale_kv/abs": stats.stale_kv_abs,
        "stale_kv/kl": stats.stale_kv_kl,
        "staleness/abs": stats.staleness_abs,
        "staleness/kl": stats.staleness_kl,
        "policy/entropy": stats.entropy,
        "policy/kl_ref": stats.kl_ref,
        "policy/value_error": stats.value_error,
        "train/loss": stats.loss,
        "train/grad_norm": stats.grad_norm,
        "train/learning_rate": stats.learning_rate,
        "train/tokens": stats.num_tokens,
        "train/pack_fill": stats.pack_fill,
        "train/num_packs": stats.num_packs,
        "time/compute_seconds": stats.compute_seconds,
    }


def _mean(values: NDArray[Any]) -> float | None:
    return float(values.mean()) if len(values) else None


def as_markdown() -> str:
    """docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Generated by `python -m pipelinerl_core.tracking.metrics > docs/metrics.md`; edit the declarations there.",
        "Every metric is logged at step = optimizer step = weight version. A metric without a value is left out.",
        "A chart's x axis in MLflow can be a metric: `progress/samples`, `progress/tokens` or `progress/seconds`.",
    ]
    titles = {
        "trainer": "In the commit of every step (and in MLflow)",
        "tracker": "Derived from commits and evaluations (MLflow only)",
        "system": "Of the host of the flow, every 10 s, at step = seconds since the run began (MLflow only)",
    }
    for writer, title in titles.items():
        lines += ["", f"## {title}", "", "| key | unit | reduction | meaning |", "| --- | --- | --- | --- |"]
        lines += [
            f"| `{spec.key}` | {spec.unit} | {spec.reduction} | {spec.sentence} |"
            for spec in METRICS.values()
            if spec.writer == writer
        ]
    lines += ["", "## For Prometheus", ""]
    lines += ["From the page of a run (`pipelinerl status --web`, /metrics), with the label `run`:", ""]
    lines += ["| name | label | meaning |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | {label} | {text} |" for name, label, text in prometheus.described()]
    lines += ["", "From each role (its own /metrics); Prometheus knows run, role and name from /targets.json:", ""]
    return "\n".join([*lines, *role_metrics.as_markdown()]) + "\n"


if __name__ == "__main__":
    sys.stdout.write(as_markdown())
