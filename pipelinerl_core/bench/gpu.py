"""Measure engines and the learner on a GPU in bfloat16: tokens per second, pauses, parity, model-flop utilisation.

Run: `make bench-gpu`, or `python -m pipelinerl_core.bench.gpu`, which needs torch and transformers. The learner is
measured if pydantic is installed, vLLM if vLLM is installed. Parity compares the engine's log-probabilities with the
trainer's forward pass. Limits of the device stand beside the figures: a copy of all weights within the device beside
the pause, one reading of all weights at the bandwidth of that copy beside the decode step, and the peak FLOP/s beside
the learner.
"""

import argparse
import asyncio
import gc
import importlib.util
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipelinerl_core.algo.logprobs import token_logprobs
from pipelinerl_core.algo.parity import ParityReport, logprob_parity
from pipelinerl_core.batching.collate import PackBatcher
from pipelinerl_core.bench import report
from pipelinerl_core.bench.engine_load import (
    SIZES,
    complete,
    complete_endlessly,
    count_tokens,
    random_model,
    random_prompts,
    random_rollout,
    update_of,
)
from pipelinerl_core.engine.embedded.engine import EmbeddedEngine
from pipelinerl_core.errors import PipelineRLError
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table, or one JSON document with --json; --out writes the table to a file too."""
    options = _parse(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("bench gpu: torch finds no GPU; set --device cpu to try the benchmark without one")
    torch.manual_seed(0)
    try:
        result = asyncio.run(asyncio.wait_for(measure(options), DEADLINE_SECONDS))
        result |= _measure_learner(options)
    except PipelineRLError as error:
        sys.exit(f"bench gpu: {error}")
    if options.out is not None:
        options.out.write_text(table(result), encoding="utf-8")
    report.write(result, table, as_json=options.json)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="pipelinerl bench gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--size", choices=[*SIZES], default="0.5b", help="shape of the random model")
    parser.add_argument("--slots", type=int, nargs="+", default=[64, 256], help="concurrent sequences of an engine")
    parser.add_argument("--max-tokens", type=int, default=256, help="length of a completion")
    parser.add_argument("--engines", nargs="+", choices=["embedded", "vllm"], help="default: all that are installed")
    parser.add_argument(
        "--learner-sizes",
        nargs="*",
        choices=[*SIZES],
        default=["0.5b", "1.5b"],
        help="shapes of the models of the learner",
    )
    parser.add_argument("--learner-tokens", type=int, default=16384, help="tokens of one forward pass of the learner")
    parser.add_argument("--out", type=Path, help="write the table to this file")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    return parser.parse_args(arguments)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Every engine at every number of slots."""
    has_vllm = importlib.util.find_spec("vllm") is not None
    engines = options.engines or ["embedded", *(["vllm"] if has_vllm else [])]
    dtype: torch.dtype = getattr(torch, options.dtype)
    model = random_model(options.size, dtype=dtype)
    update = update_of({name: p.detach().clone() for name, p in model.named_parameters()}, 0)
    copy_seconds = _copy_seconds(update, options.device)
    rows: list[dict[str, Any]] = []
    for kind in engines:
        for slots in options.slots:
            rows.append(await _measure_engine(kind, slots, update, options))
            limit = {"copy_ms": 1e3 * copy_seconds, "weights_read_ms": 1e3 * copy_seconds / 2}
            rows[-1] |= {**limit, "pause_per_copy": rows[-1]["pause_ms"] / limit["copy_ms"]}
            gc.collect()
            _empty_cache()
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or "CPU",
        "torch": torch.__version__,
        "dtype": options.dtype,
        "size": options.size,
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "num_bytes": update.num_bytes,
        "prompt_tokens": PROMPT_TOKENS,
        "max_tokens": options.max_tokens,
        "rows": rows,
    }


