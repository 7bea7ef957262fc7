"""The queries of the ledger: counts, states of groups, and decisions of the schedule."""

from pipelinerl_core.config import RunConfig
from pipelinerl_core.ledger.groups import ActorKey
from pipelinerl_core.ledger.pool import GroupPool
from pipelinerl_core.ledger.schedules import GroupCounts, Schedule
from pipelinerl_core.types import LengthTotals, WeightManifest


class LedgerView:
    """The queries; the subclass `Ledger` adds the transitions."""

    def __init__(self, config: RunConfig, pool: GroupPool, schedule: Schedule) -> None:
        self._config = config
        self._pool = pool
        self._schedule = schedule
        self.committed_step = -1
        self.manifest: WeightManifest | None = None

    @property
    def num_leased(self) -> int:
        return self._pool.leases.num_held

    @property
    def num_queued(self) -> int:
        return self._pool.leases.num_queued

    @property
    def num_ready(self) -> int:
        return len(self._pool.ready)

    @property
    def num_reserved(self) -> int:
        return self._pool.num_reserved

    @property
    def counts(self) -> GroupCounts:
        """The input of the schedule."""
        return GroupCounts(
            leased=self.num_leased,
            ready=self.num_ready,
            reserved=self.num_reserved,
            committed_step=max(0, self.committed_step),
            newest_version=max(0, self.newest_version),
        )

    def must_pause(self, engine_version: int) -> bool:
        return self._schedule.must_pause(self.counts, engine_version)

    @property
    def next_group_id(self) -> int:
        """Prompt frontier: no group at or beyond it was ever leased."""
        return self._pool.next_group_id

    @property
    def newest_version(self) -> int:
        """Newest announced weights; -1 before the first."""
        return self.manifest.version if self.manifest else -1

    @property
    def is_done(self) -> bool:
        """Whether the last step is committed."""
        return self.committed_step >= self._config.trainer.steps

    def needs_rows(self, group_id: int, attempt: int) -> bool:
        """Whether the trainer may still request the rows of this attempt."""
        return self._pool.needs_rows(group_id, attempt)

    def needed_rows(self) -> set[tuple[int, int]]:
        """(group_id, attempt) of all groups whose rows the trainer may still request."""
        return self._pool.needed_rows()

    def is_open(self, group_id: int) -> bool:
        return self._pool.is_open(group_id)

    def holder(self, group_id: int, attempt: int) -> ActorKey | None:
        """The actor epoch that holds or delivered this attempt; None if it is neither leased, ready nor reserved."""
        return self._pool.holder(group_id, attempt)

    def segment_of(self, group_id: int, attempt: int) -> tuple[ActorKey, int] | None:
        """(actor epoch, seq) of the segment that holds a group; None if unknown."""
        return self._pool.segments.find(group_id, attempt)

    def num_ready_of(self, actor: ActorKey) -> int:
        return self._pool.ready.num_of(actor)

    def take_departures(self) -> set[ActorKey]:
        """The actors of groups that left the ready state since the last call."""
        return self._pool.ready.take_departures()

    def num_leased_by(self, actor: ActorKey) -> int:
        return self._pool.leases.num_held_by(actor)

    def is_gone(self, actor: ActorKey) -> bool:
        """Whether an actor epoch has left or expired."""
        return self._pool.tokens.account(actor).is_gone

    def tokens(self) -> dict[str, int]:
        return self._pool.tokens.totals()

    def lengths(self) -> dict[str, LengthTotals]:
        return self._pool.tokens.lengths.totals()
