"""Preemptions of machines: a trace from a file or from rates, and the goodput of a run with them."""

import csv
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.planning.prediction import MIN_STEPS, START_SHARE, Prediction, Source, predict
from pipelinerl_core.planning.simulator import Preemption, simulate

_START_STEPS = 10  # most steps at the start that a goodput leaves out
_OTHERS = ("trainer", "hub")
_TIMES = ("seconds", "away_seconds", "notice_seconds")


def read_trace(text: str, config: RunConfig, seconds: float) -> list[Preemption]:
    """Preemptions of a CSV file, or made ones of the first `seconds` at rates such as `actors=3600,away=300`.

    Rates: mean seconds that a machine of actors, trainer or hub lives, exponentially distributed by the seed of the
    configuration; away (300) and notice (0) seconds. Raises ConfigError.
    """
    actors = [f"actor-{index}" for index in range(config.placement.actors)]
    try:
        made = _made(text, actors, config.seed, seconds) if "=" in text else None
        rows = made or csv.DictReader(Path(text).read_text(encoding="utf-8").splitlines())
        trace = [Preemption(role=row["role"], **{key: float(row[key]) for key in _TIMES}) for row in rows]
        times = [getattr(event, key) for event in trace for key in _TIMES]
        if not all(0 <= time < math.inf for time in times) or {event.role for event in trace} - {*_OTHERS, *actors}:
            raise ValueError
    except OSError as error:
        raise ConfigError(f"--preemptions {text}: {error.strerror}. Give a CSV file or rates") from None
    except (KeyError, ValueError, TypeError, csv.Error):
        raise ConfigError(
            f"--preemptions {text}: give a CSV file of role,{','.join(_TIMES)} with times of 0 or more and roles "
            f"{', '.join(_OTHERS)}, actor-0 to {actors[-1]}; or rates above 0, such as actors=3600,hub=9e4,away=300"
        ) from None
    for before, after in itertools.pairwise(sorted(trace, key=lambda event: (event.role, event.seconds))):
        if before.role == after.role and after.seconds < before.seconds + before.away_seconds:
            raise ConfigError(
                f"--preemptions {text}: {after.role} goes at {after.seconds:g} s, but it has gone at "
                f"{before.seconds:g} s for {before.away_seconds:g} s"
            )
    return trace


def _made(text: str, actors: Sequence[str], seed: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Rows at rates. Raises ValueError."""
    rates = {key: float(value) for key, _, value in (part.partition("=") for part in text.split(","))}
    away, notice = rates.pop("away", 300.0), rates.pop("notice", 0.0)
    if not min(rates.values(), default=0.0) > 0 or not min(away, notice) >= 0 or rates.keys() - {*_OTHERS, "actors"}:
        raise ValueError
    random = np.random.default_rng(seed)
    for key, mean in rates.items():
        for role in actors if key == "actors" else [key]:
            at = random.exponential(mean)
            while at < seconds:
                yield {"role": role, "seconds": at, "away_seconds": away, "notice_seconds": notice}
                at += away + random.exponential(mean)


def goodput(
    steps: Sequence[float], trace: Sequence[Preemption], config: RunConfig, undisturbed: Prediction
) -> dict[str, float]:
    """Steps per second of a run with preemptions, and what its machines allow, without the first steps.

    steps: ends of the optimizer steps, seconds since the start of the run. undisturbed: the same run without
    preemptions. Its rate times the share of the time in which the machines of the bottleneck were there is possible,
    and no more than the other machines allow, which have idle time without preemptions. Raises ConfigError.
    """
    skip = max(1, min(_START_STEPS, int(START_SHARE * len(steps))))
    if len(steps) < MIN_STEPS:
        raise ConfigError(f"{len(steps)} steps are too few for a goodput, at least {MIN_STEPS} are needed")
    start, end = steps[skip - 1], steps[-1]
    num, away = Counter[str](), dict.fromkeys(("actor", "trainer", "hub"), 0.0)
    for event in trace:
        role = event.role.partition("-")[0]
        num[role] += start <= event.seconds < end
        away[role] += max(0.0, min(end, event.seconds + event.away_seconds) - max(start, event.seconds))
    actors = 1 - away["actor"] / (config.placement.actors * (end - start))
    trainer = 1 - away["trainer"] / (end - start)
    if undisturbed.bottleneck == "generation":
        share = min(actors, trainer / max(1e-9, 1 - undisturbed.trainer_idle))
    elif undisturbed.bottleneck == "training":
        share = min(trainer, actors / max(1e-9, undisturbed.busy_slots))
    else:
        share = min(actors, trainer)
    rate, possible = (len(steps) - skip) / (end - start), undisturbed.steps_per_second * share
    return {f"{role}_preemptions": num[role] for role in away} | {
        "actors_there": actors, "trainer_there": trainer, "steps_per_second": rate,
        "possible_steps_per_second": possible, "goodput": rate / possible,
    }  # fmt: skip


def predict_goodput(source: Source, config: RunConfig, preemptions: str, start_seconds: float) -> dict[str, float]:
    """`goodput` of a simulation with preemptions, a CSV file or rates (`read_trace`). Raises ConfigError."""
    speeds, work, prediction = source.speeds_of(config), source.work_of(config), predict(source, config)
    steps = [step.at for step in simulate(config, speeds, work).steps]
    rate = goodput(steps, (), config, prediction)["steps_per_second"]  # of as many steps
    trace = read_trace(preemptions, config, 4 * steps[-1])  # longer than the run
    work = replace(work, preemptions=tuple(trace), start_seconds=start_seconds)
    steps = [step.at for step in simulate(config, speeds, work).steps]
    return goodput(steps, trace, config, replace(prediction, steps_per_second=rate))
