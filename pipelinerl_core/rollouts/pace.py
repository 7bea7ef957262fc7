"""Slow an engine down to the speed at which the trainer consumes groups.

When the trainer is the bottleneck, an engine at full speed only fills the queue: finished groups age there until the
admission window closes and the slots run empty. A paced engine keeps every slot in use, finishes groups just when
they are needed, and its sequences take new weights meanwhile: the same samples per second with less lag, and cores
left to others. See docs/adr/0005.
"""

import math

# Target number of ready groups, in steps of the trainer. The number is a saw-tooth of height one; centred here, it is
# hardly ever zero when the trainer requests groups.
_TARGET_STEPS = 0.75
# The controller is proportional-integral, in the logarithm of the time per decode step. Per step's worth of surplus
# the time grows by e^2 at once, and every second adds a little more as long as the surplus lasts. The surplus in the
# integral is capped, and a shortage counts twice: a shortage cannot exceed the target, so the integral that a full
# queue builds up in seconds (while the trainer starts) would take a minute to decay, during which the trainer waits
# for a paced engine. In simulations with engines of one to eight times the trainer's speed, the trainer waits for
# under 3 % of the time.
_PROPORTIONAL = 2.0
_RISE_PER_SECOND = 0.1
_FALL_PER_SECOND = 0.2
_LARGEST_SURPLUS_STEPS = 0.5
# Pause that doubles the time of a typical decode step of a small model; larger models settle at larger exponents.
_UNIT_SECONDS = 0.002
# exp(4) * 2 ms = 0.1 s per token: sequences must still make progress, because leases expire.
_LARGEST_EXPONENT = 4.0


class Pacer:
    """Turns the number of ready groups into a pause between decode steps."""

    def __init__(self, groups_per_step: int) -> None:
        self._groups_per_step = groups_per_step
        self._integral = 0.0
        self.delay_seconds = 0.0
        """Pause after each decode step."""

    def update(self, ready_groups: int, seconds: float) -> float:
        """Process one observation, `seconds` after the previous one; returns the new delay."""
        surplus_steps = ready_groups / self._groups_per_step - _TARGET_STEPS
        lasting = min(surplus_steps, _LARGEST_SURPLUS_STEPS)
        gain = _RISE_PER_SECOND if lasting > 0 else _FALL_PER_SECOND
        self._integral = _clamp(self._integral + gain * lasting * seconds)
        exponent = _clamp(self._integral + _PROPORTIONAL * surplus_steps)
        self.delay_seconds = _UNIT_SECONDS * (math.exp(exponent) - 1.0)
        return self.delay_seconds


def _clamp(exponent: float) -> float:
    return min(_LARGEST_EXPONENT, max(0.0, exponent))
