"""Writes a small finished run, object by object, for tests of the report, the follower and the status.

The model learns running sums ("3+4+8=" -> "7+8=15"): early completions are guesses, late completions compute in
steps. The times are exact: step n is reserved at START + n * STEP_SECONDS, computed 0.6 s and committed 0.7 s later.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelinerl_core.config.run import RunConfig
from pipelinerl_core.data.codec import encode_batch, to_segment
from pipelinerl_core.data.compaction import SCHEMA
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.messages import ActorSample, FateRecord, SwapRecord
from pipelinerl_core.prompts.sums import total
from pipelinerl_core.report.document import report_of
from pipelinerl_core.report.facts import TrainedRollout, collect
from pipelinerl_core.report.html import page_of
from pipelinerl_core.run.compacted import StepRange, encode_commits
from pipelinerl_core.run.records import (
    RUN_KEY,
    Commit,
    EpochRecord,
    EvalRecord,
    Record,
    RunRecord,
    batch_key,
    commit_key,
    epoch_key,
    eval_key,
)
from pipelinerl_core.storage.digests import entry_of
from pipelinerl_core.types import (
    FileEntry,
    FinishReason,
    LengthTotals,
    Outcome,
    Rollout,
    Sampler,
    TrainingRow,
    WeightManifest,
    WeightSpan,
)

ALPHABET = "0123456789+=\n"
"""Token id -> text. The end token has the next id."""
END_TOKEN = len(ALPHABET)
START = 1_750_000_000.0
STEP_SECONDS = 0.8
TRAINER_EPOCH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Size of a synthetic run."""

    steps: int = 12
    num_actors: int = 2
    groups_per_step: int = 4
    group_size: int = 4
    concurrency: int = 16
    max_lag: int = 3
    reward: float | None = None
    """Of all rollouts; None: rewards that rise."""
    finish_reason: FinishReason = FinishReason.STOP


def decode(token_ids: Sequence[int]) -> str:
    """Text of tokens."""
    return "".join(ALPHABET[token_id] if token_id < len(ALPHABET) else "<end>" for token_id in token_ids)


def text_of_ids(token_ids: Sequence[int]) -> str:
    """Text of tokens that are code points."""
    return "".join(map(chr, token_ids))


def encode(text: str) -> np.ndarray:
    """Token ids [T] of a text."""
    return np.array([ALPHABET.index(letter) for letter in text], dtype=np.int32)


def make_rollout(
    *,
    group_id: int = 0,
    rollout_index: int = 0,
    spans: Sequence[tuple[int, int, int]] = ((0, 0, 4),),
    reward: float | None = 1.0,
    actor: str = "actor-0",
    prompt: str = "3+4=",
    completion: str = "",
) -> Rollout:
    """A rollout whose completion is `completion` and an end token, or as many tokens 7 as the spans cover."""
    num = spans[-1][2]
    tokens = [*encode(completion), END_TOKEN] if completion else [7] * num
    return Rollout(
        group_id=group_id,
        rollout_index=rollout_index,
        attempt=0,
        lease_id=f"lease-{group_id}",
        prompt_id=hashlib.sha256(prompt.encode()).hexdigest(),
        source="sums",
        env="sums",
        task=json.dumps({"answer": str(total(prompt)), "terms": prompt.count("+") + 1}),
        actor=actor,
        group_size=4,
        prompt_token_ids=encode(prompt),
        completion_token_ids=np.array(tokens, dtype=np.int32),
        rollout_logprobs=np.full(num, -0.5, dtype=np.float32),
        weight_spans=tuple(WeightSpan(*span) for span in spans),
        loss_mask=np.ones(num, dtype=np.bool_),
        reward=reward,
        outcome=Outcome.ERROR if reward is None else Outcome.SCORED,
        finish_reason=FinishReason.STOP,
        error=None if reward is not None else "verifier: timed out",
        sampler=Sampler(seed=group_id * 100 + rollout_index),
        max_tokens=64,
        started_at=START,
        finished_at=START + 1,
        scored_at=START + 1.1,
    )


def training_row(rollout: Rollout, *, oldest_version: int = 0, advantage: float = 0.0) -> TrainingRow:
    """The rollout with every token of a version below `oldest_version` masked."""
    mask = rollout.loss_mask.copy()
    for span in rollout.weight_spans:
        mask[span.start : span.end] &= span.version >= oldest_version
    return TrainingRow(rollout=rollout, loss_mask=mask, advantage=advantage, loss_weight=0.01)


def trained_rollout(**values: Any) -> TrainedRollout:
    """A rollout of `make_rollout` with the given fields, as a trained rollout."""
    rollout = make_rollout()
    own = {each.name: getattr(rollout, each.name) for each in fields(rollout)}
    return TrainedRollout(**own | values)


def batch_bytes(run_id: str, step: int, rows: Sequence[TrainingRow]) -> bytes:
    """The batch file of a step."""
    return to_segment([encode_batch(run_id, step, rows)])


def put_record(store: ObjectStore, key: str, record: Record) -> None:
    """Write a JSON object."""
    store.put(key, record.model_dump_json().encode())


