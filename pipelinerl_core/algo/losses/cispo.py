"""CISPO: the importance ratio is clipped, and no token loses its gradient for it (MiniMax-M1, arXiv:2506.13585)."""

from pipelinerl_core.algo.losses.terms import LossSums, TrainedTokens
from pipelinerl_core.config.losses import CispoLoss


def cispo(tokens: TrainedTokens, config: CispoLoss) -> LossSums:
    """-(clip(ratio, 1 - clip_low, 1 + clip_high).detach() * advantage * logprob)."""
    ratio_M = tokens.log_ratio_M.detach().exp()
    clipped_M = ratio_M.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    terms_M = -(clipped_M * tokens.advantages_M * tokens.trainer_logprobs_M)
    return tokens.sums(terms_M, clipped_M != ratio_M)
