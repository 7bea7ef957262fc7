"""Model-flop utilisation of the learner on a GPU, part of `make bench-gpu`.

The model's flops are 6 per weight and token for forward and backward, plus for attention within each sequence of L
tokens 6 * layers * heads * head size * L^2 (causal: half of all pairs). Recomputed logits do not count. The time is
that of the whole step with packing, loss, clipping and AdamW.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks import report
from benchmarks.engine_load import random_model, random_rollout
from benchmarks.gpu_engine import synchronized
from benchmarks.learner_rounds import step_config
from benchmarks.sizes import SIZES
from pipelinerl_core.batching.assemble import assemble_rows
from pipelinerl_core.batching.collate import PackBatcher, num_forward_tokens
from pipelinerl_core.config.run import RunConfig
from pipelinerl_core.training.learner import TorchLearner
from pipelinerl_core.training.model import ModelDimensions, model_dimensions, prepare_model
from pipelinerl_core.types import TrainingRow

PEAK_TFLOPS = {"H200": 989.0, "H100 NVL": 835.0, "H100 PCIe": 756.0, "H100": 989.0, "A100": 312.0}
"""Dense bfloat16, TFLOP/s, from NVIDIA's data sheets; the first name contained in the device's name applies."""

PROMPT_TOKENS = 64
SEQUENCE_TOKENS = 1024
PACKS_PER_STEP = 4
GROUP_SIZE = 8
ROUNDS = 5


def measure_learner(size: str, *, device: str, dtype: str, pack_tokens: int) -> dict[str, Any]:
    """Tokens per second and utilisation of a model of random weights: medians over steps after two that warm up."""
    model = prepare_model(random_model(size, dtype=getattr(torch, dtype)).to(device))
    dimensions = model_dimensions(model)
    config, rows = step_of(size, pack_tokens)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    learner = TorchLearner(model, config, batcher=PackBatcher(pack_tokens))
    seconds = statistics.median([step_seconds(learner, rows, device) for _ in range(2 + ROUNDS)][2:])
    lengths = [num_forward_tokens(row.rollout) for row in rows]
    tflops = model_flops(dimensions, lengths) / seconds / 1e12
    peak = peak_tflops(torch.cuda.get_device_name()) if device == "cuda" else None
    peak_bytes = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return {
        "size": size,
        "num_parameters": dimensions.num_parameters,
        "num_tokens": sum(lengths),
        "pack_tokens": pack_tokens,
        "step_seconds": seconds,
        "tokens_per_second": sum(lengths) / seconds,
        "model_tflops": tflops,
        "peak_tflops": peak,
        "utilisation": None if peak is None else tflops / peak,
        "peak_bytes": peak_bytes,
    }


def model_flops(dimensions: ModelDimensions, lengths: Sequence[int]) -> float:
    """Flops of a forward and backward pass over sequences of these lengths; the head is tied to the embedding."""
    width = dimensions.num_heads * dimensions.head_dim
    attention = 6.0 * dimensions.num_layers * width * sum(length**2 for length in lengths)
    return 6.0 * dimensions.num_parameters * sum(lengths) + attention


def peak_tflops(device_name: str) -> float | None:
    """Peak of a device by name; None if PEAK_TFLOPS lacks the device."""
    return next((peak for name, peak in PEAK_TFLOPS.items() if name in device_name), None)


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The rows as lines of Markdown."""
    columns = {
        "learner": "{size}", "parameters": "{millions:,.1f} M", "tokens of a pack": "{pack_tokens:,}",
        "of a step": "{num_tokens:,}", "step, s": "{step_seconds:.3f}", "tokens/s": "{tokens_per_second:,.0f}",
        "model TFLOP/s": "{model_tflops:.3g}", "of peak": "{share}", "memory, GiB": "{memory}",
    }  # fmt: skip
    cells = [
        row | {"millions": row["num_parameters"] / 1e6, "share": _share_of_peak(row), "memory": memory_of(row)}
        for row in rows
    ]
    return report.formatted(columns, cells)


def _share_of_peak(row: dict[str, Any]) -> str:
    return "-" if row["utilisation"] is None else f"{row['utilisation']:.1%} of {row['peak_tflops']:,.0f}"


def memory_of(row: dict[str, Any]) -> str:
    """The peak of memory of a row in GiB."""
    return "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.1f}"


def step_of(size: str, pack_tokens: int, *, uneven: bool = False) -> tuple[RunConfig, list[TrainingRow]]:
    """Rollouts that fill the packs of a step, and the configuration of a run of such steps.

    All rollouts have the greatest length that fits; `uneven`: lengths are random, from an eighth of that length on.
    """
    shape = SIZES[size]
    length = min(SEQUENCE_TOKENS, pack_tokens // 2, shape["max_position_embeddings"])
    prompt_tokens = min(PROMPT_TOKENS, length // 2)
    num_groups = max(1, PACKS_PER_STEP * pack_tokens // length // GROUP_SIZE)
    rng = np.random.default_rng(0)

    def rollout(group: int, index: int) -> Any:
        # One token more than the forward pass has: the last token is only predicted.
        tokens = int(rng.integers(max(prompt_tokens, length // 8), length + 1)) if uneven else length
        ids = rng.integers(0, shape["vocab_size"], tokens + 1, dtype=np.int32)
        prompt, completion = ids[:prompt_tokens], ids[prompt_tokens:]
        logprob = -np.log(shape["vocab_size"])
        return random_rollout(prompt, completion, logprob, group=group, index=index, size=GROUP_SIZE)

    config = step_config(num_groups, pack_tokens, GROUP_SIZE, length)
    groups = [[rollout(group, index) for index in range(GROUP_SIZE)] for group in range(num_groups)]
    return config, assemble_rows(1, groups, config).rows


def step_seconds(learner: TorchLearner, rows: Sequence[TrainingRow], device: str) -> float:
    """Seconds of one step until the device has finished."""
    with synchronized(device):
        started = time.perf_counter()
        learner.step(rows)
    return time.perf_counter() - started
