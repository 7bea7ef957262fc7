"""The embedded engine: a transformers decoder over a fixed number of slots, on one thread of one event loop.

One loop admits, decodes, samples, stamps and retires sequences, and yields to the event loop between two steps. A
step is a plain function, so other coroutines run only between two steps: a swap needs neither a lock nor a pause
protocol. While keys are computed again, other coroutines run but no step. An idle engine has no task.
"""

import asyncio
import functools
import heapq
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import torch

from pipelinerl_core.engine.embedded.compact import compact
from pipelinerl_core.engine.embedded.decoder import PREFILL_TOKENS, SlotDecoder, StagedWeights, prefill_batches
from pipelinerl_core.engine.embedded.sampling import sample
from pipelinerl_core.engine.embedded.slots import SlotTable
from pipelinerl_core.engine.queued import KVPolicy, QueuedEngine
from pipelinerl_core.engine.sequence import SlotSequence
from pipelinerl_core.errors import EngineError, SwapError
from pipelinerl_core.interfaces import StepClock, WeightUpdate
from pipelinerl_core.types import (
    EngineRequest,
    EngineStats,
    FinishReason,
    Int32Array,
    SwapReport,
)

# The number of rows of a deterministic step is a multiple of this. Vectorised loops compute the remainder at the end
# of a tensor with other instructions, whose last bit may differ, so there must be no remainder.
_ROW_STEP = 32


