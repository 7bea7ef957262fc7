"""Every call of vLLM's API (0.32 and 0.33) from outside of vLLM's own processes.

AsyncLLM runs in this process; the engine core (scheduler, model) runs in separate processes, which `VLLMCore` starts,
updates, watches and ends.
"""

import asyncio
import contextlib
import gc
import hashlib
import os
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from pipelinerl_core.errors import EngineError
from pipelinerl_core.interfaces import BroadcastGroup, TensorMeta
from pipelinerl_core.types import FinishReason, Sampler, WeightSpan

_FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}
# vLLM reads these when it is imported, or in the processes that it starts.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_PLUGINS": "pipelinerl",
    # A forked process cannot use CUDA if its parent has initialized CUDA.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # No binding of threads to CPU cores: trainer and actors share the cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
# Loading new weights takes longest: hundreds of gigabytes from shared memory.
_CALL_SECONDS = 600.0
# How often a waiting call checks whether the engine core is alive.
_POLL_SECONDS = 0.5
# An engine core needs 3 to 5 s to end its workers.
_SHUTDOWN_SECONDS = 15.0


# The last text says only that an engine core failed; the core's own error is in the log above.
_MEMORY_ERRORS = (
    "out of memory", "No available memory for the cache blocks", "KV cache is needed", "Free memory on device",
    "Engine core initialization failed",
)  # fmt: skip


class CoreDied(EngineError):
    """vLLM's engine core has ended, and with it all requests in the engine core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSettings:
    """The arguments of a start of an engine core."""

    model: str
    """Directory of the model."""
    dtype: str
    max_len: int
    """Longest sequence, prompt included."""
    max_sequences: int
    """Sequences decoded at once, at most."""
    seed: int
    """Seed of the sampling noise; two actors must not have the same seed. See `VLLMCore.seed`."""
    kv_bytes: int | None = None
    """Memory of the KV cache; None: what memory_share leaves."""
    memory_share: float = 0.9
    """Share of a GPU's memory for weights, KV cache and working memory."""
    batched_tokens: int | None = None
    """Tokens of one engine step at most; None: vLLM decides."""
    prefix_cache: bool = True
    tensor_parallel: int = 1
    data_parallel: int = 1
    is_eager: bool = True
    """No compilation and no CUDA graphs, which makes the start faster."""
    block_size: int | None = None
    stream_interval: int = 16
    """Tokens of a sequence between two of its outputs."""
    sleeps: bool = False
    """`VLLMCore.rest` gives memory back, which needs a GPU."""


@dataclass(frozen=True, slots=True)
class CoreOutput:
    """New tokens of one request. Only the last output has a finish reason and the weight spans."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: FinishReason | None
    spans: tuple[WeightSpan, ...]
    """Over all tokens of the request; empty before the last output."""


@dataclass(slots=True)
class CoreLoad:
    """The load that the engine core reported last."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    num_preemptions: int = 0
    num_steps: int = 0
    num_prefilled: int = 0
    num_reused: int = 0
    """Of the prefix cache, as in EngineStats."""


