"""The queue that all engines share: a request waits, runs, and ends; its tokens are returned as chunks."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable
from typing import Generic, Literal, TypeVar

import numpy as np

from pipelinerl_core.engine.sequence import OpenSequence, check_request
from pipelinerl_core.errors import EngineError, SwapError
from pipelinerl_core.types import Chunk, EngineRequest

KVPolicy = Literal["keep", "recompute", "drain"]
"""What a swap does with the KV cache of running sequences (`engine.kv`)."""
SequenceT = TypeVar("SequenceT", bound=OpenSequence)


class QueuedEngine(ABC, Generic[SequenceT]):
    """The requests of one engine; each request is checked against vocab_size, eos_token_ids and max_len."""

    def __init__(self, *, max_len: int, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._max_len = max_len
        self._is_eos_V = np.isin(np.arange(vocab_size), list(eos_token_ids))
        self._waiting: dict[str, SequenceT] = {}
        self._running: dict[str, SequenceT] = {}
        self._swap_lock = asyncio.Lock()
        self._drained: asyncio.Event | None = None
        """Set when no sequence runs any more. While the event exists a swap waits for it, and nothing is admitted."""
        self._failure: str | None = None
        self._is_paused = self._is_resting = False
        self._num_tokens = 0
        self._running_seconds = 0.0
        self._counted_at = time.perf_counter()

    @property
    @abstractmethod
    def weight_version(self) -> int:
        """Version that samples the next token."""

    @abstractmethod
    def _enqueue(self, request: EngineRequest) -> SequenceT:
        """Put a request into the queue, and start the task that serves the queue."""

    @abstractmethod
    def _forget(self, sequence: SequenceT) -> None:
        """Release the resources of a sequence; no effect if the sequence has ended already."""

    def generate(self, request: EngineRequest) -> AsyncIterator[Chunk]:
        """Chunks of one sequence; see `interfaces.Engine`. The first await puts the request into the queue."""
        self._check_open(request.request_id)
        check_request(request, max_len=self._max_len, is_eos_V=self._is_eos_V)
        return self._stream(request)

    def _check_open(self, request_id: str) -> None:
        if self._failure is not None:
            raise EngineError(self._failure)
        if request_id in self._running or request_id in self._waiting:
            raise EngineError(f"request {request_id!r} is open already. Give every open request its own id")

    async def _stream(self, request: EngineRequest) -> AsyncIterator[Chunk]:
        self._check_open(request.request_id)  # again: time may have passed since generate()
        sequence = self._enqueue(request)
        try:
            while True:
                # No deadline here: every way in which the engine ends puts an error into all outboxes.
                item = await sequence.outbox.get()
                if isinstance(item, str):
                    raise EngineError(item)
                yield item
                if item.completion is not None:
                    return
        finally:
            self._leave(sequence)

    def _leave(self, sequence: SequenceT) -> None:
        """Called when the consumer of the chunks has left."""
        self._forget(sequence)

    @property
    def failure(self) -> str:
        """Why the engine has ended for good; empty while it serves requests."""
        return self._failure or ""

    def _end_all(self, message: str) -> None:
        for sequence in [*self._running.values(), *self._waiting.values()]:
            sequence.fail(message)
            self._forget(sequence)

    def _fail(self, message: str) -> None:
        """End the engine for good: every open request and every later call fails with the first `message`."""
        self._failure = self._failure or message
        self._end_all(self._failure)

    def _check_version(self, version: int) -> None:
        if self._failure is not None:
            raise SwapError(f"no swap to version {version}: {self._failure}")
        if version < self.weight_version:
            raise SwapError(
                f"the update is version {version}, the engine has {self.weight_version}: versions never decrease"
            )

    async def _drain(self) -> None:
        """Admit nothing until all running sequences have ended."""
        self._drained = asyncio.Event()
        if self._running:
            await self._drained.wait()
        if self._failure is not None:
            raise SwapError(f"the engine ended while it was drained: {self._failure}")

    def _set_resting(self, is_resting: bool) -> None:
        self._count_time()
        self._is_resting = is_resting

    def _count_time(self) -> None:
        """Bring running_seconds, the integral of `running` over time, up to now. Call before `running` changes."""
        now = time.perf_counter()
        is_idle = self._is_paused or self._is_resting
        self._running_seconds += 0 if is_idle else len(self._running) * (now - self._counted_at)
        self._counted_at = now
