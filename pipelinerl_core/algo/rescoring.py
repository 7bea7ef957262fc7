"""Does each engine sample from the version that its tokens name? Statistics of re-scored tokens, and the alarm.

The trainer scores a few rollouts again under the versions that sampled their tokens. It tells apart:

    mismatch     engine - trainer, both under the version of the token, on the tokens of the first version in their
                 rollout: their context has no keys and values of older weights
    stale_kv     the same on the tokens after these: with engine.kv=keep, older weights computed part of their context
    staleness    current policy - version of the token, both by the trainer: how far the policy has moved since

Only mismatch raises an alarm: the other two are expected in an asynchronous run. `HealthyMean` is the run's own
figure of healthy engines, and `Evidence` compares one actor with this figure.

Shapes: M = tokens of one actor.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipelinerl_core.algo.parity import LEAST_HEALTHY_MEAN, PARITY_BOUNDS
from pipelinerl_core.types import Rollout

Float64Array = NDArray[np.float64]

ALLOWANCE = 2.0
"""An actor may differ by this many times the healthy mean: lengths and entropy drift during a run, and with them the
rounding."""
HEALTHY_TOKENS = 512
"""The healthy mean is measured on at least this many tokens."""
# The first healthy mean counts as this many comparisons, and every later one as at most this many.
_FIRST_WEIGHT, _LAST_WEIGHT = 10, 100
# A comparison counts as at most this many times the healthy mean: less than ALLOWANCE, or the mean would follow a
# fault before the alarm; enough for the rounding of LoRA, which doubles.
_FOLLOWED = 1.5
# An actor with fewer of these tokens does not count in the healthy mean.
_MIN_TOKENS = 32
# Differences count in units of the healthy mean, each at most this: a healthy engine has a few large ones.
_LARGEST = 40.0
# One comparison counts as at most this many tokens: many tokens of few rollouts are not independent.
_MOST_TOKENS = 64
# The sum at which the alarm begins. On recorded streams healthy engines reach less than half (docs/off-policy.md).
_LIMIT = 200.0


@dataclass(frozen=True, slots=True)
class OwnedTokens:
    """Completion tokens [start, end) that one actor epoch sampled."""

    actor: str
    """"<actor>/<epoch>"."""
    start: int
    end: int


def owners(rollout: Rollout, epoch: int) -> list[OwnedTokens]:
    """The actor epochs that sampled the tokens of a rollout, in order. epoch: of the actor that finished it."""
    owned, start = [], 0
    for name, origin_epoch, num_tokens in rollout.origins:
        owned.append(OwnedTokens(f"{name}/{origin_epoch}", start, min(start + num_tokens, rollout.num_tokens)))
        start = owned[-1].end
    return [*owned, OwnedTokens(f"{rollout.actor}/{epoch}", start, rollout.num_tokens)]


def num_fresh_tokens(rollout: Rollout) -> int:
    """Number of completion tokens before the first token of a second version: no older token is in their context."""
    first = rollout.weight_spans[0].version
    return next((span.start for span in rollout.weight_spans if span.version != first), rollout.num_tokens)


class HealthyMean:
    """The mean |difference| of healthy engines: measured on the first tokens of a run, then followed slowly.

    The figure is the run's, not the actor's: with a figure of its own, an actor that is wrong from its start would be
    its own norm. At the start each actor counts once, and the median actor is the figure. Later comparisons without
    an alarm move it by a tenth of their difference, soon by a hundredth: lengths and entropy drift, and with LoRA in
    bfloat16 the merged weights are rounded after version 0 only.
    """

    def __init__(self, dtype: Literal["float32", "bfloat16"]) -> None:
        """dtype: type of the model's weights."""
        self._least, self._most = LEAST_HEALTHY_MEAN[dtype], PARITY_BOUNDS[dtype]["mean"] / ALLOWANCE
        self._first: dict[str, list[Float64Array]] = {}
        self._num_comparisons = _FIRST_WEIGHT
        self.mean: float | None = None
        """Nats; None before HEALTHY_TOKENS tokens."""

    def adopt(self, mean: float) -> None:
        """Continue with the figure of an earlier start of the trainer."""
        self.mean, self._num_comparisons = mean, _LAST_WEIGHT

    def measure(self, differences: Mapping[str, Float64Array]) -> None:
        """Add tokens of the start, by actor, engine - trainer in nats; no effect once the mean is known."""
        if self.mean is not None:
            return
        for actor, differences_M in differences.items():
            self._first.setdefault(actor, []).append(np.abs(differences_M))
        first = [np.concatenate(parts) for parts in self._first.values()]
        means = sorted(float(sizes_M.mean()) for sizes_M in first if len(sizes_M) >= _MIN_TOKENS)
        if means and sum(map(len, first)) >= HEALTHY_TOKENS and np.isfinite(means).all():
            self.mean = means[(len(means) - 1) // 2]
            self._first.clear()

    def follow(self, differences_M: Float64Array) -> None:
        """Move towards a comparison of an actor without an alarm; a fault that is not noticed yet moves it little."""
        if self.mean is not None and len(differences_M):
            newest = min(float(np.abs(differences_M).mean()), _FOLLOWED * self.norm)
            self.mean += (newest - self.mean) / self._num_comparisons
            self._num_comparisons = min(self._num_comparisons + 1, _LAST_WEIGHT)

    @property
    def is_refused(self) -> bool:
        """Whether the mean is too large for rounding, so that it is no norm."""
        return self.mean is not None and self.mean > self._most

    @property
    def norm(self) -> float:
        """The mean to compare with; the alarm's bound, ALLOWANCE times the norm, is at most the parity gate's."""
        return self._most if self.mean is None else min(max(self.mean, self._least), self._most)


class Evidence:
    """Whether the tokens of one actor differ by more than healthy engines': a one-sided cumulative sum (CUSUM).

    Every token adds its |difference| in units of the healthy mean, less ALLOWANCE. The sum stays between 0 and a
    limit. At the limit the alarm begins, and below half of the limit it ends. So evidence of many comparisons adds
    up, and a few comparisons without a fault end the alarm.
    """

    def __init__(self) -> None:
        self._sum = 0.0
        self._num_tokens = 0  # since the sum was 0, like the next
        self._total = 0.0  # nats
        self.is_alarm = False

    def add(self, differences_M: Float64Array, norm: float) -> None:
        """Add the tokens of a comparison, engine - trainer in nats; not a number is an alarm."""
        if not len(differences_M):
            return
        sizes_M = np.nan_to_num(np.abs(differences_M), nan=np.inf, posinf=np.inf)
        change = float(np.minimum(sizes_M / norm, _LARGEST).mean() - ALLOWANCE) * min(len(sizes_M), _MOST_TOKENS)
        self._sum = min(max(0.0, self._sum + change), _LIMIT) if np.isfinite(sizes_M).all() else _LIMIT
        self._num_tokens, self._total = self._num_tokens + len(sizes_M), self._total + float(sizes_M.sum())
        if not self._sum:
            self._num_tokens, self._total = 0, 0.0
        self.is_alarm = self._sum >= _LIMIT or (self.is_alarm and self._sum > _LIMIT / 2)

    def text(self, norm: float) -> str:
        """What is wrong, empty without an alarm."""
        if not self.is_alarm:
            return ""
        mean = self._total / self._num_tokens
        return f"mean |difference| {mean:.2g} over {self._num_tokens} tokens ({norm:.2g} is healthy)"
