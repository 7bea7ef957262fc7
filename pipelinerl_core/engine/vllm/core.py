"""vLLM's own API and nothing else: the one module that knows what vLLM 0.32 and 0.33 call things.

AsyncLLM runs in this process; its engine core (scheduler, model) in processes of its own, which this class starts,
updates, watches and ends.
"""

import asyncio
import contextlib
import gc
import os
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from pipelinerl_core.errors import EngineError
from pipelinerl_core.interfaces import BroadcastGroup, TensorMeta
from pipelinerl_core.types import FinishReason, Sampler, WeightSpan

_FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}
# Read by vLLM when it is imported, or by the processes it starts.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_PLUGINS": "pipelinerl",
    # One core is not bound to one engine: trainer and actors share them (design: passive threads, few of them).
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
# The longest answer is that to new weights: hundreds of gigabytes from shared memory.
_ANSWER_SECONDS = 600.0
# How soon the death of an engine core is noticed by a call that waits for it.
_LOOK_SECONDS = 0.5
# A core that is asked to stop ends its workers in 3 to 5 s.
_SHUTDOWN_SECONDS = 15.0


class CoreDied(EngineError):
    """vLLM's engine core is gone, and with it every request in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSettings:
    """What an engine core is started with."""

    model: str
    """Directory of the model."""
    dtype: str
    max_len: int
    """Longest sequence, prompt included."""
    max_sequences: int
    """Most sequences decoded at once."""
    seed: int
    """Of the sampling noise; two actors must not share one."""
    kv_bytes: int | None = None
    """Memory of the KV cache; None leaves it to vLLM."""
    tensor_parallel: int = 1
    data_parallel: int = 1
    is_eager: bool = True
    """No compilation and no CUDA graphs: starts in seconds."""
    block_size: int | None = None
    stream_interval: int = 16
    """Tokens of a sequence between two of its outputs."""


@dataclass(frozen=True, slots=True)
class CoreOutput:
    """New tokens of one request; the last output has a reason and says which weights sampled what."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: FinishReason | None
    spans: tuple[WeightSpan, ...]
    """Over all tokens of the request, not of this output; empty before the last."""


