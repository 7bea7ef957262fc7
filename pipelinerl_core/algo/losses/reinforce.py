"""REINFORCE with a truncated importance ratio: the objective of PipelineRL (arXiv:2509.19128)."""

from pipelinerl_core.algo.losses.terms import LossSums, TrainedTokens
from pipelinerl_core.config.losses import ReinforceLoss


def reinforce(tokens: TrainedTokens, config: ReinforceLoss) -> LossSums:
    """-(min(ratio, ratio_max).detach() * advantage * logprob)."""
    ratio_M = tokens.log_ratio_M.detach().exp()
    terms_M = -(ratio_M.clamp(max=config.ratio_max) * tokens.advantages_M * tokens.trainer_logprobs_M)
    return tokens.sums(terms_M, ratio_M > config.ratio_max)
