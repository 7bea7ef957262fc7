"""The declarations of all metrics of a run; `make docs-reference` writes docs/metrics.md.

Commits and MLflow store a metric under `Metric.name`, Prometheus under `Metric.prometheus`, `status --json` and
`replay --json` under `short_key`.

If a metric has no finite value at a step, the metric is left out at this step; a metric is never NaN.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pipelinerl_core.telemetry import measures
from pipelinerl_core.types import Fate, Outcome, TrainingRow

Group = Literal["trainer", "evaluator", "tracker", "system", "run", "role"]
Kind = Literal["gauge", "counter", "histogram"]

ALL_ROLES = ("hub", "actor", "trainer", "evaluator")
RUN_LABELS = ("name", "owner", "preset")
# Buckets in seconds: a swap or a write to the store takes milliseconds, a step or a wait up to minutes.
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_LAGS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)
# Units that are appended to the Prometheus name.
_UNITS = ("seconds", "bytes", "tokens", "steps", "nats")
# Prefixes that short_key removes.
_WELL_KNOWN = ("importance", "policy", "train", "time", "rollouts")


@dataclass(frozen=True, slots=True)
class Metric:
    """The declaration of one metric."""

    name: str
    """Key in MLflow and in the metrics of a commit, with a slash; in the groups run and role without a slash."""
    unit: str
    reduction: str
    """How the values of a step are reduced to one number."""
    help: str
    group: Group = "trainer"
    """trainer: part of the commit of the step; evaluator: of an evaluation; tracker: derived from commits; system: of
    the machine, with <role> or <index> in the name; run: of a run's status; role: of a process."""
    kind: Kind = "gauge"
    roles: tuple[str, ...] = ()
    """In the group role: the roles that export the metric."""
    labels: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    """All values of the label, if there is a single label and its values are known in advance."""
    buckets: tuple[float, ...] = _SECONDS

    @property
    def prometheus(self) -> str:
        """Name of the exported metric, without the _bucket, _sum and _count of a histogram; empty: not exported."""
        if self.group in ("tracker", "system"):
            return ""
        name, unit = f"pipelinerl_{self.name.replace('/', '_')}", self.unit.rpartition(" ")[2]
        if unit in _UNITS and unit not in name:
            name += f"_{unit}"
        return f"{name}_total" if self.kind == "counter" and not name.endswith("_total") else name

    @property
    def series(self) -> tuple[str, ...]:
        """Names of the exported series."""
        ends = ("_bucket", "_sum", "_count") if self.kind == "histogram" else ("",)
        return tuple(f"{self.prometheus}{end}" for end in ends) if self.prometheus else ()


_ROLE_HELP = "<role>: flow, hub, trainer, evaluator or an actor's name, with all processes below."
_SYSTEM = (
    ("cpu_utilization_percentage", "%", "mean", "All cores of the host together."),
    ("system_memory_usage_megabytes", "MB", "value", "Used memory of the host."),
    ("system_memory_usage_percentage", "%", "value", "Used memory of the host."),
    ("<role>/cpu_utilization_percentage", "% of a core", "mean", _ROLE_HELP),
    ("<role>/memory_usage_megabytes", "MB", "sum", "Resident memory; shared pages count in each process."),
    ("gpu_<index>_utilization_percentage", "%", "value", "As reported by nvidia-smi."),
    ("gpu_<index>_memory_usage_megabytes", "MB", "value", "As reported by nvidia-smi."),
    ("gpu_<index>_memory_usage_percentage", "%", "value", "As reported by nvidia-smi."),
    ("gpu_<index>_power_usage_watts", "W", "value", "As reported by nvidia-smi."),
)

_DIFFERENCE_HELP = {
    "mismatch": "Tokens of lag 0 without older tokens before them: engine and trainer differ.",
    "stale_kv": "Tokens of lag 0 after older tokens: mismatch, and with engine.kv=keep old keys and values.",
    "staleness": "Tokens of lag 1 and more: both of these, and the change of the policy.",
}


