"""Load for benchmarks: random models, prompts and rollouts, requests without an end token, and weight updates."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.sizes import SIZES
from pipelinerl_core.interfaces import Engine, WeightUpdate
from pipelinerl_core.types import Completion, EngineRequest, FinishReason, Int32Array, Rollout, Sampler
from tests.rollout_rows import build_rollout


def random_model(size: str | Mapping[str, Any], *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """A model of a size of SIZES, or of a shape, in evaluation mode; equal arguments give equal random weights.

    device: where the weights are drawn; a CPU takes minutes for some billion weights.
    """
    shape = SIZES[size] if isinstance(size, str) else size
    torch.manual_seed(0)
    model_class: Any = Qwen2ForCausalLM
    with torch.device(device):
        return model_class(Qwen2Config(**shape, tie_word_embeddings=True)).to(dtype).eval()


def random_prompts(num: int, num_tokens: int, vocab_size: int) -> Int32Array:
    """Random token ids [num, num_tokens]; equal arguments give equal prompts."""
    return np.random.default_rng(0).integers(0, vocab_size, (num, num_tokens), dtype=np.int32)


def random_rollout(
    prompt: Int32Array,
    completion: Int32Array,
    logprobs: NDArray[Any] | float,
    *,
    group: int = 0,
    index: int = 0,
    size: int = 1,
) -> Rollout:
    """A scored rollout of version 0, at a place in a group. Every second rollout has a reward of 1, the others 0."""
    built = build_rollout(
        np.random.default_rng(0),
        group_id=group,
        rollout_index=index,
        group_size=size,
        num_tokens=len(completion),
        reward=float(index % 2),
    )
    return replace(
        built,
        prompt_token_ids=prompt,
        completion_token_ids=completion,
        rollout_logprobs=np.full(len(completion), logprobs, np.float32),
        finish_reason=FinishReason.LENGTH,
    )


async def complete(engine: Engine, prompts: Int32Array, *, max_tokens: int, name: str = "") -> list[Completion]:
    """A completion of each prompt; all requests are sent at once."""

    async def complete_prompt(index: int, prompt: Int32Array) -> Completion:
        request = EngineRequest(
            request_id=f"{name}{index}", prompt_token_ids=prompt, max_tokens=max_tokens, sampler=Sampler(seed=index)
        )
        completion: Completion | None = None
        async for chunk in engine.generate(request):
            completion = chunk.completion
        assert completion is not None
        return completion

    return list(await asyncio.gather(*(complete_prompt(index, prompt) for index, prompt in enumerate(prompts))))


async def count_tokens(engine: Engine, prompts: Int32Array, *, max_tokens: int, name: str = "") -> int:
    """The number of tokens that `complete` generates."""
    completions = await complete(engine, prompts, max_tokens=max_tokens, name=name)
    return sum(len(completion.token_ids) for completion in completions)


async def complete_endlessly(engine: Engine, prompts: Int32Array, *, max_tokens: int) -> None:
    """Keep the engine busy until cancelled."""
    for round_ in range(1_000_000):
        await complete(engine, prompts, max_tokens=max_tokens, name=f"load.{round_}.")


def update_of(weights: Mapping[str, torch.Tensor] | Path, version: int) -> WeightUpdate:
    """The weights of a model, or of a model directory, as version `version`."""
    if isinstance(weights, Path):
        files = sorted(weights.glob("*.safetensors"))
        weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
    return WeightUpdate(version=version, tensors=weights, num_bytes=sum(t.nbytes for t in weights.values()))


async def start_vllm(
    directory: Path, *, slots: int, max_len: int, vocab_size: int, **settings: Any
) -> tuple[Any, Any, Any]:
    """A VLLMEngine without end tokens on the model of a directory, its VLLMCore and its StagedWeights.

    settings: further fields of `CoreSettings`.
    """
    from pipelinerl_core.engine.vllm.core import CoreSettings, VLLMCore
    from pipelinerl_core.engine.vllm.engine import VLLMEngine
    from pipelinerl_core.engine.vllm.weights import StagedWeights

    core = VLLMCore(CoreSettings(model=str(directory), max_len=max_len, max_sequences=slots, seed=0, **settings))
    staged = StagedWeights(str(directory))
    await core.start()
    engine = VLLMEngine(core, staged, slots=slots, max_len=max_len, vocab_size=vocab_size, eos_token_ids=())
    await engine.open()
    return engine, core, staged
