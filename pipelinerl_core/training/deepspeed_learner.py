"""The Learner on DeepSpeed: ZeRO 0 to 3, on one or many ranks, with the gradient and the state of the torch learner.

DeepSpeed divides the loss by the number of accumulation steps, and the gradients by the number of ranks. Neither
division is wanted, because loss_weight contains the normalisation. So this module sets the accumulation boundary, and
multiplies the loss by the number of ranks before DeepSpeed averages over the ranks.

Checkpoints have the same names and values as the torch learner's checkpoints: any number of ranks, any ZeRO stage and
both learners can load them. With ZeRO 1 to 3 each rank writes the parts of masters and moments that it has.

Shapes: N = sampled tokens of a pack, C = completion tokens of a rollout.
"""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

from pipelinerl_core.algo.packed import PackedBatch
from pipelinerl_core.config.run import RunConfig
from pipelinerl_core.errors import ConfigError, PipelineRLError
from pipelinerl_core.training.base_learner import BaseLearner, copy_overlap
from pipelinerl_core.training.live_state import part_key
from pipelinerl_core.training.lora import PublishedWeight
from pipelinerl_core.training.model import own_part, whole_shape
from pipelinerl_core.training.optimizer import MOMENTS, make_adam, num_updates_tensor
from pipelinerl_core.training.ranks import Ranks
from pipelinerl_core.training.step_sums import StepSums, check_finite, is_finite
from pipelinerl_core.types import Float32Array, Rollout

# Weights are gathered in batches of about this many elements: few collectives, little memory.
_GATHERED_ELEMENTS = 64 << 20
# Attribute with the float32 masters of this rank, by optimizer class: stages 1 and 2, stage 1 in bfloat16, stage 3.
_MASTERS = ("single_partition_of_fp32_groups", "fp32_groups_flat_partition", "fp32_partitioned_groups_flat")