def _difference_metrics() -> list[Metric]:
    metrics = []
    for cause, text in _DIFFERENCE_HELP.items():
        size = f"Absolute difference of trainer and rollout log-probability. {text}"
        metrics.append(Metric(f"{cause}/abs", "nats", "mean over such tokens", size))
        signed = "As importance/kl."
        metrics.append(Metric(f"{cause}/kl", "nats", "mean over such tokens", signed))
    return metrics


def _run(name: str, unit: str, help: str, kind: Kind = "gauge", labels: tuple[str, ...] = ()) -> Metric:
    return Metric(name, unit, "value", help, "run", kind, labels=labels)


def _role(
    kind: Kind, name: str, roles: tuple[str, ...], help: str,
    labels: tuple[str, ...] = (), values: tuple[str, ...] = (), buckets: tuple[float, ...] = _SECONDS,
) -> Metric:  # fmt: skip
    return Metric(name, "", "", help, "role", kind, roles, labels, values, buckets)


_ACTOR, _TRAINER, _HUB = ("actor",), ("trainer",), ("hub",)
_OPERATIONS = ("put", "get", "list", "exists", "delete")

_DECLARED = (
    Metric("reward/mean", "reward", "mean over scored rollouts", "Training reward."),
    Metric("reward/std", "reward", "standard deviation over scored rollouts", "Spread of the reward."),
    Metric("rollout/length_mean", "tokens", "mean over rollouts", "Completion length."),
    Metric("rollout/prompt_mean", "tokens", "mean over rollouts", "Prompt length."),
    Metric("rollout/length_p995", "tokens", "99.5th percentile over rollouts",
           "Length of the longest completions."),
    Metric("lag/mean", "optimizer steps", "mean over trained tokens",
           "Step n trains a token of version v at lag n - 1 - v. Masked tokens are not counted."),
    Metric("lag/p99", "optimizer steps", "99th percentile over trained tokens", "Lag of the oldest tokens."),
    Metric("lag/max", "optimizer steps", "maximum over trained tokens", "Never above schedule.max_lag."),
    Metric("lag/short_mean", "optimizer steps", "mean over sampled tokens",
           "Of the shorter half of the step's rollouts."),
    Metric("lag/long_mean", "optimizer steps", "mean over sampled tokens", "Of the longer half."),
    Metric("train/short_refused_fraction", "share", "mean over sampled tokens",
           "Tokens of the shorter half that the lag rule masks, or the loss truncates or clips."),
    Metric("train/long_refused_fraction", "share", "mean over sampled tokens",
           "Of the longer half; from three times the shorter half on, status and report say so."),
    Metric("importance/ess", "share", "(sum w)^2 / (n sum w^2) over sampled tokens",
           "Effective sample size of untruncated ratios: 1 is on-policy."),
    Metric("importance/ess_sequence", "share", "the same over rollouts", "Ratio of a rollout: the product."),
    Metric("importance/sequence_tokens", "tokens", "mean over rollouts", "Sampled tokens in the ratio of a rollout."),
    Metric("importance/ratio_mean", "ratio", "mean over trained tokens", "Trainer over rollout probability."),
    Metric("importance/ratio_clipped_fraction", "share", "mean over trained tokens",
           "Tokens whose ratio the loss truncates, clips or masks."),
    Metric("importance/kl", "nats", "mean over trained tokens",
           "Rollout minus trainer log-probability: the change of the policy since sampling (k1)."),
    *_difference_metrics(),
    Metric("rescored/mismatch", "nats", "mean over compared tokens without older context",
           "Absolute difference of engine and trainer log-probability under the same version. Above twice "
           "rescored/healthy, an engine samples from other weights than its tokens name."),
    Metric("rescored/healthy", "nats", "value",
           "The same of healthy engines: the median actor at the start, then followed slowly."),
    Metric("rescored/stale_kv", "nats", "mean over compared tokens with older context",
           "The same after a swap within the rollout."),
    Metric("rescored/staleness", "nats", "mean over compared tokens of earlier versions",
           "Absolute difference of the policy before the step and the version that sampled the token."),
    Metric("rescored/tokens", "tokens", "sum", "Tokens that the step compared (trainer.rescore_share)."),
    Metric("rescored/gone_tokens", "tokens", "sum over all rollouts of the step",
           "Tokens whose version the trainer no longer has (trainer.rescore_bytes)."),
    Metric("rescored/kept_bytes", "bytes", "value", "Earlier versions in the trainer's memory."),
    Metric("rescored/alarms", "actors", "count", "Actors whose engine does not sample from the versions it names."),
    Metric("policy/entropy", "nats", "mean over sampled tokens", "Entropy of the trainer's distribution."),
    Metric("policy/value_error", "1", "mean over trained tokens", "Squared error of the value head, if any."),
    Metric("policy/kl_ref", "nats", "mean over trained tokens",
           "Divergence from loss.ref_model, if any (k3; times the ratio with loss.kl_weighted)."),
    Metric("policy/kl_start", "nats", "mean over the tokens of up to 64 rollouts",
           "Divergence of the evaluated versions from version 0 (k3)."),
    Metric("policy/kl_teacher", "nats", "mean over trained tokens",
           "Trainer minus teacher log-probability, with loss.teacher (k1)."),
    Metric("control/lr_factor", "factor", "value",
           "Factor of learner.ess_scaling; below 1 the control acted."),
    Metric("control/negative_masked_fraction", "share", "mean over trained tokens",
           "Left out by loss.negative_kl_max."),
    Metric("control/kl_corrected_fraction", "share", "mean over trained tokens",
           "Weight off 1 by more than 0.01 in the KL term (loss.kl_weighted)."),
    Metric("control/overlong_fraction", "share", "mean over sampled tokens",
           "Left out by loss.overlong_filtering."),
    Metric("train/loss", "loss", "sum of loss_weight * loss over tokens", "The objective of the step."),
    Metric("train/grad_norm", "norm", "global norm", "Before clipping."),
    Metric("train/learning_rate", "rate", "value", "Of the step, with the factor of learner.ess_scaling."),
    Metric("train/tokens", "tokens", "sum", "Tokens of the computed rollouts, the prompt of each included."),
    Metric("train/rollouts", "rollouts", "count",
           "Rollouts that the learner computed; its metrics (importance, policy, mismatch, ages by length) are means "
           "over them. Without trainer.score_zero_advantage, rollouts without an advantage are left out, unless all "
           "are."),
    Metric("train/computed_fraction", "share", "of the step's rollouts", "Those that the learner computed."),
    Metric("train/trained_tokens", "tokens", "sum", "Completion tokens with a gradient, of the computed rollouts."),
    Metric("train/masked_stale_tokens", "tokens", "sum", "Sampled tokens that the lag rule masked."),
    Metric("train/pack_fill", "share", "used over budget of the packs", "How full the forward passes were."),
    Metric("train/quarantined_groups", "groups", "sum",
           "Groups quarantined at the step: loss or gradient was not finite."),
    Metric("train/num_packs", "packs", "count", "Forward passes of the step."),
    Metric("time/compute_seconds", "seconds", "value", "Forward, backward and optimizer."),
    Metric("time/reserve_wait_seconds", "seconds", "value", "Time the trainer waited for groups and for its turn."),
    Metric("time/prepare_seconds", "seconds", "value",
           "From the rows of the step to its first forward pass; GPUs idle."),
    Metric("time/cpu_seconds", "seconds", "running total", "CPU time of the trainer's process."),
    Metric("time/rescore_cpu_seconds", "seconds", "value",
           "CPU time for scoring rollouts again (trainer.rescore_share)."),
    Metric("time/commit_seconds", "seconds", "value",
           "Publication and checkpoint; without the wait for earlier commits and the write of the commit itself."),
    Metric("rollouts/multi_version_fraction", "share", "mean over rollouts",
           "Rollouts of two or more weight versions."),
    Metric("rollouts/max_versions", "versions", "maximum over rollouts", "Most versions in one rollout."),
    Metric("rollouts/error_fraction", "share", "errors over all rollouts of the step's groups",
           "Rollouts without a reward, which are not trained."),
    Metric("environment/turns", "turns", "mean over rollouts", "Turns of the model."),
    Metric("environment/branches", "branches", "mean over rollouts",
           "Histories that do not continue the previous call's (docs/agents.md)."),
    Metric("environment/given_fraction", "share", "mean over completion tokens",
           "Tokens of the environment, which carry no loss."),
    Metric("environment/timeout_fraction", "share", "mean over rollouts",
           "The environment took too long (environment.timeout_reward)."),
    Metric("progress/samples", "rollouts", "running total", "Rollouts trained so far; an x axis."),
    Metric("progress/tokens", "tokens", "running total", "Completion tokens trained on so far; an x axis."),
    Metric("progress/seconds", "seconds", "value", "Wall clock since the run began; an x axis."),
    Metric("weights/copy_seconds", "seconds", "value", "Copy of the weights, for which training stands still."),
    Metric("weights/published_seconds", "seconds", "value", "Digest and publication of the version."),
    Metric("weights/bytes", "bytes", "sum over files",
           "Size of the published version, or of its difference from a version before."),
    Metric("eval/accuracy", "reward", "mean over held-out prompts",
           "Of eval.samples completions; step = version. A set of eval.sets has eval/<set>/accuracy.",
           "evaluator"),
    Metric("eval/accuracy_low", "reward", "value", "Lower end of the 95 % confidence interval.", "evaluator"),
    Metric("eval/accuracy_high", "reward", "value", "Upper end of the 95 % confidence interval.", "evaluator"),
    Metric("eval/best", "reward", "mean over held-out prompts",
           "Best of eval.samples completions: pass@k for rewards 0 and 1.", "evaluator"),
    Metric("eval/greedy", "reward", "mean over held-out prompts", "Greedy completions (eval.greedy).", "evaluator"),
    Metric("eval/mean_tokens", "tokens", "mean over held-out prompts", "Length of the answers.", "evaluator"),
    Metric("eval/lag", "steps", "value", "Optimizer steps from the version to the end of its evaluation.",
           "evaluator"),
    Metric("actor/running_mean", "sequences", "mean since the previous reservation, summed over actors",
           "Sequences in flight.", "tracker"),
    Metric("actor/tokens_per_second", "tokens/s", "mean since the previous reservation, summed over actors",
           "Speed of generation.", "tracker"),
    Metric("swap/pause_seconds_max", "seconds", "maximum over swaps since the previous commit",
           "Longest pause of an engine for a swap.", "tracker"),
    Metric("weights/live_min", "version", "minimum over actors", "Oldest version that sampled at the reservation.",
           "tracker"),
    Metric("weights/live_max", "version", "maximum over actors", "Newest version that sampled at the reservation.",
           "tracker"),
    Metric("environment/replayed_tokens", "tokens", "sum since the previous reservation",
           "Tokens of earlier plays that were used again after a takeover.",
           "tracker"),
    Metric("environment/dropped_tokens", "tokens", "sum since the previous reservation",
           "Tokens sampled again because the environment acted differently.", "tracker"),
    Metric("tokens/generated", "tokens", "running total", "Completion tokens that actors sampled.", "tracker"),
    Metric("tokens/trained", "tokens", "running total", "Those with a gradient in a committed step.", "tracker"),
    Metric("tokens/masked_stale", "tokens", "running total", "Masked by the lag rule in a trained group.", "tracker"),
    Metric("tokens/dropped_stale", "tokens", "running total", "In groups that the lag rule dropped.", "tracker"),
    Metric("tokens/filtered", "tokens", "running total", "In groups whose rewards were all equal.", "tracker"),
    Metric("tokens/failed", "tokens", "running total", "In groups that could not be scored.", "tracker"),
    Metric("tokens/quarantined", "tokens", "running total",
           "In groups of a quarantined step.", "tracker"),
    Metric("tokens/superseded", "tokens", "running total", "Sampled again by a later attempt.", "tracker"),
    Metric("tokens/in_flight", "tokens", "value", "In groups that are not finished.", "tracker"),
    Metric("tokens/ready", "tokens", "value", "In finished groups that no commit has taken.", "tracker"),
    Metric("length/bias", "ratio", "mean length of trained over generated tokens",
           "Below 1, long completions are lost. One step is noisy; see the report.",
           "tracker"),
    Metric("length/mean_<class>", "tokens", "mean over tokens since the previous reservation",
           "Completion length of an average token. Classes: generated, trained, masked, dropped.", "tracker"),
    Metric("length/first_third_<class>", "share", "share of tokens since the previous reservation",
           "In the first third of a completion; unbiased: 1/3.", "tracker"),
    Metric("length/last_third_<class>", "share", "share of tokens since the previous reservation",
           "In the last third of a completion; unbiased: 1/3.", "tracker"),
    Metric("wait/engine_seconds", "seconds", "sum since the previous reservation",
           "The trainer waited for groups that were being generated.", "tracker"),
    Metric("wait/window_seconds", "seconds", "sum since the previous reservation",
           "The full window kept slots empty (weighted by their share).",
           "tracker"),
    Metric("wait/stale_wait_seconds", "seconds", "sum since the previous reservation",
           "schedule.stale=wait held the step back.", "tracker"),
    Metric("wait/actors_seconds", "seconds", "sum over actors since the previous reservation",
           "Engine time lost to slots without a group.", "tracker"),
    Metric("part/<part>/reward", "reward", "mean over scored rollouts", "Of one part of a mixture.", "tracker"),
    Metric("part/<part>/length_mean", "tokens", "mean over rollouts", "Completion length of the part.", "tracker"),
    Metric("part/<part>/turns", "turns", "mean over rollouts", "Turns of the model in the part.", "tracker"),
    Metric("part/<part>/rollouts", "rollouts", "count", "Rollouts of the part in the step's groups.", "tracker"),
    Metric("part/<part>/error_fraction", "share", "errors over rollouts of the step's groups",
           "Rollouts of the part without a reward, outside of failed groups.", "tracker"),
    Metric("part/<part>/component/<component>", "reward", "mean over scored rollouts",
           "Component of the reward, before its weight.", "tracker"),
    Metric("part/<part>/groups_<fate>", "groups", "running total", f"Fates: {', '.join(Fate)}.", "tracker"),
    *(Metric(f"system/{key}", unit, how, text, "system") for key, unit, how, text in _SYSTEM),
    _run("step", "", "Newest committed optimizer step."),
    _run("steps", "", "Steps of the run."),
    _run("weight_version", "", "Newest announced weight version."),
    _run("pause_seconds", "seconds", "Median pause of recent weight swaps."),
    _run("tokens_per_second", "tokens/s", "Tokens sampled per second, all actors."),
    _run("ready_groups", "", "Finished groups that no step has reserved."),
    _run("leased_groups", "", "Groups that actors work on."),
    _run("state", "", "1 for the state of the run.", labels=("state",)),
    _run("hub_silent_seconds", "seconds", "Time since the last heartbeat of a hub that has not ended by itself."),
    _run("run_info", "", "1; the labels describe the run: tracking.name, owner and preset.", labels=RUN_LABELS),
    _run("actor_running", "", "Sequences in decoding.", labels=("actor",)),
    _run("actor_waiting", "", "Sequences that wait for a slot.", labels=("actor",)),
    _run("actor_slots", "", "Slots.", labels=("actor",)),
    _run("actor_weight_version", "", "Weight version in the engine.", labels=("actor",)),
    _run("part_reward", "", "Mixture: newest reward of the part.", labels=("part",)),
    _run("part_accuracy", "", "Mixture: newest held-out accuracy of the part.", labels=("part",)),
    *(_run(f"part_{fate}_groups_total", "", f"Mixture: groups of the part with fate {fate}.", "counter", ("part",))
      for fate in Fate),
    _run("tokens", "tokens", "Tokens by class of the ledger. Fall if a new hub knows fewer.", "gauge", ("class",)),
    _role("gauge", "role_info", ALL_ROLES, "1; the labels identify the process.", ("run", "role", "name")),
    _role("gauge", "role_healthy", ALL_ROLES, "1 while the main loop runs (/healthz)."),
    _role("gauge", "role_ready", ALL_ROLES, "1 while the role does its work (/readyz)."),
    _role("gauge", "role_beat_age_seconds", ALL_ROLES, "Time since the last iteration of the main loop."),
    _role("gauge", "role_weight_version", ALL_ROLES,
          "Weight version of the role; of the hub: the newest announced version."),
    _role("counter", "role_restarts_total", ALL_ROLES, "Restarts of the role by its supervisor."),
    _role("histogram", "store_seconds", ALL_ROLES, "Requests to the object store.", ("operation",), _OPERATIONS),
    _role("counter", "store_errors_total", ALL_ROLES, "Failed requests to the object store.", ("operation",),
          _OPERATIONS),
    _role("gauge", "hub_row_bytes", _HUB, "Rows that the hub keeps in memory."),
    _role("gauge", "hub_peers", _HUB, "Open exchanges: actors and the trainer."),
    _role("counter", "actor_rollouts_total", _ACTOR, "Rollouts by outcome.", ("outcome",), ("scored", "error")),
    _role("counter", "actor_lost_scorings_total", _ACTOR,
          "Scorings without a result, which count as wrong answers.",
          ("cause",), ("timeout", "died")),
    _role("counter", "actor_tokens_total", _ACTOR, "Completion tokens of finished rollouts."),
    _role("counter", "actor_groups_total", _ACTOR, "Groups by answer of the hub.", ("answer",),
          ("accepted", "stale_lease", "other")),
    _role("gauge", "actor_unsent_groups", _ACTOR, "Finished groups that wait for credit from the hub."),
    _role("gauge", "actor_engine_running", _ACTOR, "Sequences that hold a slot."),
    _role("gauge", "actor_engine_waiting", _ACTOR, "Sequences that wait for a slot."),
    _role("gauge", "actor_kv_usage", _ACTOR, "Share of the KV memory in use."),
    _role("gauge", "actor_prefix_hit_share", _ACTOR,
          "Prompt tokens that another sequence had prefilled, over all, since the start of the engine."),
    _role("histogram", "actor_generation_seconds", _ACTOR, "Generation of the longest rollout of a group."),
    _role("histogram", "actor_scoring_seconds", _ACTOR, "From last token to reward, the slowest rollout of a group."),
    _role("histogram", "actor_swap_pause_seconds", _ACTOR, "Time without sampling at a swap of weights."),
    _role("histogram", "actor_weight_update_seconds", _ACTOR, "From announcement of a version to sampling."),
    _role("histogram", "trainer_step_seconds", _TRAINER, "Forward, backward and optimizer of a step."),
    _role("histogram", "trainer_wait_seconds", _TRAINER, "Waiting for the groups of a step."),
    _role("histogram", "trainer_commit_seconds", _TRAINER, "Publication and checkpoint of a step."),
    _role("counter", "trainer_tokens_total", _TRAINER, "Completion tokens of trained rollouts."),
    _role("counter", "trainer_quarantined_groups_total", _TRAINER,
          "Groups of quarantined steps."),
    _role("histogram", "trainer_lag_steps", _TRAINER,
          "Lag of the oldest token of each trained rollout.", buckets=_LAGS),
    _role("gauge", "trainer_checkpoint_age_seconds", _TRAINER, "Age of the newest checkpoint."),
)  # fmt: skip

