"""Functions of a user in the objective: `loss.function` and `loss.advantage_function`.

A process that trains loads them into OWN at its start (training/own_functions.py).
"""

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from pipelinerl_core.config.losses import LossConfig
from pipelinerl_core.errors import ConfigError

OWN: dict[str, Callable[..., Any]] = {}
"""Location, FILE.py:NAME or package.module:NAME -> the function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRollout:
    """What a function of advantages reads of a rollout."""

    reward: float
    """With the penalty of reward.overlong_tokens."""
    components: Mapping[str, float]
    """Components of the reward, before their weights; empty if the reward is one number."""
    turn_rewards: Sequence[float]
    """Parts of the reward that belong to single turns, one per turn; empty without such parts."""
    num_turns: int
    num_tokens: int
    """Length of the completion."""
    is_truncated: bool
    """Whether the completion, or its last turn, was cut, or the episode had no turn or branch left."""


def own_function(location: str) -> Callable[..., Any]:
    """A loaded function. Raises RuntimeError if the process has not loaded it."""
    if location not in OWN:
        raise RuntimeError(f"{location} is not loaded in this process")
    return OWN[location]


def own_advantages(group: Sequence[ScoredRollout], config: LossConfig) -> list[tuple[float, ...]]:
    """For each rollout of a group one advantage, or one per turn, from loss.advantage_function(group, **options).

    The function returns for each rollout a number, or a sequence with one number per turn. Raises ConfigError for any
    other result.
    """
    subject = f"loss.advantage_function={config.advantage_function}"
    result = own_function(config.advantage_function)(group, **config.advantage_options)
    try:
        if isinstance(result, Mapping | Set | str):
            raise TypeError
        advantages = [
            tuple(map(float, advantage)) if isinstance(advantage, Sequence) else (float(advantage),)
            for advantage in result
        ]
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{subject}: returned {str(result)[:80]}, not a number or numbers per rollout") from None
    if len(advantages) != len(group):
        raise ConfigError(f"{subject}: returned {len(advantages)} values for a group of {len(group)} rollouts")
    for values, rollout in zip(advantages, group, strict=True):
        if len(values) not in (1, rollout.num_turns):
            raise ConfigError(f"{subject}: returned {len(values)} advantages for {rollout.num_turns} turns")
        if not all(map(math.isfinite, values)):
            raise ConfigError(f"{subject}: returned {values[0] if len(values) == 1 else values}, which is not finite")
    return advantages
