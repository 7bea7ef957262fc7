"""The engine of a run, from a model directory."""

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from pipelinerl_core.config import RunConfig
from pipelinerl_core.engine.embedded.engine import EmbeddedEngine
from pipelinerl_core.errors import ConfigError, EngineError
from pipelinerl_core.interfaces import Engine


def load_engine(
    path: str | Path,
    config: RunConfig,
    *,
    max_prompt_tokens: int,
    eos_token_ids: Iterable[int] | None = None,
    weight_version: int = 0,
    device: torch.device | str = "cpu",
) -> EmbeddedEngine:
    """The engine of a run from a model directory (config.json and safetensors; the network is never asked).

    Slots, dtype, KV policy and completion length come from `config`; a slot holds max_prompt_tokens + max_tokens.
    eos_token_ids default to those of the model's generation configuration. Raises EngineError.
    """
    if not Path(path).is_dir():
        raise EngineError(f"{path}: no such model directory")
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
    return EmbeddedEngine(
        model.to(device),
        slots=config.engine.concurrency,
        max_len=max_prompt_tokens + config.rollouts.max_tokens,
        eos_token_ids=_eos_of(model) if eos_token_ids is None else eos_token_ids,
        weight_version=weight_version,
        kv=config.engine.kv,
        deterministic=config.engine.deterministic,
    )


async def start_engine(
    path: str | Path, config: RunConfig, *, max_prompt_tokens: int, name: str, staging: Path | None
) -> Engine:
    """The engine of a run on vLLM; see `load_vllm.start_vllm_engine`. Raises ConfigError where vLLM is missing."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "engine.kind=vllm: vLLM is not installed. Run `make install ENGINE=vllm` (CPU) or "
            "`pip install -e '.[vllm]'` (GPU), or set engine.kind=embedded"
        )
    from pipelinerl_core.engine.vllm.load import start_vllm_engine

    return await start_vllm_engine(path, config, max_prompt_tokens=max_prompt_tokens, name=name, staging=staging)


def _eos_of(model: Any) -> list[int]:
    """End tokens of the generation configuration, which transformers fills from config.json where it has none."""
    eos = model.generation_config.eos_token_id
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
