"""One request in an engine: which requests are valid, and how new tokens are sent as chunks."""

import asyncio

import numpy as np
from numpy.typing import NDArray

from pipelinerl_core.algo.spans import joined
from pipelinerl_core.errors import EngineError, PromptRefused
from pipelinerl_core.types import (
    Chunk,
    Completion,
    EngineRequest,
    FinishReason,
    Float32Array,
    Int32Array,
    WeightSpan,
)


class OpenSequence:
    """A request that an engine has accepted: the weight version of each token, and the queue of chunks."""

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.spans: list[WeightSpan] = [] if request.prior is None else list(request.prior.weight_spans)
        self.num_sent = 0 if request.prior is None else len(request.prior.token_ids)
        """Completion tokens that were sent in chunks, or came with the prior."""
        self.outbox: asyncio.Queue[Chunk | str] = asyncio.Queue()
        """Read by the generator; a string is the message of the EngineError that the generator raises."""

    @property
    def oldest_weights(self) -> int:
        """Version of the newest token. Older weights must not continue the sequence: versions never decrease."""
        return self.spans[-1].version if self.spans else self.request.min_version

    def send(
        self, token_ids: Int32Array, rollout_logprobs: Float32Array, version: int, completion: Completion | None
    ) -> None:
        """Send a chunk of new tokens, the last chunk if a completion is given; send nothing if both are empty."""
        if len(token_ids) == 0 and completion is None:
            return
        self.num_sent += len(token_ids)
        chunk = Chunk(
            request_id=self.request.request_id,
            token_ids=token_ids,
            rollout_logprobs=rollout_logprobs,
            weight_version=version,
            completion=completion,
        )
        self.outbox.put_nowait(chunk)

    def fail(self, message: str) -> None:
        """Send the error that ends the request."""
        self.outbox.put_nowait(message)


class SlotSequence(OpenSequence):
    """A request in the queue or in a slot."""

    slot: int | None = None
    """None while the sequence waits, and after the end."""
    kv_version = 0
    """Weight version of the oldest keys and values in the slot."""

    @property
    def num_prior(self) -> int:
        """Completion tokens that came with the request."""
        return 0 if self.request.prior is None else len(self.request.prior.token_ids)

    def emit(
        self,
        token_ids: Int32Array,
        rollout_logprobs: Float32Array,
        version: int,
        finish_reason: FinishReason | None = None,
    ) -> None:
        """Send the tokens that were not sent yet, stamped with `version`; with a reason the chunk is the last.

        Both arrays are [C], the whole completion so far. Without new tokens and without a reason nothing is sent.
        """
        start, completion = self.num_sent, None
        self.spans = joined(self.spans, [WeightSpan(version, start, len(token_ids))])
        if finish_reason is not None:
            completion = Completion(
                token_ids=token_ids,
                rollout_logprobs=rollout_logprobs,
                weight_spans=tuple(self.spans),
                finish_reason=finish_reason,
            )
        self.send(token_ids[start:], rollout_logprobs[start:], version, completion)


def check_request(request: EngineRequest, *, max_len: int, is_eos_V: NDArray[np.bool_]) -> None:
    """Raise EngineError, or PromptRefused, if a request can never be served; is_eos_V [V] is True for end tokens."""
    name, prompt_len = f"request {request.request_id!r}", len(request.prompt_token_ids)
    num_prior = 0 if request.prior is None else len(request.prior.token_ids)
    if prompt_len == 0:
        raise PromptRefused(f"{name} has an empty prompt. Give at least one prompt token")
    if request.max_tokens <= num_prior:
        raise EngineError(
            f"{name}: max_tokens={request.max_tokens} must be above the {num_prior} tokens of the prior"
        )
    if prompt_len + request.max_tokens > max_len:
        raise PromptRefused(
            f"{name}: {prompt_len} prompt tokens + max_tokens={request.max_tokens} exceed the engine's "
            f"max_len={max_len}. Shorten the prompt, lower max_tokens or build the engine with a larger max_len"
        )
    sampler = request.sampler
    if not 0 <= sampler.temperature < float("inf") or not 0 < sampler.top_p <= 1:
        raise EngineError(
            f"{name}: temperature={sampler.temperature} must be at least 0 and top_p={sampler.top_p} in (0, 1]"
        )
    _check_tokens(name, request.prompt_token_ids, len(is_eos_V))
    if request.prior is not None and num_prior > 0:
        _check_prior(name, request.prior, is_eos_V)


def _check_prior(name: str, prior: Completion, is_eos_V: NDArray[np.bool_]) -> None:
    num_tokens, spans = len(prior.token_ids), prior.weight_spans
    _check_tokens(name, prior.token_ids, len(is_eos_V))
    if is_eos_V[prior.token_ids[-1]]:
        raise EngineError(f"{name}: its prior ends with end token {prior.token_ids[-1]} and cannot be continued")
    is_covered = [0, *(span.end for span in spans)] == [*(span.start for span in spans), num_tokens]
    if not is_covered or len(prior.rollout_logprobs) != num_tokens:
        raise EngineError(
            f"{name}: its prior has {num_tokens} tokens, {len(prior.rollout_logprobs)} log-probabilities and spans "
            f"{[tuple(span) for span in spans]}; all three must cover the same tokens"
        )


def _check_tokens(name: str, token_ids: Int32Array, vocab_size: int) -> None:
    low, high = int(token_ids.min()), int(token_ids.max())
    if low < 0 or high >= vocab_size:
        raise EngineError(f"{name} has token id {low if low < 0 else high}, outside of [0, {vocab_size})")
