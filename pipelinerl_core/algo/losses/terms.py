"""The input and the output of every loss.

A loss is a pure function of the trained tokens of one pack and the options of the loss: no model, no
process group, no logging, no random numbers. It returns the weighted sum of its terms and sums of its statistics.
Normalisation is inside loss_weights (algo/weighting.py), so sums of packs, micro-batches and ranks add up to the loss
of the whole step.

Shapes: N = tokens offered to the loss, M = those of them that are trained, where loss_mask is True.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipelinerl_core.algo.importance import MAX_LOG_RATIO


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSums:
    """Sums over the M trained tokens of one pack, ready to be added across packs and ranks. All but one are []
    tensors."""

    loss: Tensor
    """sum(loss_weight * loss_t): the only one with a gradient."""
    num_tokens: Tensor
    """M."""
    ratio: Tensor
    """Sum of the untruncated ratios."""
    clipped: Tensor
    """Tokens whose ratio the loss has clipped, truncated or refused."""
    is_clipped_M: Tensor
    """bool: which tokens these are."""
    kl: Tensor
    """Sum of rollout_logprob - trainer_logprob."""
    kl_ref: Tensor | None = None
    """Sum of the estimates of the divergence from the reference model, if there is one."""
    kl_teacher: Tensor | None = None
    """Sum of trainer_logprob - teacher_logprob, if there is a teacher."""
    kl_corrected: Tensor | None = None
    """Tokens whose weight in that divergence is off 1 by more than a hundredth, with loss.kl_weighted."""
    negative_masked: Tensor | None = None
    """Tokens that loss.negative_kl_max leaves out, if it is set."""
    value_error: Tensor | None = None
    """Sum of the value head's squared errors, if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedTokens:
    """The tokens of one pack that are trained."""

    trainer_logprobs_M: Tensor
    """float32, with a gradient: under the weights being trained."""
    rollout_logprobs_M: Tensor
    """float32: as the engine recorded it when it sampled the token."""
    advantages_M: Tensor
    """Advantage of the token's rollout, of the token's turn, or of the token."""
    loss_weights_M: Tensor
    """Weight of each term, normalisation included."""
    entropy_M: Tensor
    """float32, with a gradient: of the next token's distribution under the weights being trained."""
    ref_logprobs_M: Tensor | None
    """float32: under the reference model, if there is one."""
    sequence_M: Tensor
    """int64: which sequence of the pack the token belongs to. No sequence is in two packs."""
    num_sequences: int
    """Number of sequences in the pack."""
    lags_M: Tensor
    """int64, 0 or more: optimizer steps from the weights that sampled the token to those being trained."""
    refused_M: Tensor | None = None
    """bool: tokens that are left out of every loss; their weight is 0."""

    @property
    def log_ratio_M(self) -> Tensor:
        """log(trainer / rollout probability) with a gradient, clamped so that its exponential stays finite."""
        return (self.trainer_logprobs_M - self.rollout_logprobs_M).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def sequence_sums(self, values_M: Tensor) -> Tensor:
        """[M] sum over the trained tokens of the same sequence, of which all are in one pack."""
        return values_M.new_zeros(self.num_sequences).index_add(0, self.sequence_M, values_M)[self.sequence_M]

    def sequence_means(self, values_M: Tensor) -> Tensor:
        """[M] mean over the trained tokens of the same sequence."""
        return self.sequence_sums(values_M) / self.sequence_sums(torch.ones_like(values_M))

    def without_far_sequences(self, ratio_max: float) -> "TrainedTokens":
        """The same, without the sequences whose geometric mean ratio is outside of [1 / ratio_max, ratio_max]."""
        refused_M = self.sequence_means(self.log_ratio_M.detach()).abs() > math.log(ratio_max)
        return replace(self, refused_M=refused_M, loss_weights_M=self.loss_weights_M.masked_fill(refused_M, 0.0))

    def without_far_negatives(self, kl_max: float) -> "TrainedTokens":
        """The same, without the tokens of negative advantage in sequences whose log-probability has fallen by more
        than kl_max nats per token since they were sampled: the off-policy sequence mask of DeepSeek-V3.2
        (arXiv:2512.02556).

        Such a sequence is one that the policy has left, so it tells little about the present policy; a negative
        advantage would push its probability down further, without a bound.
        """
        is_far_M = -self.sequence_means(self.log_ratio_M.detach()) > kl_max
        masked_M = is_far_M & (self.advantages_M < 0)
        refused_M = masked_M if self.refused_M is None else self.refused_M | masked_M
        return replace(self, refused_M=refused_M, loss_weights_M=self.loss_weights_M.masked_fill(masked_M, 0.0))

    def sums(self, terms_M: Tensor, clipped_M: Tensor) -> LossSums:
        """What a loss returns, from the loss of each token and whether its ratio was cut."""
        ratio_M = self.log_ratio_M.detach().exp()
        if self.refused_M is not None:
            clipped_M = clipped_M | self.refused_M
        return LossSums(
            loss=(self.loss_weights_M * terms_M).sum(),
            num_tokens=terms_M.new_full((), len(terms_M), dtype=torch.int64),  # on a GPU without a copy
            ratio=ratio_M.sum(),
            clipped=clipped_M.sum(),
            is_clipped_M=clipped_M,
            kl=(self.rollout_logprobs_M - self.trainer_logprobs_M.detach()).sum(),
        )


