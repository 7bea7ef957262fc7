"""What the ledger must know of all groups of one write, found together: each question to Arrow is asked once."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from pipelinerl_core.ledger import GroupSummary
from pipelinerl_core.roles.hub_store import summarize
from pipelinerl_core.stream.quick_checks import spans_of_rows
from pipelinerl_core.stream.schema import ROLLOUT_SCHEMA
from pipelinerl_core.types import GroupRef, LengthTotals, Outcome

_COMPLETION_AT, _OUTCOME_AT, _REWARD_AT = map(
    ROLLOUT_SCHEMA.get_field_index, ("completion_token_ids", "outcome", "reward")
)
_NOTHING = LengthTotals()

Sums = tuple[int, int, int, int]
"""The four fields of LengthTotals, in their order."""


def summarize_all(refs: Sequence[GroupRef], batch: pa.RecordBatch) -> list[GroupSummary]:
    """`summarize` of each group of checked rows, one group after the other."""
    if batch.column(_OUTCOME_AT).to_pylist().count(Outcome.SCORED.value) < batch.num_rows:
        return [summarize(ref, batch.slice(start, ref.num_rollouts)) for ref, start in _with_starts(refs)]
    rewards = batch.column(_REWARD_AT).to_pylist()
    found = []
    for (ref, start), sums in zip(_with_starts(refs), _sums_by_version(refs, batch), strict=True):
        lengths = {
            version: LengthTotals(num_tokens=one[0], first_third=one[1], last_third=one[2], length_sum=one[3])
            for version, one in sums.items()
        }
        summary = GroupSummary(
            ref=ref,
            rewards=tuple(rewards[start : start + ref.num_rollouts]),
            tokens_by_version={version: one[0] for version, one in sums.items()},
            lengths_by_version=lengths,
            lengths_unscored=_NOTHING,
        )
        found.append(summary)
    return found


def _with_starts(refs: Sequence[GroupRef]) -> "zip[tuple[GroupRef, int]]":
    """Each group, and its first row."""
    return zip(refs, itertools.accumulate((ref.num_rollouts for ref in refs[:-1]), initial=0), strict=True)


def _sums_of_whole_rows(refs: Sequence[GroupRef], lengths: list[int]) -> Iterator[Sums]:
    """Of each group, if every row is of one version."""
    thirds = [(length + 1) // 3 for length in lengths]
    squares = [length * length for length in lengths]
    for ref, start in _with_starts(refs):
        rows = slice(start, start + ref.num_rollouts)
        third = sum(thirds[rows])
        yield sum(lengths[rows]), third, third, sum(squares[rows])


def _sums_by_version(refs: Sequence[GroupRef], batch: pa.RecordBatch) -> list[dict[int, Sums]]:
    """Of each group: version -> sums, by version. Every span has tokens, the sums fit into 64 bits (checks.py).

    Shapes: R = rows, S = weight spans, G = groups, V = versions.
    """
    bounds, version_S, start_S, end_S = spans_of_rows(batch)
    lengths_R = np.diff(batch.column(_COMPLETION_AT).offsets.to_numpy()).astype(np.int64)
    has_one_each = bounds == list(range(len(bounds)))  # as long as no weights are swapped meanwhile
    versions = set(version_S.tolist())
    if has_one_each and len(versions) == 1:
        [version] = versions
        return [{version: sums} for sums in _sums_of_whole_rows(refs, lengths_R.tolist())]
    group_R = np.repeat(np.arange(len(refs)), [ref.num_rollouts for ref in refs])
    if has_one_each:
        group_S, length_S = group_R, lengths_R
    else:
        num_R = np.diff(bounds)
        group_S, length_S = np.repeat(group_R, num_R), np.repeat(lengths_R, num_R)
    third_S = (length_S + 1) // 3
    num_S = end_S.astype(np.int64) - start_S
    sums_S = np.stack(
        [
            num_S,
            np.maximum(np.minimum(end_S, third_S) - start_S, 0),
            np.maximum(end_S - np.maximum(start_S, length_S - third_S), 0),
            num_S * length_S,
        ]
    )
    # where group and version stay the same; a row begins with an older version again, so a group may have several
    edges = np.flatnonzero((group_S[1:] != group_S[:-1]) | (version_S[1:] != version_S[:-1])) + 1
    firsts = np.concatenate([[0], edges]) if len(version_S) else edges
    runs = np.add.reduceat(sums_S, firsts, axis=1).T.tolist() if len(version_S) else []
    by_group: list[dict[int, Sums]] = [{} for _ in refs]
    for group, version, run in zip(group_S[firsts].tolist(), version_S[firsts].tolist(), runs, strict=True):
        before = by_group[group].get(version)
        by_group[group][version] = tuple(run if before is None else map(sum, zip(before, run, strict=True)))
    return [dict(sorted(sums.items())) if len(sums) > 1 else sums for sums in by_group]
