"""What engines have in common: a request waits, runs, and leaves as chunks; versions of weights never decrease."""

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
    """The requests of one engine. vocab_size, eos_token_ids and max_len are what they are checked against."""

    def __init__(self, *, max_len: int, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._max_len = max_len
        self._is_eos_V = np.isin(np.arange(vocab_size), list(eos_token_ids))
        self._waiting: dict[str, SequenceT] = {}
        self._running: dict[str, SequenceT] = {}
        self._swap_lock = asyncio.Lock()
        self._drained: asyncio.Event | None = None
        """Of a swap that waits until nothing runs; nothing is admitted while there is one."""
        self._failure: str | None = None
        self._is_paused = False
        self._num_tokens = 0
        self._running_seconds = 0.0
        self._counted_at = time.perf_counter()

    @property
    @abstractmethod
    def weight_version(self) -> int:
        """Version that samples the next token."""

    @abstractmethod
    def _enqueue(self, request: EngineRequest) -> SequenceT:
        """Put a request into the queue, and see that it is served."""

    @abstractmethod
    def _forget(self, sequence: SequenceT) -> None:
        """Free what a sequence holds. Harmless when it has ended already."""

    def generate(self, request: EngineRequest) -> AsyncIterator[Chunk]:
        """Chunks of one sequence; see `interfaces.Engine`. It takes its place in the queue when first awaited."""
        self._check_open(request.request_id)
        check_request(request, max_len=self._max_len, is_eos_V=self._is_eos_V)
        return self._stream(request)

    def _check_open(self, request_id: str) -> None:
        if self._failure is not None:
            raise EngineError(self._failure)
        if request_id in self._running or request_id in self._waiting:
            raise EngineError(f"request {request_id!r} is open already; ids of open requests must differ")

    async def _stream(self, request: EngineRequest) -> AsyncIterator[Chunk]:
        self._check_open(request.request_id)  # again: time may have passed since generate()
        sequence = self._enqueue(request)
        try:
            while True:
                # No deadline of its own: whatever ends the engine puts an error into every outbox.
                item = await sequence.outbox.get()
                if isinstance(item, str):
                    raise EngineError(item)
                yield item
                if item.completion is not None:
                    return
        finally:
            self._leave(sequence)

    def _leave(self, sequence: SequenceT) -> None:
        """Nobody waits for its chunks any more."""
        self._forget(sequence)

    def _end_all(self, message: str) -> None:
        for sequence in [*self._running.values(), *self._waiting.values()]:
            sequence.fail(message)
            self._forget(sequence)

    def _fail(self, message: str) -> None:
        """The engine is of no use any more; everyone who waits hears why."""
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
        """Admit nothing until nothing runs; at most the longest rest of a running sequence."""
        self._drained = asyncio.Event()
        if self._running:
            await self._drained.wait()
        if self._failure is not None:
            raise SwapError(f"the engine ended while it was drained: {self._failure}")

    def _count_time(self) -> None:
        """Bring the integral of `running` up to now; called before every change of it. In a pause nothing runs."""
        now = time.perf_counter()
        self._running_seconds += 0 if self._is_paused else len(self._running) * (now - self._counted_at)
        self._counted_at = now
