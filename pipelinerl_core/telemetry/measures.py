"""Counts and quantiles over weight versions and lags, shared by the step metrics and the report.

Shapes: C = completion tokens of a rollout, L = largest lag + 1.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from pipelinerl_core.errors import StoreError
from pipelinerl_core.types import BoolArray, WeightSpan

Int64Array = NDArray[np.int64]
_Z = 1.959964
"""97.5th percentile of the normal distribution."""


def tokens_by_version(spans: Sequence[WeightSpan], mask: BoolArray) -> dict[int, int]:
    """Tokens with mask [C] True per weight version: (7, 0, 3), (8, 3, 5) and [T, T, F, T, T] give {7: 2, 8: 2}."""
    counts: dict[int, int] = {}
    for version, start, end in spans:
        num = int(np.count_nonzero(mask[start:end]))
        if num:
            counts[version] = counts.get(version, 0) + num
    return counts


def lag_counts(step: int, tokens: Iterable[Mapping[int, int]]) -> Int64Array:
    """Tokens per lag [L], from tokens per version of each rollout of a step: lag = step - 1 - version."""
    counts: dict[int, int] = {}
    for by_version in tokens:
        for version, num in by_version.items():
            counts[step - 1 - version] = counts.get(step - 1 - version, 0) + num
    if counts and min(counts) < 0:
        raise StoreError(
            f"step {step} holds tokens of weight version {step - 1 - min(counts)}: a step trains tokens of versions "
            f"up to {step - 1} only. The batch or its step number is wrong; run `pipelinerl audit`"
        )
    total_L = np.zeros(max(counts, default=-1) + 1, dtype=np.int64)
    for lag, num in counts.items():
        total_L[lag] = num
    return total_L


def add_counts(left_L: Int64Array, right_L: Int64Array) -> Int64Array:
    """Sum of two histograms that may differ in length."""
    if len(left_L) < len(right_L):
        left_L, right_L = right_L, left_L
    total_L = left_L.copy()
    total_L[: len(right_L)] += right_L
    return total_L


def mean_of_counts(counts_L: Int64Array) -> float:
    """Mean of a histogram over 0, 1, 2, ...; 0 when it is empty."""
    total = int(counts_L.sum())
    return float(np.arange(len(counts_L)) @ counts_L) / total if total else 0.0


def quantile_of_counts(counts_L: Int64Array, share: float) -> int:
    """Smallest value at or below which `share` of a histogram over 0, 1, 2, ... lies; 0 when it is empty."""
    total = int(counts_L.sum())
    if not total:
        return 0
    # Integers up to a rounding error: 0.99 of 100 tokens is 99 tokens, not 99.00000000000001.
    return int(np.searchsorted(np.cumsum(counts_L), share * total - 1e-9))


def max_of_counts(counts_L: Int64Array) -> int:
    """Largest value with a count above zero; 0 when it is empty."""
    used = np.flatnonzero(counts_L)
    return int(used[-1]) if len(used) else 0


def num_versions(spans: Sequence[WeightSpan]) -> int:
    """Distinct weight versions that sampled a completion."""
    return len({span.version for span in spans})


def confidence_interval(values_N: NDArray[np.float64]) -> tuple[float, float]:
    """95 % confidence interval of the mean of N >= 1 independent values.

    Values in [0, 1]: the score interval (Wilson, JASA 1927) with the sample size at which a share has the variance of
    this mean; for values 0 and 1 that is N. Other values: the normal approximation.
    """
    num, mean = len(values_N), float(values_N.mean())
    variance = float(values_N.var(ddof=1)) / num if num > 1 else 0.0
    if values_N.min() < 0 or values_N.max() > 1:
        return mean - _Z * variance**0.5, mean + _Z * variance**0.5
    size = max(num, mean * (1 - mean) / variance) if variance else num
    shrink = 1 / (1 + _Z**2 / size)
    centre = (mean + _Z**2 / (2 * size)) * shrink
    half = _Z * shrink * (mean * (1 - mean) / size + _Z**2 / (4 * size**2)) ** 0.5
    return max(0.0, centre - half), min(1.0, centre + half)


def percentile(values: Sequence[float] | NDArray[np.float64] | Int64Array, percent: float) -> float | None:
    """Percentile with linear interpolation; None without values."""
    return float(np.percentile(np.asarray(values, dtype=np.float64), percent)) if len(values) else None
