"""What may be seen of a ledger: counts, where a group is, and what the schedule makes of them."""

from collections import Counter

from pipelinerl_core.config import RunConfig
from pipelinerl_core.ledger.groups import ActorKey
from pipelinerl_core.ledger.pool import GroupPool
from pipelinerl_core.ledger.schedules import GroupCounts, Schedule
from pipelinerl_core.types import LengthTotals, WeightManifest


class LedgerView:
    """The questions; `Ledger` adds the moves."""

    def __init__(self, config: RunConfig, pool: GroupPool, schedule: Schedule) -> None:
        self._config = config
        self._pool = pool
        self._schedule = schedule
        self.committed_step = -1
        self.manifest: WeightManifest | None = None

    @property
    def num_leased(self) -> int:
        """Groups leased."""
        return self._pool.leases.num_held

    @property
    def num_queued(self) -> int:
        """Groups that lost their lease and have no new one."""
        return self._pool.leases.num_queued

    @property
    def num_ready(self) -> int:
        """Groups ready."""
        return len(self._pool.ready)

    @property
    def num_reserved(self) -> int:
        """Groups in reservations."""
        return self._pool.num_reserved

    @property
    def counts(self) -> GroupCounts:
        """What the schedule goes by."""
        return GroupCounts(
            leased=self.num_leased,
            ready=self.num_ready,
            reserved=self.num_reserved,
            committed_step=max(0, self.committed_step),
            newest_version=max(0, self.newest_version),
        )

    def must_pause(self, engine_version: int) -> bool:
        """Whether an engine with these weights must pause, its requests and their KV cache kept."""
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
        """Whether the trainer may still ask for the rows of this attempt."""
        return self._pool.needs_rows(group_id, attempt)

    def needed_rows(self) -> set[tuple[int, int]]:
        """(group_id, attempt) of all groups whose rows the trainer may still ask for."""
        return self._pool.needed_rows()

    def is_open(self, group_id: int) -> bool:
        """Whether a group was leased and has no fate."""
        return self._pool.is_open(group_id)

    def holder(self, group_id: int, attempt: int) -> ActorKey | None:
        """Who has the lease of this attempt, or delivered it; None if it is neither leased, ready nor reserved."""
        return self._pool.holder(group_id, attempt)

    def segment_of(self, group_id: int, attempt: int) -> tuple[ActorKey, int] | None:
        """(actor epoch, seq) of the segment that holds a group."""
        return self._pool.segments.find(group_id, attempt)

    def num_ready_of(self, actor: ActorKey) -> int:
        """Groups of an actor that the trainer has not taken."""
        return self._pool.ready.num_of(actor)

    def take_departures(self) -> Counter[ActorKey]:
        """Groups of each actor that have ceased to be ready since the last call."""
        return self._pool.ready.take_departures()

    def num_leased_by(self, actor: ActorKey) -> int:
        """Leases of an actor."""
        return self._pool.leases.num_held_by(actor)

    def is_gone(self, actor: ActorKey) -> bool:
        """Whether an actor epoch has left or died."""
        return self._pool.tokens.account(actor).is_gone

    def tokens(self) -> dict[str, int]:
        """The token ledger now; it always closes."""
        return self._pool.tokens.totals()

    def lengths(self) -> dict[str, LengthTotals]:
        """The length-bias meter now."""
        return self._pool.tokens.lengths.totals()
