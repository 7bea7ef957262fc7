"""The metrics of the parts of a mixture: part/<name>/<key> in the commit of every step, and their summary.

The order of the mixture gives the part of a group from its number alone, also for groups without a trained row.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pipelinerl_core.config.interleave import Interleave
from pipelinerl_core.messages import FateRecord
from pipelinerl_core.types import Fate, Outcome, Rollout

PREFIX = "part/"
FATES = tuple(fate.value for fate in Fate)
MIN_GROUPS = 8
"""A part of which at least so many groups ended, none of them trained, is named in a warning."""


class PartMetrics:
    """Computes the metrics of the parts step by step; the counts of groups are running totals."""

    def __init__(self, order: Interleave, names: Iterable[str]) -> None:
        """order: of the mixture; names: of its parts."""
        self._order = order
        self._totals = {f"{PREFIX}{name}/groups_{fate}": 0.0 for name in names for fate in FATES}

    def adopt(self, metrics: Mapping[str, float]) -> None:
        """Continue the totals of a commit."""
        self._totals = {key: metrics.get(key, 0.0) for key in self._totals}

    def step(self, groups: Sequence[Sequence[Rollout]], fates: Sequence[FateRecord]) -> dict[str, float]:
        """The metrics of a step.

        groups: the rollouts of the trained groups; fates: of the groups that ended untrained since the step before.
        """
        of_part: dict[str, list[Rollout]] = {}
        for group in groups:
            part = self._count(group[0].group_id, Fate.TRAINED)
            of_part.setdefault(part, []).extend(group)
        for record in fates:
            self._count(record.group_id, record.fate)
        metrics = dict(self._totals)
        for part, rollouts in of_part.items():
            metrics |= {f"{PREFIX}{part}/{key}": value for key, value in _figures(rollouts).items()}
        return metrics

    def _count(self, group_id: int, fate: str) -> str:
        part = self._order.turn(group_id).part
        self._totals[f"{PREFIX}{part}/groups_{fate}"] += 1
        return part


def _figures(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Means over the rollouts of one part in one step."""
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    components: dict[str, list[float]] = {}
    for rollout in rollouts:
        for component in rollout.reward_components:
            components.setdefault(component.name, []).append(component.value)
    return {
        "reward": float(np.mean(rewards)),
        "length_mean": float(np.mean([rollout.num_tokens for rollout in rollouts])),
        "turns": float(np.mean([rollout.num_turns for rollout in rollouts])),
        "rollouts": float(len(rollouts)),
        "error_fraction": sum(rollout.outcome is Outcome.ERROR for rollout in rollouts) / len(rollouts),
        **{f"component/{name}": float(np.mean(values)) for name, values in components.items()},
    }


def parts_of(config: Mapping[str, Any], metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Part -> {"weight": its share of the groups, key: value of part/<name>/<key>}; empty without a mixture.

    config: the stored configuration; metrics: of a commit.
    """
    mixture = config.get("mixture") or {}
    total = sum(part["weight"] for part in mixture.values())
    parts = {name: {"weight": part["weight"] / total} for name, part in mixture.items()}
    for key, value in metrics.items():
        if key.startswith(PREFIX):
            name, _, rest = key.removeprefix(PREFIX).partition("/")
            if name in parts:
                parts[name][rest] = value
    return parts


def untrained_parts(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Part -> why none of its groups is trained, as text; for parts of which enough groups have ended.

    parts: as of `parts_of`.
    """
    reasons = {}
    for name, part in parts.items():
        ended = {fate: int(part.get(f"groups_{fate}") or 0) for fate in FATES}
        total = sum(ended.values())
        if total < MIN_GROUPS or ended["trained"]:
            continue
        if ended["failed"] == total:
            reasons[name] = (
                f"mixture.{name}: all {total:,} groups failed, none is trained: its reward or environment raises, or "
                "its process ends. The logs of the actors name the first errors (pipelinerl logs)"
            )
        else:
            counts = ", ".join(f"{num:,} {fate}" for fate, num in ended.items() if num)
            reasons[name] = (
                f"mixture.{name}: none of {total:,} groups is trained ({counts}). Filtered groups have equal "
                "rewards: choose easier or harder prompts for this part"
            )
    return reasons
