"""One optimizer step on exactly the rows it is given.

rows -> packs -> [forward, log-probabilities, loss, backward] per pack -> clip -> AdamW -> version + 1

Gradients of packs are added and never divided: loss_weight carries the normalisation, so cutting the step into other
packs changes nothing but rounding. On a CPU several packs are computed at once, one per thread, and added in their
order: the sum is the same to the last bit, however many threads there are.

Shapes: N = sampled tokens of a pack, C = completion tokens of a rollout.
"""

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pipelinerl_core.algo.importance import ess, sequence_log_ratios
from pipelinerl_core.algo.logprobs import token_logprobs
from pipelinerl_core.algo.losses import LossSums, compute_loss, select
from pipelinerl_core.algo.packed import PackedBatch
from pipelinerl_core.config.sections import RunConfig
from pipelinerl_core.errors import TrainingDiverged
from pipelinerl_core.training.model import head_weight, hidden_states
from pipelinerl_core.training.optimizer import MasterOptimizer, learning_rate
from pipelinerl_core.types import Float32Array, Rollout, StepStats, TrainingRow


class Batcher(Protocol):
    """Cuts rows into packs."""

    def rows(self, rows: Sequence[TrainingRow]) -> list[PackedBatch]:
        """Packs that hold every sampled token of the rows once."""
        ...

    def rollouts(self, rollouts: Sequence[Rollout]) -> list[PackedBatch]:
        """Packs that hold every completion token of the rollouts once."""
        ...


@dataclass(slots=True)
class _StepSums:
    """What the packs of a step add up to."""

    loss: float = 0.0
    num_sampled: int = 0
    num_trained: int = 0
    ratio: float = 0.0
    clipped: int = 0
    kl: float = 0.0
    kl_ref: float | None = None
    entropy: float = 0.0
    log_ratios: list[Tensor] = field(default_factory=list)
    sequence_log_ratios: list[Tensor] = field(default_factory=list)

    def add(self, batch: PackedBatch, sums: LossSums, trainer_logprobs_N: Tensor, entropy_N: Tensor) -> None:
        self.loss += sums.loss.item()
        self.num_sampled += len(entropy_N)
        self.num_trained += int(sums.num_tokens.item())
        self.ratio += sums.ratio.item()
        self.clipped += int(sums.clipped.item())
        self.kl += sums.kl.item()
        if sums.kl_ref is not None:
            self.kl_ref = (self.kl_ref or 0.0) + sums.kl_ref.item()
        self.entropy += entropy_N.detach().sum().item()
        # Neither truncated nor masked: ess tells what the lag did to the data, before the rules against it.
        log_ratios_N = trainer_logprobs_N.detach() - batch.rollout_logprobs_N
        self.log_ratios.append(log_ratios_N)
        self.sequence_log_ratios.append(
            sequence_log_ratios(log_ratios_N, batch.sequence_N, batch.layout.num_sequences)
        )

    def ess(self) -> tuple[float, float]:
        """Over tokens, and over sequences."""
        if not self.log_ratios:
            return 1.0, 1.0
        return ess(torch.cat(self.log_ratios)), ess(torch.cat(self.sequence_log_ratios))


@dataclass(frozen=True, slots=True, eq=False)
class _PackResult:
    """What the forward and backward pass of one pack gives."""

    batch: PackedBatch
    sums: LossSums
    trainer_logprobs_N: Tensor
    entropy_N: Tensor
    gradients: tuple[Tensor | None, ...]


