"""PPO's clipped surrogate (arXiv:1707.06347), and the recipes that differ from it in configuration alone.

GRPO (arXiv:2402.03300), Dr. GRPO (arXiv:2503.20783) and DAPO (arXiv:2503.14476) are this function with advantages,
normalisation and bounds of their own: config/losses.py has them side by side.
"""

from pipelinerl_core.algo.losses.surrogate import surrogate
from pipelinerl_core.algo.losses.terms import LossSums, TrainedTokens
from pipelinerl_core.config.losses import ClippedLoss


def ppo(tokens: TrainedTokens, config: ClippedLoss) -> LossSums:
    """-surrogate(ratio, advantage)."""
    values_M, is_clipped_M = surrogate(tokens.log_ratio_M.exp(), tokens.advantages_M, config)
    return tokens.sums(-values_M, is_clipped_M)