METRICS: dict[str, Metric] = {metric.name: metric for metric in _DECLARED}


def step_metrics(
    learned: Mapping[str, float],
    rows: Sequence[TrainingRow],
    *,
    step: int,
    masked_stale: int,
    num_errors: int,
    reserve_wait_seconds: float,
    samples: int,
    tokens: int,
    seconds: float,
    overlong_fraction: float | None = None,
) -> dict[str, float]:
    """The metrics of a step after its computation; the commit adds time/commit_seconds.

    `learned` are the metrics of the learner, by name, `rows` all rows of the step, `masked_stale` the sampled tokens
    that the lag rule masked in them, `num_errors` the rollouts of its groups without a reward. `samples` and `tokens`
    are running totals with this step, `seconds` the time since the run began. `overlong_fraction` is the share of
    sampled tokens that loss.overlong_filtering leaves out; None: the filter is off.
    """
    scored = [row.rollout.reward for row in rows if row.rollout.outcome is Outcome.SCORED]
    rewards = np.array(scored, dtype=np.float64)
    lengths = np.array([row.rollout.num_tokens for row in rows], dtype=np.float64)
    versions = np.array([measures.num_versions(row.rollout.weight_spans) for row in rows])
    lags_L = measures.lag_counts(
        step, (measures.tokens_by_version(row.rollout.weight_spans, row.loss_mask) for row in rows)
    )
    values = {
        "reward/mean": _mean(rewards),
        "reward/std": float(rewards.std()) if len(rewards) else None,
        **_component_means(rows),
        "rollout/length_mean": _mean(lengths),
        "rollout/prompt_mean": _mean(np.array([len(row.rollout.prompt_token_ids) for row in rows])),
        "rollout/length_p995": measures.percentile(lengths, 99.5),
        "lag/mean": measures.mean_of_counts(lags_L),
        "lag/p99": measures.quantile_of_counts(lags_L, 0.99),
        "lag/max": measures.max_of_counts(lags_L),
        "train/masked_stale_tokens": masked_stale,
        "control/overlong_fraction": overlong_fraction,
        "time/reserve_wait_seconds": reserve_wait_seconds,
        "rollouts/multi_version_fraction": _mean(versions >= 2),
        "rollouts/max_versions": int(versions.max()) if len(versions) else None,
        "rollouts/error_fraction": num_errors / (len(rows) + num_errors) if len(rows) + num_errors else None,
        **_environment_metrics(rows),
        "progress/samples": samples,
        "progress/tokens": tokens,
        "progress/seconds": seconds,
    }
    if rows and "train/rollouts" in learned:
        values["train/computed_fraction"] = learned["train/rollouts"] / len(rows)
    return finite({**learned, **values})


