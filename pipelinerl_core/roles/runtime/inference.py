"""Engine and tokenizer of a run's starting model, for every role that samples."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pipelinerl_core.config import RunConfig
from pipelinerl_core.emulation.accelerators import emulated_clock
from pipelinerl_core.engine.embedded.engine import EmbeddedEngine
from pipelinerl_core.engine.embedded.load import load_engine
from pipelinerl_core.engine.load import EngineStart, start_engine
from pipelinerl_core.interfaces import Engine
from pipelinerl_core.models.paths import require_model
from pipelinerl_core.prompts.chat import encode_prompt
from pipelinerl_core.prompts.turns import ChatTurns, chat_turns
from pipelinerl_core.roles.runtime.device import model_device
from pipelinerl_core.roles.runtime.monitor import RoleMonitor
from pipelinerl_core.rollouts.player import TextCodec
from pipelinerl_core.types import Int32Array, Prompt
from pipelinerl_core.weights.base import BaseWeights
from pipelinerl_core.weights.staging import staging_directory

HEARTBEAT_SECONDS = 1.0


def base_weights(config: RunConfig) -> BaseWeights | None:
    """Weights into which published adapters are merged; None if versions hold all weights. Raises ConfigError."""
    return BaseWeights(require_model(config.model.path)) if config.weights.content == "adapters" else None


def build_engine(config: RunConfig) -> EmbeddedEngine:
    """The embedded engine with the starting weights, version 0."""
    return load_engine(
        require_model(config.model.path),
        config,
        max_prompt_tokens=config.rollouts.max_prompt_tokens,
        device=model_device(config),
    )


async def open_engine(config: RunConfig, *, run_id: str, name: str, epoch: int = 0) -> Engine:
    """The configured engine with the starting weights.

    name, epoch: of the role and of its start; the pair is unique among the engines that sample for training.
    """
    start = EngineStart(
        directory=require_model(config.model.path),
        name=f"{name}/{epoch}",
        staging=staging_directory(run_id, name),
        device=lambda: model_device(config),
        clock=emulated_clock(config),
    )
    return await start_engine(config, start)


def build_codec(config: RunConfig) -> TextCodec:
    """Encode prompts and decode completions with the model's own tokenizer."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(require_model(config.model.path))

    def encode(prompt: Prompt) -> Int32Array:
        prompts = config.prompts
        return encode_prompt(prompt, tokenizer, config.model.chat_template, prompts.system, prompts.control_tokens)

    def decode(token_ids: Int32Array) -> str:
        return str(tokenizer.decode(np.asarray(token_ids).tolist(), skip_special_tokens=True))

    return TextCodec(encode=encode, decode=decode)


def build_chat(config: RunConfig) -> ChatTurns:
    """Tokens of conversations, with the model's own tokenizer and chat template."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(require_model(config.model.path))
    return chat_turns(config, tokenizer)


@asynccontextmanager
async def heartbeats(
    monitor: RoleMonitor, engine: Engine, is_paused: Callable[[], bool] = lambda: False
) -> AsyncIterator[None]:
    """Report heartbeats during the block, as long as the event loop runs and a busy engine makes progress."""

    async def report() -> None:
        seen: tuple[int, int] | None = None
        while True:
            stats = engine.stats()
            grown = (stats.num_tokens, stats.num_steps)
            if grown != seen or stats.running == 0 or is_paused():
                seen = grown
                monitor.heartbeat(f"{stats.running} sequences under version {engine.weight_version}")
                monitor.metrics.set("role_weight_version", engine.weight_version)
                monitor.facts["weight_version"] = engine.weight_version
            await asyncio.sleep(HEARTBEAT_SECONDS)

    task = asyncio.create_task(report())
    try:
        yield
    finally:
        task.cancel()