def put_batch(store: ObjectStore, step: int, epoch: int, rows: Sequence[TrainingRow]) -> tuple[FileEntry, ...]:
    """Write the batch of a step; returns the file entries of the commit."""
    data = batch_bytes("synthetic", step, rows)
    key = batch_key(step, epoch, 0)
    store.put(key, data)
    return (entry_of(key, data),)


def make_commit(step: int, *, epoch: int = TRAINER_EPOCH, reserved_at: float | None = None) -> Commit:
    """A commit at the times above, without batch, actors or metrics."""
    reserved = START + step * STEP_SECONDS if reserved_at is None else reserved_at
    return Commit(
        run_id="synthetic",
        step=step,
        epoch=epoch,
        batches=(),
        weights_digest=hashlib.sha256(f"{step}".encode()).hexdigest(),
        manifest=WeightManifest(
            version=step,
            epoch=epoch,
            files=(FileEntry(name="model.safetensors", size=2_400_000, digest="0" * 64),),
            key=None,
            shm="pipelinerl",
            host="localhost",
            published_at=reserved + 0.65,
        ),
        checkpoint=None,
        reserved_at=reserved,
        computed_at=reserved + 0.6,
        committed_at=reserved + 0.7,
    )


def write_run(store: ObjectStore, shape: Shape = Shape(), *, seed: int = 0, crash_at: int | None = None) -> RunRecord:
    """Write a finished run. `crash_at`: trainer epoch 2 ends after an orphaned commit of this step, and epoch 3
    adopts the steps before."""
    rng = np.random.default_rng(seed)
    config = RunConfig.model_validate(
        {
            "trainer": {"steps": shape.steps, "groups_per_step": shape.groups_per_step},
            "rollouts": {"group_size": shape.group_size},
            "engine": {"concurrency": shape.concurrency},
            "schedule": {"max_lag": shape.max_lag},
            "placement": {"actors": shape.num_actors},
        }
    )
    run = RunRecord(run_id="synthetic", created_at=START - 2, code_version="0", config=config.model_dump(mode="json"))
    put_record(store, RUN_KEY, run)
    put_epoch(store, 1, "hub", -1)
    put_epoch(store, TRAINER_EPOCH, "trainer", -1)
    if crash_at is not None:
        put_record(store, commit_key(crash_at, TRAINER_EPOCH), make_commit(crash_at))
        put_epoch(store, TRAINER_EPOCH + 1, "trainer", crash_at - 1)
    totals = {"generated": 0, "trained": 0, "masked_stale": 0, "in_flight": 0}
    lengths = {name: LengthTotals() for name in ("generated", "trained", "masked_stale")}
    for step in range(shape.steps + 1):
        epoch = TRAINER_EPOCH + (crash_at is not None and step >= crash_at)
        commit = make_commit(step, epoch=epoch)
        if step:
            rows = rows_of_step(rng, shape, step)
            commit = trained_commit(commit, rows, shape, totals)
            for row in rows:
                lengths["generated"] += _lengths(np.ones_like(row.loss_mask))
                lengths["trained"] += _lengths(row.loss_mask)
                lengths["masked_stale"] += _lengths(~row.loss_mask)
            commit = commit.model_copy(update={"lengths": dict(lengths)})
            commit = commit.model_copy(update={"batches": put_batch(store, step, epoch, rows)})
        put_record(store, commit_key(step, epoch), commit)
    for version, skill in ((0, 0.0), (shape.steps, 1.0)):
        put_record(store, eval_key(version), evaluation_record(rng, version, skill))
    return run


def put_epoch(store: ObjectStore, epoch: int, role: str, adopted_through: int, *, parent: int | None = None) -> None:
    """Write the record of a start of the hub or the trainer."""
    values = {"epoch": epoch, "role": role, "adopted_through": adopted_through, "parent": parent}
    record = EpochRecord.model_validate({**values, "started_at": START - 1, "host": "localhost", "pid": epoch})
    put_record(store, epoch_key(epoch), record)


def put_compacted(store: ObjectStore, held: StepRange, commits: Sequence[Commit], rows: Iterable[pa.Table]) -> None:
    """Write what compaction leaves of some steps. rows: a table for each step that has trained rows."""
    store.put(held.commits_key, encode_commits([commit.model_dump_json().encode() for commit in commits], commits))
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, SCHEMA, compression="zstd", write_page_checksum=True) as writer:
        for table in rows:
            writer.write_table(table, row_group_size=len(table))
    store.put(held.rollouts_key, memoryview(sink.getvalue()))


def _problem(rng: np.random.Generator, skill: float) -> tuple[str, str, float]:
    """(prompt, completion, reward): computed step by step with probability `skill`, else guessed."""
    digits = rng.integers(1, 10, size=int(rng.integers(2, 6)))
    prompt = "+".join(map(str, digits)) + "="
    if rng.random() < skill:
        lines = [f"{digits[:i].sum()}+{digits[i]}={digits[: i + 1].sum()}" for i in range(1, len(digits))]
        return prompt, "\n".join(lines), 1.0
    return prompt, "".join(ALPHABET[i] for i in rng.integers(0, 12, size=int(rng.integers(2, 24)))), 0.0


