"""Steps of the learner on one device: speed, utilisation by part, and memory, beside the predictions of `doctor`.

Run: python -m benchmarks.gpu_day.learner --size 0.5b [--rank 16] [--tokens 8192] [--plain]

The step is that of a run, with packing, loss, clipping and AdamW; forward is the scoring of the same rollouts. Flops
are 2 per weight and token forward, and 4 backward (2 with adapters), plus those of attention. The prediction of the
time is the roofline of `simulate`, without attention; that of the memory is the sum of `doctor`. --plain also
measures the step without fused attention, and with logits of float32 operands.
"""

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.gpu_day.models import write_random
from benchmarks.gpu_day.part import device_name, emit
from benchmarks.gpu_day.steps import GROUP_SIZE, model_flops, peak_tflops, step_of, step_seconds
from benchmarks.sizes import SIZES
from pipelinerl_core.algo import products
from pipelinerl_core.batching.collate import num_forward_tokens
from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.planning.roofline import roofline
from pipelinerl_core.roles.trainer.learners import build_alone
from pipelinerl_core.supervision.fit import fit_of
from pipelinerl_core.types import TrainingRow

ROUNDS = 3
FUSED = "all"


def main() -> int:
    """One row per variant."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=[*SIZES], required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=8192, help="of a pack")
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args()
    device = device_name()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="gpu-day-") as directory:
        write_random(options.size, directory, dtype="bfloat16", device=device)
        for variant in (FUSED, "padded attention", "float32 logits") if options.plain else (FUSED,):
            config, training_rows = step_config(directory, options, device, variant)
            rows.append(measure(options.size, config, training_rows, device, variant))
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
    return emit(rows)


def step_config(
    directory: str, options: argparse.Namespace, device: str, variant: str
) -> tuple[RunConfig, list[TrainingRow]]:
    """The configuration of a run of such steps, and the rows of a step."""
    shape, rows = step_of(options.size, options.tokens)
    config = load_config("quickstart", [
        f"model.path={directory}", "model.dtype=bfloat16", f"model.device={device}",
        f"learner.lora_rank={options.rank}", f"trainer.pack_tokens={options.tokens}",
        f"trainer.groups_per_step={shape.trainer.groups_per_step}", f"rollouts.group_size={GROUP_SIZE}",
        f"rollouts.max_tokens={shape.rollouts.max_tokens}", f"engine.concurrency={GROUP_SIZE}",
        *(["learner.attention=padded"] if variant == "padded attention" else []),
    ])  # fmt: skip
    return config, rows


def measure(size: str, config: RunConfig, rows: Sequence[TrainingRow], device: str, variant: str) -> dict[str, Any]:
    """The row of a variant: medians over steps after two that warm up."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    allows_mixed = products.has_mixed_product
    if variant == "float32 logits":
        products.has_mixed_product = lambda device: False
    try:
        learner = build_alone(config)
        step = statistics.median([step_seconds(learner, rows, device) for _ in range(2 + ROUNDS)][2:])  # type: ignore[arg-type]
        started = time.perf_counter()
        learner.logprobs_of([row.rollout for row in rows])  # its result is on the CPU: nothing is left to wait for
        forward = time.perf_counter() - started
    finally:
        products.has_mixed_product = allows_mixed
    lengths = [num_forward_tokens(row.rollout) for row in rows]
    shape, fit = SIZES[size], fit_of(config)
    assert fit is not None
    flops = model_flops(fit.num_parameters, shape["num_hidden_layers"], shape["hidden_size"], lengths)
    step_flops = flops * (2 / 3 if config.learner.lora_rank else 1)
    peak = peak_tflops(torch.cuda.get_device_name()) if device == "cuda" else None
    gigabytes = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else None
    return {
        "model": size,
        "LoRA rank": config.learner.lora_rank,
        "kernels": variant,
        "tokens of a step": sum(lengths),
        "tokens/s": sum(lengths) / step,
        "step, s": step,
        "step predicted, s": predicted_seconds(config, sum(lengths)),
        "forward, s": forward,
        "MFU of the step": None if peak is None else step_flops / step / 1e12 / peak,
        "MFU of forward": None if peak is None else flops / 3 / forward / 1e12 / peak,
        "memory, GB": gigabytes,
        "memory predicted, GB": predicted_gigabytes(config),
    }


def predicted_seconds(config: RunConfig, num_tokens: int) -> float | None:
    """Seconds of a step by the roofline of this card; None for a card that the table lacks."""
    try:
        return roofline(config, num_tokens).speeds.train_seconds(num_tokens)
    except ConfigError:
        return None


def predicted_gigabytes(config: RunConfig) -> float:
    """Memory of the trainer by `doctor`, without the context of CUDA, which torch does not count."""
    fit = fit_of(config)
    assert fit is not None
    (trainer,) = [role for role in fit.roles if role.role == "trainer"]
    return sum(size for name, size in trainer.gpu.items() if name != "CUDA") / 1e9


if __name__ == "__main__":
    sys.exit(main())
