"""What every learner shares: its policies, its packs, and a step that refuses numbers that are not finite.

To add a learner: a subclass that computes the packs of a step, a section in config/learners.py, and its line in
roles/trainer/learners.py.

Shapes: N = sampled tokens of a pack, C = completion tokens of a rollout.
"""

import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pipelinerl_core.algo.adapters import AdapterNote
from pipelinerl_core.algo.losses import LossSums
from pipelinerl_core.algo.packed import PackedBatch
from pipelinerl_core.config.run import RunConfig
from pipelinerl_core.errors import ConfigError, MissingObject
from pipelinerl_core.interfaces import WeightLayout
from pipelinerl_core.training.learning_rate import LearningRate
from pipelinerl_core.training.live_state import LiveState, StatePart, parts_of
from pipelinerl_core.training.lora import PublishedWeight, published_weights
from pipelinerl_core.training.model import whole_shape
from pipelinerl_core.training.optimizer import MOMENTS
from pipelinerl_core.training.out_of_memory import explain_out_of_memory
from pipelinerl_core.training.policy import Policy, PolicyOutput, pack_loss
from pipelinerl_core.training.ranks import Ranks
from pipelinerl_core.training.step_sums import StepSums, restored_generator_after_refusal
from pipelinerl_core.types import Float32Array, Rollout, TrainingRow

_GENERATOR = "rng.torch"

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


def copy_overlap(own_M: Tensor, own_start: int, values_N: Tensor, start: int) -> None:
    """Copy the elements that [own_start, own_start + M) and [start, start + N) share."""
    begin, end = max(own_start, start), min(own_start + len(own_M), start + len(values_N))
    if begin < end:
        own_M[begin - own_start : end - own_start].copy_(values_N[begin - start : end - start])


def _require_shape(name: str, there: Sequence[int] | None, wanted: Sequence[int] | None) -> None:
    """Raises ConfigError unless a tensor has the same shape in checkpoint and model; None: no such tensor."""
    if there is None or wanted is None or tuple(there) != tuple(wanted):
        in_checkpoint, in_model = (
            "nothing" if shape is None else f"shape {tuple(shape)}" for shape in (there, wanted)
        )
        raise ConfigError(
            f"{name}: {in_checkpoint} in the checkpoint, {in_model} in the model: the checkpoint belongs to another "
            "model. Set model.path to the model of the run"
        )


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
        self._lent: LiveState | None = None
        """A state that may still be read."""

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

    def state(self) -> LiveState:
        """Everything that the next steps depend on: trained weights, moments, version, state of torch's generator.

        With LoRA the trained weights are the adapters; the base model is not included. A sharded learner returns what
        its rank has; rank 0 alone has what all ranks share.
        """
        self._before_change()
        tensors = self._state()
        if self._ranks.rank == 0:
            tensors[_GENERATOR] = torch.get_rng_state()
        self._lent = LiveState(tensors, {"version": self.version, **self._rate.state()})
        return self._lent

    def _before_change(self) -> None:
        if self._lent is not None:
            self._lent.detach()
            self._lent = None

    @torch.no_grad()
    def load_state(self, files: Iterable[Mapping[str, Tensor]], values: Mapping[str, Any]) -> None:
        """The inverse of `state`, of any number of ranks: the following steps give the same bits.

        files: their tensors by name; every rank passes the files of all ranks. Raises ConfigError if the state is of
        another model. After an error the learner must not be used until another call succeeds.
        """
        self._before_change()
        shapes = {name: whole_shape(parameter) for name, parameter in self._policy.trained().items()}
        counts: Counter[str] = Counter()
        generator = None
        self._forget_moments()
        with self._changing():
            for part in parts_of(files):
                if part.name == _GENERATOR:
                    generator = part.values_N
                else:
                    self._load_part(part, shapes)
                    counts[part.name] += len(part.values_N)
                del part  # before the next file is read
        for name, shape in shapes.items():
            _require_shape(f"weights.{name}", shape if counts[f"weights.{name}"] == math.prod(shape) else None, shape)
            for moment in (f"optimizer.{name}.{moment}" for moment in MOMENTS):  # none without a gradient
                _require_shape(moment, shape if counts[moment] in (0, math.prod(shape)) else None, shape)
        if generator is not None:
            torch.set_rng_state(generator.clone())
        self.version = int(values["version"])
        self._rate.load_state(values)

    def _load_part(self, part: StatePart, shapes: Mapping[str, Sequence[int]]) -> None:
        kind, _, rest = part.name.partition(".")
        name, moment = (rest, None) if kind == "weights" else rest.rpartition(".")[::2]
        if moment == "step":
            self._set_num_updates(name, float(part.values_N))
            return
        _require_shape(part.name, part.shape, shapes.get(name) if moment in (None, *MOMENTS) else None)
        copy_overlap(*self._own(name, moment), part.values_N, part.start)
        if moment is None:
            self._set_weights(name, part.start, part.values_N)

    @torch.no_grad()
    def adopt_weights(self, files: Iterable[Mapping[str, Tensor]]) -> None:
        """Take weights by name instead of the learner's own; a float32 master that rounds to its weight is kept.

        Raises MissingObject if the learner trains no weight of a name.
        """
        self._before_change()
        with self._changing():
            for part in parts_of(files):
                if part.name not in self._policy.trained():
                    raise MissingObject(f"weights.{part.name} is not in the learner's state")
                own_M, start = self._own(part.name, None)
                given_M = part.values_N[start : start + len(own_M)].to(own_M.device)
                own_M.copy_(torch.where(own_M.to(given_M.dtype) == given_M, own_M, given_M.to(own_M.dtype)))
                self._set_weights(part.name, 0, part.values_N)

    @abstractmethod
    def _state(self) -> dict[str, Tensor]:
        """weights.<name> (float32 masters), optimizer.<name>.<moment> and optimizer.<name>.step, or parts of them."""

    @abstractmethod
    def _own(self, name: str, moment: str | None) -> tuple[Tensor, int]:
        """A view of the elements [M] of a parameter's master, or of a moment, that this rank has, and the position of
        the first. Moments are created."""

    @abstractmethod
    def _forget_moments(self) -> None:
        """Be as before the first step."""

    @abstractmethod
    def _set_num_updates(self, name: str, num_updates: float) -> None:
        """Set the number of updates in a parameter's moments."""

    @abstractmethod
    def _set_weights(self, name: str, start: int, values_N: Tensor) -> None:
        """Set elements of the weights that forward passes use, if they are not the master."""

    @abstractmethod
    def _changing(self) -> AbstractContextManager[None]:
        """The block in which masters and weights are changed."""

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
