"""DPPO: the trust region is a distance of probabilities, not of their ratio (arXiv:2602.04879)."""

from pipelinerl_core.algo.losses.terms import LossSums, TrainedTokens
from pipelinerl_core.config.losses import DppoLoss


def dppo(tokens: TrainedTokens, config: DppoLoss) -> LossSums:
    """-(min(ratio, ratio_max).detach() * advantage * logprob) inside of the trust region, and 0 outside.

    A token is outside if its probability has moved by more than divergence_max since it was sampled, and the
    advantage would move the probability further. This distance is the total variation of the distributions over two
    events, the sampled token and any other (the paper's binary approximation): a rare token may change by a large
    ratio, a frequent token may not.
    """
    ratio_M = tokens.log_ratio_M.detach().exp()
    moved_M = tokens.trainer_logprobs_M.detach().exp() - tokens.rollout_logprobs_M.exp()
    is_outside_M = moved_M * tokens.advantages_M.sign() > config.divergence_max
    kept_M = ratio_M.clamp(max=config.ratio_max).masked_fill(is_outside_M, 0.0)
    terms_M = -(kept_M * tokens.advantages_M * tokens.trainer_logprobs_M)
    return tokens.sums(terms_M, is_outside_M | (ratio_M > config.ratio_max))
