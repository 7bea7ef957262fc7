"""Assemble the rows of one optimizer step from reserved groups: advantage, loss_weight and loss_mask."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipelinerl_core.algo.advantages import ADVANTAGES, decoupled, over_step, per_turn
from pipelinerl_core.algo.own import ScoredRollout, own_advantages
from pipelinerl_core.algo.shaping import overlong_penalty
from pipelinerl_core.algo.staleness import live_mask
from pipelinerl_core.algo.weighting import loss_weights
from pipelinerl_core.config.run import RunConfig
from pipelinerl_core.types import FinishReason, Outcome, Rollout, TrainingRow

_ROUNDING = 1e-6
"""Relative difference that a reward in float32 and the weighted sum of its components may have."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AssembledStep:
    """The rows of a step, with counts of left-out rollouts and masked tokens."""

    rows: list[TrainingRow]
    """Ordered by (group_id, rollout_index), independent of the order of arrival; as read back from the batch file."""
    num_errors: int
    """Rollouts without a reward: in no row, no baseline and no denominator."""
    num_error_tokens: int
    """Sampled tokens of those rollouts."""
    num_sampled: int
    """Sampled tokens of the rows."""
    num_masked_stale: int
    """Sampled tokens of the rows that the lag rule masked; the other tokens are trained."""
    overlong_fraction: float | None
    """Share of the sampled tokens in truncated completions, which have weight 0; None without overlong_filtering."""

    @property
    def num_trained(self) -> int:
        """Tokens that enter the loss."""
        return self.num_sampled - self.num_masked_stale


def assemble_rows(step: int, groups: Sequence[Sequence[Rollout]], config: RunConfig) -> AssembledStep:
    """The rows that step `step` trains.

    Rollouts without a reward are left out. The advantage of the others comes from the rewards of exactly the rollouts
    in the step, and loss_weight counts their sampled tokens before the stale mask (docs/algorithms.md).

    Raises ValueError for a group with fewer than two scored rollouts, and for a token that is newer than the weights.
    """
    ordered = sorted(
        (sorted(group, key=lambda rollout: rollout.rollout_index) for group in groups),
        key=lambda group: group[0].group_id,
    )
    scored = [[rollout for rollout in group if rollout.outcome is Outcome.SCORED] for group in ordered]
    errors = [rollout for group in ordered for rollout in group if rollout.outcome is not Outcome.SCORED]
    weights = loss_weights(
        [[_num_sampled(rollout) for rollout in group] for group in scored],
        normalization=config.loss.normalization,
        max_tokens=config.rollouts.max_tokens,
    )
    rows = [
        _row(rollout, advantages, _filtered(rollout, weight, config), step=step, max_lag=config.schedule.max_lag)
        for group, group_advantages, group_weights in zip(scored, _advantages(scored, config), weights, strict=True)
        for rollout, advantages, weight in zip(group, group_advantages, group_weights, strict=True)
    ]
    num_sampled = sum(_num_sampled(row.rollout) for row in rows)
    num_overlong = sum(_num_sampled(row.rollout) for row in rows if row.loss_weight == 0)
    return AssembledStep(
        rows=rows,
        num_errors=len(errors),
        num_error_tokens=sum(_num_sampled(rollout) for rollout in errors),
        num_sampled=num_sampled,
        num_masked_stale=num_sampled - sum(int(np.count_nonzero(row.loss_mask)) for row in rows),
        overlong_fraction=num_overlong / max(1, num_sampled) if config.loss.overlong_filtering else None,
    )


def _advantages(groups: Sequence[Sequence[Rollout]], config: RunConfig) -> list[list[tuple[float, ...]]]:
    """For each rollout of each group one advantage, or one per turn."""
    if config.loss.decouples_components:
        sums = [_decoupled(group, config) for group in groups]
        return [[(advantage,) for advantage in group] for group in over_step(sums)] if sums else []
    return [_group_advantages(group, config) for group in groups]


def _group_advantages(group: Sequence[Rollout], config: RunConfig) -> list[tuple[float, ...]]:
    rewards = _rewards(group, config)
    if config.loss.has_own_advantages:
        return own_advantages(list(map(_scored, group, rewards)), config.loss)
    if config.loss.credits_turns:
        turn_rewards = [rollout.turn_rewards for rollout in group]
        return per_turn(rewards, [rollout.num_turns for rollout in group], turn_rewards)
    return [(advantage,) for advantage in ADVANTAGES[config.loss.advantage](rewards)]


def _decoupled(group: Sequence[Rollout], config: RunConfig) -> list[float]:
    """What the weighted components leave of the reward, for example an overlong penalty, is one more component."""
    weights = _part(group, config).reward.weights
    values = [dict(rollout.reward_components) for rollout in group]
    named = [[of_rollout.get(name, 0.0) for of_rollout in values] for name in weights]
    rest = []
    for i, reward in enumerate(_rewards(group, config)):
        terms = [weight * part[i] for weight, part in zip(weights.values(), named, strict=True)]
        left = reward - sum(terms)
        # Stored rewards are float32: their rounding would be standardized to advantages.
        is_rounding = abs(left) <= _ROUNDING * (abs(reward) + sum(map(abs, terms)))
        rest.append(0.0 if is_rounding else left)
    return decoupled([*named, rest], [*weights.values(), 1.0])


def _part(group: Sequence[Rollout], config: RunConfig) -> RunConfig:
    """The configuration of the group's part of a mixture."""
    return config.with_part(group[0].source) if config.mixture and group else config


def _scored(rollout: Rollout, reward: float) -> ScoredRollout:
    return ScoredRollout(
        reward=reward,
        components=dict(rollout.reward_components),
        turn_rewards=rollout.turn_rewards,
        num_turns=rollout.num_turns,
        num_tokens=rollout.num_tokens,
        is_truncated=rollout.finish_reason is FinishReason.LENGTH,
    )


def _filtered(rollout: Rollout, weight: float, config: RunConfig) -> float:
    """The weight of a rollout's tokens; 0 for a truncated completion with loss.overlong_filtering.

    The loss mask stays as the lag rule makes it, because the accounting of tokens follows the lag rule.
    """
    is_overlong = config.loss.overlong_filtering and rollout.finish_reason is FinishReason.LENGTH
    return 0.0 if is_overlong else weight


def _row(rollout: Rollout, advantages: tuple[float, ...], weight: float, *, step: int, max_lag: int) -> TrainingRow:
    live_C = live_mask(rollout.weight_spans, rollout.num_tokens, step=step, max_lag=max_lag)
    return TrainingRow(
        rollout=rollout,
        loss_mask=rollout.loss_mask & live_C,
        advantage=_stored(advantages[0]),
        loss_weight=_stored(weight),
        turn_advantages=tuple(map(_stored, advantages)) if len(advantages) > 1 else (),
    )


def _stored(value: float) -> float:
    """The value of the batch file's column, which is float32: a replay must train the same bits."""
    return float(np.float32(value))


def _rewards(group: Sequence[Rollout], config: RunConfig) -> list[float]:
    own = _part(group, config)
    limits = {"max_tokens": own.rollouts.max_tokens, "overlong_tokens": own.reward.overlong_tokens}
    return [
        rollout.reward + overlong_penalty(rollout.num_tokens - rollout.num_opening_tokens, **limits)
        for rollout in group
        if rollout.reward is not None
    ]


def _num_sampled(rollout: Rollout) -> int:
    return int(np.count_nonzero(rollout.loss_mask))