def select(
    trainer_logprobs_N: Tensor,
    rollout_logprobs_N: Tensor,
    advantages_N: Tensor,
    loss_weights_N: Tensor,
    trained_M: Tensor,
    *,
    entropy_N: Tensor,
    sequence_N: Tensor,
    num_sequences: int,
    lags_N: Tensor,
    ref_logprobs_N: Tensor | None = None,
) -> TrainedTokens:
    """The trained tokens of a pack; the arguments are those of TrainedTokens before `trained_M` (places) chooses.

    Selected before anything is computed: a nan on a masked token would reach the gradient as 0 * nan if the mask came
    last. By places and not by a mask, whose number of tokens a GPU would be asked for. Raises ValueError when shapes
    or types break this contract.
    """
    if trained_M.dtype != torch.int64 or trained_M.ndim != 1:
        raise ValueError(f"trained is {tuple(trained_M.shape)} {trained_M.dtype}: it must be int64 places of tokens")
    named = {"trainer_logprobs": trainer_logprobs_N, "rollout_logprobs": rollout_logprobs_N}
    named |= {"advantages": advantages_N, "loss_weights": loss_weights_N, "entropy": entropy_N}
    if ref_logprobs_N is not None:
        named["ref_logprobs"] = ref_logprobs_N
    for name, tensor in named.items():
        if tensor.ndim != 1 or tensor.shape != trainer_logprobs_N.shape or not tensor.is_floating_point():
            raise ValueError(
                f"{name} is {tuple(tensor.shape)} {tensor.dtype}: it must be floating point, one number per token, "
                f"in the shape of trainer_logprobs, {tuple(trainer_logprobs_N.shape)}"
            )
    for name, tensor in {"sequence": sequence_N, "lags": lags_N}.items():
        if tensor.shape != trainer_logprobs_N.shape or tensor.dtype != torch.int64:
            raise ValueError(
                f"{name} is {tuple(tensor.shape)} {tensor.dtype}: it must be int64, one number per token, "
                f"in the shape of trainer_logprobs, {tuple(trainer_logprobs_N.shape)}"
            )
    return TrainedTokens(
        trainer_logprobs_M=trainer_logprobs_N.index_select(0, trained_M).float(),
        rollout_logprobs_M=rollout_logprobs_N.index_select(0, trained_M).float(),
        advantages_M=advantages_N.index_select(0, trained_M),
        loss_weights_M=loss_weights_N.index_select(0, trained_M),
        entropy_M=entropy_N.index_select(0, trained_M).float(),
        ref_logprobs_M=None if ref_logprobs_N is None else ref_logprobs_N.index_select(0, trained_M).float(),
        sequence_M=sequence_N.index_select(0, trained_M),
        num_sequences=num_sequences,
        lags_M=lags_N.index_select(0, trained_M),
    )
