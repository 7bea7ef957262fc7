"""Tokens per second, pauses and parity of an engine on a GPU, part of `make bench-gpu`.

Parity compares the engine's log-probabilities with the trainer's forward pass. Limits of the device stand beside the
figures: a copy of all weights within the device beside the pause, and one reading of all weights at the bandwidth of
that copy beside the decode step.
"""

import argparse
import asyncio
import gc
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import report
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
from benchmarks.sizes import SIZES
from pipelinerl_core.algo.logprobs import token_logprobs
from pipelinerl_core.algo.parity import ParityReport, logprob_parity
from pipelinerl_core.batching.collate import PackBatcher
from pipelinerl_core.engine.embedded.engine import EmbeddedEngine
from pipelinerl_core.errors import DeadlineExceeded
from pipelinerl_core.interfaces import Engine, WeightUpdate
from pipelinerl_core.training.model import head_weight, hidden_states, prepare_model
from pipelinerl_core.types import Completion, Int32Array

PROMPT_TOKENS = 64
ROUNDS = 3
SWAPS = 10
SWAP_REST_SECONDS = 0.2
PARITY_COMPLETIONS = 32
DEADLINE_SECONDS = 540.0
KV_BYTES = 4 * 2**30


def measure_engine(kind: str, slots: int, options: argparse.Namespace) -> dict[str, Any]:
    """The row of an engine with a number of slots. Raises DeadlineExceeded."""
    try:
        return asyncio.run(asyncio.wait_for(_measure(kind, slots, options), DEADLINE_SECONDS))
    except TimeoutError:
        raise DeadlineExceeded(f"the engine was not measured within {DEADLINE_SECONDS:g} s") from None


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The rows as lines of Markdown."""
    row = rows[0]
    title = (
        f"Engines: random Qwen2 of {row['num_parameters'] / 1e6:,.1f} M parameters ({row['num_bytes'] / 2**20:,.0f} "
        f"MiB), {PROMPT_TOKENS} + {row['max_tokens']} tokens."
    )
    columns = {
        "engine": "{engine}", "slots": "{slots}", "tokens/s": "{tokens_per_second:,.0f}",
        "step, ms": "{step_ms:.2f}", "weights read once, ms": "{weights_read_ms:.2f}", "pause, ms": "{pause_ms:.2f}",
        "bare copy, ms": "{copy_ms:.2f}", "pause / copy": "{pause_per_copy:.1f}",
        "parity mean": "{parity_mean:.2g}", "max": "{parity_max:.2g}", "within bounds": "{verdict}",
    }  # fmt: skip
    cells = [row | {"verdict": "yes" if row["parity_ok"] else "NO"} for row in rows]
    return [title, "", *report.formatted(columns, cells)]


async def _measure(kind: str, slots: int, options: argparse.Namespace) -> dict[str, Any]:
    model = random_model(options.size, dtype=getattr(torch, options.dtype))
    update = update_of({name: p.detach().clone() for name, p in model.named_parameters()}, 0)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    copy_ms = 1e3 * copy_seconds(update.tensors.values(), options.device)
    prompts = random_prompts(2 * slots, PROMPT_TOKENS, SIZES[options.size]["vocab_size"])
    with tempfile.TemporaryDirectory() as directory:
        engine = await _start(kind, slots, model, Path(directory), options)
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
    parity = _parity(sample, completions, options)
    return {
        "engine": kind,
        "slots": slots,
        "max_tokens": options.max_tokens,
        "num_parameters": num_parameters,
        "num_bytes": update.num_bytes,
        **speed,
        "pause_ms": pause_ms,
        "copy_ms": copy_ms,
        "weights_read_ms": copy_ms / 2,
        "pause_per_copy": pause_ms / copy_ms,
        "parity_mean": parity.mean,
        "parity_max": parity.max,
        "parity_ok": parity.ok,
    }


async def _start(kind: str, slots: int, model: Any, directory: Path, options: argparse.Namespace) -> Engine:
    max_len = PROMPT_TOKENS + options.max_tokens
    if kind == "embedded":
        return EmbeddedEngine(model.to(options.device), slots=slots, max_len=max_len, eos_token_ids=())
    model.save_pretrained(directory)
    started = await start_vllm(
        directory,
        slots=slots,
        max_len=max_len,
        vocab_size=model.config.vocab_size,
        dtype=options.dtype,
        kv_bytes=KV_BYTES if options.device == "cuda" else 2**28,
        is_eager=options.device == "cpu",
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
    return {"tokens_per_second": best, "step_ms": 1e3 * slots / best}


async def _pause_ms(engine: Engine, prompts: Int32Array, update: WeightUpdate, max_tokens: int) -> float:
    """Median pause of swaps during generation."""
    pauses: list[float] = []
    load = asyncio.create_task(complete_endlessly(engine, prompts, max_tokens=max_tokens))
    try:
        for version in range(1, SWAPS + 1):
            await asyncio.sleep(SWAP_REST_SECONDS)
            report = await engine.swap(update_of(update.tensors, version))
            pauses.append(report.pause_seconds)
    finally:
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
    return 1e3 * statistics.median(pauses)


@torch.no_grad()
def _parity(prompts: Int32Array, completions: list[Completion], options: argparse.Namespace) -> ParityReport:
    """Log-probabilities of the engine against the trainer's packed forward pass on the same device."""
    model = prepare_model(random_model(options.size, dtype=getattr(torch, options.dtype)).to(options.device))
    rollouts = [
        random_rollout(prompt, completion.token_ids, completion.rollout_logprobs)
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    engines: list[np.ndarray[Any, Any]] = []
    trainers: list[np.ndarray[Any, Any]] = []
    for pack in PackBatcher(4096).rollouts(rollouts):
        batch = pack.to(torch.device(options.device))
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


@contextmanager
def synchronized(device: str) -> Iterator[None]:
    """Waits before and after the context until the device has finished all work."""
    if device == "cuda":
        torch.cuda.synchronize()
    yield
    if device == "cuda":
        torch.cuda.synchronize()
