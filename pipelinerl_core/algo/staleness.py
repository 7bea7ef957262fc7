"""How old a token is when it is trained, and until when it may be.

Step n = 1, 2, ... trains weights n - 1 and makes version n, so a token sampled by version v has at step n the
lag = n - 1 - v >= 0. It is live while lag <= max_lag.

Shapes: C = completion tokens.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from pipelinerl_core.types import BoolArray, Int32Array, WeightSpan


def token_versions(weight_spans: Sequence[WeightSpan], num_tokens: int) -> Int32Array:
    """[C] weight version that sampled each token.

    Raises ValueError when the spans do not cover [0, num_tokens) without gaps.
    """
    end = 0
    for span in weight_spans:
        if span.start != end or span.end < span.start:
            raise ValueError(f"weight_spans={list(weight_spans)} must cover [0, {num_tokens}) in order, without gaps")
        end = span.end
    if end != num_tokens:
        raise ValueError(f"weight_spans={list(weight_spans)} must cover [0, {num_tokens}), they end at {end}")
    versions = np.array([span.version for span in weight_spans], dtype=np.int32)
    return np.repeat(versions, [span.end - span.start for span in weight_spans])


def token_lags(weight_spans: Sequence[WeightSpan], num_tokens: int, *, step: int) -> Int32Array:
    """[C] lag of each token at a step, in optimizer steps.

    Raises ValueError when a token comes from weights that the step has yet to make.
    """
    lags_C = np.int32(step - 1) - token_versions(weight_spans, num_tokens)
    if num_tokens and lags_C.min() < 0:
        raise ValueError(
            f"step {step} trains version {step - 1}, but a token was sampled by version "
            f"{step - 1 - int(lags_C.min())}: no token can be newer than the weights it trains"
        )
    return lags_C


def live_mask(weight_spans: Sequence[WeightSpan], num_tokens: int, *, step: int, max_lag: int) -> BoolArray:
    """[C] True on the tokens that may still be trained at a step."""
    return token_lags(weight_spans, num_tokens, step=step) <= max_lag


def deadline_step(version: int, max_lag: int) -> int:
    """Last step at which a token of this version is live: the largest n with n - 1 - version <= max_lag."""
    return version + max_lag + 1


def group_deadline(versions: Iterable[int], *, step: int, max_lag: int) -> int | None:
    """Deadline of a group at a step: the last step at which its oldest live token is live.

    Args:
        versions: weight versions that sampled tokens of the group, in any order.
        step: the next step to be reserved.
        max_lag: oldest lag that is trained.

    Returns None when no token is live any more: the group is `dropped_stale`.
    """
    deadlines = [deadline_step(version, max_lag) for version in versions]
    return min((deadline for deadline in deadlines if deadline >= step), default=None)
