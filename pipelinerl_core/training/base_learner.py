"""What every learner shares: its policies, its packs, and a step that refuses numbers that are not finite.

To add a learner: a subclass that computes the packs of a step, a section in config/learners.py, and its line in
roles/trainer/learners.py.

Shapes: N = sampled tokens of a pack, C = completion tokens of a rollout.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from pipelinerl_core.algo.adapters import AdapterNote
from pipelinerl_core.algo.losses import LossSums
from pipelinerl_core.algo.packed import PackedBatch
from pipelinerl_core.config.run import RunConfig
from pipelinerl_core.interfaces import WeightLayout
from pipelinerl_core.training.learning_rate import LearningRate
from pipelinerl_core.training.lora import PublishedWeight, published_weights
from pipelinerl_core.training.out_of_memory import explain_out_of_memory
from pipelinerl_core.training.policy import Policy, PolicyOutput, pack_loss
from pipelinerl_core.training.ranks import Ranks
from pipelinerl_core.training.step_sums import StepSums, restored_generator_after_refusal
from pipelinerl_core.types import Float32Array, Rollout, TrainingRow

StepLogprobs = list[Float32Array | None]
"""See `interfaces.Learner.trainer_logprobs`."""


def logprobs_by_row(
    rows: Sequence[TrainingRow], orders: Sequence[Sequence[int]], vectors: Sequence[Float32Array]
) -> StepLogprobs:
    """The log-probabilities of the tokens of each row: [C], 0 for tokens that were not sampled.

    orders: for each rank the indices of its rows, in the order of `vectors`, which have their sampled tokens.
    """
    logprobs: StepLogprobs = [None] * len(rows)
    for order, vector in zip(orders, vectors, strict=True):
        end = 0
        for index in order:
            is_sampled_C = rows[index].rollout.loss_mask
            begin, end = end, end + int(is_sampled_C.sum())
            logprobs_C = np.zeros(len(is_sampled_C), dtype=np.float32)
            logprobs_C[is_sampled_C] = vector[begin:end]
            logprobs[index] = logprobs_C
    return logprobs


class Batcher(Protocol):
    """Cuts rows into packs."""

    def rows(self, rows: Sequence[TrainingRow]) -> Iterator[PackedBatch]:
        """Packs that hold every sampled token of the rows once."""

    def rollouts(self, rollouts: Sequence[Rollout]) -> Iterator[PackedBatch]:
        """Packs that hold every completion token of the rollouts once."""


class BaseLearner(ABC):
    """A learner whose subclass computes the packs of a step."""

    def __init__(
        self,
        model: Any,
        config: RunConfig,
        *,
        batcher: Batcher,
        ranks: Ranks,
        version: int = 0,
        reference: Any = None,
        teacher: Any = None,
        note: AdapterNote | None = None,
    ) -> None:
        """`model` comes from `load_model`; `version` is the number of optimizer steps inside its weights.

        reference: a model of `load_reference` for loss.kl_coefficient, which needs as much memory as the weights.
        teacher: the same for loss.teacher.
        note: publish only the adapters, with this note; None: publish all weights, adapters merged.
        """
        self.version = version
        self._config = config
        self._model = model
        self._device: torch.device = model.device
        value_seed = config.seed if config.loss.has_value_head else None
        self._policy = Policy(model, temperature=config.rollouts.temperature, value_seed=value_seed)
        self._reference = None if reference is None else Policy(reference, temperature=config.rollouts.temperature)
        self._teacher = None if teacher is None else Policy(teacher, temperature=config.rollouts.temperature)
        self._batcher = batcher
        self._ranks = ranks
        self._note = note
        self._has_stepped = False
        self.trainer_logprobs: StepLogprobs | None = None
        self.step_vectors: list[Float32Array] = []
        """[N] trainer_logprobs of each rank in the newest step, in the order of its packs."""
        self._rate = LearningRate(config)

    def step(self, rows: Sequence[TrainingRow]) -> dict[str, float]:
        """One optimizer step on these rows; version grows by one. Returns its metrics by name (see `StepSums`).

        Raises TrainingDiverged if loss, gradient or ratios are not finite; the state is as before the step then.
        """
        sums = self._sums()
        metrics = self._step(self._batcher.rows(rows), sums)
        if sums.keeps_logprobs:
            order = [index for rows_S in sums.rows for index in rows_S.tolist()]
            self.trainer_logprobs = logprobs_by_row(rows, [order], self.step_vectors)
        return metrics

    def step_packs(self, packs: Iterable[PackedBatch]) -> dict[str, float]:
        """`step` on packs of rows; with several ranks, all ranks call the method, each with its own packs."""
        return self._step(packs, self._sums())

    def _sums(self) -> StepSums:
        keeps = self._config.store.trainer_logprobs
        return StepSums(self.version, self._config.trainer.pack_tokens, keeps_logprobs=keeps)

    def _step(self, packs: Iterable[PackedBatch], sums: StepSums) -> dict[str, float]:
        started, step = time.perf_counter(), self.version + 1
        with (
            explain_out_of_memory(self._config, f"step {step}", is_first=not self._has_stepped) as watch,
            restored_generator_after_refusal(),
        ):
            metrics = self._step_packs(watch(packs), sums)
        if sums.keeps_logprobs:
            own = torch.cat([torch.zeros(0, device=self._device), *sums.trainer_logprobs])
            self.step_vectors = [vector.numpy() for vector in self._ranks.gather_vectors(own)]
        self.version, self._has_stepped = step, True
        return metrics | {"time/compute_seconds": time.perf_counter() - started}

    @abstractmethod
    def _step_packs(self, packs: Iterator[PackedBatch], sums: StepSums) -> dict[str, float]:
        """Gradients of the packs, and the step of the optimizer; raises TrainingDiverged as `step`."""

    def _pack_loss(self, batch: PackedBatch, output: PolicyOutput) -> LossSums:
        return pack_loss(
            batch, output, self._config.loss,
            version=self.version, reference=self._reference, teacher=self._teacher,
        )  # fmt: skip

    def layout(self) -> WeightLayout:
        """See `interfaces.Learner`: in the model's type, tied weights once, adapters merged, or alone with a note."""
        return WeightLayout(tuple(weight.meta for weight in self._published()), self._note)

    def _published(self) -> list[PublishedWeight]:
        is_alone = self._note is not None
        return published_weights(self._policy.model, self._config.learner.lora_scale, adapters_alone=is_alone)

    def logprobs_of(self, rollouts: Sequence[Rollout]) -> list[Float32Array]:
        return self._score(self._policy, rollouts)

    @torch.no_grad()
    def _score(self, policy: Any, rollouts: Sequence[Rollout]) -> list[Float32Array]:
        scores = [np.zeros(0, dtype=np.float32) for _ in rollouts]
        for batch in self._batcher.rollouts(rollouts):
            logprobs_N = policy(batch.to(self._device))[0].cpu().numpy()
            counts_S = np.bincount(batch.sequence_N.numpy(), minlength=len(batch.row_S))
            parts = np.split(logprobs_N, np.cumsum(counts_S)[:-1])
            for row, part in zip(batch.row_S.tolist(), parts, strict=True):
                scores[row] = part
        return scores
