"""The learning rate of each step, scaled by the effective sample size of the step's data if the run asks for that."""

import math
from collections.abc import Mapping
from typing import Any

from pipelinerl_core.config.run import RunConfig
from pipelinerl_core.training.optimizer import learning_rate

_REFERENCE, _TOKENS = "ess_reference", "ess_tokens"


class LearningRate:
    """The schedule of `learning_rate`; with learner.ess_scaling times min(1, sqrt(ess_sequence / reference)).

    The factor is from VCPO (arXiv:2602.17616). The learners compute ess_sequence of the step's own data, from
    untruncated ratios, after the backward passes and before the step of the optimizer. Every rank computes the factor
    from the same gathered numbers. The reference is learner.ess_reference, or follows from step 1: version 0 sampled
    all tokens of step 1, so only different arithmetic of engine and trainer lowers its ess_sequence. Later steps also
    have tokens of other versions, so they do not count. With independent noise of standard deviation s per token, the
    log ratio of a rollout of L tokens has the variance L s^2, and log ess_sequence is -L s^2. The rollouts of step 1
    are short, because they ended first; hence the reference of a step is

        ess_sequence of step 1 ^ (mean tokens of this step / mean tokens of step 1)

    What step 1 has measured is part of a checkpoint.
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
        """Values for a checkpoint."""
        return dict(self._first)

    def load_state(self, values: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        self._first = {name: float(values[name]) for name in (_REFERENCE, _TOKENS) if name in values}
