"""Reads the state of a run from the object store when the hub starts."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from pipelinerl_core.data.partials import PartialReader
from pipelinerl_core.data.segments import SegmentReader
from pipelinerl_core.errors import MissingObject, SchemaMismatch
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.ledger import ActorKey, SealedGroup
from pipelinerl_core.roles.hub.summaries import check_versions, summarize
from pipelinerl_core.run.commits import read_all_commits
from pipelinerl_core.run.reading import list_keys
from pipelinerl_core.run.records import RETIRED_PREFIX, Commit, parse_retired_key, rollout_key
from pipelinerl_core.types import GroupKey, PreviousHolder, WeightManifest

logger = logging.getLogger(__name__)


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
                check_versions(summary, commit.step if commit else 0)
                past.sealed.append(SealedGroup(summary=summary, seq=name.seq))
                num_bytes += batch.nbytes
                if num_bytes <= max_row_bytes:
                    past.rows[ref.group_id, ref.attempt] = batch
        except MissingObject as error:  # compaction or gc deletes segments whose groups are all decided
            logger.info("segment left out, it was deleted since the listing: %s", error)
        except SchemaMismatch as error:
            logger.error("segment left out, its groups are generated again: %s", error)
    return past
