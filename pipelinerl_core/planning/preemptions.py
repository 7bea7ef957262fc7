"""Preemptions of machines: a trace from a file or from rates, and the goodput of a run with them."""

import csv
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.planning.prediction import MIN_STEPS, START_SHARE, Prediction, Source, predict
from pipelinerl_core.planning.simulator import Preemption, simulate

START_STEPS = 10
"""Most steps at the start that a goodput leaves out."""
_ROLES = ("actors", "trainer", "hub")
_LONGEST_RUN = 4.0
"""Rates make preemptions for so many times the length of the run without preemptions."""


def read_trace(path: str, config: RunConfig) -> list[Preemption]:
    """The preemptions of a CSV file. Raises ConfigError with the line that is wrong."""
    roles = {"trainer", "hub", *(f"actor-{index}" for index in range(config.placement.actors))}
    trace = []
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                at, away, notice = (float(row[f"{name}seconds"]) for name in ("", "away_", "notice_"))
                if row["role"] not in roles or not (min(at, away, notice) >= 0 and max(at, away, notice) < math.inf):
                    raise ValueError
                trace.append(Preemption(at, row["role"], away, notice))
    except OSError as error:
        raise ConfigError(f"--preemptions {path}: {error.strerror}. Give a CSV file or rates") from None
    except (KeyError, ValueError, TypeError, csv.Error):
        raise ConfigError(
            f"--preemptions {path}, row {len(trace) + 1}: give seconds,role,away_seconds,notice_seconds, times "
            f"of 0 or more and a role of trainer, hub, actor-0 to actor-{config.placement.actors - 1}"
        ) from None
    return trace


def made_trace(rates: str, config: RunConfig, seconds: float) -> list[Preemption]:
    """Preemptions of the first `seconds` at rates such as `actors=3600,trainer=14400,hub=9e4,away=300,notice=120`.

    actors, trainer, hub: mean seconds that a machine of the role lives, exponentially distributed; a role that is
    left out is not preempted. The seed of the configuration decides the times. Raises ConfigError.
    """
    values = {"away": 300.0, "notice": 0.0}
    try:
        values |= {key: float(value) for key, _, value in (part.partition("=") for part in rates.split(","))}
        lives = {key: values[key] for key in _ROLES if key in values}
        is_known = not values.keys() - {*_ROLES, "away", "notice"}
        if not (lives and is_known and min(lives.values()) > 0 and all(0 <= x < math.inf for x in values.values())):
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"--preemptions {rates}: give a CSV file, or mean seconds between preemptions of a machine, for example "
            "actors=3600,trainer=14400,hub=86400,away=300,notice=120"
        ) from None
    random, trace = np.random.default_rng(config.seed), []
    for key, mean in lives.items():
        for role in [f"actor-{index}" for index in range(config.placement.actors)] if key == "actors" else [key]:
            at = random.exponential(mean)
            while at < seconds:
                trace.append(Preemption(at, role, values["away"], values["notice"]))
                at += values["away"] + random.exponential(mean)
    return trace


def goodput(
    steps: Sequence[float], trace: Sequence[Preemption], config: RunConfig, undisturbed: Prediction
) -> dict[str, Any]:
    """Steps per second of a run with preemptions, and what its machines allow, without the first steps.

    steps: ends of the optimizer steps, seconds since the start of the run. undisturbed: the same run without
    preemptions. Its rate times the share of the time in which the machines of the bottleneck were there is possible;
    if the bottleneck is neither generation nor training, the smaller share counts. Raises ConfigError if the run has
    too few steps.
    """
    if len(steps) < MIN_STEPS:
        raise ConfigError(f"{len(steps)} steps are too few for a goodput, at least {MIN_STEPS} are needed")
    skip = max(1, min(START_STEPS, int(START_SHARE * len(steps))))
    start, end = steps[skip - 1], steps[-1]
    away: dict[str, float] = defaultdict(float)
    for event in trace:
        overlap = min(end, event.at + event.away_seconds) - max(start, event.at)
        away[event.role.partition("-")[0]] += max(0.0, overlap)
    generation = 1 - away["actor"] / (config.placement.actors * (end - start))
    training = 1 - away["trainer"] / (end - start)
    shares = {"generation": generation, "training": training}
    share = shares.get(undisturbed.bottleneck, min(shares.values()))
    rate = (len(steps) - skip) / (end - start)
    return {
        "preemptions": dict(Counter(event.role.partition("-")[0] for event in trace if start <= event.at < end)),
        "steps_per_second": rate,
        "generation_capacity": generation,
        "training_capacity": training,
        "possible_steps_per_second": undisturbed.steps_per_second * share,
        "goodput": rate / (undisturbed.steps_per_second * share),
    }


def predict_goodput(source: Source, config: RunConfig, preemptions: str, start_seconds: float) -> dict[str, Any]:
    """Simulate all steps of a configuration with preemptions, a CSV file or rates. Raises ConfigError.

    start_seconds: from the start of a process to its first request.
    """
    undisturbed = predict(source, config)
    if "=" in preemptions:
        trace = made_trace(preemptions, config, _LONGEST_RUN * config.trainer.steps / undisturbed.steps_per_second)
    else:
        trace = read_trace(preemptions, config)
    work = replace(source.work_of(config), preemptions=tuple(trace), start_seconds=start_seconds)
    run = simulate(config, source.speeds_of(config), work)
    return goodput([step.at for step in run.steps], trace, config, undisturbed)


def goodput_lines(result: Mapping[str, Any]) -> list[str]:
    """The figures as text."""
    events = ", ".join(f"{number} of {role}" for role, number in result["preemptions"].items()) or "none"
    return [
        f"with preemptions: {events}",
        f"{'machines there':<18}actors {result['generation_capacity']:.1%}, "
        f"trainer {result['training_capacity']:.1%}",
        f"{'steps per second':<18}{result['steps_per_second']:.3g} of {result['possible_steps_per_second']:.3g}",
        f"{'goodput':<18}{result['goodput']:.3f}",
    ]
