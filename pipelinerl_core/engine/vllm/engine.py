"""vLLM as an engine: its scheduler decodes; who runs, which weights stamp what and what outlives a crash is ours.

    generate --> waiting --> (slot, weights, core) --> running --> outputs of the engine core --> chunks
                    ^                                     |
                    +---- the core died, or a swap came --+      with every token known so far
                          before the first token

A sequence goes back to the queue with its tokens when its engine core dies, and continues in the next one.
"""

import asyncio
import itertools
import math
import time
from collections.abc import Iterable

from pipelinerl_core.engine.concurrency_limit import KVLoad, Places
from pipelinerl_core.engine.queued import KVPolicy, QueuedEngine
from pipelinerl_core.engine.vllm.core import CoreDied, CoreOutput, VLLMCore
from pipelinerl_core.engine.vllm.keeper import CoreKeeper
from pipelinerl_core.engine.vllm.sequence import VLLMSequence
from pipelinerl_core.engine.vllm.weights import StagedWeights
from pipelinerl_core.errors import EngineError
from pipelinerl_core.interfaces import BroadcastGroup, WeightUpdate
from pipelinerl_core.types import (
    Completion,
    EngineRequest,
    EngineStats,
    FinishReason,
    SwapReport,
)


class VLLMEngine(QueuedEngine[VLLMSequence]):
    """`interfaces.Engine` on a started `VLLMCore`; sequences of at most `max_len` tokens, `slots` of them at most.

    vocab_size: token ids are below it. eos_token_ids: tokens that end a completion and belong to it.
    weight_version: version of the weights that the core holds now; it stamps them from here on.
    kv: what a swap does with the KV cache of running sequences: keep it; recompute: preempt and prefill them again
        under the new weights; drain: admit nothing and swap when none runs.

    Noise is vLLM's own: equal seeds of two requests do not give equal tokens.
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
        self._places = Places(slots, now=time.monotonic())
        self._kv = kv
        self._order = itertools.count()

    # ---- the contract --------------------------------------------------------------------------------------------

    @property
    def weight_version(self) -> int:
        """Version that samples the next token."""
        return self._keeper.version

    @property
    def group(self) -> int:
        """See `interfaces.BroadcastReceiver`."""
        return self._keeper.group.number if self._keeper.group is not None else 0

    @property
    def needs_weights(self) -> bool:
        """See `interfaces.BroadcastReceiver`."""
        return self._keeper.needs_weights

    async def join(self, group: BroadcastGroup, first_rank: int) -> None:
        """See `interfaces.BroadcastReceiver`; sampling stands still until all members have met."""
        await self._keeper.join(group, first_rank)

    async def open(self) -> None:
        """Stamp the core's weights and begin; the core must have been started."""
        await self._keeper.open()

    async def swap(self, update: WeightUpdate) -> SwapReport:
        """Make `update` the weights of the next token; see `interfaces.Engine`.

        Checked and staged before the pause. pause_seconds is the time from asking the core to stop until it goes on.
        """
        async with self._swap_lock:
            self._check_version(update.version)
            if update.group == 0:
                self._staged.check(update.tensors, is_partial=update.is_partial)
            if self._kv == "drain":
                await self._drain()
            num_running = 0

            async def in_pause() -> None:
                nonlocal num_running
                num_running = len(self._running)
                await self._take_back_unstarted()
                for sequence in self._running.values():
                    sequence.swapped(self._keeper.version)

            try:
                seconds = await self._keeper.swap(update, clear_cache=self._kv == "recompute", in_pause=in_pause)
            finally:
                self._drained = None
                self._admit()
        return SwapReport(
            version=update.version, pause_seconds=seconds, num_bytes=update.num_bytes, num_running=num_running
        )

    async def abort(self, request_ids: Iterable[str]) -> dict[str, Completion]:
        """Take sequences back with what they have sampled; see `interfaces.Engine`."""
        taken: list[VLLMSequence] = []
        for request_id in list(request_ids):
            sequence = self._running.get(request_id) or self._waiting.get(request_id)
            if sequence is not None:
                sequence.is_taken_back = True
                taken.append(sequence)
                if request_id in self._waiting:
                    self._finish(sequence, FinishReason.ABORT)
        await self._abort_in_core(sequence for sequence in taken if not sequence.ended.done())
        completions = await asyncio.gather(*(sequence.ended for sequence in taken))
        return {
            sequence.request.request_id: completion
            for sequence, completion in zip(taken, completions, strict=True)
            if completion is not None and completion.finish_reason is FinishReason.ABORT
        }

    def flush(self) -> None:
        """Nothing: tokens leave the engine core in steps of its stream_interval, and each step is a chunk."""

    def set_pace(self, delay_seconds: float) -> None:
        """Ignored: vLLM decodes at full speed."""

    def set_paused(self, is_paused: bool) -> None:
        """Stand still between two decode steps, every sequence and its KV kept, or go on; see `interfaces.Engine`."""
        self._count_time()
        self._is_paused = is_paused
        self._keeper.set_paused(is_paused)

    def stats(self) -> EngineStats:
        """A glance at the engine; steps and the use of the KV cache as the core last said."""
        self._count_time()
        self._observe()
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            slots=self._places.number,
            kv_usage=self._keeper.core.load.kv_usage,
            num_tokens=self._num_tokens,
            num_steps=self._keeper.core.load.num_steps,
            running_seconds=self._running_seconds,
        )

    async def close(self) -> None:
        """Stop and release memory; running generators end with EngineError. Closing twice is harmless."""
        core_ids = [sequence.core_id for sequence in self._running.values()]
        self._fail("the engine was closed")
        if core_ids and not self._keeper.core.is_dead:
            await self._keeper.core.abort(core_ids)
        await self._keeper.close()

    # ---- one request ---------------------------------------------------------------------------------------------

    def _enqueue(self, request: EngineRequest) -> VLLMSequence:
        sequence = self._waiting[request.request_id] = VLLMSequence(request, next(self._order))
        sequence.server = asyncio.create_task(self._serve(sequence), name=f"vllm-{request.request_id}")
        self._admit()
        return sequence

    def _leave(self, sequence: VLLMSequence) -> None:
        self._forget(sequence)
        if sequence.server is not None:
            sequence.server.cancel()

    async def _serve(self, sequence: VLLMSequence) -> None:
        """See a sequence through, from one engine core to the next if need be."""
        reason: FinishReason | None = None
        while reason is None:
            await sequence.may_start.wait()
            try:
                if self._keeper.is_open and not sequence.is_taken_back:
                    reason = await self._stay(sequence)
            except CoreDied as error:
                self._keeper.revive(str(error))
            except EngineError as error:
                sequence.fail(str(error))
                self._forget(sequence)
                return
            if reason is None and sequence.is_taken_back:
                reason = FinishReason.ABORT
            if reason is None:
                self._put_back(sequence)
        self._finish(sequence, reason)

    async def _stay(self, sequence: VLLMSequence) -> FinishReason | None:
        """One stay in an engine core; None: it was sent away before its end and is to continue."""
        request = sequence.request
        outputs = self._keeper.core.generate(
            sequence.begin(self.weight_version),
            [*request.prompt_token_ids.tolist(), *sequence.token_ids],
            max_tokens=request.max_tokens - len(sequence.token_ids),
            sampler=request.sampler,
            stop_token_ids=self._eos_token_ids,
            salt=f"w{self.weight_version}",
        )
        said = None
        async for output in outputs:  # to its own end: one that is left half-way aborts a request that has ended
            self._take(sequence, output)
            said = output.finish_reason
        return None if said is None else self._reason(sequence, said)

    def _reason(self, sequence: VLLMSequence, said: FinishReason) -> FinishReason | None:
        """Why a stay ended, None where it is to continue; vLLM calls an end token in the last place a length."""
        if said is FinishReason.ABORT:
            return FinishReason.ABORT if sequence.is_taken_back else None
        return FinishReason.STOP if self._is_eos_V[sequence.token_ids[-1]] else FinishReason.LENGTH

    def _take(self, sequence: VLLMSequence, output: CoreOutput) -> None:
        if not math.isfinite(sum(output.logprobs)):
            self._fail(f"the engine failed under weight version {self.weight_version}: log-probabilities not finite")
            raise EngineError(self._failure)
        self._num_tokens += len(output.token_ids)
        sequence.take(output)

    # ---- places --------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Let waiting sequences start, in order of arrival, as far as places and weights allow."""
        if not self._waiting or not self._keeper.is_open or self._drained is not None or self._failure is not None:
            return
        self._count_time()
        for sequence in list(self._waiting.values()):
            if len(self._running) >= self._places.number:
                break
            if sequence.oldest_weights <= self.weight_version:
                del self._waiting[sequence.request.request_id]
                self._running[sequence.request.request_id] = sequence
                sequence.may_start.set()

    def _observe(self) -> None:
        """Let the controller of the places see how full the KV cache is."""
        load, before = self._keeper.core.load, self._places.number
        seen = KVLoad(
            running=len(self._running),
            queued=load.waiting,
            kv_usage=load.kv_usage,
            num_preemptions=load.num_preemptions,
        )
        if self._places.update(seen, now=time.monotonic()) > before:
            self._admit()

    def _put_back(self, sequence: VLLMSequence) -> None:
        """To the queue, in its old place; nothing for one that was given up meanwhile."""
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
        """Free what a sequence holds. Harmless when it has ended already."""
        self._count_time()
        for place in (self._waiting, self._running):
            if place.get(sequence.request.request_id) is sequence:
                del place[sequence.request.request_id]
        if not sequence.ended.done():
            sequence.ended.set_result(None)
        self._after_departure()

    def _after_departure(self) -> None:
        if self._drained is not None and not self._running:
            self._drained.set()
        self._admit()

    # ---- swaps and ends ------------------------------------------------------------------------------------------

    async def _take_back_unstarted(self) -> None:
        """In a pause: requests without a token go back to the queue, to be salted and prefilled by the new weights.

        One that was admitted under the old weights and starts under the new ones could else be given keys of the old
        weights, cached for an equal prompt.
        """
        await self._abort_in_core(sequence for sequence in self._running.values() if sequence.num_new == 0)

    async def _abort_in_core(self, sequences: Iterable[VLLMSequence]) -> None:
        core_ids = [sequence.core_id for sequence in sequences if sequence.core_id]
        if core_ids and not self._keeper.core.is_dead:
            await self._keeper.core.abort(core_ids)
