"""Tokens per second, pauses and parity of an engine.

Run: python -m benchmarks.gpu_day.engine embedded --dtype bfloat16 [--size 0.5b] [--slots 64 256] [--max-tokens 64]

The models have random weights. Parity compares the engine's log-probabilities with the trainer's forward pass. Limits
of the device stand beside the figures: a copy of all weights within the device beside the pause, and one reading of
all weights at the bandwidth of that copy beside the decode step.
"""

import argparse
import asyncio
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engine_load import (
    complete,
    complete_endlessly,
    count_tokens,
    random_model,
    random_prompts,
    random_rollout,
    start_vllm,
    update_of,
)
from benchmarks.gpu_day.part import device_name, emit
from benchmarks.gpu_day.steps import synchronized
from benchmarks.sizes import SIZES
from pipelinerl_core.algo.logprobs import token_logprobs
from pipelinerl_core.algo.parity import ParityReport, logprob_parity
from pipelinerl_core.batching.collate import PackBatcher
from pipelinerl_core.engine.embedded.engine import EmbeddedEngine
from pipelinerl_core.interfaces import Engine, WeightUpdate
from pipelinerl_core.training.model import head_weight, hidden_states, prepare_model
from pipelinerl_core.types import Completion, Int32Array

PROMPT_TOKENS = 64
ROUNDS = 3
SWAPS = 10
SWAP_REST_SECONDS = 0.2
PARITY_COMPLETIONS = 32
KV_BYTES = 4 * 2**30


def main() -> int:
    """One row per number of slots; the exit code is 1 if the engine does not agree with the trainer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("engine", choices=("embedded", "vllm"))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), required=True)
    parser.add_argument("--size", choices=[*SIZES], default="0.5b")
    parser.add_argument("--slots", type=int, nargs="+", default=[64])
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()
    if options.engine == "vllm" and find_spec("vllm") is None:
        return emit([{"engine": "vllm", "result": "not run: the package vllm is not installed"}])
    rows = [asyncio.run(_measure(slots, options, device_name())) for slots in options.slots]
    return emit(rows, problems=[f"parity: mean {row['parity mean']:.2g}" for row in rows if not row["parity holds"]])


async def _measure(slots: int, options: argparse.Namespace, device: str) -> dict[str, Any]:
    model = random_model(options.size, dtype=getattr(torch, options.dtype))
    update = update_of({name: p.detach().clone() for name, p in model.named_parameters()}, 0)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    copy_ms = 1e3 * copy_seconds(update.tensors.values(), device)
    prompts = random_prompts(2 * slots, PROMPT_TOKENS, SIZES[options.size]["vocab_size"])
    with tempfile.TemporaryDirectory() as directory:
        engine = await _start(slots, model, Path(directory), options, device)
        try:
            speed = await _speed(engine, prompts, slots, options.max_tokens)
            pause_ms = await _pause_ms(engine, prompts, update, options.max_tokens)
            sample = prompts[:PARITY_COMPLETIONS]
            completions = await complete(engine, sample, max_tokens=options.max_tokens, name="parity.")
        finally:
            await engine.close()
    del engine, model
    gc.collect()
    torch.cuda.empty_cache()
    parity = _parity(sample, completions, options, device)
    return {
        "engine": options.engine,
        "parameters, M": num_parameters / 1e6,
        "slots": slots,
        "tokens": f"{PROMPT_TOKENS} + {options.max_tokens}",
        **speed,
        "weights read once, ms": copy_ms / 2,
        "pause, ms": pause_ms,
        "bare copy, ms": copy_ms,
        "pause / copy": pause_ms / copy_ms,
        "parity mean": parity.mean,
        "parity max": parity.max,
        "parity holds": parity.ok,
    }


async def _start(slots: int, model: Any, directory: Path, options: argparse.Namespace, device: str) -> Engine:
    max_len = PROMPT_TOKENS + options.max_tokens
    if options.engine == "embedded":
        return EmbeddedEngine(model.to(device), slots=slots, max_len=max_len, eos_token_ids=())
    model.save_pretrained(directory)
    started = await start_vllm(
        directory,
        slots=slots,
        max_len=max_len,
        vocab_size=model.config.vocab_size,
        dtype=options.dtype,
        kv_bytes=KV_BYTES if device == "cuda" else 2**28,
        is_eager=device == "cpu",
    )
    engine: Engine = started[0]
    return engine


async def _speed(engine: Engine, prompts: Int32Array, slots: int, max_tokens: int) -> dict[str, float]:
    """Best of ROUNDS rounds with two requests per slot, after a round that warms up."""
    best = 0.0
    for round_ in range(1 + ROUNDS):
        start = time.perf_counter()
        num_tokens = await count_tokens(engine, prompts, max_tokens=max_tokens, name=f"{round_}.")
        best = max(best, num_tokens / (time.perf_counter() - start) if round_ else 0.0)
    return {"tokens/s": best, "step, ms": 1e3 * slots / best}


async def _pause_ms(engine: Engine, prompts: Int32Array, update: WeightUpdate, max_tokens: int) -> float:
    """Median pause of swaps during generation."""
    pauses: list[float] = []
    load = asyncio.create_task(complete_endlessly(engine, prompts, max_tokens=max_tokens))
    try:
        for version in range(1, SWAPS + 1):
            await asyncio.sleep(SWAP_REST_SECONDS)
            swapped = await engine.swap(update_of(update.tensors, version))
            pauses.append(swapped.pause_seconds)
    finally:
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
    return 1e3 * statistics.median(pauses)


@torch.no_grad()
def _parity(
    prompts: Int32Array, completions: list[Completion], options: argparse.Namespace, device: str
) -> ParityReport:
    """Log-probabilities of the engine against the trainer's packed forward pass on the same device."""
    model = prepare_model(random_model(options.size, dtype=getattr(torch, options.dtype)).to(device))
    rollouts = [
        random_rollout(prompt, completion.token_ids, completion.rollout_logprobs)
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    engines: list[np.ndarray[Any, Any]] = []
    trainers: list[np.ndarray[Any, Any]] = []
    for pack in PackBatcher(4096).rollouts(rollouts):
        batch = pack.to(torch.device(device))
        logprobs_N, _ = token_logprobs(
            hidden_states(model, batch), head_weight(model), batch.target_ids_N, temperature=1.0
        )
        trainers.append(logprobs_N.cpu().numpy())
        engines += [completions[row].rollout_logprobs for row in pack.row_S.tolist()]
    return logprob_parity(np.concatenate(engines), np.concatenate(trainers), options.dtype)


def copy_seconds(weights: Iterable[torch.Tensor], device: str) -> float:
    """Best of ten copies of all weights within the device."""
    sources = [tensor.to(device) for tensor in weights]
    targets = [torch.empty_like(tensor) for tensor in sources]
    best = float("inf")
    for _ in range(10):
        with synchronized(device):
            start = time.perf_counter()
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source)
        best = min(best, time.perf_counter() - start)
    return best


if __name__ == "__main__":
    sys.exit(main())