class DeepSpeedLearner(BaseLearner):
    """One rank of a DeepSpeed run; every method is called on all ranks at once.

    Every rank passes the same number of packs to a step, at least one; packs may be without rows. TrainingDiverged is
    raised on all ranks.
    """

    def __init__(self, model: Any, config: RunConfig, *, ranks: Ranks, **more: Any) -> None:
        """As BaseLearner. torch's default process group must exist, also with one rank.

        Raises ConfigError if DeepSpeed is not installed, or would round weights that transformers keeps in float32.
        """
        kept = "|".join(map(re.escape, getattr(model, "_keep_in_fp32_modules_strict", None) or ()))
        wide = kept and [name for name, _ in model.named_parameters() if re.search(rf"(^|\.)({kept})($|\.)", name)]
        if wide and config.model.dtype != "float32":
            raise ConfigError(
                f"learner.kind=deepspeed would round {wide[0]} to {config.model.dtype}. Set learner.kind=torch"
            )
        super().__init__(model, config, ranks=ranks, **more)
        self._parameters = self._policy.trained()
        self._deepspeed = load_deepspeed(self._device, ranks, config.trainer.collective_seconds)
        self._stage = config.learner.zero_stage
        if self._stage == 3:  # the policy's forward uses the head's weight without a call of the head
            self._deepspeed.zero.register_external_parameter(self._policy, self._policy.head)
        self._engine = self._deepspeed.initialize(
            model=self._policy,
            optimizer=make_adam(list(self._parameters.values()), config.learner),
            config=deepspeed_config(config),
        )[0]

    @property
    def is_sharded(self) -> bool:
        """Whether `weights` and `state` need all ranks at once."""
        return self._stage > 0

    def _step_packs(self, packs: Iterator[PackedBatch], sums: StepSums) -> dict[str, float]:
        metrics: dict[str, float] = {}
        following = next(packs, None)
        while (batch := following) is not None:
            following = next(packs, None)
            is_last = following is None
            self._engine.set_gradient_accumulation_boundary(is_last)
            loss, logprobs_N = self._forward(batch.to(self._device), sums)
            if is_last:
                metrics = sums.over_ranks(self._ranks, self._device)
                if not is_finite(metrics):
                    # DeepSpeed refuses a step and removes its gradients if their norm is not finite. A loss or ratio
                    # that is not finite must have the same effect. The loss of a pack without a trained token has no
                    # gradient; every pack has log-probabilities.
                    loss = logprobs_N.sum() * math.nan
            self._engine.backward(loss * self._ranks.size, scale_wrt_gas=False)
        rate = self._rate.at(self.version + 1, metrics)
        metrics["train/grad_norm"] = self._apply(rate["train/learning_rate"])
        check_finite(self.version + 1, metrics)
        return metrics | rate

    def _forward(self, batch: PackedBatch, sums: StepSums) -> tuple[Tensor, Tensor]:
        output = self._engine(batch)
        loss_sums = self._pack_loss(batch, output)
        sums.add(batch, loss_sums, output.trainer_logprobs_N, output.entropy_N)
        return loss_sums.loss, output.trainer_logprobs_N

    def _apply(self, lr: float) -> float:
        """Clip and step; returns the global norm before clipping. If the norm is not finite, nothing is changed.

        The optimizers of ZeRO 1 to 3 leave out such a step. Raises PipelineRLError if one has not.
        """
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        norm = None
        if self._stage == 0:  # gradients are whole on every rank, and DeepSpeed does not report their norm
            norm = float(torch.nn.utils.clip_grad_norm_(self._policy.parameters(), self._config.learner.clip_norm))
            if not math.isfinite(norm):  # the plain optimizer would take the step
                self._engine.zero_grad()
                return norm
        self._before_change()
        self._engine.step()
        global_norm = float(self._engine.get_global_grad_norm() if norm is None else norm)
        if not math.isfinite(global_norm) and self._engine.was_step_applied():
            raise PipelineRLError(
                f"step {self.version + 1}: DeepSpeed took a step with a gradient that is not finite; the weights of "
                "this process are lost. The next start loads the checkpoint"
            )
        if not math.isfinite(global_norm) and self._stage < 3:
            # With offload DeepSpeed would add later gradients to the refused ones.
            averaged = getattr(self._engine.optimizer, "averaged_gradients", {})
            averaged.update(dict.fromkeys(averaged))
        return global_norm

    def logprobs_of(self, rollouts: Sequence[Rollout]) -> list[Float32Array]:
        return self._score(self._engine, rollouts)

    @property
    def rescorer(self) -> None:
        """See `interfaces.Learner`: weights and their masters are divided among the ranks, or may be."""
        return None

    def weights(self, targets: Mapping[str, Tensor]) -> None:
        """As `TorchLearner.weights`; `targets` is read on rank 0 only. The whole model is on no rank at once."""
        for chunk in self._chunks():
            with self._gathered([part for weight in chunk for part in weight.parts]):
                if self._ranks.rank == 0:
                    for weight in chunk:
                        weight.copy_to(targets[weight.name])

    def _state(self) -> dict[str, Tensor]:
        tensors = {}
        for name, parameter in self._parameters.items():
            shape = whole_shape(parameter)
            keys: dict[str, str | None] = {f"weights.{name}": None}
            if self._num_updates:
                keys |= {f"optimizer.{name}.{moment}": moment for moment in MOMENTS}
            for key, moment in keys.items():
                own_M, start = self._own(name, moment)
                if len(own_M) == math.prod(shape):
                    tensors[key] = own_M.view(shape)
                elif len(own_M):
                    tensors[part_key(key, start, shape)] = own_M
            if self._num_updates and self._ranks.rank == 0:
                tensors[f"optimizer.{name}.step"] = torch.tensor(float(self._num_updates))
        return tensors

    def _own(self, name: str, moment: str | None) -> tuple[Tensor, int]:
        parameter: Any = self._parameters[name]
        if moment is not None and not self._adam.state:
            self._make_states()
        if self._stage == 0:
            own_M: Tensor = parameter if moment is None else self._adam.state[parameter][moment]
            return own_M.view(-1), 0
        if self._stage == 3:
            own_M, _ = self._engine.optimizer._get_fp32_opt_state_partition(
                parameter, release_swap_buffers=False, optim_state_key=moment
            )
            start = self._ranks.rank * len(own_M)
            return own_M[: max(0, parameter.ds_numel - start)], start
        fragment = parameter._hp_mapping  # None if this rank has no element
        if fragment is None:
            return torch.empty(0), 0
        return fragment.get_hp_fragment(moment), fragment.lp_fragment_address.start

    def _forget_moments(self) -> None:
        self._adam.state.clear()
        if self._stage in (1, 2):
            self._engine.optimizer._hp_optimizer_states_linked = False

    def _set_num_updates(self, name: str, num_updates: float) -> None:
        if not self._adam.state:
            self._make_states()
        for state in self._adam.state.values():
            state["step"].fill_(num_updates)

    def _set_weights(self, name: str, start: int, values_N: Tensor) -> None:
        parameter: Any = self._parameters[name]
        if self._stage == 3:
            copy_overlap(
                own_part(parameter, self._ranks.rank), self._ranks.rank * parameter.ds_tensor.numel(), values_N, start
            )
        else:
            copy_overlap(parameter.view(-1), 0, values_N, start)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        if self._stage < 3:
            yield
            return
        self._engine.optimizer.checkpoint_event_prologue()  # small parameters, which every rank has, are divided
        yield
        self._engine.optimizer.checkpoint_event_epilogue()

    def _chunks(self) -> Iterator[list[PublishedWeight]]:
        chunk: list[PublishedWeight] = []
        for weight in self._published():
            chunk.append(weight)
            if (
                sum(getattr(part, "ds_numel", part.numel()) for member in chunk for part in member.parts)
                >= _GATHERED_ELEMENTS
            ):
                yield chunk
                chunk = []
        if chunk:
            yield chunk

    def _gathered(self, parameters: Sequence[Tensor]) -> AbstractContextManager[Any]:
        if self._stage < 3:
            return nullcontext()
        context: AbstractContextManager[Any] = self._deepspeed.zero.GatheredParameters(list(parameters))
        return context

    @property
    def _adam(self) -> torch.optim.Optimizer:
        wrapper: Any = self._engine.optimizer
        adam: torch.optim.Optimizer = wrapper if self._stage == 0 else wrapper.optimizer
        return adam

    @property
    def _num_updates(self) -> int:
        return int(next((float(state["step"]) for state in self._adam.state.values()), 0.0))

    def _masters(self) -> list[Tensor]:
        """The tensors that the optimizer has moments for."""
        if self._stage == 0:
            return list(self._parameters.values())
        masters = next(
            getattr(self._engine.optimizer, name) for name in _MASTERS if hasattr(self._engine.optimizer, name)
        )
        return list(masters)

    def _make_states(self) -> None:
        """Create moments, which AdamW creates only at its first step."""
        for master in self._masters():
            moments = {moment: torch.zeros_like(master) for moment in MOMENTS}
            self._adam.state[master] = {"step": num_updates_tensor(0.0, self._adam, master), **moments}
        if self._stage in (1, 2):
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()


