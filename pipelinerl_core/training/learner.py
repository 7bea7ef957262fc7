"""The learner in plain PyTorch: one optimizer step on the given rows.

rows -> packs -> [forward, log-probabilities, loss, backward] per pack -> sum over ranks -> clip -> AdamW

Gradients of packs are added and never divided, because loss_weight contains the normalisation. So another division of
the step into packs, or of the packs among ranks, changes only the rounding. On a CPU several packs are computed at
once, one per thread, and added in their order: the sum has the same bits for every number of threads.

Shapes: N = sampled tokens of a pack, C = completion tokens of a rollout.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipelinerl_core.algo.losses import LossSums
from pipelinerl_core.algo.packed import PackedBatch
from pipelinerl_core.config.run import RunConfig
from pipelinerl_core.training.base_learner import BaseLearner
from pipelinerl_core.training.lora import trained_parameters
from pipelinerl_core.training.optimizer import MasterOptimizer
from pipelinerl_core.training.ranks import ALONE, Ranks
from pipelinerl_core.training.step_sums import StepSums, check_finite


@dataclass(frozen=True, slots=True, eq=False)
class _PackResult:
    """The result of the forward and backward pass of one pack."""

    batch: PackedBatch
    sums: LossSums
    trainer_logprobs_N: Tensor
    entropy_N: Tensor
    gradients: tuple[Tensor | None, ...]
    """Gradient of each parameter; empty if the pack needs no backward pass."""


class TorchLearner(BaseLearner):
    """The Learner in plain PyTorch: every rank has all weights, gradients are summed over the ranks."""

    is_sharded = False
    """Whether `weights` and `state` need all ranks at once."""

    def __init__(self, model: Any, config: RunConfig, *, threads: int = 1, ranks: Ranks = ALONE, **more: Any) -> None:
        """As BaseLearner; threads: packs computed at once, each on one core.

        With one thread torch's number of threads does not change.
        """
        super().__init__(model, config, ranks=ranks, **more)
        self._optimizer = MasterOptimizer(self._policy.trained(), config.learner, rests=config.gpu_turns)
        # One core per pack: the matrix products of a small model are too small for several threads.
        self._workers = None if threads == 1 else ThreadPoolExecutor(threads, "pack", torch.set_num_threads, (1,))

    def _step_packs(self, packs: Iterator[PackedBatch], sums: StepSums) -> dict[str, float]:
        with self._optimizer.on_device():
            packs = (batch.to(self._device) for batch in packs if not batch.is_empty)
            self._optimizer.zero_grad()
            for result in self._workers.map(self._backward, packs) if self._workers else map(self._backward, packs):
                if result.gradients:
                    self._optimizer.add_grads(result.gradients)
                sums.add(result.batch, result.sums, result.trainer_logprobs_N, result.entropy_N)
                del result  # its gradients, before the next pack is computed
            if self._ranks.size > 1:
                self._ranks.sum_(self._optimizer.gradients())
            grad_norm = self._optimizer.grad_norm()
            metrics = sums.over_ranks(self._ranks, self._device, grad_norm)  # the only wait for a GPU in a step
            check_finite(self.version + 1, metrics)
            rate = self._rate.at(self.version + 1, metrics)
            self._before_change()
            if metrics["train/grad_norm"]:  # a step without a gradient leaves the moments, however it is cut
                self._optimizer.step(grad_norm, learning_rate=rate["train/learning_rate"])
        return metrics | rate

    def _backward(self, batch: PackedBatch) -> _PackResult:
        with torch.set_grad_enabled(batch.needs_backward):
            output = self._policy(batch)
            loss_sums = self._pack_loss(batch, output)
        gradients: tuple[Tensor | None, ...] = ()
        if batch.needs_backward:
            gradients = torch.autograd.grad(loss_sums.loss, self._optimizer.parameters, allow_unused=True)
        return _PackResult(batch, loss_sums, output.trainer_logprobs_N.detach(), output.entropy_N.detach(), gradients)

    @property
    def rescorer(self) -> "TorchLearner":
        """See `interfaces.Learner`: every rank has all weights."""
        return self

    def trained_weights(self, published: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `interfaces.Rescorer`; without a value head, which no log-probability depends on."""
        return {
            name: published[name] if name in published else parameter.detach().to("cpu", copy=True)
            for name, parameter in trained_parameters(self._model).items()
        }

    @torch.no_grad()
    def set_trained_weights(self, weights: Mapping[str, Tensor]) -> None:
        """See `interfaces.Rescorer`. Raises KeyError for a missing weight, before anything is replaced."""
        pairs = [(parameter, weights[name]) for name, parameter in trained_parameters(self._model).items()]
        if not self._optimizer.has_own_masters:
            self._before_change()
        for parameter, weight in pairs:
            parameter.copy_(weight)

    def weights(self, targets: Mapping[str, Tensor]) -> None:
        for weight in self._published():
            weight.copy_to(targets[weight.name])

    def _state(self) -> dict[str, Tensor]:
        return self._optimizer.state()

    def _own(self, name: str, moment: str | None) -> tuple[Tensor, int]:
        return self._optimizer.own(name, moment), 0

    def _forget_moments(self) -> None:
        self._optimizer.forget_moments()

    def _set_num_updates(self, name: str, num_updates: float) -> None:
        self._optimizer.set_num_updates(name, num_updates)

    def _set_weights(self, name: str, start: int, values_N: Tensor) -> None:
        """Nothing to do: the optimizer copies its masters at the end of the block."""

    def _changing(self) -> AbstractContextManager[None]:
        return self._optimizer.changing()
