"""The data types of the system. Every object that passes from one folder to another is defined here.

Array shapes in the field texts: P = prompt tokens, C = completion tokens, N = rollouts of a step.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelinerl_core.ranges import Attempt, Count, Seconds, Step, Total

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
BoolArray = NDArray[np.bool_]


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"  # the model sampled an end token, which is part of the completion
    LENGTH = "length"  # max_tokens or the engine's length limit was reached
    ABORT = "abort"  # taken back before its end; a continuation may follow


class Outcome(StrEnum):
    """The result of scoring a rollout."""

    SCORED = "scored"  # reward is a number
    ERROR = "error"  # reward is null, never 0


class Fate(StrEnum):
    """How a group left the ledger."""

    TRAINED = "trained"
    FILTERED = "filtered"  # all rewards equal
    DROPPED_STALE = "dropped_stale"
    FAILED = "failed"  # fewer than two rollouts could be scored
    QUARANTINED = "quarantined"  # in a step whose loss or gradient was not finite


class WeightSpan(NamedTuple):
    """Completion tokens [start, end) were sampled by one weight version."""

    version: int
    start: int
    end: int


class TurnSpan(NamedTuple):
    """Completion tokens [start, end) were sampled in one turn; tokens between turns come from the environment."""

    start: int
    end: int


class Origin(NamedTuple):
    """The first tokens of a completion, sampled by an actor epoch that did not finish the completion."""

    actor: str
    epoch: Count
    num_tokens: Count


class RewardComponent(NamedTuple):
    """A named part of a reward, without its weight."""

    name: str
    value: float


class Score(float):
    """A reward, and its components: the reward is their weighted sum."""

    components: tuple[RewardComponent, ...]
    """Empty if the verifier returned one number."""

    def __new__(cls, reward: float, components: tuple[RewardComponent, ...] = ()) -> "Score":
        score = super().__new__(cls, reward)
        score.components = components
        return score


class PreviousHolder(NamedTuple):
    """An actor that held the lease of a group before; its log of open groups may hold tokens of the group."""

    actor: str
    epoch: Count
    attempt: Attempt


class LoggedStep(NamedTuple):
    """The newest training step whose metrics a tracker has."""

    step: int
    weights_digest: str
    """The weights after the step: two timelines of one run have different weights at the same step."""


NO_STEP = LoggedStep(-1, "")

Message = Mapping[str, Any]
"""A message of a conversation, JSON values only, with the keys of chat APIs: {"role": "user", "content": "Hello"}."""


class ToolCall(NamedTuple):
    """A call of a tool in a reply."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One turn of the model in an episode."""

    text: str
    """The whole turn as text, without the token that ends the turn."""
    content: str
    """The text without reasoning and tool calls."""
    reasoning: str = ""
    """The text of the reasoning block; empty without such a block."""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: FinishReason = FinishReason.STOP
    """STOP, or LENGTH if the turn was cut off by a limit of tokens."""
    num_tokens: int = 0
    """Tokens of the turn."""
    num_tokens_before: int = 0
    """Tokens of the conversation before the turn."""
    tokens_left: int = 0
    """Completion tokens that the episode may still have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """The result of an episode."""

    score: Score
    """Weighted sum of the components, with the components."""
    turn_rewards: tuple[float, ...] = ()
    """Parts of the score that belong to single turns, weighted, one per turn; empty without such parts."""
    is_cut: bool = False
    """The episode used up its tokens or turns, and the environment did not handle this: every component is 0."""


class Transcript(NamedTuple):
    """The result of an episode whose environment scores the episodes of a group together."""

    text: str
    """What `play` returned, as JSON."""
    num_turns: int
    """Turns of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One problem of a prompt source."""

    prompt_id: str
    """Hex digest of source and text: equal for equal problems, whatever their position."""
    source: str
    """Name of the prompt source."""
    env: str
    """Name of the verifier that scores it."""
    text: str
    """Input of the model, before tokenisation; with `messages` their contents."""
    messages: tuple[dict[str, Any], ...] = ()
    """A conversation that ends with a message of the user; empty: `text` is the only message."""
    task: dict[str, Any] = field(default_factory=dict)
    """Input of the verifier (JSON values only), for example {"answer": "15"}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """How tokens are drawn. The seed is one per rollout; noise is keyed by (seed, position)."""

    temperature: float = 1.0
    """0: greedy, the most likely token."""
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """The tokens that an engine has sampled for one request so far."""

    token_ids: Int32Array
    """[C], with the end token if there is one."""
    rollout_logprobs: Float32Array
    """[C] log-probability of each token under the distribution it was drawn from."""
    weight_spans: tuple[WeightSpan, ...]
    """Cover [0, C) without gaps, versions not decreasing."""
    finish_reason: FinishReason | None = None
    """None while it is still running."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineRequest:
    """One sequence to generate, given as token ids: engines do not tokenise."""

    request_id: str
    prompt_token_ids: Int32Array
    """[P], at least one token."""
    max_tokens: int
    """Limit of completion tokens, tokens of `prior` included."""
    sampler: Sampler
    prior: Completion | None = None
    """Tokens already sampled; they keep their log-probabilities and versions."""
    is_turn: bool = False
    """A request may follow whose prompt begins with this prompt and its completion: keep their keys and values."""
    min_version: int = -1
    """Version of the newest token of the prompt that the model sampled: older weights must not continue it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunk:
    """New tokens of one request, all sampled by weights `weight_version` or newer.

    An engine that records the version of each token starts a new chunk where the version changes, so that the version
    is exact. Other engines give a lower bound. The versions in `completion` are always exact.
    Example: 3 tokens under version 7, then 2 under version 8 and the end -> two chunks; the second carries
    `completion`, the whole of it with `finish_reason` set.
    """

    request_id: str
    token_ids: Int32Array
    rollout_logprobs: Float32Array
    weight_version: int
    completion: Completion | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """State of an engine. Counters start at 0 with the engine."""

    running: int
    """Sequences that hold a slot."""
    waiting: int
    """Sequences accepted but not started."""
    slots: int
    """Current limit of running sequences: engine.concurrency, or less if the KV cache is too small."""
    kv_usage: float
    """Share of the KV memory in use, in [0, 1]."""
    num_tokens: int
    """Tokens sampled since the start."""
    num_steps: int
    """Decode steps since the start."""
    running_seconds: float
    """Integral of `running` over time since the start, in sequence-seconds: mean running = its slope."""
    num_prefilled: int = 0
    """Tokens of sequences that started or continued, whose keys and values were needed."""
    num_reused: int = 0
    """Those among them whose keys and values were there, from a sequence with the same beginning."""
    overrun_seconds: float = 0.0
    """Time by which decode steps took longer than an emulated accelerator would; 0 without emulation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapReport:
    """Costs of one weight swap."""

    version: int
    pause_seconds: float
    """Time during which no token could be sampled, seconds."""
    num_bytes: int
    num_running: int
    """Sequences that were running during the swap."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """One finished and scored completion of a prompt: one row of the `rollout` schema."""

    group_id: int
    """Position of the group in the prompt ledger."""
    rollout_index: int
    """0 .. group_size - 1."""
    attempt: int
    lease_id: str
    prompt_id: str
    source: str
    env: str
    actor: str
    group_size: int
    prompt_token_ids: Int32Array
    """[P]"""
    completion_token_ids: Int32Array
    """[C]"""
    rollout_logprobs: Float32Array
    """[C], 0 where loss_mask is False."""
    weight_spans: tuple[WeightSpan, ...]
    loss_mask: BoolArray
    """[C], True on tokens that were sampled and may be trained."""
    reward: float | None
    """None with outcome `error`."""
    outcome: Outcome
    finish_reason: FinishReason
    error: str | None
    """One line about the failure; None without a failure."""
    sampler: Sampler
    max_tokens: int
    started_at: float
    """Unix seconds when the first token was requested."""
    finished_at: float
    """Unix seconds when the last token was sampled."""
    scored_at: float
    """Unix seconds when the reward was known."""
    origins: tuple[Origin, ...] = ()
    """Actor epochs that sampled the first tokens, in order; `actor` sampled the rest."""
    reward_components: tuple[RewardComponent, ...] = ()
    """Components of the reward, in the verifier's order; empty if the verifier returned one number."""
    turn_spans: tuple[TurnSpan, ...] = ()
    """Turns in order; loss_mask is False outside of turns. Empty if the whole completion is one turn."""
    turn_rewards: tuple[float, ...] = ()
    """Parts of the reward that belong to single turns, one per turn; empty without such parts."""
    branch_starts: tuple[int, ...] = ()
    """Offsets in the completion where a context begins anew: from there to the next offset, or to the end, nothing
    follows the prompt or an earlier token. Empty: the whole completion follows the prompt."""
    task: str = "{}"
    """Columns of the prompt's row, or the environment's task: a JSON object, with long values cut."""

    @property
    def num_tokens(self) -> int:
        return len(self.completion_token_ids)

    @property
    def min_version(self) -> int:
        """Oldest weight version of a token."""
        return self.weight_spans[0].version

    @property
    def num_turns(self) -> int:
        """Number of turns, at least 1."""
        return len(self.turn_spans) or 1

    @property
    def num_opening_tokens(self) -> int:
        """Given tokens with which branches begin; they do not count for rollouts.max_tokens."""
        firsts = [turn.start for turn in self.turn_spans]
        return sum(
            min((first for first in firsts if first >= start), default=end) - start
            for start, end in self.contexts[1:]
        )

    @property
    def contexts(self) -> list[tuple[int, int]]:
        """[start, end) in the completion of each context; the first context begins with the prompt."""
        edges = (0, *self.branch_starts, self.num_tokens)
        return list(itertools.pairwise(edges))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartialRow:
    """New tokens of one rollout of an unfinished group: one row of the `partial` schema."""

    group_id: int
    rollout_index: int
    attempt: int
    start: int
    """Offset of the tokens in the completion. The row replaces everything recorded from this offset on."""
    token_ids: Int32Array
    rollout_logprobs: Float32Array
    weight_spans: tuple[WeightSpan, ...]
    """Weight spans of the tokens; offsets count from the start of the completion."""
    finish_reason: FinishReason | None = None
    """None while the rollout is being sampled."""
    reward: float | None = None
    outcome: Outcome | None = None
    """None until the rollout is scored."""
    origins: tuple[Origin, ...] = ()
    """Actor epochs that sampled the first tokens of the completion, other than the epoch that writes the row."""
    reward_components: tuple[RewardComponent, ...] = ()
    """Components of the reward, once known."""
    notes: tuple[str, ...] = ()
    """New notes of an episode, JSON texts (rollouts/episode.py); with start=0, all notes."""

    @property
    def end(self) -> int:
        """Number of completion tokens known up to and including the row."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingRow:
    """A rollout as it is trained: one row of the `batch` schema, in training order."""

    rollout: Rollout
    loss_mask: BoolArray
    """[C] after the lag rule."""
    advantage: float
    """Advantage of every token, or with turn_advantages of the first turn."""
    loss_weight: float
    """Weight of each token in the loss."""
    turn_advantages: tuple[float, ...] = ()
    """Advantage of each of the rollout's turn_spans; empty if `advantage` is valid for all tokens."""
    trainer_logprobs: Float32Array | None = None
    """[C] log-probability of each sampled token under the weights that the step trained, 0 for other tokens; None if
    it was not computed or not kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file of a manifest."""

    name: str
    size: Count
    digest: str
    """BLAKE3 of the bytes, 64 hexadecimal digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightDelta:
    """How the store has a version: as its difference from an earlier version, which the store has whole."""

    entry: FileEntry
    """The difference, below the version's own key."""
    base: FileEntry
    """The file of the earlier version; the name in this entry is the key of the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """One published set of weights. Written after its data; readers ignore weights without a manifest."""

    version: Step
    """Number of optimizer steps in the weights; 0 for the initial weights."""
    epoch: Count
    """Trainer epoch that published it."""
    files: tuple[FileEntry, ...]
    key: str | None
    """Prefix of the durable copy in the object store, relative to the run; None without a durable copy."""
    shm: str | None
    """File of the copy in shared memory on `host`; None without such a copy."""
    host: str
    published_at: Seconds
    """Unix seconds."""
    group: Count = 0
    """Broadcast group that the actors named in the group are to join; 0: none."""
    is_broadcast: bool = False
    """Whether members of the group receive this version from the trainer, directly after the announcement."""
    broadcast_index: Count = 0
    """Number of the broadcast within the group, from 1: broadcast data does not contain the version."""
    delta: WeightDelta | None = None
    """The store has this difference instead of `files`; None: it has the files, if `key` is not None."""

    @property
    def num_bytes(self) -> int:
        """Size of the files, or of the difference that stands for them."""
        return sum(entry.size for entry in self.files) if self.delta is None else self.delta.entry.size


GroupKey = tuple[int, int]
"""(group_id, attempt)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRef:
    """Identifies one finished group."""

    group_id: Count
    attempt: Attempt
    actor: str
    actor_epoch: Count
    num_rollouts: Count
    num_tokens: Count
    """Completion tokens of all rollouts."""
    origins: tuple[Origin, ...] = ()
    """Tokens sampled by other actor epochs."""

    def shares(self) -> "dict[tuple[str, int], int]":
        """(actor, epoch) -> tokens of the group sampled by the actor epoch; the sum is num_tokens."""
        shares = {(self.actor, self.actor_epoch): self.num_tokens}
        for actor, epoch, num_tokens in self.origins:
            shares[actor, epoch] = shares.get((actor, epoch), 0) + num_tokens
            shares[self.actor, self.actor_epoch] -= num_tokens
        return shares


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthTotals:
    """Sums over a set of tokens about the lengths of their completions and their positions in them.

    The first and the last third of a completion are its first and last (C + 1) // 3 tokens: C / 3, rounded.
    """

    num_tokens: Total = 0
    first_third: Total = 0
    """Tokens in the first third of their completion."""
    last_third: Total = 0
    """Tokens in the last third of their completion."""
    length_sum: Total = 0
    """Sum over the tokens of the length of their completion: a completion of C tokens counts C times C."""

    def __add__(self, other: "LengthTotals") -> "LengthTotals":
        return LengthTotals(
            num_tokens=self.num_tokens + other.num_tokens,
            first_third=self.first_third + other.first_third,
            last_third=self.last_third + other.last_third,
            length_sum=self.length_sum + other.length_sum,
        )

    def __sub__(self, other: "LengthTotals") -> "LengthTotals":
        return LengthTotals(
            num_tokens=self.num_tokens - other.num_tokens,
            first_third=self.first_third - other.first_third,
            last_third=self.last_third - other.last_third,
            length_sum=self.length_sum - other.length_sum,
        )

    @property
    def mean_length(self) -> float | None:
        """Mean over the tokens of the length of their completion; None without tokens."""
        return self.length_sum / self.num_tokens if self.num_tokens else None

    @property
    def first_third_share(self) -> float | None:
        """Share of the tokens in the first third of their completion; None without tokens."""
        return self.first_third / self.num_tokens if self.num_tokens else None

    @property
    def last_third_share(self) -> float | None:
        """Share of the tokens in the last third of their completion; None without tokens."""
        return self.last_third / self.num_tokens if self.num_tokens else None
