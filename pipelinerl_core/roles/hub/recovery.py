"""Reads the state of a run from the object store when the hub starts; summarizes rows for the ledger."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from pipelinerl_core.data.codec import flat_structs
from pipelinerl_core.data.partials import PartialReader
from pipelinerl_core.data.schema import ROLLOUT_SCHEMA
from pipelinerl_core.data.segments import SegmentReader
from pipelinerl_core.errors import MissingObject, SchemaMismatch
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.ledger import ActorKey, GroupSummary, SealedGroup
from pipelinerl_core.run.commits import read_all_commits
from pipelinerl_core.run.reading import list_keys
from pipelinerl_core.run.records import RETIRED_PREFIX, Commit, parse_retired_key, rollout_key
from pipelinerl_core.types import GroupKey, GroupRef, LengthTotals, PreviousHolder, WeightManifest

logger = logging.getLogger(__name__)

# Access by column index is faster than by name, and runs for every group.
_COMPLETION_AT, _SPANS_AT, _REWARD_AT, _TURN_REWARDS_AT = map(
    ROLLOUT_SCHEMA.get_field_index, ("completion_token_ids", "weight_spans", "reward", "turn_rewards")
)
_UNSCORED = -1
"""Key in place of the weight version for tokens of rollouts with outcome error."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredState:
    """The state of a run, as read from the object store."""

    commit: Commit | None = None
    """The newest commit that counts (docs/storage.md)."""
    manifest: WeightManifest | None = None
    """The newest published version."""
    sealed: list[SealedGroup] = field(default_factory=list)
    """Groups in the segments at and above the low-water marks of the commit."""
    rows: dict[GroupKey, pa.RecordBatch] = field(default_factory=dict)
    """Rows of the first of these groups, up to the limit of bytes."""
    retired: frozenset[ActorKey] = frozenset()
    """Actor epochs that never return and whose groups are all decided."""
    holders: Mapping[int, list[PreviousHolder]] = field(default_factory=dict)
    """group_id -> actor epochs whose logs hold tokens of the group, newest attempt first."""


def read_stored_state(store: ObjectStore, max_row_bytes: float = math.inf) -> StoredState:
    """Read the newest commit, and the groups in segments above the commit's low-water marks.

    max_row_bytes: limit of the rows returned in memory; other rows stay in their segments.
    """
    commits = read_all_commits(store)
    commit = next(iter(commits.newest(1)), None)
    manifests = (commits[step].manifest for step in reversed(commits))
    manifest = next((candidate for candidate in manifests if candidate is not None), None)
    retired = frozenset(ActorKey(*parse_retired_key(key)) for key in list_keys(store, RETIRED_PREFIX))
    past = StoredState(commit=commit, manifest=manifest, retired=retired, holders=PartialReader(store).holders())
    segments, num_bytes = SegmentReader(store), 0
    for name in segments.segments(commit.low_water if commit else None, retired):
        key = rollout_key(*name)
        try:
            for ref in segments.groups_in(key):
                batch = segments.read_group(*name, ref.group_id, ref.attempt)
                [summary] = summarize([ref], batch)
                check_versions(summary, manifest)
                past.sealed.append(SealedGroup(summary=summary, seq=name.seq))
                num_bytes += batch.nbytes
                if num_bytes <= max_row_bytes:
                    past.rows[ref.group_id, ref.attempt] = batch
        except MissingObject as error:  # compaction or gc deletes segments whose groups are all decided
            logger.info("segment left out, it was deleted since the listing: %s", error)
        except SchemaMismatch as error:
            logger.error("segment left out, its groups are generated again: %s", error)
    return past


def check_versions(summary: GroupSummary, manifest: WeightManifest | None) -> None:
    """Raises SchemaMismatch for tokens of a version newer than `manifest`, the newest announced version.

    Before the first announcement actors sample with the initial weights, version 0.
    """
    newest = manifest.version if manifest is not None else 0
    newest_of_group = max(summary.tokens_by_version, default=0)
    if newest_of_group > newest:
        raise SchemaMismatch(
            f"group {summary.ref.group_id} of {summary.actor} has tokens of weight version {newest_of_group}, "
            f"but the newest announced version is {newest}"
        )


def summarize(refs: Sequence[GroupRef], batch: pa.RecordBatch) -> list[GroupSummary]:
    """One summary per group.

    batch: checked rows (data/checks.py) of all groups, in the order of `refs`.
    """
    lengths = np.diff(batch.column(_COMPLETION_AT).offsets.to_numpy()).tolist()
    offsets, fields = flat_structs(batch.column(_SPANS_AT))
    bounds, (versions, starts, ends) = offsets.tolist(), (field.tolist() for field in fields)
    rewards = batch.column(_REWARD_AT).to_pylist()  # null exactly with outcome error
    turn_rewards = batch.column(_TURN_REWARDS_AT)
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
            has_turn_rewards=turn_rewards.slice(rows.start, len(rows)).null_count < len(rows),
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
