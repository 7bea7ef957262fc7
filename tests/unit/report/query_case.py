"""A small run with what the queries of docs/sql.md ask for: compacted steps, newer steps, and rows without a step."""

import json
from dataclasses import replace

import numpy as np
from tokenizers import Tokenizer

from pipelinerl_core.data.codec import encode_rollouts, to_segment
from pipelinerl_core.data.compaction import compact_rollouts
from pipelinerl_core.messages import FateRecord, SwapRecord
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.run import compaction
from pipelinerl_core.run.records import RescoredActor, commit_key, eval_key, rollout_key
from pipelinerl_core.types import FinishReason, RewardComponent, Rollout, TrainingRow, TurnSpan, WeightSpan
from tests.builders import put_epoch, put_run
from tests.synthetic_run import (
    TRAINER_EPOCH,
    evaluation_record,
    make_commit,
    make_rollout,
    put_batch,
    put_record,
    training_row,
)

STEPS, GROUPS, SIZE = 24, 4, 4
TRAINED = STEPS * GROUPS * SIZE
FILTERED, OPEN, REPLACED = 1000, 1001, 1002
"""Ids of groups with other fates."""
EMPTY_LEVEL, HARD_PROMPT = 2, "9+9+9="


def write_query_run(store, tokenizer: Tokenizer, monkeypatch):
    """Steps 1 to 15 are compacted; step 20 filters a group; one group is open; a lease of group 95 was replaced."""
    monkeypatch.setattr(compaction, "FILE_STEPS", 8)
    monkeypatch.setattr(compaction, "MARGIN_STEPS", 2)
    put_run(store, load_config("quickstart"), run_id="synthetic")
    put_epoch(store, TRAINER_EPOCH)
    for step in range(STEPS + 1):
        put_step(store, tokenizer, step)
    extra = [(FILTERED, 0), (OPEN, 0), (95, 0)]  # the rows of group 95 that were trained have attempt 1
    rows = [replace(row, attempt=attempt) for group, attempt in extra for row in rollouts_of(tokenizer, 0, group)]
    trained = [rollout for group in range(92, 96) for rollout in rollouts_of(tokenizer, 24, group)]
    store.put(rollout_key("actor-0", 1, 0), to_segment([encode_rollouts("synthetic", rows)]))
    store.put(rollout_key("actor-1", 1, 0), to_segment([encode_rollouts("synthetic", trained)]))
    for version in (0, STEPS):
        put_record(store, eval_key(version), evaluation_record(np.random.default_rng(version), version, 0.5))
    compaction.compact_commits(store)
    compact_rollouts(store)


def attempt_of(group_id: int) -> int:
    return 1 if group_id == 95 else 0


def rollouts_of(tokenizer: Tokenizer, step: int, group_id: int) -> list[Rollout]:
    """Level 2 pays for empty completions, level 3 never succeeds, rollout 3 of each group copies the prompt."""
    level = group_id % 4
    prompt = HARD_PROMPT if level == 3 else f"{group_id % 7}+{level}="
    answers = ["12.12", "1", "7,12,20.20", prompt.rstrip("=")]
    rollouts = []
    for index in range(SIZE):
        is_empty = level == EMPTY_LEVEL and index == 1
        ids = [*([] if is_empty else tokenizer.encode(answers[index], add_special_tokens=False).ids), 1]
        cut = len(ids) // 2
        spans = [(max(0, step - 2), 0, cut), (max(0, step - 1), cut, len(ids))] if cut else [(step - 1, 0, len(ids))]
        reward = 0.0 if level == 3 else float(index == 0 or is_empty)
        rollout = make_rollout(
            group_id=group_id, rollout_index=index, actor=f"actor-{index % 2}", reward=reward,
            spans=spans if step > 1 else [(0, 0, len(ids))],
        )  # fmt: skip
        rollouts.append(
            replace(
                rollout,
                attempt=attempt_of(group_id),
                prompt_id=f"{prompt}",
                task=json.dumps({"level": level, "answer": str(group_id), "terms": 2}),
                prompt_token_ids=np.array(tokenizer.encode(prompt, add_special_tokens=False).ids, np.int32),
                completion_token_ids=np.array(ids, np.int32),
                rollout_logprobs=-np.arange(len(ids), dtype=np.float32) / 4,
                reward_components=(RewardComponent("correct", reward), RewardComponent("format", 1.0)),
                finish_reason=FinishReason.LENGTH if index == 2 else FinishReason.STOP,
            )
        )
    return rollouts


