"""GSPO: one ratio for a whole rollout (arXiv:2507.18071)."""

from pipelinerl_core.algo.losses.surrogate import surrogate
from pipelinerl_core.algo.losses.terms import LossSums, TrainedTokens
from pipelinerl_core.config.losses import GspoLoss


def gspo(tokens: TrainedTokens, config: GspoLoss) -> LossSums:
    """-surrogate(s, advantage), s = exp(mean log ratio of the trained tokens of the rollout).

    This is the paper's GSPO-token: s has the value of GSPO, but the gradient reaches each token through the log ratio
    of this token. With equal advantages in a rollout this gradient equals GSPO's. With different advantages (of
    turns, values or a teacher) the gradient of the mean would credit every token with the mean advantage.
    """
    log_ratio_M = tokens.sequence_means(tokens.log_ratio_M)
    log_ratio_M = log_ratio_M.detach() + (tokens.log_ratio_M - tokens.log_ratio_M.detach())
    values_M, is_clipped_M = surrogate(log_ratio_M.exp(), tokens.advantages_M, config)
    return tokens.sums(-values_M, is_clipped_M)
