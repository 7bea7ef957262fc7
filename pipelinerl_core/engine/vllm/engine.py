"""vLLM as an engine. vLLM schedules and decodes; admission, weight versions and recovery from crashes are here.

    generate --> waiting --> admitted --> running --> outputs of the engine core --> chunks
                    ^                        |
                    +--- the core died, or --+      with all tokens known so far
                         a swap came before
                         the first token

If the engine core dies, its sequences return to the queue with their tokens, and the restarted core continues them.
"""

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import torch

from pipelinerl_core.engine.concurrency_limit import ConcurrencyLimit
from pipelinerl_core.engine.queued import KVPolicy, QueuedEngine
from pipelinerl_core.engine.vllm.core import CoreDied, CoreOutput, VLLMCore
from pipelinerl_core.engine.vllm.keeper import CoreKeeper
from pipelinerl_core.engine.vllm.sequence import VLLMSequence
from pipelinerl_core.engine.vllm.weights import StagedWeights
from pipelinerl_core.errors import EngineError, SwapError
from pipelinerl_core.interfaces import BroadcastGroup, WeightUpdate
from pipelinerl_core.types import (
    EngineRequest,
    EngineStats,
    FinishReason,
    SwapReport,
)


class VLLMEngine(QueuedEngine[VLLMSequence]):
    """`interfaces.Engine` on a started `VLLMCore`: at most `slots` sequences of at most `max_len` tokens.

    vocab_size: every token id is smaller. eos_token_ids: tokens that end a completion and are part of the completion.
    weight_version: version of the core's weights now.
    kv: what a swap does with the KV cache of running sequences. keep: nothing; recompute: vLLM preempts the sequences
        and computes keys and values again under the new weights; drain: admit nothing and swap when no sequence runs.

    vLLM draws the sampling noise: equal seeds of two requests do not give equal tokens.
    """

    def __init__(
        self,
        core: VLLMCore,
        staged: StagedWeights,
        *,
        slots: int,
        max_len: int,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        weight_version: int = 0,
        kv: KVPolicy = "keep",
    ) -> None:
        self._eos_token_ids = list(eos_token_ids)
        super().__init__(max_len=max_len, vocab_size=vocab_size, eos_token_ids=self._eos_token_ids)
        self._keeper = CoreKeeper(core, staged, version=weight_version, on_open=self._admit, on_failure=self._fail)
        self._staged = staged
        self._kv = kv
        self._limit = ConcurrencyLimit(slots, now=time.monotonic(), num_preemptions=self._num_preemptions())
        self._num_observed_steps = 0
        self._order = itertools.count()

    @property
    def weight_version(self) -> int:
        return self._keeper.version

    @property
    def group(self) -> int:
        return self._keeper.group.number if self._keeper.group is not None else 0

    @property
    def needs_weights(self) -> bool:
        return self._keeper.needs_weights

    async def join(self, group: BroadcastGroup, first_rank: int) -> None:
        """See `interfaces.BroadcastReceiver`. Raises EngineError if the model has other weights than the group."""
        layout = {
            meta.name: torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), device="meta")
            for meta in group.layout
        }
        try:
            await asyncio.to_thread(self._staged.check_layout, layout)
        except SwapError as error:
            raise EngineError(f"broadcast group {group.number}: {error}") from error
        await self._keeper.join(group, first_rank)

    async def open(self) -> None:
        """Set the version of the core's weights and admit requests; the core must have been started."""
        await self._keeper.open()

    async def swap(self, update: WeightUpdate) -> SwapReport:
        """Make `update` the weights of the next token; see `interfaces.Engine`.

        The update is checked and staged before the pause. pause_seconds: from the request to pause to the resumption.
        """
        async with self._swap_lock:
            self._check_version(update.version)
            if update.group == 0:
                await asyncio.to_thread(self._staged.check, update.tensors, is_partial=update.is_partial)
            if self._kv == "drain":
                await self._drain()
            num_running = 0

            async def in_pause() -> None:
                nonlocal num_running
                num_running = len(self._running)
                await self._requeue_unstarted()

            old_version = self.weight_version
            try:
                seconds = await self._keeper.swap(update, clear_cache=self._kv == "recompute", in_pause=in_pause)
                for sequence in self._running.values():
                    sequence.swapped(old_version)
            finally:
                self._drained = None
                self._admit()
        return SwapReport(
            version=update.version, pause_seconds=seconds, num_bytes=update.num_bytes, num_running=num_running
        )

    def flush(self) -> None:
        """No effect: the engine core has an output every stream_interval tokens, and each output is a chunk."""

    def set_pace(self, delay_seconds: float) -> None:
        """Ignored: vLLM decodes at full speed."""

    def set_paused(self, is_paused: bool) -> None:
        """Pause between two decode steps and keep all sequences and KV, or continue; see `interfaces.Engine`."""
        self._count_time()
        self._is_paused = is_paused
        self._keeper.set_paused(is_paused)

    @asynccontextmanager
    async def resting(self) -> AsyncIterator[None]:
        """Give memory back for the time of the block; see `interfaces.Engine`."""
        async with self._swap_lock:
            self._set_resting(True)
            async with self._keeper.resting():
                yield
            self._set_resting(False)

    def stats(self) -> EngineStats:
        """Load of the engine now; steps and KV cache usage as the core reported them last."""
        self._count_time()
        self._observe()
        load = self._keeper.core.load
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            slots=self._limit.value,
            kv_usage=load.kv_usage,
            num_tokens=self._num_tokens,
            num_steps=load.num_steps,
            num_prefilled=load.num_prefilled,
            num_reused=load.num_reused,
            running_seconds=self._running_seconds,
        )

    async def close(self) -> None:
        """Stop and release memory; running generators end with EngineError. A second call has no effect."""
        core_ids = [sequence.core_id for sequence in self._running.values()]
        self._fail("the engine was closed")
        if core_ids and not self._keeper.core.is_dead:
            await self._keeper.core.abort(core_ids)
        await self._keeper.close()

    def _enqueue(self, request: EngineRequest) -> VLLMSequence:
        sequence = self._waiting[request.request_id] = VLLMSequence(request, next(self._order))
        sequence.task = asyncio.create_task(self._serve(sequence), name=f"vllm-{request.request_id}")
        self._admit()
        return sequence

    def _leave(self, sequence: VLLMSequence) -> None:
        self._forget(sequence)
        if sequence.task is not None:
            sequence.task.cancel()

    async def _serve(self, sequence: VLLMSequence) -> None:
        """Serve a sequence until its end, with several core requests if needed."""
        reason: FinishReason | None = None
        while reason is None:
            await sequence.may_start.wait()
            try:
                if self._keeper.is_open:
                    reason = await self._run_in_core(sequence)
            except CoreDied as error:
                self._keeper.restart(str(error))
            except EngineError as error:
                sequence.fail(str(error))
                self._forget(sequence)
                return
            if reason is None:
                self._requeue(sequence)
        self._finish(sequence, reason)

    async def _run_in_core(self, sequence: VLLMSequence) -> FinishReason | None:
        """Serve one core request; returns None if the sequence must continue with another core request."""
        request = sequence.request
        outputs = self._keeper.core.generate(
            sequence.begin(self.weight_version),
            [*request.prompt_token_ids.tolist(), *sequence.token_ids],
            max_tokens=request.max_tokens - len(sequence.token_ids),
            sampler=request.sampler,
            stop_token_ids=self._eos_token_ids,
            salt=f"w{self.weight_version}",
        )
        reported = None
        async for output in outputs:  # until exhausted: leaving the loop early would abort the ended request
            self._add(sequence, output)
            reported = output.finish_reason
        return None if reported is None else self._reason(sequence, reported)

    def _reason(self, sequence: VLLMSequence, reported: FinishReason) -> FinishReason | None:
        """Why a core request ended; None: continue. vLLM reports LENGTH for an end token at the length limit."""
        if reported is FinishReason.ABORT:
            return None
        return FinishReason.STOP if self._is_eos_V[sequence.token_ids[-1]] else FinishReason.LENGTH

    def _add(self, sequence: VLLMSequence, output: CoreOutput) -> None:
        if not math.isfinite(sum(output.logprobs)):
            self._fail(f"the engine failed under weight version {self.weight_version}: log-probabilities not finite")
            raise EngineError(self._failure)
        self._num_tokens += len(output.token_ids)
        sequence.add(output)

    def _admit(self) -> None:
        """Start waiting sequences in order of arrival, as far as concurrency limit and weight version allow."""
        if not self._waiting or not self._keeper.is_open or self._drained is not None or self._failure is not None:
            return
        self._count_time()
        for sequence in list(self._waiting.values()):
            if len(self._running) >= self._limit.value:
                break
            if sequence.oldest_weights <= self.weight_version:
                del self._waiting[sequence.request.request_id]
                self._running[sequence.request.request_id] = sequence
                sequence.may_start.set()

    def _observe(self) -> None:
        """Update the concurrency limit from the load of the KV cache."""
        load, before = self._keeper.core.load, self._limit.value
        if load.num_steps == self._num_observed_steps:
            return  # in a pause or a rest an old load would lower the limit again and again
        self._num_observed_steps = load.num_steps
        limit = self._limit.update(
            running=len(self._running),
            queued=load.waiting,
            kv_usage=load.kv_usage,
            num_preemptions=self._num_preemptions(),
            now=time.monotonic(),
        )
        if limit > before:
            self._admit()

    def _num_preemptions(self) -> int:
        """Preemptions for lack of KV cache, where vLLM's count tells them.

        A rest, and with kv=recompute a swap, preempts all running sequences: then only the use of the KV cache tells.
        """
        is_always = self._kv == "recompute" or self._keeper.core.settings.sleeps
        return 0 if is_always else self._keeper.core.load.num_preemptions

    def _requeue(self, sequence: VLLMSequence) -> None:
        """Return a running sequence to its old position in the queue; no effect if the sequence has ended."""
        self._count_time()
        sequence.may_start.clear()
        if self._running.pop(sequence.request.request_id, None) is sequence:
            self._waiting[sequence.request.request_id] = sequence
            self._waiting = dict(sorted(self._waiting.items(), key=lambda item: item[1].order))
            self._after_departure()

    def _finish(self, sequence: VLLMSequence, reason: FinishReason) -> None:
        sequence.finish(reason)
        self._forget(sequence)

    def _forget(self, sequence: VLLMSequence) -> None:
        """Release the resources of a sequence; no effect if the sequence has ended already."""
        self._count_time()
        for sequences in (self._waiting, self._running):
            if sequences.get(sequence.request.request_id) is sequence:
                del sequences[sequence.request.request_id]
        self._after_departure()

    def _after_departure(self) -> None:
        if self._drained is not None and not self._running:
            self._drained.set()
        self._admit()

    async def _requeue_unstarted(self) -> None:
        """In a pause: return sequences without a new token to the queue, so that they start under the new weights.

        Otherwise a request with the old weights' salt could start under the new weights with cached keys of the old
        weights, computed for an equal prompt.
        """
        core_ids = [s.core_id for s in self._running.values() if s.core_id and s.num_new == 0]
        if core_ids and not self._keeper.core.is_dead:
            await self._keeper.core.abort(core_ids)
