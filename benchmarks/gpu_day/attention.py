"""The learner's step with each kind of attention, and its log-probabilities beside those of padded attention.

Run: python -m benchmarks.gpu_day.attention --dtype bfloat16 [--size 0.5b] [--tokens 4096]

Rollouts have uneven lengths, as in training: with equal lengths padded attention would have no padding.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.engine_load import random_model
from benchmarks.gpu_day.part import device_name, emit
from benchmarks.gpu_day.steps import step_of, step_seconds
from benchmarks.sizes import SIZES
from pipelinerl_core.batching.collate import PackBatcher, num_forward_tokens
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.training.attention_choice import ATTENTION_NAMES, AttentionKind
from pipelinerl_core.training.learner import TorchLearner
from pipelinerl_core.training.model import prepare_model

ROUNDS = 5
KINDS: tuple[AttentionKind, ...] = ("padded", "varlen", "flex")
MEAN = "log-probabilities off padded: mean"
MEAN_OFF = {"float32": 1e-3, "bfloat16": 3e-2}
"""Largest mean difference of log-probabilities between a kind of attention and padded attention."""


def main() -> int:
    """One row per kind; the exit code is 1 if a difference is too large."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtype", choices=[*MEAN_OFF], required=True)
    parser.add_argument("--size", choices=[*SIZES], default="0.5b")
    parser.add_argument("--tokens", type=int, default=4096, help="of a pack")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for kind in KINDS:
        rows.append(
            measure(options.size, kind, device=device_name(), dtype=options.dtype, pack_tokens=options.tokens)
        )
        code = emit(rows, problems=problems_of(rows, MEAN_OFF[options.dtype]))
    return code


def measure(size: str, kind: AttentionKind, *, device: str, dtype: str, pack_tokens: int) -> dict[str, Any]:
    """The row of a kind: medians over steps after two that warm up."""
    config, rows = step_of(size, pack_tokens, uneven=True)
    rollouts = [row.rollout for row in rows]
    model = random_model(size, dtype=getattr(torch, dtype)).to(device)
    figures = ("step, s", "tokens/s", "memory, GiB", MEAN, "max")
    row = {"model": size, "attention": kind, "tokens of a pack": pack_tokens, **dict.fromkeys(figures, "-")}
    try:
        prepare_model(model, kind)
    except ConfigError as error:
        return {**row, "result": f"not run: {error}"}
    learner = TorchLearner(model, config, batcher=PackBatcher(pack_tokens))
    model.set_attn_implementation(ATTENTION_NAMES["padded"])
    expected = np.concatenate(learner.logprobs_of(rollouts)).astype(np.float64)
    model.set_attn_implementation(ATTENTION_NAMES[kind])
    differences = np.abs(np.concatenate(learner.logprobs_of(rollouts)) - expected)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = statistics.median([step_seconds(learner, rows, device) for _ in range(2 + ROUNDS)][2:])
    return {
        **row,
        "step, s": seconds,
        "tokens/s": sum(num_forward_tokens(rollout) for rollout in rollouts) / seconds,
        "memory, GiB": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else "-",
        MEAN: float(differences.mean()),
        "max": float(differences.max()),
        "result": "measured",
    }


def problems_of(rows: Sequence[dict[str, Any]], limit: float) -> list[str]:
    """The measured kinds whose mean difference is above the limit, or not a number."""
    return [
        f"attention {row['attention']}: {row[MEAN]:.2g} off padded attention"
        for row in rows
        if row["result"] == "measured" and not row[MEAN] <= limit
    ]


if __name__ == "__main__":
    sys.exit(main())
