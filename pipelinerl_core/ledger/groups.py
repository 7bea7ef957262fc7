"""The data types of the ledger: actor epochs, leases, summaries of groups, and reservations."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from pipelinerl_core.messages import Reserved, SwapRecord
from pipelinerl_core.types import GroupRef, LengthTotals, PreviousHolder


class ActorKey(NamedTuple):
    """One epoch of one actor."""

    name: str
    epoch: int

    def __str__(self) -> str:
        """The form used as a key in commits: "<actor>/<epoch>"."""
        return f"{self.name}/{self.epoch}"

    @classmethod
    def parse(cls, text: str) -> "ActorKey":
        name, _, epoch = text.rpartition("/")
        return cls(name, int(epoch))


class Arrival(StrEnum):
    """The result of a group's arrival."""

    READY = "ready"
    FILTERED = "filtered"
    FAILED = "failed"
    KNOWN = "known"  # the same attempt arrived before: acknowledged and ignored


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A lease as granted by the ledger; its prompt is PromptSource.prompt(group_id)."""

    group_id: int
    attempt: int
    lease_id: str
    deadline_seconds: float
    """Unix seconds."""
    holders: tuple[PreviousHolder, ...] = ()
    """Previous holders of the group, newest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary:
    """The facts about the rows of a finished group that the ledger needs.

    Only scored rollouts can be trained, so the summary has versions for their tokens only. The rest of
    `ref.num_tokens` belongs to rollouts with outcome error.
    """

    ref: GroupRef
    rewards: tuple[float, ...]
    """Rewards of the scored rollouts."""
    has_turn_rewards: bool = False
    """Whether parts of a reward belong to single turns of several."""
    tokens_by_version: Mapping[int, int] = field(default_factory=dict)
    """Completion tokens of the scored rollouts per weight version that sampled them."""
    lengths_by_version: Mapping[int, LengthTotals] = field(default_factory=dict)
    """Lengths of the same tokens, for the length-bias meter."""
    lengths_unscored: LengthTotals = field(default_factory=LengthTotals)
    """Lengths of tokens of rollouts with outcome error, for the length-bias meter."""

    def __post_init__(self) -> None:
        """Raises ValueError for inconsistent token counts."""
        if self.num_scored_tokens > self.ref.num_tokens:
            raise ValueError(
                f"group {self.ref.group_id}: {self.num_scored_tokens} tokens of scored rollouts, "
                f"but only {self.ref.num_tokens} in all"
            )

    @property
    def actor(self) -> ActorKey:
        return ActorKey(self.ref.actor, self.ref.actor_epoch)

    @property
    def num_scored_tokens(self) -> int:
        """Completion tokens of scored rollouts."""
        return sum(self.tokens_by_version.values())

    @property
    def lengths(self) -> LengthTotals:
        return sum(self.lengths_by_version.values(), self.lengths_unscored)


@dataclass(slots=True, eq=False)
class Reservation:
    """The reservation of one step. The trainer may reserve step n + 1 while step n is being committed."""

    step: int
    answer: Reserved
    """The answer to the trainer, also for repeated requests."""
    refs: dict[int, GroupRef]
    """group_id -> group."""
    summaries: dict[int, GroupSummary]
    """group_id -> summary, for groups whose rows have arrived since the start of the hub."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedGroup:
    """A group found in a segment of the object store."""

    summary: GroupSummary
    seq: int
    """Number of the segment within the actor epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncResult:
    """The ledger's answer to a sync."""

    leases: tuple[Grant, ...]
    """New leases, and leases of the actor that are missing in its list."""
    stop_leases: tuple[str, ...]
    swaps: tuple[SwapRecord, ...]
    """Swaps reported for the first time."""
