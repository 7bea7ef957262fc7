"""Computes report.json and weights.parquet from the stored objects of a run (docs/metrics.md)."""

import io
import itertools
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelinerl_core.emulation.report_lines import emulation
from pipelinerl_core.messages import SwapRecord
from pipelinerl_core.models.recipes import TINY_PREFIX
from pipelinerl_core.report import utilization
from pipelinerl_core.report.actor_alarms import alarm_text
from pipelinerl_core.report.advice import (
    Evidence,
    advice,
    clipped_advice,
    mean_delay_seconds,
    quarantine_advice,
    refused_advice,
    unmoved_advice,
)
from pipelinerl_core.report.diagnosis import as_documents, diagnose, text_decoder
from pipelinerl_core.report.equal_rewards import NEXT_STEP, TINY_STEP, comparison_text, headline, run_equal_reward
from pipelinerl_core.report.facts import RunFacts, StepFacts
from pipelinerl_core.report.parts import parts_report
from pipelinerl_core.run.records import Commit, EvalRecord, RunRecord
from pipelinerl_core.telemetry import measures
from pipelinerl_core.telemetry.length_bias import length_report
from pipelinerl_core.telemetry.parts import untrained_parts
from pipelinerl_core.telemetry.redact import redact_text

# First and last reward are means over a tenth of the steps, at most 10 steps, because one step is noisy.
_REWARD_WINDOW = 10
_SHORT = 5
"""Commits up to which a run is too short for a bottleneck: its engines start, and libraries warm up."""

WEIGHTS_SCHEMA = pa.schema(
    [
        pa.field("version", pa.int64(), nullable=False),
        pa.field("actor", pa.string(), nullable=False),
        pa.field("published", pa.timestamp("us", tz="UTC")),
        pa.field("swapped", pa.timestamp("us", tz="UTC")),
        pa.field("pause_seconds", pa.float64()),
        pa.field("bytes", pa.int64()),
        pa.field("tokens_sampled", pa.int64()),
        pa.field("tokens_trained", pa.int64()),
        pa.field("digest", pa.string()),
    ]
)


def report_of(facts: RunFacts) -> dict[str, Any]:
    """report.json of a run, finished or live, as JSON values; a figure without a value is None."""
    commits = list(facts.commits.values())
    use = utilization.actor_use(commits)
    trainer_idle = utilization.trainer_idle_fraction(commits)
    actor_idle = use.idle_fraction if use else None
    waits = utilization.wait_shares(commits)
    spread = _group_spread(facts.steps)
    evidence = None
    if trainer_idle is not None and actor_idle is not None and len(commits) > _SHORT:
        evidence = Evidence(
            trainer_idle=trainer_idle,
            actor_idle=actor_idle,
            delay_seconds=mean_delay_seconds(commits),
            waits=waits or {},
            spread=spread,
        )
    lengths = commits[-1].lengths if commits else {}
    findings = advice(evidence, lengths, facts.run.config)
    is_over = bool(commits) and commits[-1].step >= int(facts.run.config.get("trainer", {}).get("steps", 0))
    reward = run_equal_reward(commits, facts.run.config, is_over=is_over)
    parts = parts_report(facts)
    warnings = [f"{text}." for text in untrained_parts(parts).values()]
    if reward is None:
        warnings.append(unmoved_advice(commits, facts.run.config))
    else:
        next_step = TINY_STEP if facts.run.model_path.startswith(TINY_PREFIX) else NEXT_STEP
        first = headline(reward, commits[-1].step, is_over=is_over)
        warnings.insert(0, f"{_sentence(first)} {comparison_text(facts.run.config)} {next_step}")
    if alarm := alarm_text(commits):  # before anything else: the run has trained on tokens of unknown versions
        warnings.insert(0, f"{alarm}.")
    texts = [*warnings, quarantine_advice(commits)]  # before any advice on speed
    texts += [_sentence(find(commits, facts.run.config)) for find in (clipped_advice, refused_advice)]
    findings["advice"] = " ".join(filter(None, (*texts, findings["advice"]))) or None
    return {
        "run_id": facts.run.run_id,
        "schedule": _kind(facts, "schedule"),
        "engine": _kind(facts, "engine"),
        "emulation": emulation(facts.run.config, commits),
        "steps": commits[-1].step if commits else 0,
        "versions": sum(commit.manifest is not None for commit in commits),
        "wall_seconds": commits[-1].committed_at - facts.run.created_at if commits else 0.0,
        "seconds": _seconds(facts, commits),
        **_learning(facts),
        "parts": parts,
        **_tokens(facts),
        "tokens_per_second": use.tokens_per_second if use else None,
        "rollouts_per_second": _rollouts_per_second(facts),
        **_swaps(commits),
        "weights": _weights(commits, _seconds(facts, commits).get("training", 0.0)),
        **_versions(facts.steps),
        "ess_mean": _mean_metric(commits, "importance/ess"),
        "trainer_idle_fraction": trainer_idle,
        "actor_idle_fraction": actor_idle,
        "wait_fractions": waits,
        "group_spread": spread,
        "equal_reward": reward,
        "warning": " ".join(filter(None, warnings)) or None,
        "findings": as_documents(diagnose(facts, text_decoder(facts.run.model_path))),
        "mlflow": _mlflow(facts.run),
        **findings,
        "ledger": dict(commits[-1].tokens) if commits else {},
        "length_bias": length_report(lengths),
    }


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def held_out_name(report: Mapping[str, Any]) -> str:
    """What the mean of an evaluation is called: a reward of several components is no share of right answers."""
    return "held-out reward" if report.get("eval_components") else "held-out accuracy"


