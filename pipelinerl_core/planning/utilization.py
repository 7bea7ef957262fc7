"""The utilization of an accelerator as a function of the sequences that it decodes at once."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.planning.lengths import FloatArray


@dataclass(frozen=True, slots=True)
class UtilizationCurve:
    """U(h), the share of the peak FLOPs at h sequences: linear from (0, 0) through the points, then constant.

    With one point (saturation, 1) this is U(h) = min(1, h / saturation), the curve of emulated accelerators.
    """

    points: tuple[tuple[float, float], ...]
    """(h, U(h)) with increasing h and increasing U."""

    def __post_init__(self) -> None:
        """Raises ConfigError if the points are not increasing, or if a utilization exceeds 1."""
        pairs = [(0.0, 0.0), *self.points]
        is_increasing = all(a < b and u < v for (a, u), (b, v) in pairwise(pairs))
        if not self.points or not is_increasing or pairs[-1][1] > 1:
            raise ConfigError(
                f"utilization curve {self.points}: sequences and utilization must increase from point to point, and "
                "utilization is at most 1. Correct the points"
            )

    @property
    def saturation(self) -> float:
        """Sequences from which on the utilization is constant."""
        return self.points[-1][0]

    def at(self, sequences: FloatArray) -> FloatArray:
        """U(h) for each h."""
        known, utilization = zip((0.0, 0.0), *self.points, strict=True)
        interpolated: FloatArray = np.interp(sequences, known, utilization)
        return interpolated

    def step_flashes(self, sequences: FloatArray) -> FloatArray:
        """Flashes of one decode step with h > 0 sequences on one accelerator: h / U(h)."""
        return np.asarray(sequences / self.at(sequences), dtype=np.float64)
