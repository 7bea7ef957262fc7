"""Prefect events for conditions that need a user: the reward of a run has collapsed, a run makes no progress, an
actor samples from other weights than its tokens name, or a query of the user has an answer."""

import logging
import math
import statistics
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from prefect.events import emit_event

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.report.actor_alarms import alarm_lines
from pipelinerl_core.report.query.database import Database, TooSlow
from pipelinerl_core.run.records import Commit
from pipelinerl_core.telemetry.parts import parts_of, untrained_parts

logger = logging.getLogger(__name__)

REWARD_COLLAPSED = "pipelinerl.reward.collapsed"
PART_FAILED = "pipelinerl.part.failed"
RUN_STALLED = "pipelinerl.run.stalled"
ACTOR_MISMATCH = "pipelinerl.actor.mismatch"
QUERY_ANSWERED = "pipelinerl.query.answered"
QUERY_SECONDS = 5.0
"""Longest duration of tracking.alarm_query, in which this process watches nothing else."""
QUERY_SHARE = 0.05
"""Largest share of the time that the query takes."""
WINDOW_STEPS = 20
"""Window of the moving mean of the reward, in steps."""
NOISE = 4.0
"""Smallest fall that counts, in standard errors of a mean over WINDOW_STEPS steps."""
_MAX_CHARS = 500


def reward_fall(rewards: list[float]) -> tuple[float, float] | None:
    """(best, newest) moving mean of the reward if the reward has collapsed, else None.

    The reward has collapsed if the fall from the best to the newest mean is larger than the gain from the first to
    the best mean, and larger than the noise. The rule is independent of the scale of the rewards.
    """
    if len(rewards) < 2 * WINDOW_STEPS:
        return None
    means = np.lib.stride_tricks.sliding_window_view(rewards, WINDOW_STEPS).mean(axis=1)
    first, best, newest = float(means[0]), float(means.max()), float(means[-1])
    noise = NOISE * statistics.pstdev(rewards[:WINDOW_STEPS]) / WINDOW_STEPS**0.5
    return (best, newest) if best - newest > max(noise, best - first) else None


class Alarms:
    """Emits each event at most once for a run; events about an actor, once for each actor."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._emitted: set[tuple[str, str]] = set()
        self._actors_through = -1
        self._is_silent = False
        self._rewards: dict[int, float | None] = {}
        self._next_query_at = 0.0

    def skip(self, config: Mapping[str, Any], commits: Mapping[int, Commit], last: Commit | None) -> None:
        """Emit no event for what an earlier start of the run has told: what holds already at this start."""
        self._is_silent = True
        self._actors_through = max(commits, default=0) - 1  # alarms hold as of the newest commit
        try:
            self.check_parts(config, last)
            self.check(commits)
        finally:  # alarms of this start are not lost if the old commits cannot be read
            self._is_silent = False

    def check_parts(self, config: Mapping[str, Any], last: Commit | None) -> None:
        """Emit an event for the first part of the mixture of which no group is trained.

        config: the stored configuration; last: the newest commit.
        """
        for message in untrained_parts(parts_of(config, last.metrics if last else {})).values():
            self.emit(PART_FAILED, message)

    def check(self, commits: Mapping[int, Commit]) -> None:
        """Emit an event if the reward has collapsed, and for each actor under alarm."""
        self._check_actors(commits)
        if (REWARD_COLLAPSED, "") in self._emitted:
            return
        for step in commits:
            if step not in self._rewards:
                self._rewards[step] = commits[step].metrics.get("reward/mean")
        fall = reward_fall([reward for step in commits if (reward := self._rewards[step]) is not None])
        if fall is not None:
            best, newest = fall
            self.emit(
                REWARD_COLLAPSED, f"mean reward of the last {WINDOW_STEPS} steps: {newest:.3f}; best mean: {best:.3f}"
            )

    def check_query(self, store: ObjectStore, statement: str) -> None:
        """Emit an event if a statement in SQL (tracking.alarm_query; may be empty) has a row; again after a resume.

        Raises ConfigError for an error in the statement and after QUERY_SECONDS, StoreError.
        """
        if not statement or (QUERY_ANSWERED, "") in self._emitted or time.monotonic() < self._next_query_at:
            return
        begun = time.monotonic()
        try:
            with Database([store]) as database:
                row = database.first(statement, QUERY_SECONDS)
        except TooSlow:
            raise
        except ConfigError:
            self._next_query_at = math.inf  # the next try would fail, too
            raise
        finally:
            now = time.monotonic()
            self._next_query_at = max(self._next_query_at, now + (now - begun) / QUERY_SHARE)
        if row is not None:
            self.emit(QUERY_ANSWERED, ", ".join(f"{name}: {value}" for name, value in row.items())[:_MAX_CHARS])

    def _check_actors(self, commits: Mapping[int, Commit]) -> None:
        new = [step for step in commits if step > self._actors_through]
        self._actors_through = max(new, default=self._actors_through)
        for actor, line in alarm_lines(commits[step] for step in new).items():
            self.emit(ACTOR_MISMATCH, line, about=actor)

    def emit(self, event: str, message: str, about: str = "") -> None:
        """Emit an event and log a warning, unless the event was emitted before about the same thing."""
        if (event, about) in self._emitted:
            return
        self._emitted.add((event, about))
        if self._is_silent:
            return
        logger.warning("%s: %s", event, message)
        emit_event(
            event=event,
            resource={"prefect.resource.id": f"pipelinerl.run.{self._run_id}", "prefect.resource.name": self._run_id},
            payload={"message": message},
        )
