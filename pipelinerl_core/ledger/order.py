"""The lag rule: which tokens are live at a step, and which groups go first.

lag of a token at step n = n - 1 - weight_version; it is live while lag <= max_lag. A group's deadline at step n is
the last step at which its oldest token that is live at n still is.

Example with max_lag 4: tokens of versions 3 and 7. At step 8 version 3 has lag 4 and is live: deadline 3 + 1 + 4 = 8.
At step 9 it is dead, and the deadline follows version 7: 12.
"""

from typing import Literal

from pipelinerl_core.algo.staleness import deadline_step, group_deadline
from pipelinerl_core.ledger.groups import GroupSummary
from pipelinerl_core.types import LengthTotals


def deadline(summary: GroupSummary, step: int, *, max_lag: int, stale: Literal["mask", "drop", "wait"]) -> int | None:
    """Last step for which the group's oldest live token is live; None when the group is stale at `step`.

    mask, wait: stale without a single live token. drop: stale with a single dead one.
    """
    versions = summary.tokens_by_version
    if stale == "drop" and any(deadline_step(version, max_lag) < step for version in versions):
        return None
    return group_deadline(versions, step=step, max_lag=max_lag)


def split_trained(summary: GroupSummary, step: int, max_lag: int) -> dict[str, int]:
    """Where the tokens of a group go when it is trained at `step`.

    Live tokens are trained, dead ones masked_stale, those of rollouts that could not be scored failed.
    """
    trained = sum(num for version, num in summary.tokens_by_version.items() if step - 1 - version <= max_lag)
    scored = summary.num_scored_tokens
    return {"trained": trained, "masked_stale": scored - trained, "failed": summary.ref.num_tokens - scored}


def split_lengths(summary: GroupSummary, step: int, max_lag: int) -> dict[str, LengthTotals]:
    """The same split for the length-bias meter."""
    by_version = summary.lengths_by_version.items()
    live = [lengths for version, lengths in by_version if step - 1 - version <= max_lag]
    dead = [lengths for version, lengths in by_version if step - 1 - version > max_lag]
    return {"trained": _total(live), "masked_stale": _total(dead), "failed": summary.lengths_unscored}


def _total(lengths: list[LengthTotals]) -> LengthTotals:
    return sum(lengths[1:], lengths[0]) if lengths else LengthTotals()
