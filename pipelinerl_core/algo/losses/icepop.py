"""IcePop: tokens on which trainer and engine disagree too much are left out (arXiv:2510.18855)."""

from pipelinerl_core.algo.losses.terms import LossSums, TrainedTokens
from pipelinerl_core.config.losses import IcepopLoss


def icepop(tokens: TrainedTokens, config: IcepopLoss) -> LossSums:
    """-(ratio.detach() * advantage * logprob) where ratio_min <= ratio <= ratio_max, and 0 elsewhere."""
    ratio_M = tokens.log_ratio_M.detach().exp()
    is_outside_M = (ratio_M < config.ratio_min) | (ratio_M > config.ratio_max)
    kept_M = ratio_M.masked_fill(is_outside_M, 0.0)
    return tokens.sums(-(kept_M * tokens.advantages_M * tokens.trainer_logprobs_M), is_outside_M)
