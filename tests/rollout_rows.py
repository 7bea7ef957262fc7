"""Builders of rollouts and groups for tests and benchmarks."""

import itertools

import numpy as np

from pipelinerl_core.types import FinishReason, GroupRef, Outcome, Rollout, Sampler, WeightSpan


def build_rollout(
    rng: np.random.Generator,
    *,
    group_id: int = 0,
    rollout_index: int = 0,
    group_size: int = 8,
    attempt: int = 0,
    actor: str = "actor-0",
    num_tokens: int = 12,
    prompt_tokens: int = 5,
    first_version: int = 0,
    num_versions: int = 1,
    reward: float | None = 1.0,
) -> Rollout:
    """A valid rollout of `num_tokens` random tokens, cut into up to `num_versions` spans of increasing versions."""
    cuts = sorted({0, num_tokens, *(num_tokens * part // num_versions for part in range(num_versions))})
    spans = tuple(
        WeightSpan(first_version + number, start, end) for number, (start, end) in enumerate(itertools.pairwise(cuts))
    )
    return Rollout(
        group_id=group_id,
        rollout_index=rollout_index,
        attempt=attempt,
        lease_id=f"lease-{group_id}-{attempt}",
        prompt_id=f"{group_id:016x}",
        source="sums",
        env="sums",
        actor=actor,
        group_size=group_size,
        prompt_token_ids=rng.integers(0, 100, prompt_tokens, dtype=np.int32),
        completion_token_ids=rng.integers(0, 100, num_tokens, dtype=np.int32),
        rollout_logprobs=-rng.random(num_tokens, dtype=np.float32),
        weight_spans=spans,
        loss_mask=np.ones(num_tokens, np.bool_),
        reward=reward,
        outcome=Outcome.ERROR if reward is None else Outcome.SCORED,
        finish_reason=FinishReason.STOP,
        error="verifier: killed after 5 s" if reward is None else None,
        sampler=Sampler(temperature=1.0, top_p=1.0, seed=int(rng.integers(0, 2**62))),
        max_tokens=max(num_tokens, 1),
        started_at=1_700_000_000.0,
        finished_at=1_700_000_001.5,
        scored_at=1_700_000_001.75,
    )


def build_group(
    seed: int, *, group_id: int, attempt: int = 0, size: int = 8, num_tokens: int = 12, actor: str = "actor-0"
) -> list[Rollout]:
    """All rollouts of one group, rewards alternating between 0 and 1."""
    rng = np.random.default_rng((seed, group_id, attempt))
    return [
        build_rollout(
            rng,
            group_id=group_id,
            attempt=attempt,
            rollout_index=index,
            group_size=size,
            num_tokens=num_tokens,
            actor=actor,
            reward=float(index % 2),
        )
        for index in range(size)
    ]


def group_ref(rollouts: list[Rollout], *, actor_epoch: int = 0) -> GroupRef:
    """The GroupRef of a group of rollouts."""
    first = rollouts[0]
    return GroupRef(
        group_id=first.group_id,
        attempt=first.attempt,
        actor=first.actor,
        actor_epoch=actor_epoch,
        num_rollouts=len(rollouts),
        num_tokens=sum(rollout.num_tokens for rollout in rollouts),
    )
