"""Distributions of completion lengths, in tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pipelinerl_core.errors import ConfigError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
_MOST_GROUPS = 4096
"""Measured groups that are kept."""
_NEAR = 64
"""A measured group stands for this many groups before and after."""


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """A distribution of the lengths 1, 2, ..., L."""

    shares: FloatArray
    """Share of the completions with length 1, 2, ..., L; the last share is positive."""
    groups: IntArray | None = None
    """[G, S] lengths of measured groups: completions of one prompt are alike. None: lengths are independent."""
    is_course: bool = False
    """Whether `groups` are the first groups of a run, in order: lengths change while a model learns."""

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
    def of_groups(cls, groups: Sequence[Sequence[int]]) -> "Lengths":
        """The distribution of the groups of a run, in the order of training; `shares` has their newer half.

        Groups that have fewer completions than most are left out.
        """
        known = cls.of([length for group in groups[len(groups) // 2 :] for length in group])
        size = int(np.median([len(group) for group in groups]))
        whole = [group for group in groups if len(group) == size]
        kept = whole[:: 1 + len(whole) // _MOST_GROUPS]
        return replace(known, groups=np.array(kept, dtype=np.int64), is_course=len(kept) == len(whole))

    @classmethod
    def around(cls, mean: float, longest: int) -> "Lengths":
        """Uniform lengths with this mean, cut at `longest`."""
        return cls.uniform(max(1, round(2 * mean) - 1)).scaled(1.0, longest)

    def scaled(self, factor: float, longest: int) -> "Lengths":
        """All lengths times `factor`; lengths above `longest` become `longest`."""
        if not 0 < factor < math.inf:
            raise ConfigError(f"lengths times {factor:g}: the factor must be a number above 0")

        def changed(lengths: IntArray) -> IntArray:
            scaled: IntArray = np.clip(np.rint(factor * lengths), 1, longest).astype(np.int64)
            return scaled

        lengths = changed(np.arange(1, self.longest + 1))
        shares = np.bincount(lengths, weights=self.shares)[1:].astype(np.float64)
        groups = None if self.groups is None else changed(self.groups)
        return replace(self, shares=shares[: int(lengths[self.shares > 0].max())], groups=groups)

    @property
    def longest(self) -> int:
        """L."""
        return len(self.shares)

    @property
    def mean(self) -> float:
        return float(self.running.sum())

    @property
    def running(self) -> FloatArray:
        """[L] share of the completions that sample token 1, 2, ..., L: the completions of at least this length."""
        return np.cumsum(self.shares[::-1])[::-1]

    def draw(self, random: np.random.Generator, num: int, size: int, first: int = 0) -> IntArray:
        """[num, size] random lengths of groups: measured groups if there are any, else independent lengths.

        first: number of the first of these groups in a run. With `is_course`, a group is drawn from measured groups
        of about the same number, and after the last from their newer half.
        """
        if self.groups is None:
            drawn = np.searchsorted(np.cumsum(self.shares), random.random((num, size)), side="right") + 1
            return np.minimum(drawn, self.longest)  # the last cumulative share may be below 1 by rounding
        num_known, known_size = self.groups.shape
        low, high = np.zeros(num, dtype=np.int64), np.full(num, num_known)
        if self.is_course:
            numbers = np.arange(first, first + num)
            low = np.clip(numbers - _NEAR, 0, num_known // 2)
            high = np.minimum(numbers + _NEAR, num_known)
        chosen = self.groups[random.integers(low, high)]
        if size == known_size:
            return chosen
        return np.take_along_axis(chosen, random.integers(known_size, size=(num, size)), axis=1)
