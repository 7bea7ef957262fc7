"""Lag and refused tokens of the short and of the long rollouts of a step.

A long rollout is older when it is trained, so the lag rule and every bound on whole rollouts refuse long ones first.
The packs sum over classes of length, because no pack and no rank has all lengths of the step: four classes per
doubling of the number of sampled tokens.

Shapes: N = sampled tokens of a pack, M = those of them that are trained, S = its sequences, B = classes of length.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_PER_DOUBLING = 4
_NUM_CLASSES = 80
"""B: up to 2^20 tokens; longer rollouts are in the last class."""
_NUM_COLUMNS = 4
NUM_SUMS = _NUM_CLASSES * _NUM_COLUMNS


def length_sums(
    lags_N: Tensor, sequence_N: Tensor, trained_M: Tensor, clipped_M: Tensor, *, num_sequences: int
) -> Tensor:
    """[NUM_SUMS] for each class of length sequences, tokens, sum of lags, refused tokens; float64, on the device.

    Args:
        lags_N: int64, steps from the weights that sampled a token to those being trained.
        sequence_N: int64, the sequence of each token. No sequence is in two packs.
        trained_M: int64, places of the tokens that the lag rule leaves; the others are refused.
        clipped_M: bool, trained tokens whose ratio the loss clips, truncates or refuses.
        num_sequences: S.
    """
    ones_N = torch.ones_like(lags_N, dtype=torch.float64)
    refused_N = ones_N.index_copy(0, trained_M, clipped_M.double())
    sums_S = ones_N.new_zeros(num_sequences, _NUM_COLUMNS - 1).index_add(
        0, sequence_N, torch.stack([ones_N, lags_N.double(), refused_N], dim=1)
    )
    lengths_S = sums_S[:, 0]
    class_S = (_PER_DOUBLING * lengths_S.clamp(min=1.0).log2()).long().clamp(max=_NUM_CLASSES - 1)
    columns = torch.cat([(lengths_S > 0).double()[:, None], sums_S], dim=1)
    return columns.new_zeros(_NUM_CLASSES, _NUM_COLUMNS).index_add(0, class_S, columns).flatten()


def length_metrics(sums: Sequence[float]) -> dict[str, float]:
    """Mean lag and refused share of the shorter and of the longer half of the rollouts, from sums over all packs and
    ranks. All rollouts of a length class are in the same half. Empty if all rollouts are in one class."""
    classes = [sums[start : start + _NUM_COLUMNS] for start in range(0, NUM_SUMS, _NUM_COLUMNS)]
    halves = {"short": [0.0] * _NUM_COLUMNS, "long": [0.0] * _NUM_COLUMNS}
    total, before = sum(length_class[0] for length_class in classes), 0.0
    for length_class in classes:
        half = "short" if before + length_class[0] / 2 < total / 2 else "long"
        halves[half] = [left + right for left, right in zip(halves[half], length_class, strict=True)]
        before += length_class[0]
    if not all(columns[0] for columns in halves.values()):
        return {}
    metrics: dict[str, float] = {}
    for half, (_, num_tokens, lags, refused) in halves.items():
        metrics |= {f"lag/{half}_mean": lags / num_tokens, f"train/{half}_refused_fraction": refused / num_tokens}
    return metrics
