"""Emulated accelerators: real roles, data and learning, at the speed of configured hardware.

    decode step of h sequences on I accelerators    at least token_seconds * s / U(s),  s = ceil(h / I)
    optimizer step of K tokens on T accelerators    at least train_token_seconds * K / T
    U(s) = min(1, s / saturation)                   share of an accelerator that s sequences use

This is the throughput model of the PipelineRL paper (arXiv:2509.19128, appendix A). With schedule.kind=pipeline, the
accelerators are divided and both parts work all the time: I = generators, T = accelerators - generators. With other
schedules, generation and training take turns: I = T = accelerators. The actors of a run have equal shares of I.

If the real work was faster, the emulation waits. If the real work was slower, the excess is counted as overrun:
figures of a run with much overrun describe this machine, not the emulated accelerators.
"""

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from pipelinerl_core.config import RunConfig
from pipelinerl_core.interfaces import Learner
from pipelinerl_core.types import TrainingRow

logger = logging.getLogger(__name__)

_WARN_EVERY_SECONDS = 60.0
# Less overrun than this share of the emulated time is noise of the operating system.
_NOISE_SHARE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedSpeeds:
    """Minimum times of the work of one actor and of the trainer."""

    generators: float
    """Accelerators of one actor: an equal share of all that generate."""
    trainers: int
    """Accelerators of the trainer."""
    token_seconds: float
    saturation: int
    train_token_seconds: float

    @classmethod
    def of(cls, config: RunConfig) -> "EmulatedSpeeds":
        """The speeds of a configuration with emulation.accelerators > 0."""
        emulation = config.emulation
        takes_turns = config.takes_turns
        generators = emulation.accelerators if takes_turns else emulation.generators
        return cls(
            generators=generators / config.placement.actors,
            trainers=emulation.accelerators if takes_turns else emulation.accelerators - emulation.generators,
            token_seconds=emulation.token_seconds,
            saturation=emulation.saturation,
            train_token_seconds=emulation.train_token_seconds,
        )

    def decode_seconds(self, num_running: int) -> float:
        """Minimum time of a decode step with this many running sequences; s / U(s) = max(s, saturation)."""
        return self.token_seconds * max(math.ceil(num_running / self.generators), self.saturation)

    def train_seconds(self, num_tokens: int) -> float:
        """Minimum time of an optimizer step on this many tokens, prompt tokens included."""
        return self.train_token_seconds * num_tokens / self.trainers

    def __str__(self) -> str:
        return (
            f"an actor on {self.generators:g} accelerators, the trainer on {self.trainers}; "
            f"{self.token_seconds:g} s per sampled token, full from {self.saturation} sequences on; "
            f"{self.train_token_seconds:g} s per trained token"
        )


class Overrun:
    """Time that real work took beyond the emulated time."""

    def __init__(self, work: str) -> None:
        self.seconds = 0.0
        """Since the start."""
        self._work = work
        self._recent_late = 0.0
        self._recent_emulated = 0.0
        self._warned_at = time.monotonic()

    def add(self, *, late_seconds: float, emulated_seconds: float) -> None:
        """Count one piece of work that should have taken `emulated_seconds`."""
        self.seconds += late_seconds
        self._recent_late += late_seconds
        self._recent_emulated += emulated_seconds
        if time.monotonic() - self._warned_at < _WARN_EVERY_SECONDS:
            return
        share = self._recent_late / self._recent_emulated if self._recent_emulated else 0.0
        if share > _NOISE_SHARE:
            logger.warning("emulation: real %s took %.0f %% longer than emulated", self._work, 100 * share)
        self._recent_late = self._recent_emulated = 0.0
        self._warned_at = time.monotonic()


class EmulatedClock:
    """The StepClock of an actor on emulated accelerators.

    Steps are due at absolute times: after a sleep that ended late, the next sleeps are shorter, so that the mean step
    is exact. A delay of more than one step is counted as overrun and not caught up.
    """

    def __init__(self, speeds: EmulatedSpeeds) -> None:
        self._speeds = speeds
        self._overrun = Overrun("decoding")
        self._due = time.perf_counter()

    @property
    def overrun_seconds(self) -> float:
        """Time that decode steps took beyond the emulated time."""
        return self._overrun.seconds

    def start(self) -> None:
        self._due = time.perf_counter()

    def rest_seconds(self, num_running: int, delay_seconds: float) -> float:
        emulated_seconds = self._speeds.decode_seconds(num_running)
        now = time.perf_counter()
        self._due += emulated_seconds
        late_seconds = max(0.0, now - self._due - emulated_seconds)
        self._overrun.add(late_seconds=late_seconds, emulated_seconds=emulated_seconds)
        self._due += late_seconds + delay_seconds
        return max(0.0, self._due - now)

    def extend(self, seconds: float) -> None:
        self._due += seconds


class EmulatedLearner:
    """A Learner whose optimizer steps last as long as on emulated accelerators; all else is the wrapped learner's."""

    def __init__(self, learner: Learner, speeds: EmulatedSpeeds) -> None:
        self._learner = learner
        self._speeds = speeds
        self._overrun = Overrun("training")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)

    def step(self, rows: Sequence[TrainingRow]) -> dict[str, float]:
        """See `interfaces.Learner`; time/compute_seconds includes the wait."""
        began = time.perf_counter()
        metrics = self._learner.step(rows)
        emulated_seconds = self._speeds.train_seconds(int(metrics["train/tokens"]))
        left_seconds = began + emulated_seconds - time.perf_counter()
        self._overrun.add(late_seconds=max(0.0, -left_seconds), emulated_seconds=emulated_seconds)
        time.sleep(max(0.0, left_seconds))
        return metrics | {"time/compute_seconds": time.perf_counter() - began}


def emulated_clock(config: RunConfig) -> EmulatedClock | None:
    """The clock of an actor; None without emulation."""
    if not config.emulation.accelerators:
        return None
    speeds = EmulatedSpeeds.of(config)
    logger.info("speeds are emulated: %s", speeds)
    return EmulatedClock(speeds)


def emulated_learner(learner: Learner, config: RunConfig) -> Learner:
    """The learner of the trainer, at emulated speed if the configuration emulates accelerators."""
    if not config.emulation.accelerators:
        return learner
    speeds = EmulatedSpeeds.of(config)
    logger.info("speeds are emulated: %s", speeds)
    return cast(Learner, EmulatedLearner(learner, speeds))