class TorchLearner:
    """The Learner of one process in plain PyTorch."""

    def __init__(
        self,
        model: Any,
        config: RunConfig,
        *,
        batcher: Batcher,
        version: int = 0,
        threads: int = 1,
        reference: Any = None,
    ) -> None:
        """`model` comes from `load_model`; `version` is the number of optimizer steps inside its weights.

        reference: a model of `load_reference` for loss.kl_coefficient; it needs as much memory as the weights.

        threads: packs computed at once, each on one core; 1 leaves the number of torch's threads as it is.
        """
        self.version = version
        self._model = model
        self._reference = reference
        self._config = config
        self._batcher = batcher
        self._optimizer = MasterOptimizer(dict(model.named_parameters()), config.learner)
        # One core per pack: a small model's matrix products are too small to share one among threads.
        self._workers = None if threads == 1 else ThreadPoolExecutor(threads, "pack", torch.set_num_threads, (1,))

    def step(self, rows: Sequence[TrainingRow]) -> StepStats:
        """One optimizer step on these rows; version grows by one.

        Raises TrainingDiverged, with the weights untouched, when loss, gradient or ratios are not finite.
        """
        started = time.perf_counter()
        step = self.version + 1
        packs = [batch.to(self._model.device) for batch in self._batcher.rows(rows)]
        self._optimizer.zero_grad()
        sums = _StepSums()
        for result in self._workers.map(self._backward, packs) if self._workers else map(self._backward, packs):
            self._optimizer.add_grads(result.gradients)
            sums.add(result.batch, result.sums, result.trainer_logprobs_N, result.entropy_N)
        grad_norm = self._optimizer.grad_norm()
        ratios = sums.ess()
        _check_finite(
            step, loss=sums.loss, grad_norm=grad_norm.item(), kl=sums.kl, ess=ratios[0], ess_sequence=ratios[1]
        )
        lr = learning_rate(step, self._config.learner, self._config.trainer.steps)
        self._optimizer.step(grad_norm, learning_rate=lr)
        self.version = step
        budget = sum(max(batch.num_tokens, self._config.trainer.pack_tokens) for batch in packs)
        num_tokens = sum(batch.num_tokens for batch in packs)
        return StepStats(
            step=step,
            loss=sums.loss,
            grad_norm=grad_norm.item(),
            learning_rate=lr,
            ess=ratios[0],
            ess_sequence=ratios[1],
            ratio_mean=sums.ratio / max(1, sums.num_trained),
            ratio_clipped_fraction=sums.clipped / max(1, sums.num_trained),
            kl=sums.kl / max(1, sums.num_trained),
            kl_ref=None if sums.kl_ref is None else sums.kl_ref / max(1, sums.num_trained),
            entropy=sums.entropy / max(1, sums.num_sampled),
            num_tokens=num_tokens,
            num_trained_tokens=sums.num_trained,
            num_packs=len(packs),
            pack_fill=num_tokens / max(1, budget),
            compute_seconds=time.perf_counter() - started,
        )

    def _backward(self, batch: PackedBatch) -> _PackResult:
        trainer_logprobs_N, entropy_N = self._logprobs(batch)
        tokens = select(
            trainer_logprobs_N,
            batch.rollout_logprobs_N,
            batch.advantages_N,
            batch.loss_weights_N,
            batch.loss_mask_N,
            entropy_N=entropy_N,
            sequence_N=batch.sequence_N,
            num_sequences=batch.layout.num_sequences,
            ref_logprobs_N=self._ref_logprobs(batch),
        )
        loss_sums = compute_loss(tokens, self._config.loss)
        gradients = torch.autograd.grad(loss_sums.loss, self._optimizer.parameters, allow_unused=True)
        return _PackResult(batch, loss_sums, trainer_logprobs_N.detach(), entropy_N.detach(), gradients)

    def _logprobs(self, batch: PackedBatch, model: Any = None) -> tuple[Tensor, Tensor]:
        model = self._model if model is None else model
        return token_logprobs(
            hidden_states(model, batch),
            head_weight(model),
            batch.target_ids_N,
            temperature=self._config.rollouts.temperature,
        )

    @torch.no_grad()
    def _ref_logprobs(self, batch: PackedBatch) -> Tensor | None:
        return None if self._reference is None else self._logprobs(batch, self._reference)[0]

    @torch.no_grad()
    def logprobs_of(self, rollouts: Sequence[Rollout]) -> list[Float32Array]:
        """[C] trainer_logprobs of every completion token of each rollout, under the current weights."""
        found = [np.zeros(0, dtype=np.float32) for _ in rollouts]
        for batch in self._batcher.rollouts(rollouts):
            logprobs_N = self._logprobs(batch.to(self._model.device))[0].cpu().numpy()
            counts_S = np.bincount(batch.sequence_N.numpy(), minlength=len(batch.row_S))
            parts = np.split(logprobs_N, np.cumsum(counts_S)[:-1])
            for row, part in zip(batch.row_S.tolist(), parts, strict=True):
                found[row] = part
        return found

    def weights(self) -> dict[str, Tensor]:
        """Snapshot of the weights by parameter name, in the model's type; tied weights appear once."""
        return {
            name: parameter.detach().to("cpu", copy=True).contiguous()
            for name, parameter in self._model.named_parameters()
        }

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that the next steps depend on: weights, moments, version, the state of torch's generator."""
        tensors = self._optimizer.state()
        tensors["rng.torch"] = torch.get_rng_state()
        return tensors, {"version": self.version}

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """The inverse of `state`: the steps after it are equal bit for bit."""
        self._optimizer.load_state(tensors)
        torch.set_rng_state(tensors["rng.torch"])
        self.version = int(values["version"])


def _check_finite(step: int, **numbers: float) -> None:
    if all(math.isfinite(number) for number in numbers.values()):
        return
    found = ", ".join(f"{name}={number:g}" for name, number in numbers.items())
    raise TrainingDiverged(
        f"step {step}: {found}; all of them must be finite. The weights are still version {step - 1}. Lower "
        "learner.lr or learner.clip_norm, or lengthen learner.warmup_steps; if only kl or ess is not finite, an "
        "engine recorded bad log-probabilities"
    )