class VLLMCore:
    """One AsyncLLM and its engine core; `start` works again after the engine core has died."""

    def __init__(self, settings: CoreSettings) -> None:
        self.settings = settings
        self.load = CoreLoad()
        self._num_submitting = 0
        self._num_starts = 0
        self.llm: Any = None
        """The AsyncLLM; None before the start and after the end."""
        # Linux kills a child with a parent-death signal when the thread that started the child ends: keep one thread.
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vllm-start")

    @property
    def is_dead(self) -> bool:
        """Whether no engine core runs."""
        return self.llm is None or bool(self.llm.errored)

    @property
    def seed(self) -> int:
        """Seed of the sampling noise of this engine core: another one after every start.

        With the same seed a restarted engine core would draw the noise of its predecessor again, and repeat its
        completions of equal prompts.
        """
        digest = hashlib.blake2b(f"{self.settings.seed}/{self._num_starts}".encode(), digest_size=4).digest()
        return int.from_bytes(digest, "little") >> 1

    async def start(self) -> None:
        """End the old engine core and start one with the weights of the model directory. Raises EngineError."""
        self._num_starts += 1
        loop = asyncio.get_running_loop()
        self._end_requests()
        await loop.run_in_executor(self._starter, self._stop)
        self.load = replace(self.load, running=0, waiting=0, kv_usage=0.0)
        try:
            await loop.run_in_executor(self._starter, _import_vllm)
            self.llm = await loop.run_in_executor(self._starter, self._build)
        except Exception as error:
            advice = memory_advice(str(error), self.settings)
            raise EngineError(f"vLLM did not start: {type(error).__name__}: {error}{advice}") from error

    async def close(self) -> None:
        """End the engine core; a second call has no effect."""
        self._end_requests()
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
        """Outputs of one request. Raises CoreDied; closing the iterator early aborts the request.

        salt: only requests with the same salt share cached prefixes.
        """
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=sampler.temperature,
            top_p=sampler.top_p,
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
            ignore_eos=True,  # stop_token_ids has all end tokens
            logprobs=0,  # of the sampled token only
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
        """AsyncLLM.generate without its first line, which does not report when the request was sent to the core."""
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
        """Wait until every request was sent to the core. The core receives calls in the order of sending."""
        deadline = time.monotonic() + _CALL_SECONDS
        while self._num_submitting and not self.is_dead:
            if time.monotonic() > deadline:
                raise EngineError(f"vLLM: {self._num_submitting} requests were not sent within {_CALL_SECONDS:g} s")
            await asyncio.sleep(0.001)

    async def abort(self, request_ids: Iterable[str]) -> None:
        await self._submitted()
        await self._call(self.llm.abort(list(request_ids)))

    async def pause(self, *, clear_cache: bool) -> None:
        """Pause between two steps; requests stay scheduled and, unless the cache is cleared, keep their KV.

        AsyncLLM.pause_generation adds a sleep of 20 ms to `pause_scheduler_async`, which returns when the engine core
        is idle; a swap needs no more.
        """
        await self._submitted()
        await self._call(self.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache))

    async def resume(self) -> None:
        """Continue after a pause."""
        await self._call(self.llm.resume_generation())

    async def rest(self) -> None:
        """Pause, drop the KV cache, and with `sleeps` free its memory and that of the weights; requests stay."""
        if not self.settings.sleeps:
            return await self.pause(clear_cache=True)
        await self._submitted()
        await self._call(self.llm.sleep(level=1, mode="keep"))

    async def wake(self) -> None:
        """Continue after `rest`: vLLM computes the keys and values of its requests again."""
        await self._call(self.llm.wake_up() if self.settings.sleeps else self.llm.resume_generation())

    async def join(self, group: BroadcastGroup, first_rank: int) -> None:
        """Make every worker join a broadcast group on a thread. Returns at once; the workers continue to generate."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        info = {
            "host": group.host,
            "port": group.port,
            "nccl_id": group.nccl_id,
            "first_rank": first_rank,
            "world_size": group.world_size,
            "deadline_seconds": group.deadline_seconds,
        }
        await self._call(self.llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info)))

    async def load_weights(self, path: str, version: int) -> None:
        """In a pause: load a verified safetensors file; tokens sampled afterwards have `version`."""
        await self._update({"path": path}, version)

    async def receive_weights(self, layout: Sequence[TensorMeta], version: int, seconds: float) -> None:
        """In a pause: load the trainer's broadcast; tokens sampled afterwards have `version`.

        seconds: limit of the transfer. NCCL has no limit: if another member has ended, the workers would wait without
        end.
        """
        info = {
            "names": [meta.name for meta in layout],
            "dtype_names": [meta.dtype for meta in layout],
            "shapes": [list(meta.shape) for meta in layout],
        }
        await self._update(info, version, seconds)

    async def _update(self, info: dict[str, Any], version: int, seconds: float = _CALL_SECONDS) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._call(self.llm.start_weight_update())
        await self._call(self.llm.update_weights(WeightTransferUpdateRequest(update_info=info)), seconds)
        await self._call(self.llm.finish_weight_update(str(version)))

    async def set_version(self, version: int) -> None:
        """Tokens sampled from here on have `version`."""
        await self._call(self.llm.update_weight_version(str(version)))

    async def _call(self, call: Coroutine[Any, Any, Any], seconds: float = _CALL_SECONDS) -> None:
        """Await one of vLLM's calls, which may never return if the engine core dies. Raises CoreDied, EngineError."""
        name = getattr(call, "__qualname__", "a call").rpartition(".")[2]
        task = asyncio.ensure_future(call)
        deadline = time.monotonic() + seconds
        try:
            while not task.done() and not self.is_dead and time.monotonic() < deadline:
                await asyncio.wait({task}, timeout=_POLL_SECONDS)
        finally:
            task.cancel()
        if not task.done() and not self.is_dead:
            raise EngineError(f"vLLM: no answer to {name} within {seconds:g} s")
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
            seed=self.seed,
            kv_cache_memory_bytes=settings.kv_bytes,
            gpu_memory_utilization=settings.memory_share,
            max_num_batched_tokens=settings.batched_tokens,
            tensor_parallel_size=settings.tensor_parallel,
            data_parallel_size=settings.data_parallel,
            enforce_eager=settings.is_eager,
            block_size=settings.block_size,
            stream_interval=settings.stream_interval,
            enable_prefix_caching=settings.prefix_cache,
            skip_tokenizer_init=True,
            generation_config="vllm",
            logprobs_mode="processed_logprobs",
            hf_overrides={"head_dtype": "float32"},
            weight_transfer_config=WeightTransferConfig(backend=BACKEND),
            enable_log_requests=False,
            disable_log_stats=True,
            enable_sleep_mode=settings.sleeps,
        )
        return AsyncLLM.from_engine_args(arguments, stat_loggers=[self._stat_logger()])

    def _end_requests(self) -> None:
        """Let open requests raise CoreDied. vLLM ends them itself only if the engine core dies."""
        if self.llm is not None:
            self.llm.output_processor.propagate_error(CoreDied("the engine core is stopped"))

    def _stop(self) -> None:
        llm, self.llm = self.llm, None
        if llm is None:
            return
        if llm.output_handler is not None:  # otherwise the handler reports the shutdown as a failure
            with contextlib.suppress(RuntimeError):
                llm.output_handler.get_loop().call_soon_threadsafe(llm.output_handler.cancel)
        llm.shutdown(timeout=_SHUTDOWN_SECONDS)
        del llm
        gc.collect()  # otherwise the interpreter shuts the AsyncLLM down a second time at its end

    def _stat_logger(self) -> Any:
        from vllm.v1.metrics.loggers import StatLoggerBase

        core = self

        class LoadRecorder(StatLoggerBase):  # type: ignore[misc]
            """Stores the newest statistics; with data parallelism those of the engine core that reported last."""

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
                    if scheduler_stats.prefix_cache_stats is not None:
                        core.load.num_prefilled += scheduler_stats.prefix_cache_stats.queries
                        core.load.num_reused += scheduler_stats.prefix_cache_stats.hits
                if iteration_stats is not None:
                    core.load.num_preemptions += iteration_stats.num_preempted_reqs

            def log_engine_initialized(self) -> None:
                pass

        return LoadRecorder


