"""The learning rate of each step, scaled by the effective sample size of the step's data if the run asks for that."""

import math
from collections.abc import Mapping
from typing import Any

from pipelinerl_core.config.run import RunConfig
from pipelinerl_core.training.optimizer import learning_rate

_REFERENCE, _TOKENS = "ess_reference", "ess_tokens"


class LearningRate:
    """The schedule of `learning_rate`; with learner.ess_scaling times min(1, sqrt(ess_sequence / reference)).

    The factor is from VCPO (arXiv:2602.17616), its reference in docs/algorithms.md: with independent noise of
    standard deviation s, log ess_sequence of rollouts of L tokens is -L s^2. Every rank computes the factor from the
    same gathered numbers. What step 1 has measured is part of a checkpoint.
    """

    def __init__(self, config: RunConfig) -> None:
        self._learner = config.learner
        self._num_steps = config.trainer.steps
        self._first: dict[str, float] = {}

    def at(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Metrics of the rate of a step, from the metrics of the step's data: train/learning_rate, and with
        ess_scaling control/lr_factor, which the rate includes."""
        if step == 1:
            self._first = {
                _REFERENCE: metrics["importance/ess_sequence"],
                _TOKENS: metrics["importance/sequence_tokens"],
            }
        rate = learning_rate(step, self._learner, self._num_steps)
        if not self._learner.ess_scaling:
            return {"train/learning_rate": rate}
        reference = self._learner.ess_reference or self._first[_REFERENCE]
        if not self._learner.ess_reference:
            reference **= metrics["importance/sequence_tokens"] / self._first[_TOKENS]
        factor = min(1.0, math.sqrt(metrics["importance/ess_sequence"] / reference))
        return {"train/learning_rate": rate * factor, "control/lr_factor": factor}

    def state(self) -> dict[str, float]:
        return dict(self._first)

    def load_state(self, values: Mapping[str, Any]) -> None:
        self._first = {name: float(values[name]) for name in (_REFERENCE, _TOKENS) if name in values}
