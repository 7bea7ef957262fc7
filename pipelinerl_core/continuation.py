"""The nouns of taking a group over: who held it, and what its log says of each rollout."""

from dataclasses import dataclass
from typing import NamedTuple

from pipelinerl_core.ranges import Attempt, Count
from pipelinerl_core.types import FinishReason, Float32Array, Int32Array, Origin, Outcome, WeightSpan


class Holder(NamedTuple):
    """Who held a group and gave it up: its log may hold tokens of it."""

    actor: str
    epoch: Count
    attempt: Attempt


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartialRow:
    """What became known of one rollout of an open group: one row of the `partial` schema."""

    group_id: int
    rollout_index: int
    attempt: int
    start: int
    """Offset of its tokens in the completion; what was known from there on is replaced."""
    token_ids: Int32Array
    rollout_logprobs: Float32Array
    weight_spans: tuple[WeightSpan, ...]
    """Of its tokens, counted from the start of the completion."""
    finish_reason: FinishReason | None = None
    """None while it is sampled."""
    reward: float | None = None
    outcome: Outcome | None = None
    """None until it is scored."""
    origins: tuple[Origin, ...] = ()
    """Who sampled the first tokens of the completion, if others did."""

    @property
    def end(self) -> int:
        """Tokens of the completion known with it."""
        return self.start + len(self.token_ids)
