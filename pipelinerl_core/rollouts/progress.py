"""State of a rollout while it is sampled and scored: for the write-ahead log, and to continue a partial rollout."""

import numpy as np

from pipelinerl_core.algo.spans import clipped, joined
from pipelinerl_core.types import (
    Chunk,
    Completion,
    FinishReason,
    Float32Array,
    Int32Array,
    Origin,
    Outcome,
    PartialRow,
    RewardComponent,
    Score,
    WeightSpan,
)


class Progress:
    """One rollout of an open group."""

    def __init__(
        self, *, group_id: int, rollout_index: int, attempt: int, restored: PartialRow | None = None
    ) -> None:
        """`restored`: the logged part of the rollout, from previous holders of the group."""
        self._key = {"group_id": group_id, "rollout_index": rollout_index, "attempt": attempt}
        self._token_ids: list[Int32Array] = []
        self._logprobs: list[Float32Array] = []
        self._spans: list[WeightSpan] = []
        self._num_tokens = 0
        self._num_logged = 0
        self._is_news = False
        self.finish_reason: FinishReason | None = None
        self.reward: float | None = None
        self.outcome: Outcome | None = None
        self.reward_components: tuple[RewardComponent, ...] = ()
        self.origins: tuple[Origin, ...] = ()
        self.notes: tuple[str, ...] = ()
        """What the log holds besides tokens: the notes of an episode, in order. Add with `note`."""
        self._num_notes_logged = 0
        if restored is not None:
            self._token_ids, self._logprobs = [restored.token_ids], [restored.rollout_logprobs]
            self._spans, self._num_tokens = list(restored.weight_spans), len(restored.token_ids)
            self.finish_reason, self.origins = restored.finish_reason, restored.origins
            self.notes = restored.notes
            self._is_news = True
            if restored.outcome is Outcome.SCORED:  # a rollout with an error is scored again
                self.reward, self.outcome = restored.reward, restored.outcome
                self.reward_components = restored.reward_components

    @property
    def num_tokens(self) -> int:
        """Tokens of the completion so far."""
        return self._num_tokens

    def completion(self) -> Completion:
        """The completion so far; finish_reason ABORT if it is unfinished."""
        if len(self._token_ids) != 1:
            self._token_ids = [np.concatenate([np.zeros(0, np.int32), *self._token_ids])]
            self._logprobs = [np.concatenate([np.zeros(0, np.float32), *self._logprobs])]
        return Completion(
            token_ids=self._token_ids[0],
            rollout_logprobs=self._logprobs[0],
            weight_spans=tuple(self._spans),
            finish_reason=self.finish_reason or FinishReason.ABORT,
        )

    def add(self, chunk: Chunk, start: int = 0) -> None:
        """Append new tokens of the request whose completion begins at offset `start` of this completion.

        The last chunk's completion has the final weight spans of all tokens of the request.
        """
        self._append(chunk.token_ids, chunk.rollout_logprobs, chunk.weight_version)
        if chunk.completion is not None:
            shifted = [WeightSpan(span.version, span.start + start, span.end + start)
                       for span in chunk.completion.weight_spans]  # fmt: skip
            exact = joined(self._spans, shifted)
            if exact != self._spans:
                self._spans = exact
                self.log_again()  # versions in the log were lower bounds

    def add_given(self, token_ids: Int32Array) -> None:
        """Append tokens that were not sampled: log-probability 0, the version of the token before them."""
        self._append(token_ids, np.zeros(len(token_ids), np.float32), self._spans[-1].version)

    def finish(self, reason: FinishReason) -> None:
        """No token follows."""
        self.finish_reason = reason
        self._is_news = True

    def note(self, text: str) -> None:
        """Add a note to the log."""
        self.notes = (*self.notes, text)
        self._is_news = True

    def truncate(self, num_tokens: int, notes: tuple[str, ...]) -> None:
        """Drop all tokens after the first `num_tokens`, and replace the notes."""
        whole = self.completion()
        self._token_ids, self._logprobs = [whole.token_ids[:num_tokens]], [whole.rollout_logprobs[:num_tokens]]
        self._spans, self._num_tokens, self.notes = clipped(self._spans, num_tokens), num_tokens, notes
        kept, left = [], num_tokens
        for origin in self.origins:
            kept.append(origin._replace(num_tokens=min(origin.num_tokens, left)))
            left -= kept[-1].num_tokens
        self.origins = tuple(origin for origin in kept if origin.num_tokens)
        self.log_again()

    def log_again(self) -> None:
        """Let the next row of the log replace all earlier rows."""
        self._num_logged = 0
        self._is_news = True

    def _append(self, token_ids: Int32Array, logprobs: Float32Array, version: int) -> None:
        start, self._num_tokens = self._num_tokens, self._num_tokens + len(token_ids)
        if self._num_tokens > start:
            self._token_ids.append(token_ids)
            self._logprobs.append(logprobs)
            self._spans = joined(self._spans, [WeightSpan(version, start, self._num_tokens)])
            self._is_news = True

    def score(self, reward: float | None) -> None:
        """Set the reward; None for an error."""
        self.reward = reward
        self.reward_components = reward.components if isinstance(reward, Score) else ()
        self.outcome = Outcome.SCORED if reward is not None else Outcome.ERROR
        self._is_news = True

    def growth(self) -> PartialRow | None:
        """The part that is new since the last call; None if nothing is new."""
        if not self._is_news:
            return None
        whole, start = self.completion(), self._num_logged
        notes = self.notes[self._num_notes_logged :] if start else self.notes  # a row from offset 0 replaces all
        self._num_logged, self._num_notes_logged, self._is_news = self._num_tokens, len(self.notes), False
        return PartialRow(
            **self._key,
            start=start,
            token_ids=whole.token_ids[start:],
            rollout_logprobs=whole.rollout_logprobs[start:],
            weight_spans=tuple(
                WeightSpan(span.version, max(span.start, start), span.end)
                for span in whole.weight_spans
                if span.end > start
            ),
            finish_reason=self.finish_reason,
            reward=self.reward,
            outcome=self.outcome,
            origins=self.origins,
            reward_components=self.reward_components,
            notes=notes,
        )