def rows_of_step(rng: np.random.Generator, shape: Shape, step: int) -> list[TrainingRow]:
    """The rows that a step trains."""
    skill = 0.95 / (1 + np.exp(-8 * (step / shape.steps - 0.45)))
    rows = []
    for index in range(shape.groups_per_step * shape.group_size):
        prompt, completion, reward = _problem(rng, skill)
        num = len(completion) + 1
        oldest = max(0, step - 1 - int(rng.integers(0, shape.max_lag + 2)))
        versions = range(oldest, min(step - 1, oldest + num - 1) + 1)
        cuts = np.linspace(0, num, len(versions) + 1).astype(int)
        rollout = make_rollout(
            group_id=(step - 1) * shape.groups_per_step + index // shape.group_size,
            rollout_index=index % shape.group_size,
            spans=[(version, int(cuts[i]), int(cuts[i + 1])) for i, version in enumerate(versions)],
            reward=reward if shape.reward is None else shape.reward,
            actor=f"actor-{index % shape.num_actors}",
            prompt=prompt,
            completion=completion,
        )
        rollout = replace(rollout, group_size=shape.group_size, finish_reason=shape.finish_reason)
        rows.append(training_row(rollout, oldest_version=step - 1 - shape.max_lag, advantage=reward - skill))
    return rows


def trained_commit(commit: Commit, rows: list[TrainingRow], shape: Shape, totals: dict[str, int]) -> Commit:
    """The commit of a step with tokens, swaps, actors and metrics for the rows of the step."""
    step = commit.step
    trained = sum(int(row.loss_mask.sum()) for row in rows)
    masked = sum(row.rollout.num_tokens for row in rows) - trained
    totals["trained"] += trained
    totals["masked_stale"] += masked
    totals["in_flight"] = 40 * shape.num_actors
    totals["generated"] = totals["trained"] + totals["masked_stale"] + totals["in_flight"]
    actors = [f"actor-{index}" for index in range(shape.num_actors)]
    elapsed = step * STEP_SECONDS
    swaps = [
        SwapRecord(
            actor=actor,
            actor_epoch=1,
            version=step - 1,
            at=commit.reserved_at - 0.08 + 0.01 * index,
            pause_seconds=0.004 + 0.001 * ((step * 7 + index * 3) % 9),
            num_bytes=2_400_000,
            num_running=shape.concurrency,
            num_tokens=(totals["generated"] - trained) // shape.num_actors,
        )
        for index, actor in enumerate(actors)
        if step > 1
    ]
    sample = ActorSample(
        at=commit.reserved_at,
        engine_version=step - 1,
        running=shape.concurrency,
        waiting=0,
        concurrency=shape.concurrency,
        num_tokens=totals["generated"] // shape.num_actors,
        running_seconds=0.95 * shape.concurrency * elapsed,
    )
    rewards = np.array([row.rollout.reward for row in rows])
    groups = sorted({row.rollout.group_id for row in rows})
    return commit.model_copy(
        update={
            "fates": tuple(FateRecord(group_id=g, attempt=0, fate="trained", num_tokens=1) for g in groups),
            "tokens": dict(totals),
            "waits": {"engine": 0.15 * step, "window": 0.05 * step, "stale_wait": 0.0, "actors": 0.04 * step},
            "swaps": tuple(swaps),
            "actors": {f"{actor}/1": sample for actor in actors},
            "metrics": {
                "reward/mean": float(rewards.mean()),
                "reward/std": float(rewards.std()),
                "importance/ess": 0.97 - 0.01 * (step % 4),
                "lag/mean": 1.5,
                "time/reserve_wait_seconds": 0.2,
                "progress/samples": float(step * len(rows)),
                "progress/seconds": elapsed,
            },
        }
    )


def _lengths(mask: np.ndarray) -> LengthTotals:
    """Totals of the tokens where a mask [C] over a completion is True."""
    num, third = len(mask), (len(mask) + 1) // 3
    return LengthTotals(
        num_tokens=int(mask.sum()),
        first_third=int(mask[:third].sum()),
        last_third=int(mask[num - third :].sum()),
        length_sum=int(mask.sum()) * num,
    )


def evaluation_record(rng: np.random.Generator, version: int, skill: float) -> EvalRecord:
    """The evaluation of a version."""
    samples = []
    for _ in range(4):
        prompt, completion, reward = _problem(rng, skill)
        samples.append({"prompt": prompt, "completion": completion, "reward": reward})
    return EvalRecord(
        version=version,
        num_prompts=1000,
        accuracy=0.12 + 0.75 * skill,
        mean_tokens=14.0,
        errors=0,
        seconds=1.0,
        samples=tuple(samples),
    )


def build_report(store: ObjectStore) -> dict[str, Any]:
    """report.json of a run."""
    return report_of(collect(store))


def render_report(store: ObjectStore, *, decode: Any = None) -> str:
    """report.html of a run."""
    return page_of(store, collect(store), decode)
