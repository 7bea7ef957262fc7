"""PPO's clipped surrogate (arXiv:1707.06347), and the recipes that differ from it in configuration alone.

GRPO (arXiv:2402.03300), Dr. GRPO (arXiv:2503.20783) and DAPO (arXiv:2503.14476) are this function with advantages,
normalisation and bounds of their own: config/losses.py has them side by side.
"""

import torch

from pipelinerl_core.algo.losses.terms import LossSums, TrainedTokens
from pipelinerl_core.config.losses import DapoLoss, DrGrpoLoss, GrpoLoss, PpoLoss


def ppo(tokens: TrainedTokens, config: PpoLoss | GrpoLoss | DrGrpoLoss | DapoLoss) -> LossSums:
    """-min(ratio * advantage, clip(ratio, 1 - clip_low, 1 + clip_high) * advantage): no gradient where clipped."""
    ratio_M = tokens.log_ratio_M.exp()
    clipped_M = ratio_M.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    free_M, bounded_M = ratio_M * tokens.advantages_M, clipped_M * tokens.advantages_M
    return tokens.sums(-torch.minimum(free_M, bounded_M), bounded_M < free_M)
