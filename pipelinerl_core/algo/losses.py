"""Policy-gradient losses for asynchronous rollouts.

Every loss is a pure function of tensors and its own config: no model, no process group, no logging, no random
numbers. It returns the weighted sum of its terms and sums of its statistics. Normalisation is inside loss_weights
(algo/weighting.py), so sums of packs, micro-batches and ranks add up to the loss of the whole step.

Shapes: N = tokens offered to the loss, M = those of them where loss_mask is True.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pipelinerl_core.algo.importance import log_ratio
from pipelinerl_core.config.sections import LossConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSums:
    """Sums over the M trained tokens of one pack, ready to be added across packs and ranks. All are [] tensors."""

    loss: Tensor
    """sum(loss_weight * loss_t): the only one with a gradient."""
    num_tokens: Tensor
    """M."""
    ratio: Tensor
    """Sum of the untruncated ratios."""
    clipped: Tensor
    """Tokens whose ratio hit the ceiling."""
    kl: Tensor
    """Sum of rollout_logprob - trainer_logprob."""


def reinforce(
    trainer_logprobs_N: Tensor,
    rollout_logprobs_N: Tensor,
    advantages_N: Tensor,
    loss_weights_N: Tensor,
    loss_mask_N: Tensor,
    *,
    config: LossConfig,
) -> LossSums:
    """REINFORCE with a truncated importance ratio: -(min(ratio, ratio_max).detach() * advantage * logprob).

    The objective of PipelineRL (arXiv:2509.19128).

    Args:
        trainer_logprobs_N: log-probability of each token under the weights being trained.
        rollout_logprobs_N: log-probability the engine recorded when it sampled the token.
        advantages_N: advantage of the rollout the token belongs to.
        loss_weights_N: weight of each term, normalisation included.
        loss_mask_N: bool, True on the tokens that are trained.
        config: `ratio_max` is the ceiling of the ratio.

    Raises ValueError when shapes or types break this contract.
    """
    _check(trainer_logprobs_N, rollout_logprobs_N, advantages_N, loss_weights_N, loss_mask_N)
    # Select before computing: a nan on a masked token would reach the gradient as 0 * nan if the mask came last.
    trainer_M = trainer_logprobs_N[loss_mask_N].float()
    rollout_M = rollout_logprobs_N[loss_mask_N].float()
    ratio_M = log_ratio(trainer_M, rollout_M).exp()
    terms_M = -(ratio_M.clamp(max=config.ratio_max) * advantages_N[loss_mask_N] * trainer_M)
    return LossSums(
        loss=(loss_weights_N[loss_mask_N] * terms_M).sum(),
        num_tokens=loss_mask_N.sum(),
        ratio=ratio_M.sum(),
        clipped=(ratio_M > config.ratio_max).sum(),
        kl=(rollout_M - trainer_M.detach()).sum(),
    )


LossFunction = Callable[..., LossSums]

LOSSES: dict[str, LossFunction] = {"reinforce": reinforce}
"""By `loss.kind`; all share the signature of `reinforce`."""


def _check(trainer_N: Tensor, rollout_N: Tensor, advantages_N: Tensor, weights_N: Tensor, mask_N: Tensor) -> None:
    if mask_N.dtype != torch.bool:
        raise ValueError(f"loss_mask is {mask_N.dtype}: it must be torch.bool, because it selects tokens")
    named = {"trainer_logprobs": trainer_N, "rollout_logprobs": rollout_N}
    named |= {"advantages": advantages_N, "loss_weights": weights_N}
    for name, tensor in named.items():
        if tensor.ndim != 1 or tensor.shape != mask_N.shape or not tensor.is_floating_point():
            raise ValueError(
                f"{name} is {tuple(tensor.shape)} {tensor.dtype}: it must be floating point, one number per token, "
                f"in the shape of loss_mask, {tuple(mask_N.shape)}"
            )
