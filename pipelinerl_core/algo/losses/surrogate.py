"""PPO's clipped surrogate (arXiv:1707.06347) with dual clip (arXiv:1912.09729), which the PPO family shares."""

import torch
from torch import Tensor

from pipelinerl_core.config.losses import ClippedLoss


def surrogate(ratio_M: Tensor, advantages_M: Tensor, bounds: ClippedLoss) -> tuple[Tensor, Tensor]:
    """min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A), and for A < 0 at least dual_clip * A (0: no bound).

    With A < 0 the minimum is r * A for every large r, so its gradient grows with r: one token that has become likely
    since it was sampled can outweigh all other tokens of a step.

    Returns also a mask, bool: the value is a bound, without a gradient.
    """
    clipped_M = ratio_M.clamp(1.0 - bounds.clip_low, 1.0 + bounds.clip_high)
    free_M, bounded_M = ratio_M * advantages_M, clipped_M * advantages_M
    values_M, is_clipped_M = torch.minimum(free_M, bounded_M), bounded_M < free_M
    if not bounds.dual_clip:
        return values_M, is_clipped_M
    is_far_M = (advantages_M < 0) & (ratio_M > bounds.dual_clip)
    return torch.where(is_far_M, bounds.dual_clip * advantages_M, values_M), is_clipped_M | is_far_M
