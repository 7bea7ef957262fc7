"""Steps of the learner with random rollouts, their seconds, and the flops of the model.

The model's flops are 6 per weight and token for forward and backward, plus for attention within each sequence of L
tokens 6 * layers * heads * head size * L^2 (causal: half of all pairs). Recomputed logits do not count. The time is
that of the whole step with packing, loss, clipping and AdamW.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from benchmarks.engine_load import random_rollout
from benchmarks.learner_rounds import step_config
from benchmarks.sizes import SIZES
from pipelinerl_core.batching.assemble import assemble_rows
from pipelinerl_core.config.run import RunConfig
from pipelinerl_core.training.learner import TorchLearner
from pipelinerl_core.types import TrainingRow

PEAK_TFLOPS = {"H200": 989.0, "H100 NVL": 835.0, "H100 PCIe": 756.0, "H100": 989.0, "A100": 312.0}
"""Dense bfloat16, TFLOP/s, from NVIDIA's data sheets; the first name contained in the device's name applies."""

PROMPT_TOKENS = 64
SEQUENCE_TOKENS = 1024
PACKS_PER_STEP = 4
GROUP_SIZE = 8


def model_flops(num_parameters: int, num_layers: int, width: int, lengths: Sequence[int]) -> float:
    """Flops of a forward and backward pass over sequences of these lengths; the head is tied to the embedding.

    width: of attention, the size of all query heads together.
    """
    attention = 6.0 * num_layers * width * sum(length**2 for length in lengths)
    return 6.0 * num_parameters * sum(lengths) + attention


def peak_tflops(device_name: str) -> float | None:
    """Peak of a device by name; None if PEAK_TFLOPS lacks the device."""
    return next((peak for name, peak in PEAK_TFLOPS.items() if name in device_name), None)


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


@contextmanager
def synchronized(device: str) -> Iterator[None]:
    """Waits before and after the context until the device has finished all work."""
    if device == "cuda":
        torch.cuda.synchronize()
    yield
    if device == "cuda":
        torch.cuda.synchronize()
