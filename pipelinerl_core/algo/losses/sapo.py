"""SAPO: a smooth gate in place of clipping (arXiv:2511.20347)."""

import torch

from pipelinerl_core.algo.losses.terms import LossSums, TrainedTokens
from pipelinerl_core.config.losses import SapoLoss


def sapo(tokens: TrainedTokens, config: SapoLoss) -> LossSums:
    """-(4 / tau) * sigmoid(tau * (ratio - 1)) * advantage; tau by the sign of the advantage.

    On policy the gradient is that of REINFORCE; far from it the gradient vanishes on both sides. A token counts as
    clipped if the gate lowers its gradient to less than half.
    """
    ratio_M = tokens.log_ratio_M.exp()
    is_positive_M = tokens.advantages_M > 0
    tau_M = torch.where(is_positive_M, config.tau_positive, config.tau_negative)
    gate_M = torch.sigmoid(tau_M * (ratio_M - 1.0))
    slope_M = 4.0 * (gate_M * (1.0 - gate_M)).detach()
    return tokens.sums(-(4.0 / tau_M) * gate_M * tokens.advantages_M, slope_M < 0.5)