@dataclass(slots=True)
class CoreLoad:
    """What the engine core last said of itself."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    num_preemptions: int = 0
    num_steps: int = 0


class VLLMCore:
    """One AsyncLLM and its engine core; can be started again after a death."""

    def __init__(self, settings: CoreSettings) -> None:
        self.settings = settings
        self.load = CoreLoad()
        self._num_submitting = 0
        self.llm: Any = None
        """The AsyncLLM; None before the start and after the end."""
        # Linux ends a child that asked to die with its parent when the thread that started it ends: keep one thread.
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vllm-start")

    @property
    def is_dead(self) -> bool:
        """Whether there is no engine core to ask."""
        return self.llm is None or bool(self.llm.errored)

    async def start(self) -> None:
        """Start an engine core with the weights of the model directory; an old one is ended first."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._starter, self._stop)
        self.load = CoreLoad(num_preemptions=self.load.num_preemptions, num_steps=self.load.num_steps)
        try:
            await loop.run_in_executor(self._starter, _import_vllm)
            self.llm = await loop.run_in_executor(self._starter, self._build)
        except Exception as error:
            raise EngineError(f"vLLM did not start: {type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """End the engine core; closing twice is harmless."""
        await asyncio.get_running_loop().run_in_executor(self._starter, self._stop)

    async def generate(
        self,
        request_id: str,
        token_ids: list[int],
        *,
        max_tokens: int,
        sampler: Sampler,
        stop_token_ids: list[int],
        salt: str,
    ) -> AsyncIterator[CoreOutput]:
        """Outputs of one request. Raises CoreDied; closing the iterator early takes the request back.

        salt: only requests of equal salt share cached prefixes.
        """
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=sampler.temperature,
            top_p=sampler.top_p,
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
            ignore_eos=True,  # stop_token_ids say it all
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        try:
            self._num_submitting += 1
            try:
                queue = await self.llm.add_request(request_id, tokens_input(token_ids, cache_salt=salt), params)
            finally:
                self._num_submitting -= 1
            async for output in self._outputs(queue):
                yield output
        except EngineError:
            raise
        except Exception as error:
            if self.is_dead:
                raise CoreDied(f"vLLM's engine core died: {error}") from None
            raise EngineError(f"vLLM: {type(error).__name__}: {error}") from error

    async def _outputs(self, queue: Any) -> AsyncIterator[CoreOutput]:
        """AsyncLLM.generate after its first line, which does not say when the core has been told of a request."""
        is_finished = False
        try:
            while not is_finished:
                output = queue.get_nowait() or await queue.get()
                is_finished = output.finished
                yield _core_output(output.outputs[0], is_finished)
        finally:
            if not is_finished and not self.is_dead:
                await self.llm.abort(queue.request_id, internal=True)
            queue.close()

    async def _submitted(self) -> None:
        """Returns when the core has been told of every request: it is told in the order of what is asked."""
        deadline = time.monotonic() + _ANSWER_SECONDS
        while self._num_submitting and not self.is_dead:
            if time.monotonic() > deadline:
                raise EngineError(f"vLLM: {self._num_submitting} requests not taken within {_ANSWER_SECONDS:g} s")
            await asyncio.sleep(0.001)

    async def abort(self, request_ids: Iterable[str]) -> None:
        """Take requests back; each ends with an output of reason ABORT."""
        await self._submitted()
        await self._ask(self.llm.abort(list(request_ids)))

    async def pause(self, *, clear_cache: bool) -> None:
        """Stop between two steps; requests keep their places and, unless the cache is cleared, their KV.

        AsyncLLM.pause_generation would add a sleep of 20 ms "for more intuitive ordering"; the call beneath it
        returns when the engine core is idle, which is all that a swap needs.
        """
        await self._submitted()
        await self._ask(self.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache))

    async def resume(self) -> None:
        """Go on after a pause."""
        await self._ask(self.llm.resume_generation())

    async def join(self, group: BroadcastGroup, first_rank: int) -> None:
        """Let every worker meet the other members of a broadcast group; generation stands still until they have."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        info = {
            "ticket": group.ticket,
            "first_rank": first_rank,
            "world_size": group.world_size,
            "deadline_seconds": group.deadline_seconds,
        }
        await self._ask(self.llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info)))

    async def load_weights(self, path: str, version: int) -> None:
        """Inside a pause: load a verified safetensors file, and stamp what follows with `version`."""
        await self._update({"path": path}, version)

    async def receive_weights(self, layout: Sequence[TensorMeta], version: int) -> None:
        """Inside a pause: load what the trainer broadcasts, and stamp what follows with `version`."""
        info = {
            "names": [meta.name for meta in layout],
            "dtype_names": [meta.dtype for meta in layout],
            "shapes": [list(meta.shape) for meta in layout],
        }
        await self._update(info, version)

    async def _update(self, info: dict[str, Any], version: int) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._ask(self.llm.start_weight_update())
        await self._ask(self.llm.update_weights(WeightTransferUpdateRequest(update_info=info)))
        await self._ask(self.llm.finish_weight_update(str(version)))

    async def set_version(self, version: int) -> None:
        """Stamp what follows with `version`."""
        await self._ask(self.llm.update_weight_version(str(version)))

    async def _ask(self, question: Coroutine[Any, Any, Any]) -> None:
        """Await one of vLLM's calls; a dead engine core leaves some of them without an answer for ever."""
        name = getattr(question, "__qualname__", "a call").rpartition(".")[2]
        task = asyncio.ensure_future(question)
        deadline = time.monotonic() + _ANSWER_SECONDS
        try:
            while not task.done() and not self.is_dead and time.monotonic() < deadline:
                await asyncio.wait({task}, timeout=_LOOK_SECONDS)
        finally:
            task.cancel()
        if not task.done() and not self.is_dead:
            raise EngineError(f"vLLM: no answer to {name} within {_ANSWER_SECONDS:g} s")
        error = task.exception() if task.done() and not task.cancelled() else None
        if self.is_dead:
            raise CoreDied(f"vLLM's engine core died: {error or f'no answer to {name}'}")
        if error is not None:
            raise EngineError(f"vLLM: {name}: {type(error).__name__}: {error}") from error

    def _build(self) -> Any:
        from vllm import AsyncEngineArgs
        from vllm.config import WeightTransferConfig
        from vllm.v1.engine.async_llm import AsyncLLM

        from pipelinerl_core.engine.vllm.plugin import BACKEND

        settings = self.settings
        arguments = AsyncEngineArgs(
            model=settings.model,
            dtype=settings.dtype,
            max_model_len=settings.max_len,
            max_num_seqs=settings.max_sequences,
            seed=settings.seed,
            kv_cache_memory_bytes=settings.kv_bytes,
            tensor_parallel_size=settings.tensor_parallel,
            data_parallel_size=settings.data_parallel,
            enforce_eager=settings.is_eager,
            block_size=settings.block_size,
            stream_interval=settings.stream_interval,
            enable_prefix_caching=True,
            skip_tokenizer_init=True,
            generation_config="vllm",
            logprobs_mode="processed_logprobs",
            hf_overrides={"head_dtype": "float32"},
            weight_transfer_config=WeightTransferConfig(backend=BACKEND),
            enable_log_requests=False,
            disable_log_stats=True,
        )
        return AsyncLLM.from_engine_args(arguments, stat_loggers=[self._stat_logger()])

    def _stop(self) -> None:
        llm, self.llm = self.llm, None
        if llm is None:
            return
        if llm.output_handler is not None:  # or it would report the end as a failure
            with contextlib.suppress(RuntimeError):
                llm.output_handler.get_loop().call_soon_threadsafe(llm.output_handler.cancel)
        llm.shutdown(timeout=_SHUTDOWN_SECONDS)
        del llm
        gc.collect()  # it would be shut down once more when the interpreter ends

    def _stat_logger(self) -> Any:
        from vllm.v1.metrics.loggers import StatLoggerBase

        core = self

        class LoadRecorder(StatLoggerBase):  # type: ignore[misc]
            """Keeps the last glance; with data parallelism that of the engine core that spoke last."""

            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                pass

            def record(
                self,
                scheduler_stats: Any,
                iteration_stats: Any,
                mm_cache_stats: Any = None,
                engine_idx: int = 0,
            ) -> None:
                if scheduler_stats is not None:
                    core.load.running = scheduler_stats.num_running_reqs
                    core.load.waiting = scheduler_stats.num_waiting_reqs
                    core.load.kv_usage = scheduler_stats.kv_cache_usage
                    core.load.num_steps += 1
                if iteration_stats is not None:
                    core.load.num_preemptions += iteration_stats.num_preempted_reqs

            def log_engine_initialized(self) -> None:
                pass

        return LoadRecorder


def _import_vllm() -> None:
    """Import it with its environment set.

    By a call of its own: an import within vLLM fails and is caught, but the traceback is kept, and with it every
    frame up to here. An AsyncLLM in one of them would live until the interpreter ends and fail to close then.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import vllm.v1.engine.async_llm  # noqa: F401

    from pipelinerl_core.engine.vllm.plugin import DIE_WITH_PARENT

    os.environ[DIE_WITH_PARENT] = str(os.getpid())


def _core_output(output: Any, is_finished: bool) -> CoreOutput:
    """Of vLLM's CompletionOutput; spans of an engine core that has not been told its version have no number."""
    spans = output.weight_versions if is_finished and output.weight_versions else ()
    return CoreOutput(
        token_ids=output.token_ids,
        logprobs=output.logprobs.logprobs if output.logprobs is not None else (),
        finish_reason=_FINISH_REASONS[output.finish_reason] if is_finished else None,
        spans=tuple(WeightSpan(int(span.version), span.start, span.end) for span in spans),
    )