def memory_advice(error: str, settings: CoreSettings) -> str:
    """What to set if a start failed for lack of memory; empty if the error has another cause."""
    if not any(words in error for words in _MEMORY_ERRORS):
        return ""
    kv = "unset: what memory_share leaves" if settings.kv_bytes is None else f"{settings.kv_bytes / 2**30:g}"
    return (
        f". If the cause is memory, lower engine.memory_share ({settings.memory_share:g}) if others use the GPU, set "
        f"engine.kv_gigabytes ({kv}), lower engine.concurrency ({settings.max_sequences}) or rollouts.max_tokens "
        f"(sequences have up to {settings.max_len} tokens), or raise engine.tensor_parallel "
        f"({settings.tensor_parallel})"
    )


def _import_vllm() -> None:
    """Import vLLM with its environment variables set.

    In a function of its own: vLLM catches the error of an import inside of vLLM but keeps the traceback, which keeps
    all frames up to this function alive. An AsyncLLM in such a frame would live until the interpreter ends, and its
    shutdown would fail then.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import vllm.v1.engine.async_llm  # noqa: F401

    from pipelinerl_core.engine.vllm.plugin import DIE_WITH_PARENT

    os.environ[DIE_WITH_PARENT] = str(os.getpid())


def _core_output(output: Any, is_finished: bool) -> CoreOutput:
    """From vLLM's CompletionOutput. An engine core without a version reports spans without version numbers."""
    spans = output.weight_versions if is_finished and output.weight_versions else ()
    return CoreOutput(
        token_ids=output.token_ids,
        logprobs=output.logprobs.logprobs if output.logprobs is not None else (),
        finish_reason=_FINISH_REASONS[output.finish_reason] if is_finished else None,
        spans=tuple(WeightSpan(int(span.version), span.start, span.end) for span in spans),
    )
