"""How fast an engine should decode: as fast as the trainer consumes, and no faster.

When the trainer is the bottleneck, an engine at full speed only fills the queue: finished groups age there until the
admission window closes and the slots run empty. A paced engine keeps every slot in use, finishes groups just when
they are needed, and its sequences take new weights meanwhile: the same samples per second with less lag, and cores
left to others. See docs/adr/0005.
"""

import math

# Ready groups that are aimed at, in steps of the trainer: their number is a saw-tooth of height one, which centred
# here hardly ever touches zero when the trainer asks.
_TARGET_STEPS = 0.75
# The controller is proportional-integral, in the logarithm of the time per decode step. Per step's worth of surplus
# the time grows by e^2 at once, and every second adds a little more as long as the surplus lasts. What is added up is
# capped above and counts twice below the target: shortage cannot be larger than the target, so what a full queue adds
# in seconds (while the trainer starts) would take a minute to go, with the trainer waiting for a paced engine. By
# simulation engines of one to eight times the trainer's speed make it wait for under 3 % of the time.
_PROPORTIONAL = 2.0
_RISE_PER_SECOND = 0.1
_FALL_PER_SECOND = 0.2
_LARGEST_SURPLUS_STEPS = 0.5
# Pause that doubles the time of a typical decode step of a small model; larger models settle at larger exponents.
_UNIT_SECONDS = 0.002
# exp(4) * 2 ms = 0.1 s a token: a sequence must still move, because leases and people's patience end.
_LARGEST_EXPONENT = 4.0


class Pacer:
    """Turns the number of ready groups into a pause between decode steps."""

    def __init__(self, groups_per_step: int) -> None:
        self._groups_per_step = groups_per_step
        self._integral = 0.0
        self.delay_seconds = 0.0
        """Pause after each decode step."""

    def update(self, ready_groups: int, seconds: float) -> float:
        """Take in one observation, `seconds` after the last; returns the new delay."""
        surplus_steps = ready_groups / self._groups_per_step - _TARGET_STEPS
        lasting = min(surplus_steps, _LARGEST_SURPLUS_STEPS)
        gain = _RISE_PER_SECOND if lasting > 0 else _FALL_PER_SECOND
        self._integral = _clamp(self._integral + gain * lasting * seconds)
        exponent = _clamp(self._integral + _PROPORTIONAL * surplus_steps)
        self.delay_seconds = _UNIT_SECONDS * (math.exp(exponent) - 1.0)
        return self.delay_seconds


def _clamp(exponent: float) -> float:
    return min(_LARGEST_EXPONENT, max(0.0, exponent))
