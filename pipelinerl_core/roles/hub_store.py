"""What the hub reads from the store: whether another hub lives, and everything since the newest commit.

Shapes: R = rows of a group, S = weight spans of all its rows, V = weight versions in them; lengths carry the four
fields of LengthTotals in a last dimension.
"""

import logging
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import psutil
import pyarrow as pa
from numpy.typing import NDArray

from pipelinerl_core.errors import MissingObject, PipelineRLError, SchemaMismatch
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.ledger import GroupSummary, SealedGroup
from pipelinerl_core.records import HUB_KEY, Commit, HubRecord, rollout_key
from pipelinerl_core.roles.history import counted_commit_keys, read_commit, read_epochs
from pipelinerl_core.stream.codec import flat_list
from pipelinerl_core.stream.partials import PartialReader
from pipelinerl_core.stream.segments import SegmentReader
from pipelinerl_core.takeover import Holder
from pipelinerl_core.types import GroupRef, LengthTotals, Outcome, WeightManifest

logger = logging.getLogger(__name__)

# A hub rewrites hub.json every second; one on another host that did not for so long is dead.
BEAT_LIMIT_SECONDS = 5.0

Int64Array = NDArray[np.int64]

GroupKey = tuple[int, int]
"""(group_id, attempt)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Past:
    """Where a run stands in its objects."""

    commit: Commit | None = None
    """The newest that counts."""
    manifest: WeightManifest | None = None
    """The newest published version."""
    sealed: list[SealedGroup] = field(default_factory=list)
    """Groups in the segments at and above the low-water marks of the commit."""
    rows: dict[GroupKey, pa.RecordBatch] = field(default_factory=dict)
    """Their rows."""
    holders: Mapping[int, list[Holder]] = field(default_factory=dict)
    """group_id -> whose logs hold tokens of it, newest attempt first."""


def read_past(store: ObjectStore) -> Past:
    """Everything a starting hub must know."""
    commits = counted_commit_keys(store, read_epochs(store))
    commit = read_commit(store, commits[max(commits)]) if commits else None
    manifest = None
    for step in sorted(commits, reverse=True):
        manifest = read_commit(store, commits[step]).manifest
        if manifest is not None:
            break
    past = Past(commit=commit, manifest=manifest, holders=PartialReader(store).holders())
    segments = SegmentReader(store)
    for name in segments.segments(commit.low_water if commit else None):
        key = rollout_key(*name)
        try:
            for ref in segments.groups_in(key):
                batch = segments.read_group(*name, ref.group_id, ref.attempt)
                past.sealed.append(SealedGroup(summary=summarize(ref, batch), seq=name.seq))
                past.rows[ref.group_id, ref.attempt] = batch
        except SchemaMismatch as error:
            logger.error("segment left out, its groups are generated again: %s", error)
    return past


def summarize(ref: GroupRef, batch: pa.RecordBatch) -> GroupSummary:
    """What the ledger must know of the rows [R] of a group; SchemaMismatch if `ref` counts other tokens."""
    is_scored_R = np.array([outcome == Outcome.SCORED for outcome in batch.column("outcome").to_pylist()], dtype=bool)
    rewards = [reward for reward in batch.column("reward").to_pylist() if reward is not None]
    ids, _ = flat_list(batch.column("completion_token_ids"))
    if int(ids[-1] - ids[0]) != ref.num_tokens or batch.num_rows != ref.num_rollouts:
        raise SchemaMismatch(
            f"group {ref.group_id}: {batch.num_rows} rows with {int(ids[-1] - ids[0])} tokens, "
            f"its reference says {ref.num_rollouts} with {ref.num_tokens}"
        )
    spans: pa.ListArray = batch.column("weight_spans")
    offsets = spans.offsets.to_numpy()
    structs = spans.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    version_S, start_S, end_S = (
        structs.field(name).to_numpy().astype(np.int64) for name in ("version", "start", "end")
    )
    length_R = np.diff(ids).astype(np.int64)
    row_S = np.repeat(np.arange(batch.num_rows), np.diff(offsets))
    lengths_S = _length_totals(start_S, end_S, length_R[row_S])
    is_scored_S = is_scored_R[row_S]
    versions, index_S = np.unique(version_S[is_scored_S], return_inverse=True)
    lengths_V = np.zeros((len(versions), 4), dtype=np.int64)
    np.add.at(lengths_V, index_S, lengths_S[is_scored_S])
    by_version = dict(zip(versions.tolist(), map(_as_totals, lengths_V), strict=True))
    unscored_R = _length_totals(np.zeros_like(length_R), length_R, length_R)[~is_scored_R]
    return GroupSummary(
        ref=ref,
        rewards=tuple(rewards),
        tokens_by_version={version: lengths.num_tokens for version, lengths in by_version.items()},
        lengths_by_version=by_version,
        lengths_unscored=_as_totals(unscored_R.sum(axis=0)),
    )


def _length_totals(start_S: Int64Array, end_S: Int64Array, length_S: Int64Array) -> Int64Array:
    """[S, 4] fields of LengthTotals for the tokens [start, end) of completions of these lengths."""
    third_S = (length_S + 1) // 3
    num_S = end_S - start_S
    first_S = np.clip(np.minimum(end_S, third_S) - start_S, 0, None)
    last_S = np.clip(end_S - np.maximum(start_S, length_S - third_S), 0, None)
    return np.stack([num_S, first_S, last_S, num_S * length_S], axis=1)


def _as_totals(row: Int64Array) -> LengthTotals:
    num_tokens, first_third, last_third, length_sum = row.tolist()
    return LengthTotals(num_tokens=num_tokens, first_third=first_third, last_third=last_third, length_sum=length_sum)


def refuse_second_hub(store: ObjectStore) -> None:
    """Raise PipelineRLError while another hub of this run lives; a dead one is taken over."""
    try:
        record = HubRecord.model_validate_json(store.get(HUB_KEY))
    except MissingObject:
        return
    age_seconds = time.time() - record.beat
    is_here = record.host == socket.gethostname()
    if _lives_here(record) if is_here else age_seconds < BEAT_LIMIT_SECONDS:
        raise PipelineRLError(
            f"{store.url}: this run has a hub: pid {record.pid} on {record.host}, heard {age_seconds:.1f} s ago. "
            "Stop it first, or follow the run with `pipelinerl status`"
        )


def _lives_here(record: HubRecord) -> bool:
    try:
        process = psutil.Process(record.pid)
        is_same = abs(process.create_time() - record.process_started_at) < 1.0  # or the pid was given out again
        return bool(is_same and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
