"""The order of the parts of a mixture: earliest deadline first, with a window for each turn.

Part i has the share s_i = weight_i / sum of weights. Its turn j (0, 1, ...) may take the positions from
floor(j / s_i) to ceil((j + 1) / s_i) - 1. Of all parts whose next turn may take a position, the part whose window
ends first takes the position; of equals, the first part. After n positions the number of turns of part i lies between
floor(n s_i) and ceil(n s_i): the deviation from n s_i is below 1. Source: the quota property of schedules of fair
shares (Baruah, Cohen, Plaxton, Varvel: Proportionate progress, Algorithmica 1996).

Arithmetic is exact: weights are read as the decimal numbers that they were written as.
"""

import threading
from array import array
from collections.abc import Mapping
from fractions import Fraction
from math import gcd, lcm
from typing import NamedTuple


class Turn(NamedTuple):
    """A position of the mixture."""

    part: str
    number: int
    """Number of earlier positions of the same part."""


class Interleave:
    """The part at each position 0, 1, 2, ... A pure function of weights and position. Thread-safe."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        """weights: name of a part -> weight above 0; the order of the names breaks ties."""
        exact = [Fraction(str(weight)) for weight in weights.values()]
        scale = lcm(*(weight.denominator for weight in exact))
        whole = [int(weight * scale) for weight in exact]
        divisor = gcd(*whole)
        self._names = tuple(weights)
        self._weights = [weight // divisor for weight in whole]
        self._period = sum(self._weights)
        # Positions computed so far, at most one period: the order repeats, because all counts are then exact.
        self._parts = array("H")
        self._indices = array("q")
        self._counts = [0] * len(whole)
        self._lock = threading.Lock()

    def turn(self, position: int) -> Turn:
        """The part at a position, and its turn. The first call computes all positions before, a few us each."""
        period, offset = divmod(position, self._period)
        if offset >= len(self._parts):
            with self._lock:
                while len(self._parts) <= offset:
                    self._extend()
        part = self._parts[offset]
        return Turn(self._names[part], period * self._weights[part] + self._indices[offset])

    def _extend(self) -> None:
        """Compute the next position."""
        position, total = len(self._parts), self._period
        open_ = (
            (-(-(count + 1) * total // weight), part)
            for part, (count, weight) in enumerate(zip(self._counts, self._weights, strict=True))
            if count * total // weight <= position
        )
        _, part = min(open_)
        self._indices.append(self._counts[part])
        self._counts[part] += 1
        self._parts.append(part)  # last: a reader without the lock sees complete positions
