"""Summaries of the rows of groups for the ledger."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from pipelinerl_core.data.codec import flat_structs
from pipelinerl_core.data.schema import ROLLOUT_SCHEMA
from pipelinerl_core.errors import SchemaMismatch
from pipelinerl_core.ledger import GroupSummary
from pipelinerl_core.types import GroupRef, LengthTotals

# Access by column index is faster than by name, and runs for every group.
_COMPLETION_AT, _SPANS_AT, _REWARD_AT, _TURN_REWARDS_AT = map(
    ROLLOUT_SCHEMA.get_field_index, ("completion_token_ids", "weight_spans", "reward", "turn_rewards")
)
_UNSCORED = -1
"""Key in place of the weight version for tokens of rollouts with outcome error."""


def newest_version(summary: GroupSummary) -> int:
    """The newest weight version of the group's tokens."""
    return max(summary.tokens_by_version, default=0)


def check_versions(summary: GroupSummary, committed_step: int) -> None:
    """Raises SchemaMismatch for tokens of a version that is not committed. With weights.publish_every, an earlier hub
    may have announced a version that no commit names (Committer.republish_if_unreadable).

    Before the first commit actors sample with the initial weights, version 0.
    """
    newest = max(0, committed_step)
    if (used := newest_version(summary)) > newest:
        raise SchemaMismatch(
            f"group {summary.ref.group_id} of {summary.actor} has tokens of weight version {used}, "
            f"but the newest committed version is {newest}"
        )


def summarize(refs: Sequence[GroupRef], batch: pa.RecordBatch) -> list[GroupSummary]:
    """One summary per group.

    batch: checked rows (data/checks.py) of all groups, in the order of `refs`.
    """
    lengths = np.diff(batch.column(_COMPLETION_AT).offsets.to_numpy()).tolist()
    offsets, fields = flat_structs(batch.column(_SPANS_AT))
    bounds, (versions, starts, ends) = offsets.tolist(), (field.tolist() for field in fields)
    rewards = batch.column(_REWARD_AT).to_pylist()  # null exactly with outcome error
    nums_rewards = (np.diff(batch.column(_TURN_REWARDS_AT).offsets.to_numpy()) > 1).tolist()
    summaries, first = [], 0
    for ref in refs:
        rows = range(first, first + ref.num_rollouts)
        first = rows.stop
        by_version: dict[int, list[int]] = {}  # version -> the four fields of LengthTotals
        for row in rows:
            for span in range(bounds[row], bounds[row + 1]):
                version = _UNSCORED if rewards[row] is None else versions[span]
                _count(by_version.setdefault(version, [0, 0, 0, 0]), starts[span], ends[span], lengths[row])
        totals = {version: _as_totals(by_version[version]) for version in sorted(by_version)}
        unscored = totals.pop(_UNSCORED, LengthTotals())
        summary = GroupSummary(
            ref=ref,
            rewards=tuple([reward for reward in rewards[rows.start : rows.stop] if reward is not None]),
            has_turn_rewards=any(nums_rewards[rows.start : rows.stop]),
            tokens_by_version={version: total.num_tokens for version, total in totals.items()},
            lengths_by_version=totals,
            lengths_unscored=unscored,
        )
        summaries.append(summary)
    return summaries


def _count(sums: list[int], start: int, end: int, length: int) -> None:
    """Add the tokens [start, end) of a completion to the four fields of LengthTotals."""
    third = (length + 1) // 3
    num_tokens = end - start
    sums[0] += num_tokens
    if start < third:
        sums[1] += (end if end < third else third) - start
    if end > length - third:
        sums[2] += end - (start if start > length - third else length - third)
    sums[3] += num_tokens * length


def _as_totals(sums: list[int]) -> LengthTotals:
    num_tokens, first_third, last_third, length_sum = sums
    return LengthTotals(num_tokens=num_tokens, first_third=first_third, last_third=last_third, length_sum=length_sum)
