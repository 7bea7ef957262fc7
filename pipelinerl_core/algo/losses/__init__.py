"""Policy-gradient losses for asynchronous rollouts, by `loss.kind`."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from pipelinerl_core.algo.losses.cispo import cispo
from pipelinerl_core.algo.losses.gspo import gspo
from pipelinerl_core.algo.losses.icepop import icepop
from pipelinerl_core.algo.losses.ppo import ppo
from pipelinerl_core.algo.losses.reinforce import reinforce
from pipelinerl_core.algo.losses.terms import LossSums, TrainedTokens, select

__all__ = ["LOSSES", "LossSums", "TrainedTokens", "select"]

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
