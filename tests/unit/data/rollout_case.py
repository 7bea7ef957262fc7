"""A rollout written by hand."""

import numpy as np

from pipelinerl_core.types import (
    FinishReason,
    Origin,
    Outcome,
    RewardComponent,
    Rollout,
    Sampler,
    TurnSpan,
    WeightSpan,
)

TURNS = (TurnSpan(0, 2), TurnSpan(2, 4))  # the last token of `by_hand` was not sampled


def by_hand(rollout_index: int = 0) -> Rollout:
    """Five tokens, three under version 7 and two under version 8; the last one was not sampled."""
    return Rollout(
        group_id=2**40,
        rollout_index=rollout_index,
        attempt=1,
        lease_id="lease",
        prompt_id="0badcafe",
        source="sums",
        env="sums",
        actor="actor-0",
        group_size=2,
        prompt_token_ids=np.array([3, 4], np.int32),
        completion_token_ids=np.array([10, 11, 12, 13, 14], np.int32),
        rollout_logprobs=np.array([-0.5, -0.25, -1.0, -2.0, 0.0], np.float32),
        weight_spans=(WeightSpan(7, 0, 3), WeightSpan(8, 3, 5)),
        loss_mask=np.array([True, True, True, True, False]),
        reward=0.5 if rollout_index == 0 else None,
        outcome=Outcome.SCORED if rollout_index == 0 else Outcome.ERROR,
        finish_reason=FinishReason.STOP,
        error=None if rollout_index == 0 else "verifier: killed after 5 s",
        sampler=Sampler(temperature=0.7, top_p=1.0, seed=2**62 + 1),
        max_tokens=64,
        started_at=1700000000.25,
        finished_at=1700000001.5,
        scored_at=1700000002.75,
    )


COMPONENTS = (RewardComponent("correct", 1.0), RewardComponent("short", -0.1))
ORIGINS = (Origin("actor-7", 1700000000, 2), Origin("actor-0", 1700000009, 1))
