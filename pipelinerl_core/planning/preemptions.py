"""Preemptions of machines: a trace from a file or from rates, and the capacity that is left.

A trace is a CSV file with the header `seconds,role,away_seconds,notice_seconds` and a row for each preemption:

    seconds          when the machine of the role ends, seconds since the start of the run
    role             actor-<index>, trainer or hub
    away_seconds     until a machine is back; the role then starts
    notice_seconds   the role gets SIGTERM so many seconds before; 0: it is killed
"""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import ConfigError

_RATES = ("actors", "trainer", "hub", "away", "notice")


@dataclass(frozen=True, slots=True, order=True)
class Preemption:
    """A machine ends, and a machine of the same role is back later."""

    at: float
    """Seconds since the start of the run."""
    role: str
    """actor-<index>, trainer or hub."""
    away_seconds: float
    notice_seconds: float = 0.0


def read_trace(path: str, config: RunConfig) -> tuple[Preemption, ...]:
    """The preemptions of a file, in order of time. Raises ConfigError with the line that is wrong."""
    roles = {"trainer", "hub", *(f"actor-{index}" for index in range(config.placement.actors))}
    trace = []
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            for number, row in enumerate(csv.DictReader(file), 2):
                numbers = [float(row[f"{name}seconds"] or "") for name in ("", "away_", "notice_")]
                if row["role"] not in roles or not all(0 <= value < math.inf for value in numbers):
                    raise ConfigError(
                        f"--preemptions {path}, line {number}: the role must be trainer, hub or actor-0 to "
                        f"actor-{config.placement.actors - 1} (placement.actors), and the times 0 or more"
                    )
                trace.append(Preemption(numbers[0], row["role"], *numbers[1:]))
    except OSError as error:
        raise ConfigError(f"--preemptions {path}: {error.strerror}. Give a CSV file or rates") from None
    except (KeyError, ValueError, TypeError, csv.Error):
        raise ConfigError(
            f"--preemptions {path}: not a CSV file with numbers in seconds,role,away_seconds,notice_seconds"
        ) from None
    return tuple(sorted(trace))


def made_trace(rates: str, config: RunConfig, seconds: float) -> tuple[Preemption, ...]:
    """Preemptions of the first `seconds` at rates such as `actors=3600,trainer=14400,away=300,notice=120`.

    actors, trainer, hub: mean seconds that a machine of the role lives, exponentially distributed; a role that is
    left out is not preempted. The seed of the configuration decides the times. Raises ConfigError.
    """
    try:
        values = {key: float(value) for key, _, value in (part.partition("=") for part in rates.split(","))}
    except ValueError:
        values = {}
    lives = {key: value for key, value in values.items() if key in _RATES[:3]}
    if values.keys() - set(_RATES) or not lives or not min(lives.values()) > 0 or min(values.values()) < 0:
        raise ConfigError(
            f"--preemptions {rates}: give a CSV file, or the mean seconds between preemptions, for example "
            "actors=3600,trainer=14400,away=300,notice=120 (also hub=)"
        )
    random, trace = np.random.default_rng(config.seed), []
    away, notice = values.get("away", 300.0), values.get("notice", 0.0)
    actors = [f"actor-{index}" for index in range(config.placement.actors)]
    for key, mean in lives.items():
        for role in actors if key == "actors" else [key]:
            at = random.exponential(mean)
            while at < seconds:
                trace.append(Preemption(at, role, away, notice))
                at += away + random.exponential(mean)
    return tuple(sorted(trace))


def capacity(trace: Sequence[Preemption], actors: int, start: float, end: float) -> tuple[float, float]:
    """Shares of the time from `start` to `end` in which machines of (actors, trainer) were there."""
    away = {"actor": 0.0, "trainer": 0.0, "hub": 0.0}
    for event in trace:
        overlap = min(end, event.at + event.away_seconds) - max(start, event.at)
        away[event.role.partition("-")[0]] += max(0.0, overlap)
    return 1 - away["actor"] / (actors * (end - start)), 1 - away["trainer"] / (end - start)
