"""The lag rule: which tokens are live at a step, and in which order groups are trained.

lag of a token at step n = n - 1 - weight_version; it is live while lag <= max_lag. A group's deadline at step n is
the last step at which the oldest of its tokens that are live at n is live.

Example with max_lag 4: tokens of versions 3 and 7. At step 8 version 3 has lag 4 and is live: deadline 3 + 1 + 4 = 8.
At step 9 version 3 is stale, and version 7 determines the deadline: 12.
"""

from typing import Literal

from pipelinerl_core.algo.staleness import deadline_step, group_deadline
from pipelinerl_core.config import RunConfig
from pipelinerl_core.ledger.groups import GroupSummary
from pipelinerl_core.types import LengthTotals


def is_filtered(summary: GroupSummary, config: RunConfig) -> bool:
    """Whether rollouts.filter_zero_variance replaces a group with two or more rewards: all rewards are equal.

    With loss.advantage=turn, rewards of turns give advantages also where the sums are equal.
    """
    credits_turns = summary.has_turn_rewards and config.loss.credits_turns
    return config.rollouts.filter_zero_variance and len(set(summary.rewards)) == 1 and not credits_turns


def deadline(summary: GroupSummary, step: int, *, max_lag: int, stale: Literal["mask", "drop", "wait"]) -> int | None:
    """The deadline of a group at `step`; None if the group is stale.

    mask, wait: a group is stale if no token is live. drop: a group is stale if any token is stale.
    """
    versions = summary.tokens_by_version
    if stale == "drop" and any(deadline_step(version, max_lag) < step for version in versions):
        return None
    return group_deadline(versions, step=step, max_lag=max_lag)


def split_trained(summary: GroupSummary, step: int, max_lag: int) -> dict[str, int]:
    """Tokens by class of a group that is trained at `step`.

    Live tokens are trained, stale tokens masked_stale, and tokens of rollouts with outcome error failed.
    """
    trained = sum(num for version, num in summary.tokens_by_version.items() if step - 1 - version <= max_lag)
    scored = summary.num_scored_tokens
    return {"trained": trained, "masked_stale": scored - trained, "failed": summary.ref.num_tokens - scored}


def split_lengths(summary: GroupSummary, step: int, max_lag: int) -> dict[str, LengthTotals]:
    """The same split for the length-bias meter."""
    by_version = summary.lengths_by_version.items()
    live = [lengths for version, lengths in by_version if step - 1 - version <= max_lag]
    dead = [lengths for version, lengths in by_version if step - 1 - version > max_lag]
    none = LengthTotals()
    return {"trained": sum(live, none), "masked_stale": sum(dead, none), "failed": summary.lengths_unscored}
