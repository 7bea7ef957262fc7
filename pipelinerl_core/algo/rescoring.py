"""Does each engine sample from the version that its tokens name? Statistics of re-scored tokens, and the alarm.

The trainer scores a few rollouts again under the versions that sampled their tokens. It tells apart:

    mismatch     engine - trainer, both under the version of the token, on the tokens of the first version in their
                 rollout: their context has no keys and values of older weights
    stale_kv     the same on the tokens after these: with engine.kv=keep, older weights computed part of their context
    staleness    current policy - version of the token, both by the trainer: how far the policy has moved since

Only mismatch raises an alarm: the other two are expected in an asynchronous run.

Shapes: M = tokens of one actor.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipelinerl_core.algo.parity import PARITY_BOUNDS
from pipelinerl_core.types import Rollout

Float64Array = NDArray[np.float64]

MIN_TOKENS = 32
"""An actor with fewer tokens in its window raises no alarm."""
WINDOW_TOKENS = 256
"""A window keeps the newest steps that together have this many tokens: long enough for an estimate, short enough that
an engine that fails late is noticed after a few steps."""
# The mean of few tokens can be one outlier. A single outlier has a mean of one standard error, k outliers sqrt(k).
_MEAN_ERRORS = 2.0
# A signed mean and a difference of means are tested at every step of a run, hence far out in the tail.
_TEST_ERRORS = 5.0
# Share of the bound of the mean by which an actor may differ from the other actors, for example by its processor.
_OTHERS_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class OwnedTokens:
    """Completion tokens [start, end) that one actor epoch sampled."""

    actor: str
    """"<actor>/<epoch>"."""
    start: int
    end: int


def owners(rollout: Rollout, epoch: int) -> list[OwnedTokens]:
    """The actor epochs that sampled the tokens of a rollout, in order. epoch: of the actor that finished it."""
    found, start = [], 0
    for name, origin_epoch, num_tokens in rollout.origins:
        found.append(OwnedTokens(f"{name}/{origin_epoch}", start, min(start + num_tokens, rollout.num_tokens)))
        start = found[-1].end
    return [*found, OwnedTokens(f"{rollout.actor}/{epoch}", start, rollout.num_tokens)]


def num_fresh_tokens(rollout: Rollout) -> int:
    """Number of completion tokens before the first token of a second version: no older token is in their context."""
    first = rollout.weight_spans[0].version
    return next((span.start for span in rollout.weight_spans if span.version != first), rollout.num_tokens)


class MismatchWindow:
    """The newest mismatches of one actor."""

    def __init__(self) -> None:
        self._steps: deque[Float64Array] = deque()

    def add(self, differences_M: Float64Array) -> None:
        """Add the tokens of a step, engine - trainer in nats; not a number counts as infinite."""
        if len(differences_M):
            self._steps.append(np.nan_to_num(differences_M, nan=np.inf))
        while sum(map(len, self._steps)) - len(self._steps[0] if self._steps else ()) >= WINDOW_TOKENS:
            self._steps.popleft()

    @property
    def values_M(self) -> Float64Array:
        """[M] all of them."""
        return np.concatenate(self._steps) if self._steps else np.zeros(0)


def alarm(own_M: Float64Array, others: Sequence[Float64Array], dtype: Literal["float32", "bfloat16"]) -> str:
    """What is wrong with an actor, as text; empty if its tokens look as they should, or are too few.

    The bounds are those of the parity gate (`PARITY_BOUNDS`) on mean and signed mean. The bounds on the largest
    differences are left to the gate: a run re-scores for days, and the largest of many differences grows.

    Args:
        own_M: engine - trainer of the actor's tokens without older context, nats.
        others: the same of each other actor.
        dtype: type of the model's weights.
    """
    if len(own_M) < MIN_TOKENS:
        return ""
    bounds = PARITY_BOUNDS[dtype]
    mean, error = _mean(np.abs(own_M))
    if not mean - _MEAN_ERRORS * error <= bounds["mean"]:
        return f"mean |difference| {mean:.2g} over {len(own_M)} tokens (at most {bounds['mean']:.2g})"
    signed, signed_error = _mean(own_M)
    bound = max(bounds.get("signed_mean", np.inf), _TEST_ERRORS * signed_error)
    if not abs(signed) <= bound:
        return f"signed mean difference {signed:.2g} over {len(own_M)} tokens (at most {bound:.2g})"
    enough = [other_M for other_M in others if len(other_M) >= MIN_TOKENS]
    if not enough:
        return ""
    # Each actor counts once, and the median actor is the measure: one other actor that fails does not hide this one.
    other, other_error = sorted(_mean(np.abs(other_M)) for other_M in enough)[(len(enough) - 1) // 2]
    bound = max(_OTHERS_SHARE * bounds["mean"], _TEST_ERRORS * float(np.hypot(error, other_error)))
    if mean - other > bound:
        return f"mean |difference| {mean:.2g} over {len(own_M)} tokens, {other:.2g} on the other actors"
    return ""


def _mean(values_M: Float64Array) -> tuple[float, float]:
    """Mean and its standard error; infinite values have an error of 0, so that they break every bound."""
    if not np.isfinite(values_M).all():
        return float("inf"), 0.0
    return float(values_M.mean()), float(values_M.std(ddof=1)) / len(values_M) ** 0.5