def _mlflow(run: RunRecord) -> str | None:
    """Where MLflow shows the run: the command for a database file, or the server; None without MLflow."""
    if not run.mlflow_uri:
        return None
    uri = redact_text(run.mlflow_uri)  # a database's URL may have a password
    return uri if uri.startswith(("http://", "https://")) else f"mlflow ui --backend-store-uri {shlex.quote(uri)}"


def _kind(facts: RunFacts, section: str) -> str | None:
    kind = facts.run.config.get(section, {}).get("kind")
    return str(kind) if kind is not None else None


def _group_spread(steps: tuple[StepFacts, ...]) -> float | None:
    """Longest over mean completion length, mean over the trained groups."""
    spreads = np.concatenate([step.spreads for step in steps]) if steps else np.empty(0)
    return float(spreads.mean()) if len(spreads) else None


def _learning(facts: RunFacts) -> dict[str, Any]:
    steps, evals = facts.steps, list(facts.evals.values())
    window = max(1, min(_REWARD_WINDOW, len(steps) // 10))
    return {
        "reward_first": _reward(facts, slice(window), steps),
        "reward_last": _reward(facts, slice(-window, None), steps),
        "reward_components": _components(facts, window),
        "reward_window_steps": window,
        "eval_first": evals[0].known_accuracy if evals else None,
        "eval_last": evals[-1].known_accuracy if evals else None,
        "eval_last_low": evals[-1].low if evals else None,
        "eval_last_high": evals[-1].high if evals else None,
        "evaluations": [
            _evaluation(record) for each in (facts.evals, *facts.set_evals.values()) for record in each.values()
        ],
        "eval_components": {
            name: {"first": evals[0].components.get(name), "last": mean}
            for name, mean in evals[-1].components.items()
        }
        if evals
        else {},
    }


def _evaluation(record: EvalRecord) -> dict[str, Any]:
    wanted = {
        "version", "last_version", "set", "num_prompts", "num_samples", "temperature", "top_p", "accuracy", "low",
        "high", "best", "greedy", "components", "mean_tokens", "errors", "seconds",
    }  # fmt: skip
    return {name: value for name, value in record.document().items() if name in wanted} | {"lag": record.lag}


def _components(facts: RunFacts, window: int) -> dict[str, dict[str, float | None]]:
    """Component of the reward -> its mean over the first and over the last steps of a window."""
    commits = facts.trained_commits
    keys = {key for commit in commits for key in commit.metrics if key.startswith("reward/")}
    return {
        key.removeprefix("reward/"): {
            "first": _mean_metric(commits[:window], key),
            "last": _mean_metric(commits[-window:], key),
        }
        for key in sorted(keys - {"reward/mean", "reward/std"})
    }


def _reward(facts: RunFacts, part: slice, steps: tuple[StepFacts, ...]) -> float | None:
    """Mean of the rewards of the first or last steps; from the commits if rows of steps are not kept."""
    trained = [commit.metrics.get("reward/mean") for commit in facts.commits.values() if commit.step > 0]
    if len(trained) > len(steps) and (known := [mean for mean in trained if mean is not None][part]):
        return float(np.mean(known))
    return _mean_reward(steps[part])


def _mean_reward(steps: Sequence[StepFacts]) -> float | None:
    rewards = np.concatenate([step.rewards for step in steps]) if steps else np.empty(0)
    return float(rewards.mean()) if len(rewards) else None


def _tokens(facts: RunFacts) -> dict[str, Any]:
    lengths = np.concatenate([step.lengths for step in facts.steps]) if facts.steps else np.empty(0, dtype=np.int64)
    last = facts.commits[max(facts.commits)] if facts.commits else None
    of_rows = {"trained": sum(int(step.lags.sum()) for step in facts.steps),
               "masked_stale": sum(step.num_masked for step in facts.steps)}  # fmt: skip
    if last is not None and len(facts.steps) < len(facts.trained_commits):  # the rows of some steps are removed
        of_rows = {name: last.tokens.get(name, num) for name, num in of_rows.items()}
    return {
        "samples": int(last.metrics.get("progress/samples", len(lengths))) if last else 0,
        "steps_with_rows": len(facts.steps),
        "tokens_generated": last.tokens.get("generated", 0) if last else 0,
        "tokens_trained": of_rows["trained"],
        "tokens_masked_stale": of_rows["masked_stale"],
        "completion_length": {
            "median": measures.percentile(lengths, 50),
            "p99.5": measures.percentile(lengths, 99.5),
            "max": int(lengths.max()) if len(lengths) else None,
        },
    }


def _rollouts_per_second(facts: RunFacts) -> float | None:
    """Rollouts trained after the first step of each part of the span, over the span."""
    commits = list(facts.commits.values())
    seconds = utilization.span_seconds(commits)
    rows = {step.step: len(step.lengths) for step in facts.steps}
    samples, newest = {}, 0.0
    for commit in commits:
        newest = commit.metrics.get("progress/samples", newest + rows.get(commit.step, 0))
        samples[commit.step] = newest
    trained = sum(samples[part[-1].step] - samples[part[0].step] for part in utilization.spans(commits))
    return trained / seconds if seconds else None


def _seconds(facts: RunFacts, commits: list[Commit]) -> dict[str, float]:
    """The parts of wall_seconds: start of the processes, evaluation before training, down, training."""
    if not commits:
        return {}
    wall = commits[-1].committed_at - facts.run.created_at
    start = commits[0].committed_at - facts.run.created_at
    evaluation = 0.0
    if 0 in facts.evals and len(commits) > 1:  # actors start after the first evaluation
        loaded, reserved = commits[0].committed_at, commits[1].reserved_at
        # The epoch of an actor is the Unix time of its start (`take_life`). The epoch of a trainer is a counter.
        starts = [epoch for key in commits[1].actors if loaded <= (epoch := int(key.rpartition("/")[2])) <= reserved]
        evaluation = min(starts, default=min(loaded + facts.evals[0].seconds, reserved)) - loaded
    down = utilization.down_seconds(commits)
    return {"start": start, "evaluation": evaluation, "down": down, "training": wall - start - evaluation - down}


def swaps_of(commits: list[Commit]) -> list[SwapRecord]:
    """Every swap once, by time. Until the hub acknowledges a swap, the actor reports the swap again."""
    unique = {(swap.actor, swap.actor_epoch, swap.version): swap for commit in commits for swap in commit.swaps}
    return sorted(unique.values(), key=lambda swap: (swap.at, swap.actor))


def _swaps(commits: list[Commit]) -> dict[str, Any]:
    pauses = [swap.pause_seconds for swap in swaps_of(commits)]
    return {
        "num_swaps": len(pauses),
        "swap_pause_seconds": {
            "p50": measures.percentile(pauses, 50),
            "p99": measures.percentile(pauses, 99),
            "max": max(pauses, default=None),
        },
    }


def _weights(commits: list[Commit], training_seconds: float) -> dict[str, Any]:
    """What a version costs the trainer: medians, and the share of the run's time in which training stands still."""
    times = {
        name: [commit.metrics[f"weights/{name}"] for commit in commits if f"weights/{name}" in commit.metrics]
        for name in ("copy_seconds", "published_seconds")
    }
    return {
        **{name: measures.percentile(values, 50) for name, values in times.items()},
        "share": sum(times["copy_seconds"]) / training_seconds if training_seconds > 0 else None,
    }


def total_lags(steps: tuple[StepFacts, ...]) -> measures.Int64Array:
    """Trained tokens of the run per lag."""
    total_L = np.zeros(0, dtype=np.int64)
    for step in steps:
        total_L = measures.add_counts(total_L, step.lags)
    return total_L


def _versions(steps: tuple[StepFacts, ...]) -> dict[str, Any]:
    lags_L = total_lags(steps)
    versions = np.concatenate([step.versions for step in steps]) if steps else np.empty(0, dtype=np.int64)
    return {
        "lag": {
            "mean": measures.mean_of_counts(lags_L),
            "p99": measures.quantile_of_counts(lags_L, 0.99),
            "max": measures.max_of_counts(lags_L),
        }
        if lags_L.any()
        else dict.fromkeys(("mean", "p99", "max")),
        "multi_version_fraction": float((versions >= 2).mean()) if len(versions) else None,
        "max_versions_in_a_rollout": int(versions.max()) if len(versions) else None,
        "three_version_rollouts": int((versions >= 3).sum()),
    }


def _mean_metric(commits: list[Commit], key: str) -> float | None:
    values = [commit.metrics[key] for commit in commits if key in commit.metrics]
    return float(np.mean(values)) if values else None


def weights_table(facts: RunFacts) -> bytes:
    """weights.parquet as bytes."""
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(weight_rows(facts), schema=WEIGHTS_SCHEMA), sink, compression="zstd")
    return sink.getvalue()


def weight_rows(facts: RunFacts) -> list[dict[str, Any]]:
    """Rows of weights.parquet.

    If an actor swapped a version again after a restart, the row has the time of the first swap and the longest pause.
    Tokens sampled after the last reservation are in no commit and are not counted. Tokens trained of versions that a
    step without rows (store.keep_rows) may have trained are unknown.
    """
    commits = list(facts.commits.values())
    trained: dict[tuple[int, str], int] = {}
    for step in facts.steps:
        for key, num in step.trained.items():
            trained[key] = trained.get(key, 0) + num
    with_rows = {step.step for step in facts.steps}
    newest_removed = max((commit.step for commit in facts.trained_commits if commit.step not in with_rows), default=0)
    swaps: dict[tuple[int, str], list[SwapRecord]] = {}
    for swap in swaps_of(commits):
        swaps.setdefault((swap.version, swap.actor), []).append(swap)
    sampled = _tokens_sampled(facts)
    rows = []
    for version, actor in sorted({*trained, *swaps, *sampled}):
        commit = facts.commits.get(version)
        manifest = commit.manifest if commit else None
        own = swaps.get((version, actor), [])
        rows.append(
            {
                "version": version,
                "actor": actor,
                "published": _microseconds(manifest.published_at) if manifest else None,
                "swapped": _microseconds(own[0].at) if own else None,
                "pause_seconds": max((swap.pause_seconds for swap in own), default=None),
                "bytes": manifest.num_bytes if manifest else None,
                "tokens_sampled": sampled.get((version, actor)),
                "tokens_trained": trained.get((version, actor), 0) if version >= newest_removed else None,
                "digest": commit.weights_digest if commit else None,
            }
        )
    return rows


def _microseconds(unix_seconds: float) -> int:
    return round(unix_seconds * 1e6)


def _tokens_sampled(facts: RunFacts) -> dict[tuple[int, str], int]:
    """(version, actor) -> tokens, from the token counters of each actor epoch at its swaps."""
    counters: dict[tuple[str, int], list[tuple[int, int]]] = {}  # (actor, epoch) -> [(version, num_tokens)]
    for commit in facts.commits.values():
        for key, sample in commit.actors.items():
            actor, _, epoch = key.rpartition("/")
            counters.setdefault((actor, int(epoch)), []).append((sample.engine_version, sample.num_tokens))
        for swap in commit.swaps:
            counters.setdefault((swap.actor, swap.actor_epoch), []).append((swap.version, swap.num_tokens))
    sampled: dict[tuple[int, str], int] = {}
    for (actor, _), points in counters.items():
        points.sort()
        previous = 0  # tokens before the first sample or swap of an epoch count for the version of that point
        for (version, _), (_, after) in itertools.pairwise([*points, points[-1]]):
            sampled[version, actor] = sampled.get((version, actor), 0) + max(0, after - previous)
            previous = max(previous, after)
    return sampled
