"""Policy-gradient losses for asynchronous rollouts, by `loss.kind`."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from pipelinerl_core.algo.losses.cispo import cispo
from pipelinerl_core.algo.losses.gspo import gspo
from pipelinerl_core.algo.losses.icepop import icepop
from pipelinerl_core.algo.losses.ppo import ppo
from pipelinerl_core.algo.losses.reinforce import reinforce
from pipelinerl_core.algo.losses.terms import LossSums, TrainedTokens, select
from pipelinerl_core.config.losses import LossConfig

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
    }
)
"""Each takes the trained tokens of a pack and the section `loss` of its kind."""


def compute_loss(tokens: TrainedTokens, config: LossConfig) -> LossSums:
    """The loss of `config.kind`, less the bonus: entropy_bonus * sum(loss_weight * entropy)."""
    sums = LOSSES[config.kind](tokens, config)
    if not config.entropy_bonus:
        return sums
    bonus = config.entropy_bonus * (tokens.loss_weights_M * tokens.entropy_M).sum()
    return replace(sums, loss=sums.loss - bonus)
