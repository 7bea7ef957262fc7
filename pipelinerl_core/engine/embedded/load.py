"""The embedded engine of a run, from a model directory."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from pipelinerl_core.config import RunConfig
from pipelinerl_core.engine.embedded.engine import EmbeddedEngine
from pipelinerl_core.errors import EngineError
from pipelinerl_core.models.paths import within_context


def load_engine(
    path: str | Path,
    config: RunConfig,
    *,
    max_prompt_tokens: int,
    eos_token_ids: Iterable[int] | None = None,
    device: torch.device | str = "cpu",
) -> EmbeddedEngine:
    """The embedded engine on a model directory (config.json and safetensors), without any network access.

    Slots, dtype, KV policy and completion length come from `config`; a slot holds max_prompt_tokens + max_tokens, or
    the context of the model if that is shorter. eos_token_ids default to the end tokens of the model's generation
    configuration. Raises EngineError, and ConfigError for a config.json that cannot be read.
    """
    if not Path(path).is_dir():
        raise EngineError(f"{path}: no such model directory")
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
    return EmbeddedEngine(
        model.to(device),
        slots=config.engine.concurrency,
        max_len=within_context(Path(path), max_prompt_tokens + config.longest_completion),
        eos_token_ids=eos_of(model) if eos_token_ids is None else eos_token_ids,
        kv=config.engine.kv,
        deterministic=config.engine.deterministic,
    )


def eos_of(model: Any) -> list[int]:
    """End tokens of the generation configuration, else of config.json."""
    eos = model.generation_config.eos_token_id
    eos = getattr(model.config, "eos_token_id", None) if eos is None else eos
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
