"""Policy-gradient losses for asynchronous rollouts, by `loss.kind`.

To add a loss: a file in this folder with a function of the trained tokens and the loss's section, the section (its
options and their defaults) in config/losses.py, and a line in LOSSES.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from pipelinerl_core.algo.losses.cispo import cispo
from pipelinerl_core.algo.losses.custom import custom
from pipelinerl_core.algo.losses.decoupled import decoupled_ppo
from pipelinerl_core.algo.losses.divergence import divergence
from pipelinerl_core.algo.losses.dppo import dppo
from pipelinerl_core.algo.losses.gspo import gspo
from pipelinerl_core.algo.losses.icepop import icepop
from pipelinerl_core.algo.losses.ppo import ppo
from pipelinerl_core.algo.losses.reinforce import reinforce
from pipelinerl_core.algo.losses.sapo import sapo
from pipelinerl_core.algo.losses.sequence_product import sequence_product
from pipelinerl_core.algo.losses.terms import LossSums, TrainedTokens, select
from pipelinerl_core.config.losses import CustomLoss, LossConfig

__all__ = ["LOSSES", "LossSums", "TrainedTokens", "compute_loss", "select"]

LOSSES: Mapping[str, Callable[[TrainedTokens, Any], LossSums]] = MappingProxyType(
    {
        "reinforce": reinforce,
        "cispo": cispo,
        "ppo": ppo,
        "grpo": ppo,
        "dr_grpo": ppo,
        "dapo": ppo,
        "gspo": gspo,
        "icepop": icepop,
        "decoupled_ppo": decoupled_ppo,
        "dppo": dppo,
        "sapo": sapo,
        "sequence_product": sequence_product,
    }
)
"""loss.kind -> function of the trained tokens of a pack and of the section `loss` of that kind; all but custom."""

# A weight this close to 1 corrects nothing: engine and trainer round differently.
_CORRECTED = 0.01


def compute_loss(tokens: TrainedTokens, config: LossConfig) -> LossSums:
    """The loss of `config.kind`, plus the terms that every loss may have:

        - entropy_bonus * sum(loss_weight * entropy) + kl_coefficient * sum(loss_weight * divergence)

    negative_kl_max leaves tokens out of the loss of `config.kind` alone, sequence_ratio_max out of all terms. Raises
    ValueError if kl_coefficient is set and the reference's log-probabilities are missing.
    """
    if config.sequence_ratio_max:
        tokens = tokens.without_far_sequences(config.sequence_ratio_max)
    compute: Callable[..., LossSums] = custom if isinstance(config, CustomLoss) else LOSSES[config.kind]
    if config.negative_kl_max:
        kept = tokens.without_far_negatives(config.negative_kl_max)
        masked = (kept.loss_weights_M != tokens.loss_weights_M).sum()
        sums = replace(compute(kept, config), negative_masked=masked)
    else:
        sums = compute(tokens, config)
    if config.entropy_bonus:
        bonus = (tokens.loss_weights_M * tokens.entropy_M).sum()
        sums = replace(sums, loss=sums.loss - config.entropy_bonus * bonus)
    if config.kl_coefficient:
        if tokens.ref_logprobs_M is None:
            raise ValueError(f"kl_coefficient={config.kl_coefficient:g} needs the log-probabilities of a reference")
        kl_M = divergence(tokens.trainer_logprobs_M, tokens.ref_logprobs_M)
        if config.kl_weighted:
            ratio_M = tokens.log_ratio_M.exp()
            kl_M = ratio_M * kl_M
            sums = replace(sums, kl_corrected=((ratio_M.detach() - 1.0).abs() > _CORRECTED).sum())
        penalty = (tokens.loss_weights_M * kl_M).sum()
        sums = replace(sums, loss=sums.loss + config.kl_coefficient * penalty, kl_ref=kl_M.detach().sum())
    return sums
