"""The learner in plain PyTorch: one optimizer step on the given rows.

rows -> packs -> [forward, log-probabilities, loss, backward] per pack -> sum over ranks -> clip -> AdamW

Gradients of packs are added and never divided, because loss_weight contains the normalisation. So another division of
the step into packs, or of the packs among ranks, changes only the rounding. On a CPU several packs are computed at
once, one per thread, and added in their order: the sum has the same bits for every number of threads.

Shapes: N = sampled tokens of a pack, C = completion tokens of a rollout.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pipelinerl_core.algo.adapters import AdapterNote, Adapters
from pipelinerl_core.algo.losses import LossSums
from pipelinerl_core.algo.packed import PackedBatch
from pipelinerl_core.config.run import RunConfig
from pipelinerl_core.training.learning_rate import LearningRate
from pipelinerl_core.training.lora import published_weights, trained_parameters
from pipelinerl_core.training.optimizer import MasterOptimizer
from pipelinerl_core.training.out_of_memory import explain_out_of_memory
from pipelinerl_core.training.policy import Policy, pack_loss
from pipelinerl_core.training.ranks import ALONE, Ranks
from pipelinerl_core.training.step_sums import StepSums, check_finite, restored_generator_after_refusal
from pipelinerl_core.types import Float32Array, Rollout, TrainingRow


class Batcher(Protocol):
    """Cuts rows into packs."""

    def rows(self, rows: Sequence[TrainingRow]) -> Iterator[PackedBatch]:
        """Packs that hold every sampled token of the rows once."""

    def rollouts(self, rollouts: Sequence[Rollout]) -> Iterator[PackedBatch]:
        """Packs that hold every completion token of the rollouts once."""


@dataclass(frozen=True, slots=True, eq=False)
class _PackResult:
    """The result of the forward and backward pass of one pack."""

    batch: PackedBatch
    sums: LossSums
    trainer_logprobs_N: Tensor
    entropy_N: Tensor
    gradients: tuple[Tensor | None, ...]
    """Gradient of each parameter; empty if the pack needs no backward pass."""


class TorchLearner:
    """The Learner in plain PyTorch: every rank has all weights, gradients are summed over the ranks."""

    is_sharded = False
    """Whether `weights` and `state` need all ranks at once."""

    def __init__(
        self,
        model: Any,
        config: RunConfig,
        *,
        batcher: Batcher,
        version: int = 0,
        threads: int = 1,
        reference: Any = None,
        teacher: Any = None,
        ranks: Ranks = ALONE,
        note: AdapterNote | None = None,
    ) -> None:
        """`model` comes from `load_model`; `version` is the number of optimizer steps inside its weights.

        reference: a model of `load_reference` for loss.kl_coefficient, which needs as much memory as the weights.
        teacher: the same for loss.teacher.
        threads: packs computed at once, each on one core; with 1 torch's number of threads does not change.
        note: publish only the adapters, with this note; None: publish all weights, adapters merged.
        """
        self.version = version
        self._config = config
        self._model = model
        value_seed = config.seed if config.loss.has_value_head else None
        self._policy = Policy(model, temperature=config.rollouts.temperature, value_seed=value_seed)
        self._reference = None if reference is None else Policy(reference, temperature=config.rollouts.temperature)
        self._teacher = None if teacher is None else Policy(teacher, temperature=config.rollouts.temperature)
        self._batcher = batcher
        self._ranks = ranks
        self._note = note
        self._has_stepped = False
        self._rate = LearningRate(config)
        self._optimizer = MasterOptimizer(self._policy.trained(), config.learner)
        # One core per pack: the matrix products of a small model are too small for several threads.
        self._workers = None if threads == 1 else ThreadPoolExecutor(threads, "pack", torch.set_num_threads, (1,))

    def step(self, rows: Sequence[TrainingRow]) -> dict[str, float]:
        """One optimizer step on these rows; version grows by one. Returns its metrics by name (see `StepSums`).

        Raises TrainingDiverged if loss, gradient or ratios are not finite; the state is as before the step then.
        """
        return self.step_packs(self._batcher.rows(rows))

    def step_packs(self, packs: Iterable[PackedBatch]) -> dict[str, float]:
        """`step` on packs of rows; with several ranks, all ranks call the method, each with its own packs."""
        operation = f"step {self.version + 1}"
        with (
            explain_out_of_memory(self._config, operation, is_first=not self._has_stepped) as watch,
            restored_generator_after_refusal(),
        ):
            metrics = self._step_packs(watch(packs))
        self._has_stepped = True
        return metrics

    def _step_packs(self, packs: Iterator[PackedBatch]) -> dict[str, float]:
        started = time.perf_counter()
        step = self.version + 1
        packs = (batch.to(self._model.device) for batch in packs if not batch.is_empty)
        self._optimizer.zero_grad()
        sums = StepSums(self.version, self._config.trainer.pack_tokens)
        for result in self._workers.map(self._backward, packs) if self._workers else map(self._backward, packs):
            if result.gradients:
                self._optimizer.add_grads(result.gradients)
            sums.add(result.batch, result.sums, result.trainer_logprobs_N, result.entropy_N)
        if self._ranks.size > 1:
            self._ranks.sum_(self._optimizer.gradients())
        grad_norm = self._optimizer.grad_norm()
        metrics = sums.over_ranks(self._ranks, self._model.device, grad_norm)  # the only wait for a GPU in a step
        check_finite(step, metrics)
        rate = self._rate.at(step, metrics)
        self._optimizer.step(grad_norm, learning_rate=rate["train/learning_rate"])
        self.version = step
        return metrics | rate | {"time/compute_seconds": time.perf_counter() - started}

    def _backward(self, batch: PackedBatch) -> _PackResult:
        with torch.set_grad_enabled(batch.needs_backward):
            output = self._policy(batch)
            loss_sums = pack_loss(
                batch, output, self._config.loss,
                version=self.version, reference=self._reference, teacher=self._teacher,
            )  # fmt: skip
        gradients: tuple[Tensor | None, ...] = ()
        if batch.needs_backward:
            gradients = torch.autograd.grad(loss_sums.loss, self._optimizer.parameters, allow_unused=True)
        return _PackResult(batch, loss_sums, output.trainer_logprobs_N.detach(), output.entropy_N.detach(), gradients)

    def logprobs_of(self, rollouts: Sequence[Rollout]) -> list[Float32Array]:
        """[C] trainer_logprobs of every completion token of each rollout, under the current weights."""
        return score_rollouts(self._policy, self._batcher.rollouts(rollouts), len(rollouts), self._model.device)

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
        for parameter, weight in pairs:
            parameter.copy_(weight)

    def weights(self) -> dict[str, Tensor]:
        """Snapshot of the weights by parameter name, in the model's type; tied ones once, adapters merged.

        With a note the result is `Adapters`.
        """
        scale, note = self._config.learner.lora_scale, self._note
        published = published_weights(self._model, scale, adapters_alone=note is not None)
        tensors = {weight.name: weight.merged() for weight in published}
        return tensors if note is None else Adapters(tensors, note)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that the next steps depend on: trained weights, moments, version, state of torch's generator.

        With LoRA the trained weights are the adapters; the base model is not included.
        """
        tensors = self._optimizer.state()
        tensors["rng.torch"] = torch.get_rng_state()
        return tensors, {"version": self.version, **self._rate.state()}

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """The inverse of `state`: the following steps give the same bits."""
        self._optimizer.load_state(tensors)
        torch.set_rng_state(tensors["rng.torch"])
        self.version = int(values["version"])
        self._rate.load_state(values)


@torch.no_grad()
def score_rollouts(
    policy: Any, packs: Iterable[PackedBatch], num_rollouts: int, device: torch.device
) -> list[Float32Array]:
    """[C] log-probabilities of every completion token of each rollout in the packs."""
    scores = [np.zeros(0, dtype=np.float32) for _ in range(num_rollouts)]
    for batch in packs:
        logprobs_N = policy(batch.to(device))[0].cpu().numpy()
        counts_S = np.bincount(batch.sequence_N.numpy(), minlength=len(batch.row_S))
        parts = np.split(logprobs_N, np.cumsum(counts_S)[:-1])
        for row, part in zip(batch.row_S.tolist(), parts, strict=True):
            scores[row] = part
    return scores
