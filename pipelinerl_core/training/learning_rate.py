"""The learning rate of each step, scaled by the effective sample size of the step's data if the run asks for that."""

import math
from collections.abc import Mapping
from typing import Any

from pipelinerl_core.config.sections import RunConfig
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.training.optimizer import learning_rate

_STATE = "ess_reference"


class LearningRate:
    """The schedule of `learning_rate`; with learner.ess_scaling times min(1, sqrt(ess_sequence / reference)).

    The factor is from VCPO (arXiv:2602.17616). The learners compute ess_sequence of the step's own data, from
    untruncated ratios, after the backward passes and before the step of the optimizer. Every rank computes the factor
    from the same gathered numbers. The reference is learner.ess_reference, or ess_sequence of step 1: version 0
    sampled all tokens of step 1, so only different arithmetic of engine and trainer lowers this ess_sequence. The
    reference is part of a checkpoint.
    """

    def __init__(self, config: RunConfig) -> None:
        self._learner = config.learner
        self._num_steps = config.trainer.steps
        self._measured: float | None = None

    def at(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Metrics of the rate of a step, from the metrics of the step's data: train/learning_rate, and with
        ess_scaling control/lr_factor, which the rate includes.

        Raises ConfigError if the reference is neither set nor measured.
        """
        if step == 1:
            self._measured = metrics["importance/ess_sequence"]
        rate = learning_rate(step, self._learner, self._num_steps)
        if not self._learner.ess_scaling:
            return {"train/learning_rate": rate}
        reference = self._learner.ess_reference or self._measured
        if reference is None:
            raise ConfigError(
                "learner.ess_scaling=true: the checkpoint has no effective sample size of step 1, because an earlier "
                "version wrote it. Set learner.ess_reference, or start from step 1"
            )
        factor = min(1.0, math.sqrt(metrics["importance/ess_sequence"] / reference))
        return {"train/learning_rate": rate * factor, "control/lr_factor": factor}

    def state(self) -> dict[str, float]:
        """Values for a checkpoint."""
        return {} if self._measured is None else {_STATE: self._measured}

    def load_state(self, values: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        self._measured = float(values[_STATE]) if _STATE in values else None
