"""Compare the kinds of attention over packed sequences on a GPU, part of `make bench-gpu`.

The figures are the time of a whole step of the learner, and the differences of log-probabilities to padded attention.
Rollouts have uneven lengths, as in training: with equal lengths padded attention would have no padding.
"""

import gc
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pipelinerl_core.batching.collate import PackBatcher, num_forward_tokens
from pipelinerl_core.bench.engine_load import random_model
from pipelinerl_core.bench.gpu_learner import ROUNDS, step_of, step_seconds
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.training.attention_choice import ATTENTION_NAMES, AttentionKind
from pipelinerl_core.training.learner import TorchLearner
from pipelinerl_core.training.model import prepare_model


def compare_attention(size: str, *, device: str, dtype: str, pack_tokens: int) -> list[dict[str, Any]]:
    """A row for each kind: medians over steps after two that warm up, or `problem` if the kind cannot be used."""
    config, rows = step_of(size, pack_tokens, uneven=True)
    num_tokens = sum(num_forward_tokens(row.rollout) for row in rows)
    found: list[dict[str, Any]] = []
    expected = None
    for kind in ATTENTION_NAMES:
        row: dict[str, Any] = {"size": size, "attention": kind}
        found.append(row)
        try:
            learner = _learner(size, kind, config, device=device, dtype=dtype)
        except ConfigError as error:
            row |= {"problem": str(error)}
            continue
        logprobs = np.concatenate(learner.logprobs_of([one.rollout for one in rows])).astype(np.float64)
        expected = logprobs if expected is None else expected  # padded is the first
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = statistics.median([step_seconds(learner, rows, device) for _ in range(2 + ROUNDS)][2:])
        row |= {
            "step_seconds": seconds,
            "tokens_per_second": num_tokens / seconds,
            "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
            "difference_mean": float(np.abs(logprobs - expected).mean()),
            "difference_max": float(np.abs(logprobs - expected).max()),
        }
        del learner
        gc.collect()
    return found


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The rows as lines of Markdown."""
    lines = [
        "| learner | attention | step, s | tokens/s | memory, GiB | log-probabilities off padded: mean | max |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        if "problem" in row:
            lines.append(f"| {row['size']} | {row['attention']} | - | - | - | - | {row['problem']} |")
            continue
        memory = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.1f}"
        lines.append(
            f"| {row['size']} | {row['attention']} | {row['step_seconds']:.3f} | {row['tokens_per_second']:,.0f} "
            f"| {memory} | {row['difference_mean']:.2g} | {row['difference_max']:.2g} |"
        )
    return lines


def _learner(size: str, kind: str, config: Any, *, device: str, dtype: str) -> TorchLearner:
    attention: AttentionKind = kind  # type: ignore[assignment]  # a key of ATTENTION_NAMES
    model = prepare_model(random_model(size, dtype=getattr(torch, dtype)).to(device), attention)
    return TorchLearner(model, config, batcher=PackBatcher(config.trainer.pack_tokens))
