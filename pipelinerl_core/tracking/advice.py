"""Who waits for whom, and what to set: the bottleneck of a run, from its idle fractions."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pipelinerl_core.records import Commit

Bottleneck = Literal["trainer", "engine", "window", "balanced"]

# A side that waits for less than this share of the time is busy.
_BUSY = 0.15
# Mean pause between decode steps from which an engine counts as held back by its pace.
_PACED_SECONDS = 0.001


def mean_delay_seconds(commits: Sequence[Commit]) -> float:
    """Mean pause that the actors put between two decode steps to keep the trainer's pace."""
    delays = [
        sample.counters.get("step_delay_seconds", 0.0) for commit in commits for sample in commit.actors.values()
    ]
    return sum(delays) / len(delays) if delays else 0.0


def bottleneck(trainer_idle: float, actor_idle: float, delay_seconds: float) -> Bottleneck:
    """The side that nobody has to wait for is the one to make faster.

    trainer_idle: share of the time the trainer waited for groups; actor_idle: share of the slots that stood empty.
    """
    if trainer_idle > _BUSY:
        return "window" if actor_idle > _BUSY else "engine"
    return "trainer" if actor_idle > _BUSY or delay_seconds > _PACED_SECONDS else "balanced"


def advice(
    trainer_idle: float | None, actor_idle: float | None, delay_seconds: float, config: Mapping[str, Any]
) -> dict[str, str | None]:
    """{"bottleneck", "advice"} for report.json; None where the run was too short to tell."""
    if trainer_idle is None or actor_idle is None:
        return {"bottleneck": None, "advice": None}
    kind = bottleneck(trainer_idle, actor_idle, delay_seconds)
    waits = f"the trainer waited {trainer_idle:.0%} of the time, {actor_idle:.0%} of the slots stood empty"
    engine, schedule = config.get("engine", {}), config.get("schedule", {})
    texts: dict[Bottleneck, str] = {
        "trainer": f"The trainer is the bottleneck: {waits}, and engines paused {delay_seconds * 1e3:.1f} ms a token "
        "to keep its pace. More actors give nothing; a faster trainer does.",
        "engine": f"Generation is the bottleneck: {waits}. Set placement.actors higher, or engine.concurrency "
        f"(now {engine.get('concurrency', '?')}) where cores are free.",
        "window": f"The admission window is the bottleneck: {waits}. Set schedule.max_lag higher (now "
        f"{schedule.get('max_lag', '?')}), or engine.concurrency lower (now {engine.get('concurrency', '?')}).",
        "balanced": f"Trainer and engines keep each other busy: {waits}.",
    }
    if kind == "window" and not engine.get("pace", True):
        texts["window"] += " engine.pace=true also helps."
    return {"bottleneck": kind, "advice": texts[kind]}
