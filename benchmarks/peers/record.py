"""Records a reference trainer: weights of every k-th step, and points.json (benchmarks/peer_points.py).

The seconds of a point do not include the time of saving. `evaluate` adds the accuracy from the saved weights.
"""

import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from benchmarks import report
from benchmarks.peer_points import POINTS_FILE
from pipelinerl_core.comparison.analysis import has_reached
from pipelinerl_core.comparison.plan import MARGIN
from pipelinerl_core.config import RunConfig

logger = logging.getLogger(__name__)


class Recorder:
    """Records one reference trainer with one seed."""

    def __init__(
        self,
        name: str,
        config: RunConfig,
        out: Path,
        *,
        every: int,
        target: float,
        max_seconds: float,
        settings: Mapping[str, Any],
    ) -> None:
        self._out = out
        self._every = every
        self._level = target + MARGIN
        self._max_seconds = max_seconds
        self._num_steps = config.trainer.steps
        self._samples_per_step = config.trainer.groups_per_step * config.rollouts.group_size
        self._rewards: list[float] = []
        self._step_seconds: list[float] = []
        self._seconds = 0.0
        self._resumed_at = 0.0
        self._document: dict[str, Any] = {
            "name": name,
            "seed": config.seed,
            "target": target,
            "settings": dict(settings),
            "config": config.model_dump(mode="json"),
            "points": [],
        }
        out.mkdir(parents=True, exist_ok=True)

    def start(self, model: Any) -> None:
        """Store the initial weights and start the clock."""
        self._add_point(model, reward=None)
        self._resumed_at = time.perf_counter()

    def after_step(self, model: Any, reward: float) -> bool:
        """Record a step; `reward` is the mean over its rollouts. Returns whether the trainer should stop."""
        now = time.perf_counter()
        self._step_seconds.append(now - self._resumed_at)
        self._seconds += now - self._resumed_at
        self._rewards.append(reward)
        step = len(self._rewards)
        ended = (
            step >= self._num_steps or self._seconds >= self._max_seconds or has_reached(self._rewards, self._level)
        )
        logger.info("step %d: reward %.3f, %.2f s", step, reward, self._step_seconds[-1])
        if ended or step % self._every == 0:
            self._add_point(model, reward)
        self._resumed_at = time.perf_counter()
        return ended

    def _add_point(self, model: Any, reward: float | None) -> None:
        step = len(self._rewards)
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        save_file(weights, self._out / weights_file(step))
        point = {"step": step, "seconds": self._seconds, "samples": step * self._samples_per_step, "reward": reward}
        self._document["points"].append(point)
        self._document["rewards"] = self._rewards
        self._document["step_seconds"] = self._step_seconds
        write_points(self._out, self._document)


def weights_file(step: int) -> str:
    """Name of the file with the weights after a step."""
    return f"{step:06}.safetensors"


def read_points(out: Path) -> dict[str, Any]:
    """The points.json of a directory."""
    document: dict[str, Any] = json.loads((out / POINTS_FILE).read_text())
    return document


def write_points(out: Path, document: Mapping[str, Any]) -> None:
    """Replace points.json atomically."""
    report.write_file(out / POINTS_FILE, json.dumps(document, indent=1))
