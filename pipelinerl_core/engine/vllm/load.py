"""vLLM as the engine of a run, from a model directory."""

import hashlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from pipelinerl_core.config import RunConfig
from pipelinerl_core.config.engines import VllmConfig
from pipelinerl_core.engine.vllm.core import CoreSettings, VLLMCore
from pipelinerl_core.engine.vllm.engine import VLLMEngine
from pipelinerl_core.engine.vllm.weights import StagedWeights
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.paths import read_model_config, within_context

_GIB = 2**30
_CONTEXT_SHARE, _CONTEXT_BYTES = 0.03, 1.5 * _GIB
"""Of a GPU's memory, and at least, for the context of CUDA and what the trainer still allocates at rest."""


async def start_vllm_engine(
    path: str | Path,
    config: RunConfig,
    *,
    max_prompt_tokens: int,
    name: str,
    staging: Path | None = None,
) -> VLLMEngine:
    """The engine of a run on vLLM, started, which takes 20 to 30 s. Raises EngineError, ConfigError.

    name: role and epoch, different for every engine of a run: the name determines the seed of the sampling noise.
    staging: see `StagedWeights`.
    """
    directory = Path(path)
    model = read_model_config(directory)
    max_len = within_context(directory, max_prompt_tokens + config.longest_completion)
    settings = core_settings(directory, config, max_len=max_len, name=name)
    if config.gpu_turns:
        settings = replace(settings, memory_share=min(settings.memory_share, _free_share()))
    core = VLLMCore(settings)
    await core.start()
    engine = VLLMEngine(
        core,
        StagedWeights(str(directory), staging),
        slots=config.engine.concurrency,
        max_len=max_len,
        vocab_size=int(model["vocab_size"]),
        eos_token_ids=_eos_of(directory, model),
        kv=config.engine.kv,
    )
    await engine.open()
    return engine


def core_settings(directory: Path, config: RunConfig, *, max_len: int, name: str) -> CoreSettings:
    """Arguments of vLLM. On a CPU the defaults are no compilation and a KV cache of 1 GiB. Raises ConfigError."""
    on_cpu = not torch.cuda.is_available()
    engine = config.engine
    assert isinstance(engine, VllmConfig)
    if on_cpu and config.gpu_turns:
        raise ConfigError("placement.share_gpu=turns: vLLM cannot sleep on a CPU. Set placement.share_gpu=false")
    kv_gigabytes = engine.kv_gigabytes or (1.0 if on_cpu else 0)
    is_compiled = engine.compile == "always" or (engine.compile == "auto" and not on_cpu)
    digest = hashlib.blake2b(f"{config.seed}/{name}".encode(), digest_size=4).digest()
    return CoreSettings(
        model=str(directory),
        dtype=config.model.dtype,
        max_len=max_len,
        max_sequences=engine.concurrency,
        seed=int.from_bytes(digest, "little") >> 1,
        kv_bytes=int(kv_gigabytes * _GIB) or None,
        memory_share=config.engine_memory_share,
        batched_tokens=engine.batched_tokens or None,
        prefix_cache=engine.prefix_cache,
        tensor_parallel=engine.tensor_parallel,
        data_parallel=engine.data_parallel,
        is_eager=not is_compiled,
        stream_interval=engine.stream_interval,
        sleeps=config.gpu_turns,
    )


def _eos_of(directory: Path, model: dict[str, Any]) -> list[int]:
    """End tokens of the generation configuration, else of config.json."""
    try:
        eos = GenerationConfig.from_pretrained(directory, local_files_only=True).eos_token_id
    except OSError:
        eos = None
    eos = model.get("eos_token_id") if eos is None else eos
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def _free_share() -> float:
    """The share of the GPU's memory that the resting trainer leaves; vLLM demands its share to be free at its start.

    A process of its own asks, because CUDA must not be initialized in this process.
    """
    code = "import torch; print(*torch.cuda.mem_get_info())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    free, total = map(int, done.stdout.split())
    return free / total - max(_CONTEXT_SHARE, _CONTEXT_BYTES / total)
