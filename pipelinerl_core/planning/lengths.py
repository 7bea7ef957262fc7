"""Distributions of completion lengths, in tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipelinerl_core.errors import ConfigError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """A distribution of the lengths 1, 2, ..., L."""

    shares: FloatArray
    """Share of the completions with length 1, 2, ..., L; the last share is positive."""

    @classmethod
    def uniform(cls, longest: int) -> "Lengths":
        """Every length from 1 to `longest` is equally frequent."""
        if longest < 1:
            raise ConfigError(f"longest completion {longest}: a completion has at least 1 token. Set 1 or more")
        return cls(np.full(longest, 1 / longest))

    @classmethod
    def of(cls, lengths: Sequence[int]) -> "Lengths":
        """The distribution of measured lengths."""
        if not len(lengths) or min(lengths) < 1:
            raise ConfigError("lengths of completions: none, or one below 1. Give lengths of 1 token or more")
        counts = np.bincount(np.asarray(lengths, dtype=np.int64))[1:]
        return cls(counts / counts.sum())

    @classmethod
    def around(cls, mean: float, longest: int) -> "Lengths":
        """Uniform lengths with this mean, cut at `longest`."""
        return cls.uniform(max(1, round(2 * mean) - 1)).scaled(1.0, longest)

    def scaled(self, factor: float, longest: int) -> "Lengths":
        """All lengths times `factor`; lengths above `longest` become `longest`."""
        if factor <= 0:
            raise ConfigError(f"lengths times {factor:g}: the factor must be above 0")
        lengths = np.clip(np.rint(factor * np.arange(1, self.longest + 1)), 1, longest).astype(np.int64)
        shares = np.bincount(lengths, weights=self.shares)[1:].astype(np.float64)
        return Lengths(shares[: int(lengths[self.shares > 0].max())])

    @property
    def longest(self) -> int:
        """L."""
        return len(self.shares)

    @property
    def mean(self) -> float:
        """The mean length."""
        return float(self.running.sum())

    @property
    def running(self) -> FloatArray:
        """[L] share of the completions that sample token 1, 2, ..., L: the completions of at least this length."""
        return np.cumsum(self.shares[::-1])[::-1]

    def spread(self, size: int) -> float:
        """Mean of the longest of `size` lengths over the mean length."""
        shorter = np.concatenate([[0.0], np.cumsum(self.shares)[:-1]])
        return float((1 - shorter**size).sum()) / self.mean

    def draw(self, random: np.random.Generator, num: int) -> IntArray:
        """[num] random lengths."""
        drawn = np.searchsorted(np.cumsum(self.shares), random.random(num), side="right") + 1
        return np.minimum(drawn, self.longest)  # the last cumulative share may be below 1 by rounding