def _component_means(rows: Sequence[TrainingRow]) -> dict[str, float | None]:
    """reward/<component> -> mean over the scored rollouts that have the component."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for component in row.rollout.reward_components:
            values.setdefault(f"reward/{component.name}", []).append(component.value)
    return {name: _mean(np.array(component_values)) for name, component_values in values.items()}


def _environment_metrics(rows: Sequence[TrainingRow]) -> dict[str, float | None]:
    """Turns, given tokens and timeouts; empty if every rollout is one turn without a timeout."""
    late = np.array([row.rollout.error is not None for row in rows])
    if all(row.rollout.num_turns == 1 for row in rows) and not late.any():
        return {}
    num_tokens = sum(row.rollout.num_tokens for row in rows)
    num_sampled = sum(int(row.rollout.loss_mask.sum()) for row in rows)
    return {
        "environment/turns": _mean(np.array([row.rollout.num_turns for row in rows])),
        "environment/branches": _mean(np.array([len(row.rollout.branch_starts) for row in rows])),
        "environment/given_fraction": 1 - num_sampled / num_tokens,
        "environment/timeout_fraction": _mean(late),
    }


def finite(values: Mapping[str, float | int | None]) -> dict[str, float]:
    """The finite values, as floats; JSON and MLflow have no NaN."""
    return {key: float(value) for key, value in values.items() if value is not None and math.isfinite(value)}


def _mean(values: NDArray[Any]) -> float | None:
    return float(values.mean()) if len(values) else None


def short_key(name: str) -> str:
    """Short key of a metric for `status --json`. Example: importance/ess is ess, reward/mean is reward_mean."""
    group, _, rest = name.partition("/")
    return rest if group in _WELL_KNOWN else name.replace("/", "_")