def deepspeed_config(config: RunConfig) -> dict[str, Any]:
    """The configuration for `deepspeed.initialize`."""
    learner = config.learner
    zero: dict[str, Any] = {"stage": learner.zero_stage, "overlap_comm": False}
    if learner.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    if learner.offload == "parameters":
        zero["offload_param"] = {"device": "cpu"}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
        "gradient_clipping": learner.clip_norm if learner.zero_stage else 0.0,
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
    }
    if config.model.dtype == "bfloat16":
        settings["bf16"] = {"enabled": True}
    return settings


@contextmanager
def divided_among(ranks: Ranks, config: RunConfig, device: torch.device) -> Iterator[None]:
    """In this block transformers divides the weights of a model that it loads among the ranks (ZeRO 3).

    Rank 0 reads the tensors and sends each to the other ranks, so that no rank has the whole model. The other ranks
    read only names and shapes, from their own files.
    """
    load_deepspeed(device, ranks, config.trainer.collective_seconds)
    # transformers keeps a weak reference to the settings
    settings = HfDeepSpeedConfig(deepspeed_config(config))  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        del settings
        unset_hf_deepspeed_config()  # type: ignore[no-untyped-call]


def load_deepspeed(device: torch.device, ranks: Ranks, seconds: float) -> Any:
    """The module `deepspeed`, set up for a device; seconds: deadline of its collectives.

    Raises ConfigError if DeepSpeed is not installed.

    On a CPU DeepSpeed would compile an extension for ranks that share memory; gloo needs no compiler.
    """
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ["LOCAL_RANK"] = str(ranks.local_rank)  # required by DeepSpeed
    try:
        import deepspeed  # noqa: PLC0415
        import deepspeed.utils  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"learner.kind=deepspeed: DeepSpeed cannot be imported ({error}). Install it with `make install "
            "LEARNER=deepspeed`, or set learner.kind=torch"
        ) from None
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo" if device.type == "cpu" else "nccl")
    if ranks.size > 1:  # DeepSpeed would make this group with torch's own deadline of half an hour
        deepspeed.utils.groups._WORLD_GROUP = _group_of_all(dist.group.WORLD, seconds)
    return deepspeed


@lru_cache(maxsize=1)
def _group_of_all(world: Any, seconds: float) -> Any:
    """The group of all ranks of the process group `world`, the same at each call."""
    return dist.new_group(timeout=timedelta(seconds=seconds))