def _measure_learner(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """A row per model, and a row per model and kind of attention; no rows without pydantic."""
    found: dict[str, list[dict[str, Any]]] = {"learner": [], "attention": []}
    if importlib.util.find_spec("pydantic") is None:
        return found
    from pipelinerl_core.bench.gpu_attention import compare_attention
    from pipelinerl_core.bench.gpu_learner import measure_learner

    how = {"device": options.device, "dtype": options.dtype, "pack_tokens": options.learner_tokens}
    for size in options.learner_sizes:
        found["learner"].append(measure_learner(size, **how))
        _empty_cache()
        found["attention"] += compare_attention(size, **how)
        _empty_cache()
    return found


def table(result: dict[str, Any]) -> str:
    """The measurement as Markdown."""
    lines = [
        f"`make bench-gpu`, {result['date']}: {result['device']}, torch {result['torch']}, {result['dtype']}, random "
        f"Qwen2 of {result['num_parameters'] / 1e6:,.1f} M parameters ({result['num_bytes'] / 2**20:,.0f} MiB), "
        f"{result['prompt_tokens']} + {result['max_tokens']} tokens.",
        "",
        "| engine | slots | tokens/s | step, ms | weights read once, ms | pause, ms | bare copy, ms | pause / copy "
        "| parity mean | max | within bounds |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    lines += [
        f"| {row['engine']} | {row['slots']} | {row['tokens_per_second']:,.0f} | {row['step_ms']:.2f} "
        f"| {row['weights_read_ms']:.2f} | {row['pause_ms']:.2f} | {row['copy_ms']:.2f} "
        f"| {row['pause_per_copy']:.1f} | {row['parity_mean']:.2g} | {row['parity_max']:.2g} "
        f"| {'yes' if row['parity_ok'] else 'NO'} |"
        for row in result["rows"]
    ]
    if result["learner"]:
        from pipelinerl_core.bench import gpu_attention, gpu_learner

        lines += ["", *gpu_learner.table(result["learner"])]
        lines += ["", *gpu_attention.table(result["attention"])]
    return "\n".join(lines) + "\n"


async def _measure_engine(kind: str, slots: int, update: WeightUpdate, options: argparse.Namespace) -> dict[str, Any]:
    vocab_size = SIZES[options.size]["vocab_size"]
    prompts = random_prompts(2 * slots, PROMPT_TOKENS, vocab_size)
    with tempfile.TemporaryDirectory() as directory:
        engine = await _start(kind, slots, Path(directory), options)
        try:
            speed = await _speed(engine, prompts, slots, options.max_tokens)
            pause_ms = await _pause_ms(engine, prompts, update, options.max_tokens)
            sample = prompts[:PARITY_COMPLETIONS]
            completions = await complete(engine, sample, max_tokens=options.max_tokens, name="parity.")
        finally:
            await engine.close()
    del engine
    gc.collect()
    _empty_cache()
    parity = _parity(sample, completions, options)
    return {
        "engine": kind,
        "slots": slots,
        **speed,
        "pause_ms": pause_ms,
        "parity_mean": parity.mean,
        "parity_max": parity.max,
        "parity_ok": parity.ok,
    }


async def _start(kind: str, slots: int, directory: Path, options: argparse.Namespace) -> Engine:
    model = random_model(options.size, dtype=getattr(torch, options.dtype))
    max_len = PROMPT_TOKENS + options.max_tokens
    if kind == "embedded":
        return EmbeddedEngine(model.to(options.device), slots=slots, max_len=max_len, eos_token_ids=())
    from pipelinerl_core.engine.vllm.core import CoreSettings, VLLMCore
    from pipelinerl_core.engine.vllm.engine import VLLMEngine
    from pipelinerl_core.engine.vllm.weights import StagedWeights

    model.save_pretrained(directory)
    settings = CoreSettings(
        model=str(directory),
        dtype=options.dtype,
        max_len=max_len,
        max_sequences=slots,
        seed=0,
        kv_bytes=KV_BYTES if options.device == "cuda" else 2**28,
        is_eager=options.device == "cpu",
    )
    core = VLLMCore(settings)
    await core.start()
    engine = VLLMEngine(
        core,
        StagedWeights(str(directory)),
        slots=slots,
        max_len=max_len,
        vocab_size=model.config.vocab_size,
        eos_token_ids=(),
    )
    await engine.open()
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
    for version in range(1, SWAPS + 1):
        await asyncio.sleep(SWAP_REST_SECONDS)
        report = await engine.swap(update_of(update.tensors, version))
        pauses.append(report.pause_seconds)
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


def _copy_seconds(update: WeightUpdate, device: str) -> float:
    """Best of ten copies of all weights within the device."""
    sources = [tensor.to(device) for tensor in update.tensors.values()]
    targets = [torch.empty_like(tensor) for tensor in sources]
    best = float("inf")
    for _ in range(10):
        with _synchronized(device):
            start = time.perf_counter()
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source)
        best = min(best, time.perf_counter() - start)
    return best


@contextmanager
def _synchronized(device: str) -> Iterator[None]:
    """Waits before and after the context until the device has finished all work."""
    if device == "cuda":
        torch.cuda.synchronize()
    yield
    if device == "cuda":
        torch.cuda.synchronize()


def _empty_cache() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
