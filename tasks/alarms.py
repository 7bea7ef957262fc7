"""Events that people want to be woken for: a run's reward has collapsed, or it stands still."""

import logging
import statistics
from collections.abc import Mapping

from prefect.events import emit_event

from pipelinerl_core.run.records import Commit

logger = logging.getLogger(__name__)

REWARD_COLLAPSED = "pipelinerl.reward.collapsed"
RUN_STALLED = "pipelinerl.run.stalled"
WINDOW_STEPS = 20
"""Steps over which the reward is averaged."""
NOISE = 4.0
"""A fall is larger than so many standard errors of such a mean."""


def reward_fall(rewards: list[float]) -> tuple[float, float] | None:
    """(best, newest) mean reward over WINDOW_STEPS steps, if the newest has lost what was gained and more; else None.

    Gained: since the first steps, so that no scale of rewards has to be known.
    """
    if len(rewards) < 2 * WINDOW_STEPS:
        return None
    means = [statistics.fmean(rewards[i : i + WINDOW_STEPS]) for i in range(len(rewards) - WINDOW_STEPS + 1)]
    first, best, newest = means[0], max(means), means[-1]
    noise = NOISE * statistics.pstdev(rewards[:WINDOW_STEPS]) / WINDOW_STEPS**0.5
    return (best, newest) if best - newest > max(noise, best - first) else None


class Alarms:
    """Tells the Prefect server, once per run and cause."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._told: set[str] = set()

    def look(self, commits: Mapping[int, Commit]) -> None:
        """Emit an event if the reward has collapsed."""
        if REWARD_COLLAPSED in self._told:
            return
        rewards = [commit.metrics["reward/mean"] for commit in commits.values() if "reward/mean" in commit.metrics]
        fall = reward_fall(rewards)
        if fall is not None:
            best, newest = fall
            self.tell(
                REWARD_COLLAPSED, f"mean reward of the last {WINDOW_STEPS} steps {newest:.3f}, it was {best:.3f}"
            )

    def tell(self, event: str, message: str) -> None:
        """Emit an event, the first time."""
        if event in self._told:
            return
        self._told.add(event)
        logger.warning("%s: %s", event, message)
        emit_event(
            event=event,
            resource={"prefect.resource.id": f"pipelinerl.run.{self._run_id}", "prefect.resource.name": self._run_id},
            payload={"message": message},
        )
