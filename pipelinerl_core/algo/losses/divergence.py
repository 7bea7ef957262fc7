"""How far the policy has moved from a reference model."""

from torch import Tensor

from pipelinerl_core.algo.importance import MAX_LOG_RATIO


def divergence(trainer_logprobs_M: Tensor, ref_logprobs_M: Tensor) -> Tensor:
    """[M] estimate of KL(trainer | reference) at each token: ref / trainer - log(ref / trainer) - 1, never negative.

    The k3 estimator (joschu.net/blog/kl-approx.html), with the gradient that GRPO gives it (arXiv:2402.03300, eq. 4).
    With loss.kl_weighted the caller multiplies by the importance ratio, with its gradient (docs/algorithms.md).
    The log ratio is clamped, so that a token that the policy has given up stays finite.
    """
    log_ratio_M = (ref_logprobs_M - trainer_logprobs_M).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio_M.exp() - log_ratio_M - 1.0
