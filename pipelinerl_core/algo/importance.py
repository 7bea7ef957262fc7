"""Importance ratios between the weights being trained and the weights that sampled, and how much data they leave.

Shapes: N = sampled tokens, S = sequences.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# exp(20) is far above any sensible ceiling of the ratio; the clamp keeps the ratio finite in float32.
MAX_LOG_RATIO = 20.0


class EssTerms(NamedTuple):
    """What a part of the weights contributes to their effective sample size, in float64."""

    log_sum: float
    """log sum w; -inf for no weights."""
    log_sum_of_squares: float
    """log sum w^2."""
    num: float
    """n"""


def ess_terms(log_weights: Sequence[Tensor]) -> Tensor:
    """[3] the fields of EssTerms of the weights in all of these tensors together, float64, on their device."""
    if not any(tensor.numel() for tensor in log_weights):
        return torch.tensor([-math.inf, -math.inf, 0.0], dtype=torch.float64)
    log_weights_N = torch.cat([tensor.detach() for tensor in log_weights]).double()
    num = log_weights_N.new_full((), log_weights_N.numel())
    return torch.stack([torch.logsumexp(log_weights_N, 0), torch.logsumexp(2.0 * log_weights_N, 0), num])


def total_ess(parts: Sequence[EssTerms]) -> float:
    """`ess` of the weights of all parts, each of which may be on another rank."""
    num = sum(part.num for part in parts)
    if num == 0:
        return 1.0
    log_sum, log_sum_of_squares, _ = torch.tensor(parts, dtype=torch.float64).logsumexp(0).tolist()
    # Rounding may leave the quotient slightly above 1. A nan stays a nan, because min keeps its first argument.
    return min(math.exp(2.0 * log_sum - math.log(num) - log_sum_of_squares), 1.0)


def sequence_log_ratios(log_ratios_N: Tensor, sequence_N: Tensor, num_sequences: int) -> Tensor:
    """[S] log of the ratio of each whole sequence: the sum over its tokens.

    Args:
        log_ratios_N: log ratio of each token, not clamped.
        sequence_N: int64, the sequence that each token belongs to.
        num_sequences: S.
    """
    sums_S = torch.zeros(num_sequences, dtype=torch.float64, device=log_ratios_N.device)
    return sums_S.index_add_(0, sequence_N, log_ratios_N.detach().double())
