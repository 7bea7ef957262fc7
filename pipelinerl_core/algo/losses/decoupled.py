"""Decoupled PPO: clips the ratio to a proximal policy, weighted by the ratio of proximal to behaviour policy.

The decoupled objective is from arXiv:2110.00641, its use for asynchronous generation from arXiv:2505.24298 (AReaL).
Deriving the proximal policy from the age of a token, without another forward pass, is from arXiv:2512.06547 (A-3PO).
"""

import torch
from torch import Tensor

from pipelinerl_core.algo.importance import MAX_LOG_RATIO
from pipelinerl_core.algo.losses.surrogate import surrogate
from pipelinerl_core.algo.losses.terms import LossSums, TrainedTokens
from pipelinerl_core.config.losses import DecoupledPpoLoss


def decoupled_ppo(tokens: TrainedTokens, config: DecoupledPpoLoss) -> LossSums:
    """-(min(proximal / rollout, ratio_max).detach() * surrogate(trainer / proximal, advantage)).

    For tokens of lag 0 it is `ppo`.
    """
    proximal_M = proximal_logprobs(tokens)
    behaviour_M = _ratio(proximal_M, tokens.rollout_logprobs_M)
    values_M, is_clipped_M = surrogate(_ratio(tokens.trainer_logprobs_M, proximal_M), tokens.advantages_M, config)
    terms_M = -(behaviour_M.clamp(max=config.ratio_max) * values_M)
    return tokens.sums(terms_M, is_clipped_M | (behaviour_M > config.ratio_max))


def proximal_logprobs(tokens: TrainedTokens) -> Tensor:
    """[M] alpha * rollout_logprob + (1 - alpha) * trainer_logprob, alpha = 1 / (lag + 1); a constant.

    The step makes a version that is lag + 1 steps newer than the version that sampled the token. The proximal policy
    is one step older than the new version, by linear interpolation of log-probabilities. With lag 0 the proximal
    policy is the policy that sampled the token.
    """
    alpha_M = 1.0 / (tokens.lags_M + 1.0)
    return torch.lerp(tokens.trainer_logprobs_M.detach(), tokens.rollout_logprobs_M, alpha_M)


def _ratio(above_M: Tensor, below_M: Tensor) -> Tensor:
    return (above_M - below_M).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
