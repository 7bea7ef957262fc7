"""Importance ratios between the weights being trained and the weights that sampled, and how much data they leave.

Shapes: N = sampled tokens, S = sequences.
"""

import math

import torch
from torch import Tensor

# exp(20) is far above any sensible ceiling of the ratio; the clamp keeps the ratio finite in float32.
MAX_LOG_RATIO = 20.0


def ess(log_weights_N: Tensor) -> float:
    """Effective sample size over sample size, (sum w)^2 / (n * sum w^2), of weights given by their logarithms.

    1 when all weights are equal, 1/n when one outweighs all others; 1 for no weights at all. Computed from
    log-sum-exp in float64, so that products of ratios over long sequences can neither overflow nor vanish.
    """
    if log_weights_N.numel() == 0:
        return 1.0
    log_weights_N = log_weights_N.detach().double()
    log_sum = torch.logsumexp(log_weights_N, 0).item()
    log_sum_of_squares = torch.logsumexp(2.0 * log_weights_N, 0).item()
    # Rounding may leave the quotient a hair above its bound. A nan stays a nan: min keeps its first argument.
    return min(math.exp(2.0 * log_sum - math.log(log_weights_N.numel()) - log_sum_of_squares), 1.0)


def sequence_log_ratios(log_ratios_N: Tensor, sequence_N: Tensor, num_sequences: int) -> Tensor:
    """[S] log of the ratio of each whole sequence: the sum over its tokens.

    Args:
        log_ratios_N: log ratio of each token, not clamped.
        sequence_N: int64, the sequence that each token belongs to.
        num_sequences: S.
    """
    sums_S = torch.zeros(num_sequences, dtype=torch.float64, device=log_ratios_N.device)
    return sums_S.index_add_(0, sequence_N, log_ratios_N.detach().double())
