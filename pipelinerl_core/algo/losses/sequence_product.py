"""REINFORCE with one importance weight for a whole rollout: the product of the ratios of its tokens.

Sequence-level truncated and masked importance sampling (TIS, MIS; Liu and others, "When Speed Kills Stability",
2025).
"""

from pipelinerl_core.algo.importance import MAX_LOG_RATIO
from pipelinerl_core.algo.losses.terms import LossSums, TrainedTokens
from pipelinerl_core.config.losses import SequenceProductLoss


def sequence_product(tokens: TrainedTokens, config: SequenceProductLoss) -> LossSums:
    """-(w.detach() * advantage * logprob), w = min(p, ratio_max) for the product p of the ratios of the rollout.

    The product is over the trained tokens of the rollout. With config.masks, w = p, and 0 if p is above ratio_max.
    """
    product_M = tokens.sequence_sums(tokens.log_ratio_M.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    is_above_M = product_M > config.ratio_max
    weights_M = product_M.masked_fill(is_above_M, 0.0 if config.masks else config.ratio_max)
    return tokens.sums(-(weights_M * tokens.advantages_M * tokens.trainer_logprobs_M), is_above_M)