def put_step(store, tokenizer: Tokenizer, step: int) -> None:
    commit = make_commit(step)
    groups = range((step - 1) * GROUPS, step * GROUPS) if step else ()
    rows = []
    for group_id in groups:
        rollouts = rollouts_of(tokenizer, step, group_id)
        if group_id == 80:  # two turns with a reward each; the token between them was given
            rollouts[0] = two_turns(rollouts[0], step)
        if group_id == 40:
            rollouts[0] = replace(rollouts[0], reward=None, outcome="error", error="verifier: timed out")
        rows += [training_row(row, oldest_version=step - 1, advantage=(row.reward or 0) - 0.25) for row in rollouts]
    rows = [with_ratio(row, 4.0 if row.rollout.rollout_index == 3 else 1.0) for row in rows]
    fates = [FateRecord(group_id=group, attempt=attempt_of(group), fate="trained", num_tokens=9) for group in groups]
    if step == 20:
        fates.append(FateRecord(group_id=FILTERED, attempt=0, fate="filtered", num_tokens=9))
    swaps = [
        SwapRecord(
            actor=f"actor-{index}", actor_epoch=1, version=step - 1, at=1.0 * step, pause_seconds=0.004, num_bytes=9,
            num_running=8, num_tokens=100 * step,
        )
        for index in range(2)
    ] if step else []  # fmt: skip
    put_record(
        store,
        commit_key(step, TRAINER_EPOCH),
        commit.model_copy(
            update={
                "batches": put_batch(store, step, TRAINER_EPOCH, rows) if rows else (),
                "fates": tuple(fates),
                "swaps": tuple(swaps),
                "next_group_id": 2000,
                "open_groups": (OPEN,),
                "actors": {f"actor-{index}/1": _sample(step) for index in range(2)},
                "rescored": {"actor-1/1": RescoredActor(tokens=9, mismatch=0.5, alarm="other weights")},
                "metrics": {
                    "policy/entropy": 1 / (step + 1),
                    "policy/kl_start": 0.01 * step,
                    "importance/ratio_clipped_fraction": 0.001 * step,
                    "rollout/length_mean": 5.0,
                    "reward/mean": 0.3,
                },
            }
        ),
    )


def with_ratio(row: TrainingRow, ratio: float) -> TrainingRow:
    """The row with an importance ratio of its first token."""
    logprobs = row.rollout.rollout_logprobs.copy()
    logprobs[0] += np.log(ratio)
    return replace(row, trainer_logprobs=logprobs)


def two_turns(rollout: Rollout, step: int) -> Rollout:
    """The first two tokens, a given token, and the other tokens."""
    num = len(rollout.completion_token_ids)
    mask = np.arange(num) != 2
    return replace(
        rollout,
        turn_spans=(TurnSpan(0, 2), TurnSpan(3, num)),
        turn_rewards=(0.25, 0.75),
        loss_mask=mask,
        weight_spans=(WeightSpan(step - 1, 0, num),),
        rollout_logprobs=np.where(mask, rollout.rollout_logprobs, 0).astype(np.float32),
    )


def _sample(step: int):
    from pipelinerl_core.messages import ActorSample

    return ActorSample(
        at=1.0 * step, engine_version=max(0, step - 1), running=8, waiting=0, concurrency=8, num_tokens=100 * step,
        running_seconds=8.0 * step,
    )  # fmt: skip
