"""Compare the kinds of attention over packed sequences on a GPU, part of `make bench-gpu`.

The figures are the time of a whole step of the learner, and the differences of log-probabilities to padded attention.
Rollouts have uneven lengths, as in training: with equal lengths padded attention would have no padding.
"""

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks import report
from benchmarks.engine_load import random_model
from benchmarks.gpu_learner import ROUNDS, memory_of, step_of, step_seconds
from pipelinerl_core.batching.collate import PackBatcher, num_forward_tokens
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.training.attention_choice import ATTENTION_NAMES, AttentionKind
from pipelinerl_core.training.learner import TorchLearner
from pipelinerl_core.training.model import prepare_model


def measure_attention(size: str, kind: AttentionKind, *, device: str, dtype: str, pack_tokens: int) -> dict[str, Any]:
    """The row of a kind: medians over steps after two that warm up. Raises NotMeasured if the kind cannot be used."""
    config, rows = step_of(size, pack_tokens, uneven=True)
    rollouts = [row.rollout for row in rows]
    model = random_model(size, dtype=getattr(torch, dtype)).to(device)
    try:
        prepare_model(model, kind)
    except ConfigError as error:
        raise report.NotMeasured(str(error)) from error
    learner = TorchLearner(model, config, batcher=PackBatcher(pack_tokens))
    model.set_attn_implementation(ATTENTION_NAMES["padded"])
    expected = np.concatenate(learner.logprobs_of(rollouts)).astype(np.float64)
    model.set_attn_implementation(ATTENTION_NAMES[kind])
    differences = np.abs(np.concatenate(learner.logprobs_of(rollouts)) - expected)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = statistics.median([step_seconds(learner, rows, device) for _ in range(2 + ROUNDS)][2:])
    return {
        "size": size,
        "attention": kind,
        "pack_tokens": pack_tokens,
        "step_seconds": seconds,
        "tokens_per_second": sum(num_forward_tokens(rollout) for rollout in rollouts) / seconds,
        "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
        "difference_mean": float(differences.mean()),
        "difference_max": float(differences.max()),
    }


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The rows as lines of Markdown."""
    columns = {
        "learner": "{size}", "attention": "{attention}", "tokens of a pack": "{pack_tokens:,}",
        "step, s": "{step_seconds:.3f}", "tokens/s": "{tokens_per_second:,.0f}", "memory, GiB": "{memory}",
        "log-probabilities off padded: mean": "{difference_mean:.2g}", "max": "{difference_max:.2g}",
    }  # fmt: skip
    return report.formatted(columns, [row | {"memory": memory_of(row)} for row in rows], num_text_columns=2)