class EmbeddedEngine(QueuedEngine[SlotSequence]):
    """`interfaces.Engine` over `slots` sequences of at most `max_len` tokens, prompt included.

    model: a transformers causal LM that only this engine uses, on any device; full or sliding attention.
    eos_token_ids: tokens that end a completion and are part of the completion.
    weight_version: version of the model's weights now.
    kv: what a swap does with the KV cache of running sequences. keep: nothing, the sequences continue and attend to
        keys of older weights (with deterministic, sequences without a token start again); recompute: compute the
        cache again under the new weights, within the pause; drain: admit nothing and swap when the slots are empty.
    deterministic: every step has the same shape (all slots, all max_len keys) and prompts are fed through decode
        steps, so that tokens and log-probabilities depend only on the request and the weights, bit for bit, also when
        the request continues a prior. Slower: attention is over max_len, and each prompt token takes a step. The
        caller must use float32 weights and a fixed number of threads.

    A sequence has a chunk at each swap and at its end. If the prior of a request has tokens of a newer version than
    the engine's, the request waits until the engine has that version. A request that could outgrow its slot is
    refused, so no completion is cut off below max_tokens.
    """

    def __init__(
        self,
        model: Any,
        *,
        slots: int,
        max_len: int,
        eos_token_ids: Iterable[int],
        weight_version: int = 0,
        kv: KVPolicy = "keep",
        deterministic: bool = False,
    ) -> None:
        if slots < 1 or max_len < 2:
            raise EngineError(f"slots={slots}, max_len={max_len}: at least one slot of two tokens is needed")
        num_rows = -(-slots // _ROW_STEP) * _ROW_STEP if deterministic else slots
        self._decoder = SlotDecoder(model, slots=num_rows, max_len=max_len)
        if deterministic:
            self._decoder.check_rows_are_alike()
        super().__init__(max_len=max_len, vocab_size=self._decoder.vocab_size, eos_token_ids=eos_token_ids)
        self._table = SlotTable(num_rows, max_len, self._is_eos_V, fixed_shape=deterministic)
        self._num_slots = slots
        self._capacity_tokens = slots * max_len
        self._version = weight_version
        self._kv = kv
        self._deterministic = deterministic
        self._in_slot: dict[int, SlotSequence] = {}
        self._free_slots = list(range(slots))  # a heap: low slots first keeps the decoded prefix short
        self._kept: dict[int, None] = {}
        """Free slots with keys and values of a finished turn under the current weights, the oldest first."""
        self._prefilled: dict[bytes, SlotSequence] = {}
        """Prefilled tokens -> the sequence with them that was prefilled last, under the current weights."""
        self._is_recomputing = False
        self._task: asyncio.Task[None] | None = None
        self._delay_seconds = 0.0
        self._clock: StepClock | None = None
        self._num_steps = self._num_prefilled = self._num_reused = 0

    @property
    def weight_version(self) -> int:
        return self._version

    async def swap(self, update: WeightUpdate) -> SwapReport:
        """Make `update` the weights of the next token; see `interfaces.Engine`.

        Names, shapes, types and the version are checked before any weight changes. Versions never decrease.
        pause_seconds is the time in which the engine's thread does not decode, chunks included. With
        kv=drain the wait for running sequences is not included, because the sequences still sample.
        """
        async with self._swap_lock:
            start = time.perf_counter()
            self._check_version(update.version)
            prepare = functools.partial(self._decoder.prepare, update.tensors, is_partial=update.is_partial)
            if self._decoder.has_to_copy:
                staged, prepared_seconds = await asyncio.to_thread(prepare), 0.0
            else:
                staged, prepared_seconds = prepare(), time.perf_counter() - start
            try:
                if self._kv == "drain":
                    await self._drain()
                start = time.perf_counter()
                num_running = len(self._running)
                replaced = await self._replace_weights(update.version, staged)
            finally:
                self._drained = None
                self._wake()
            pause_seconds = prepared_seconds + time.perf_counter() - start
            if self._clock is not None:
                self._clock.extend(pause_seconds)
            await asyncio.to_thread(replaced.clear)  # to unmap memory takes longer than the pause
        return SwapReport(
            version=update.version,
            pause_seconds=pause_seconds,
            num_bytes=update.num_bytes,
            num_running=num_running,
        )

    def flush(self) -> None:
        """Send a chunk for every running sequence with new tokens; see `interfaces.Engine`."""
        for sequence in self._running.values():
            self._emit(sequence)

    def set_pace(self, delay_seconds: float) -> None:
        """Sleep this long after each decode step; swaps run during the sleep."""
        self._delay_seconds = delay_seconds

    def set_clock(self, clock: StepClock) -> None:
        """Let a clock decide when the next decode step is due; the clock applies the pace too."""
        self._clock = clock

    def set_paused(self, is_paused: bool) -> None:
        """Pause between two decode steps and keep all sequences and KV, or continue; see `interfaces.Engine`."""
        self._count_time()
        self._is_paused = is_paused
        self._wake()

    @asynccontextmanager
    async def resting(self) -> AsyncIterator[None]:
        """Release the keys and values of all slots for the time of the block; see `interfaces.Engine`."""
        async with self._swap_lock:
            self._set_resting(True)
            self._forget_kept()
            self._decoder.memory.clear()
            yield
            for _ in self._recompute(list(self._in_slot)):
                await asyncio.sleep(0)  # syncs with the hub, which keep the leases
            self._forget_kept()  # of sequences that ended meanwhile
            self._set_resting(False)
            self._wake()

    def stats(self) -> EngineStats:
        """Load of the engine now; kv_usage is the share of the slots' token capacity that is in use."""
        self._count_time()
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            slots=self._num_slots,
            kv_usage=float(self._table.num_fed.sum()) / self._capacity_tokens,
            num_tokens=self._num_tokens,
            num_steps=self._num_steps,
            running_seconds=self._running_seconds,
            num_prefilled=self._num_prefilled,
            num_reused=self._num_reused,
            overrun_seconds=self._clock.overrun_seconds if self._clock is not None else 0.0,
        )

    async def close(self) -> None:
        """Stop and release memory; running generators end with EngineError. A second call has no effect."""
        self._fail("the engine was closed")
        task, self._task = self._task, None
        if task is not None and not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._decoder.memory.clear()

    def _enqueue(self, request: EngineRequest) -> SlotSequence:
        sequence = self._waiting[request.request_id] = SlotSequence(request)
        self._wake()
        return sequence

    def _wake(self) -> None:
        """Start the loop if there is work and the loop does not run."""
        if (self._task is None or self._task.done()) and self._has_work():
            self._task = asyncio.get_running_loop().create_task(self._run(), name="embedded-engine")

    def _has_work(self) -> bool:
        is_held = self._is_paused or self._is_resting or self._is_recomputing
        return not is_held and bool(self._running or self._admissible(1))

    async def _run(self) -> None:
        try:
            if self._clock is not None:
                self._clock.start()
            while self._has_work():
                num_running = self._step()
                rest_seconds = self._delay_seconds
                if self._clock is not None:
                    rest_seconds = self._clock.rest_seconds(num_running, self._delay_seconds)
                await asyncio.sleep(rest_seconds)
        except asyncio.CancelledError:
            # No step is half done, so the engine stays usable; only the open requests must end.
            self._end_all("the engine's task was cancelled")
            raise
        except Exception as error:  # noqa: BLE001 - every open request must end with the reason
            self._fail(f"the engine failed under weight version {self._version}: {type(error).__name__}: {error}")

    def _step(self) -> int:
        """Admit into free slots, feed one token to each sequence, sample, retire; returns how many were fed."""
        if not self._waiting and not self._deterministic:
            compact(self._table, self._decoder.memory, self._in_slot, self._free_slots)
            self._kept = {slot: None for slot in self._kept if slot not in self._in_slot}
        admitted, copies = self._admit()
        batches = prefill_batches(admitted)
        num_running = len(self._running)
        with torch.inference_mode():
            # Copies read what is prefilled, so that they cannot wait for the pass that decodes.
            alone = len(batches) if copies else len(batches) - 1
            for batch in batches[: max(0, alone)]:
                self._decoder.prefill(*batch)
            del batches[: max(0, alone)]
            self._copy(copies)
            step = self._table.step_input()
            logits_RV = self._decoder.decode(
                step.token_ids_R,
                step.positions_R,
                num_keys=step.num_keys,
                prefill=batches[0] if batches else None,
            )
            token_ids_R, logprobs_R = sample(logits_RV, *self._table.sampler_inputs(len(step.token_ids_R)))
        outcome = self._table.advance(token_ids_R, logprobs_R)
        self._num_steps += 1
        self._num_tokens += outcome.num_sampled
        for slots, reason in ((outcome.stopped, FinishReason.STOP), (outcome.exhausted, FinishReason.LENGTH)):
            for slot in slots.tolist():
                self._finish(self._in_slot[slot], reason)
        return num_running

    def _admissible(self, count: int) -> list[SlotSequence]:
        """The first waiting sequences, at most `count`, that may start under the current weights."""
        if self._drained is not None:
            return []
        admissible: list[SlotSequence] = []
        for sequence in self._waiting.values():
            if len(admissible) == count:
                break
            if sequence.oldest_weights <= self._version:
                admissible.append(sequence)
        return admissible

    def _admit(self) -> tuple[list[tuple[int, Int32Array]], list[tuple[int, int]]]:
        """Fill free slots in order of arrival, until this step has PREFILL_TOKENS to prefill.

        Returns slots with the tokens to prefill, all of a sequence but the last, and pairs of slots: the second gets
        the keys and values of the first, because a running sequence has the same tokens, as in a group.
        """
        if not self._free_slots or not self._waiting:
            return [], []
        self._count_time()
        admitted: list[tuple[int, Int32Array]] = []
        copies: list[tuple[int, int]] = []
        num_to_prefill = 0
        for sequence in self._admissible(len(self._free_slots)):
            if num_to_prefill >= PREFILL_TOKENS:
                break  # the others start in the next steps, so that other tasks run in between
            request = sequence.request
            slot, num_kept = self._free_slot(sequence)
            del self._waiting[request.request_id]
            self._running[request.request_id] = sequence
            self._in_slot[slot] = sequence
            sequence.slot = slot
            sequence.kv_version = self._version
            # A decode step feeds the last known token and samples the next. After a kept prefix, decode steps feed
            # the new tokens too, because a prefill begins at position 0.
            num_prefilled = len(request.prompt_token_ids) + sequence.num_prior - 1
            self._num_prefilled += num_prefilled
            self._num_reused += num_kept
            is_prefilled = not num_kept and not self._deterministic
            self._table.admit(slot, request, num_fed=num_prefilled if is_prefilled else num_kept)
            if is_prefilled:
                tokens = self._table.fed_tokens(slot)
                source = self._prefilled.get(tokens.tobytes())
                if source is None or source.slot is None:
                    self._prefilled[tokens.tobytes()] = sequence
                    admitted.append((slot, tokens))
                    num_to_prefill += len(tokens)
                elif len(tokens):
                    copies.append((source.slot, slot))
                    self._num_reused += num_prefilled
        if len(self._prefilled) > 2 * self._num_slots:
            self._prefilled = {key: held for key, held in self._prefilled.items() if held.slot is not None}
        return admitted, copies

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy keys and values between slots; what is copied beyond the prefilled tokens is overwritten unread."""
        if copies:
            sources, targets = zip(*copies, strict=True)
            self._decoder.memory.move(
                torch.tensor(sources), torch.tensor(targets), int(self._table.num_fed[list(targets)].max())
            )

    def _free_slot(self, sequence: SlotSequence) -> tuple[int, int]:
        """Take a free slot: (slot, number of the sequence's first tokens whose keys and values it holds).

        A kept prefix is used if it is at least half of the sequence. Other sequences get the slot that was kept
        longest only if all free slots are kept.
        """
        if not self._kept:
            return heapq.heappop(self._free_slots), 0
        prompt, prior = sequence.request.prompt_token_ids, sequence.request.prior
        token_ids = prompt if prior is None else np.concatenate([prompt, prior.token_ids])
        for slot in self._kept:
            kept = self._table.fed_tokens(slot)
            if len(token_ids) // 2 <= len(kept) < len(token_ids) and np.array_equal(kept, token_ids[: len(kept)]):
                return self._take(slot), len(kept)
        if len(self._kept) == len(self._free_slots):
            return self._take(next(iter(self._kept))), 0
        return self._take(min(slot for slot in self._free_slots if slot not in self._kept)), 0

    def _take(self, slot: int) -> int:
        self._kept.pop(slot, None)
        self._free_slots.remove(slot)
        heapq.heapify(self._free_slots)
        return slot

    def _emit(self, sequence: SlotSequence, reason: FinishReason | None = None) -> None:
        assert sequence.slot is not None
        sequence.emit(*self._table.completion(sequence.slot), self._version, reason)

    def _finish(self, sequence: SlotSequence, reason: FinishReason) -> None:
        self._emit(sequence, reason)
        self._forget(sequence)

    def _forget(self, sequence: SlotSequence) -> None:
        """Release the resources of a sequence; no effect if the sequence has ended already."""
        request_id = sequence.request.request_id
        if self._waiting.get(request_id) is sequence:
            del self._waiting[request_id]
        if sequence.slot is None:
            return
        self._count_time()
        is_current = sequence.kv_version == self._version
        self._table.release(sequence.slot, keep=sequence.request.is_turn and is_current)
        if self._table.num_fed[sequence.slot]:
            self._kept[sequence.slot] = None
        self._in_slot.pop(sequence.slot)
        heapq.heappush(self._free_slots, sequence.slot)
        del self._running[request_id]
        sequence.slot = None
        if self._drained is not None and not self._running:
            self._drained.set()

    async def _replace_weights(self, version: int, staged: StagedWeights) -> list[torch.Tensor]:
        for sequence in self._running.values():
            self._emit(sequence)  # tokens up to here have the old version
        self._forget_kept()
        try:
            replaced = self._decoder.load(staged)
        except Exception as error:
            self._fail(f"the swap to version {version} failed half-way: {type(error).__name__}: {error}")
            raise SwapError(self._failure) from error
        self._version = version
        if self._deterministic and self._kv != "recompute":
            # A prompt is fed in several steps. The keys of its first tokens would be of the old weights, and no
            # weight span of the completion would show this: the parity gate of the trainer would refuse a sound run.
            self._table.feed_prompts_again()
        else:  # with kv=keep only turns of which no token is sampled yet, for the same reason
            slots = list(self._in_slot) if self._kv == "recompute" else self._table.slots_without_token()
            passes, self._is_recomputing = self._recompute(slots), True
            try:
                for _ in passes:
                    await asyncio.sleep(0)  # as after a rest; no step runs meanwhile
            finally:
                for _ in passes:  # if cancelled: no later token may attend to keys of two versions
                    pass
                self._is_recomputing = False
        return replaced

    def _forget_kept(self) -> None:
        for slot in self._kept:
            self._table.release(slot)
        self._kept.clear()
        self._prefilled.clear()

    def _recompute(self, slots: Sequence[int]) -> Iterator[None]:
        """Compute the keys and values in `slots` again, under the current weights, pass by pass.

        A deterministic engine computes those in all slots.
        """
        if self._deterministic:
            for position in range(int(self._table.num_fed.max())):
                step = self._table.refeed_input(position)
                with torch.inference_mode():
                    self._decoder.decode(step.token_ids_R, step.positions_R, num_keys=step.num_keys)
                yield
        else:
            for batch in prefill_batches([(slot, self._table.fed_tokens(slot)) for slot in slots]):
                with torch.inference_mode():
                    self._decoder.prefill(*batch)
                yield
        for slot in slots:
            if slot in self._in_slot:  # else the sequence has ended meanwhile
                self._in_slot[slot].kv_version = self._version
