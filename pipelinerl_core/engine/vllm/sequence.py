"""One request that one or several engine cores of vLLM serve, one after the other."""

import asyncio

import numpy as np

from pipelinerl_core.algo.spans import joined
from pipelinerl_core.engine.sequence import OpenSequence
from pipelinerl_core.engine.vllm.core import CoreOutput
from pipelinerl_core.types import Completion, EngineRequest, FinishReason, WeightSpan


class VLLMSequence(OpenSequence):
    """A request with all its tokens, so that another engine core can continue the request.

    Each start of the sequence, first and after every return to the queue, is one core request to an engine core.

    `spans` cover all tokens: versions are exact before `start` and lower bounds from there on. vLLM reports the
    versions only with the last output of a core request. Until then the version of a token is a lower bound: tokens
    that arrive after a swap may have been sampled before the swap.
    """

    def __init__(self, request: EngineRequest, order: int) -> None:
        super().__init__(request)
        self.order = order
        """Position in the queue."""
        prior = request.prior
        self.token_ids: list[int] = [] if prior is None else prior.token_ids.tolist()
        self.logprobs: list[float] = [] if prior is None else prior.rollout_logprobs.tolist()
        self.start = len(self.token_ids)
        """Tokens known before the current core request."""
        self.core_id = ""
        """Id of the current core request."""
        self.may_start = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        """Serves the sequence until its end."""
        self._num_core_requests = 0
        self._bound = 0
        self._has_output = False
        """Whether tokens have arrived since the newest swap."""

    @property
    def num_new(self) -> int:
        """Tokens of the current core request."""
        return len(self.token_ids) - self.start

    def begin(self, version: int) -> str:
        """Begin a core request under `version`; returns its id."""
        self.start = len(self.token_ids)
        self._bound, self._has_output = version, False
        self._num_core_requests += 1
        self.core_id = f"{self.request.request_id}#{self._num_core_requests}"
        return self.core_id

    def swapped(self, old_version: int) -> None:
        """Newer weights than `old_version` were loaded.

        vLLM holds tokens back for up to stream_interval. Without an output since the swap before, they may be older
        than `old_version`.
        """
        if self._has_output:
            self._bound = max(self._bound, old_version)
        self._has_output = False

    def add(self, output: CoreOutput) -> None:
        """Add new tokens; the last output of a core request makes the versions of all its tokens exact."""
        start = len(self.token_ids)
        self.token_ids.extend(output.token_ids)
        self.logprobs.extend(output.logprobs)
        if len(self.token_ids) > start:
            self.spans = joined(self.spans, [WeightSpan(self._bound, start, len(self.token_ids))])
            self._has_output = True
        if output.spans:
            exact = [WeightSpan(v.version, v.start + self.start, v.end + self.start) for v in output.spans]
            self.spans = joined(self.spans, exact)
        if output.finish_reason is None:
            self._send(None)

    def finish(self, reason: FinishReason) -> None:
        """Send the last chunk, with the whole completion."""
        completion = Completion(
            token_ids=np.array(self.token_ids, np.int32),
            rollout_logprobs=np.array(self.logprobs, np.float32),
            weight_spans=tuple(self.spans),
            finish_reason=reason,
        )
        self._send(completion)

    def _send(self, completion: Completion | None) -> None:
        start = self.num_sent
        version = next((span.version for span in self.spans if span.end > start), self._bound)
        token_ids, logprobs = np.array(self.token_ids[start:], np.int32), np.array(self.logprobs[start:], np.float32)
        self.send(token_ids, logprobs, version, completion)
