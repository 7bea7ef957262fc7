"""The lag rule: which tokens are live at a step, and which groups go first.

lag of a token at step n = n - 1 - weight_version; it is live while lag <= max_lag. A group's deadline at step n is
the last step at which its oldest token that is live at n still is.

Example with max_lag 4: tokens of versions 3 and 7. At step 8 version 3 has lag 4 and is live: deadline 3 + 1 + 4 = 8.
At step 9 it is dead, and the deadline follows version 7: 12.
"""

from collections.abc import Iterable
from typing import Literal

from pipelinerl_core.ledger.groups import GroupSummary


def deadline(summary: GroupSummary, step: int, *, max_lag: int, stale: Literal["mask", "drop"]) -> int | None:
    """Last step for which the group's oldest live token is live; None when the group is stale at `step`.

    mask: stale without a single live token. drop: stale with a single dead one.
    """
    versions = summary.tokens_by_version
    live = [version for version in versions if step - 1 - version <= max_lag]
    if not live or (stale == "drop" and len(live) < len(versions)):
        return None
    return min(live) + 1 + max_lag


def earliest(deadlines: Iterable[tuple[int, int]], count: int) -> list[int]:
    """group_id of the `count` pairs (deadline, group_id) that come first."""
    return [group_id for _, group_id in sorted(deadlines)[:count]]


def split_trained(summary: GroupSummary, step: int, max_lag: int) -> dict[str, int]:
    """Where the tokens of a group go when it is trained at `step`.

    Live tokens are trained, dead ones masked_stale, those of rollouts that could not be scored failed.
    """
    trained = sum(num for version, num in summary.tokens_by_version.items() if step - 1 - version <= max_lag)
    scored = summary.num_scored_tokens
    return {"trained": trained, "masked_stale": scored - trained, "failed": summary.ref.num_tokens - scored}
