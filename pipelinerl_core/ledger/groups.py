"""The nouns of the ledger: who holds a group, and what must be known of its rows."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from pipelinerl_core.run.records import SwapRecord
from pipelinerl_core.types import GroupRef, LengthTotals, PreviousHolder


class ActorKey(NamedTuple):
    """One life of one actor."""

    name: str
    epoch: int

    def __str__(self) -> str:
        """The form used as a key in commits: "<actor>/<epoch>"."""
        return f"{self.name}/{self.epoch}"

    @classmethod
    def parse(cls, text: str) -> "ActorKey":
        """The inverse of str()."""
        name, _, epoch = text.rpartition("/")
        return cls(name, int(epoch))


class Arrival(StrEnum):
    """What became of a delivered group."""

    READY = "ready"
    FILTERED = "filtered"
    FAILED = "failed"
    KNOWN = "known"  # the same attempt had arrived before: acknowledged and ignored


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A lease as the ledger gives it; its prompt is PromptSource.prompt(group_id)."""

    group_id: int
    attempt: int
    lease_id: str
    deadline_seconds: float
    """Unix seconds."""
    holders: tuple[PreviousHolder, ...] = ()
    """Who held the group before, newest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary:
    """What the ledger must know of the rows of a finished group.

    Only scored rollouts can be trained, so only their tokens have versions here; the rest of `ref.num_tokens` belongs
    to rollouts with outcome error.
    """

    ref: GroupRef
    rewards: tuple[float, ...]
    """Of the scored rollouts."""
    tokens_by_version: Mapping[int, int] = field(default_factory=dict)
    """Completion tokens of the scored rollouts per weight version that sampled them."""
    lengths_by_version: Mapping[int, LengthTotals] = field(default_factory=dict)
    """The same tokens, for the length-bias meter."""
    lengths_unscored: LengthTotals = field(default_factory=LengthTotals)
    """Tokens of the rollouts with outcome error, for the length-bias meter."""

    def __post_init__(self) -> None:
        """Reject counts that cannot be."""
        if self.num_scored_tokens > self.ref.num_tokens:
            raise ValueError(
                f"group {self.ref.group_id}: {self.num_scored_tokens} tokens of scored rollouts, "
                f"but only {self.ref.num_tokens} in all"
            )

    @property
    def actor(self) -> ActorKey:
        """Who sampled it."""
        return ActorKey(self.ref.actor, self.ref.actor_epoch)

    @property
    def num_scored_tokens(self) -> int:
        """Completion tokens of scored rollouts."""
        return sum(self.tokens_by_version.values())

    @property
    def lengths(self) -> LengthTotals:
        """All its tokens."""
        return sum(self.lengths_by_version.values(), self.lengths_unscored)


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedGroup:
    """A group found in a segment of the object store."""

    summary: GroupSummary
    seq: int
    """Of the segment, within the actor epoch of the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncResult:
    """What an actor is told."""

    leases: tuple[Grant, ...]
    """New ones, and again those it should have and did not list."""
    stop_leases: tuple[str, ...]
    swaps: tuple[SwapRecord, ...]
    """Swaps that are news."""
