"""The engines by `engine.kind`.

To add an engine: a folder beside `embedded` and `vllm`, its section in config/engines.py, a function here, and the
line of the function in ENGINES. The function imports the engine, so a run imports its own engine only.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

import torch

from pipelinerl_core.config import RunConfig
from pipelinerl_core.config.engines import VllmConfig
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.interfaces import Engine, StepClock


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStart:
    """What an engine is started with, besides the configuration; an engine may ignore some of the fields."""

    directory: Path
    """The starting model: config.json and safetensors."""
    name: str
    """Role and epoch. Two engines of a run that sample for training must have different names: vLLM derives the
    seed of its sampling noise from the name."""
    staging: Path | None
    """Where an engine with worker processes puts weights for the workers; None: the engine chooses."""
    device: Callable[[], torch.device]
    """The device of `model.device`. Raises ConfigError if the configured device does not exist."""
    clock: StepClock | None
    """The emulated accelerator's clock; None: decode steps run at full speed."""


async def start_engine(config: RunConfig, start: EngineStart) -> Engine:
    """The engine of `engine.kind` with the starting weights, version 0. Raises ConfigError or EngineError."""
    return await ENGINES[config.engine.kind](config, start)


async def _embedded(config: RunConfig, start: EngineStart) -> Engine:
    from pipelinerl_core.engine.embedded.load import load_engine

    max_prompt_tokens = config.rollouts.max_prompt_tokens
    engine = load_engine(start.directory, config, max_prompt_tokens=max_prompt_tokens, device=start.device())
    if start.clock is not None:
        engine.set_clock(start.clock)
    return engine


async def _vllm(config: RunConfig, start: EngineStart) -> Engine:
    if find_spec("vllm") is None:
        raise ConfigError(VllmConfig.install)
    from pipelinerl_core.engine.vllm.load import start_vllm_engine

    return await start_vllm_engine(
        start.directory,
        config,
        max_prompt_tokens=config.rollouts.max_prompt_tokens,
        name=start.name,
        staging=start.staging,
    )


ENGINES: Mapping[str, Callable[[RunConfig, EngineStart], Awaitable[Engine]]] = MappingProxyType(
    {"embedded": _embedded, "vllm": _vllm}
)
