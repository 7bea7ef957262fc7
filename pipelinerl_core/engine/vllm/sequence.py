"""One request on its way through one or several engine cores of vLLM."""

import asyncio

import numpy as np

from pipelinerl_core.algo.spans import joined
from pipelinerl_core.engine.sequence import OpenSequence
from pipelinerl_core.engine.vllm.core import CoreOutput
from pipelinerl_core.types import Completion, EngineRequest, FinishReason, WeightSpan


class VLLMSequence(OpenSequence):
    """Everything known of a request, so that it can continue anywhere.

    `spans` cover all tokens: exact up to `start`, lower bounds beyond.

    vLLM says which weights sampled what with the last output alone. Until then the version of a token is a lower
    bound: of those not yet seen when a swap happens, some may have been sampled before it.
    """

    def __init__(self, request: EngineRequest, order: int) -> None:
        super().__init__(request)
        self.order = order
        """Place in the queue."""
        prior = request.prior
        self.token_ids: list[int] = [] if prior is None else prior.token_ids.tolist()
        self.logprobs: list[float] = [] if prior is None else prior.rollout_logprobs.tolist()
        self.start = len(self.token_ids)
        """Tokens known before the present stay in an engine core."""
        self.core_id = ""
        self.is_taken_back = False
        self.may_start = asyncio.Event()
        self.server: asyncio.Task[None] | None = None
        """Sees it through."""
        self.ended: asyncio.Future[Completion | None] = asyncio.get_running_loop().create_future()
        self._num_stays = 0
        self._bound = 0

    @property
    def num_new(self) -> int:
        """Tokens of the present stay."""
        return len(self.token_ids) - self.start

    def begin(self, version: int) -> str:
        """A stay in an engine core begins under `version`; returns the id of the request there."""
        self.start = len(self.token_ids)
        self._bound = version
        self._num_stays += 1
        self.core_id = f"{self.request.request_id}#{self._num_stays}"
        return self.core_id

    def swapped(self, old_version: int) -> None:
        """Newer weights are in: tokens that come from here on were sampled by `old_version` at the oldest."""
        self._bound = max(self._bound, old_version)

    def take(self, output: CoreOutput) -> None:
        """Add new tokens; the last output of a stay makes the versions of all its tokens exact."""
        start = len(self.token_ids)
        self.token_ids.extend(output.token_ids)
        self.logprobs.extend(output.logprobs)
        if len(self.token_ids) > start:
            self.spans = joined(self.spans, [WeightSpan(self._bound, start, len(self.token_ids))])
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
        if not self.ended.done():
            self.ended.set_result(completion)
        self._send(completion)

    def _send(self, completion: Completion | None) -> None:
        start = self.num_sent
        version = next((span.version for span in self.spans if span.end > start), self._bound)
        token_ids, logprobs = np.array(self.token_ids[start:], np.int32), np.array(self.logprobs[start:], np.float32)
        self.send(token_ids, logprobs, version, completion)
