"""The Learner on DeepSpeed: ZeRO 0 to 3, on one or many ranks, with the gradient and the state of the torch learner.

DeepSpeed divides the loss by the number of accumulation steps, and the gradients by the number of ranks. Neither
division is wanted, because loss_weight contains the normalisation. So this module sets the accumulation boundary, and
multiplies the loss by the number of ranks before DeepSpeed averages over the ranks.

Checkpoints have the same names and values as the torch learner's checkpoints: any number of ranks, any ZeRO stage and
both learners can load them. State is gathered parameter by parameter.

Shapes: N = sampled tokens of a pack, C = completion tokens of a rollout.
"""

import math
import os
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
from pipelinerl_core.training.base_learner import BaseLearner
from pipelinerl_core.training.live_state import LiveState
from pipelinerl_core.training.lora import PublishedWeight
from pipelinerl_core.training.optimizer import MOMENTS, make_adam, master_of, snapshot
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

        Raises ConfigError if DeepSpeed is not installed.
        """
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
            loss = self._forward(batch.to(self._device), sums)
            if is_last:
                metrics = sums.over_ranks(self._ranks, self._device)
                if not is_finite(metrics):
                    # DeepSpeed refuses a step and removes its gradients if their norm is not finite. A loss or ratio
                    # that is not finite must have the same effect.
                    loss = loss * math.nan
            self._engine.backward(loss * self._ranks.size, scale_wrt_gas=False)
        rate = self._rate.at(self.version + 1, metrics)
        metrics["train/grad_norm"] = self._apply(rate["train/learning_rate"])
        check_finite(self.version + 1, metrics)
        return metrics | rate

    def _forward(self, batch: PackedBatch, sums: StepSums) -> Tensor:
        output = self._engine(batch)
        loss_sums = self._pack_loss(batch, output)
        sums.add(batch, loss_sums, output.trainer_logprobs_N, output.entropy_N)
        return loss_sums.loss

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
        self._engine.step()
        global_norm = float(self._engine.get_global_grad_norm() if norm is None else norm)
        if not math.isfinite(global_norm) and self._engine.was_step_applied():
            raise PipelineRLError(
                f"step {self.version + 1}: DeepSpeed took a step with a gradient that is not finite; the weights of "
                "this process are lost. The next start loads the checkpoint"
            )
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

    def state(self) -> LiveState:
        """As `TorchLearner.state`, for any stage and number of ranks, copied; on ranks except 0 without tensors."""
        tensors = {"rng.torch": torch.get_rng_state()}
        for name, parameter in self._parameters.items():
            master = self._full(parameter, None)
            if self._ranks.rank == 0:
                tensors[f"weights.{name}"] = snapshot(master)
            for moment in MOMENTS if self._num_updates else ():
                value = self._full(parameter, moment)
                if self._ranks.rank == 0:
                    tensors[f"optimizer.{name}.{moment}"] = snapshot(value)
            if self._num_updates and self._ranks.rank == 0:
                tensors[f"optimizer.{name}.step"] = torch.tensor(float(self._num_updates))
        values = {"version": self.version, **self._rate.state()}
        return LiveState(tensors if self._ranks.rank == 0 else {}, values, is_copied=True)

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """The inverse of `state`; every rank passes the same tensors."""
        steps = [float(tensors[key]) for key in tensors if key.endswith(".step")]
        self._make_states(max(steps, default=0.0))
        for name, parameter in self._parameters.items():
            shape = getattr(parameter, "ds_shape", parameter.shape)
            master = master_of(tensors, name, shape).to(self._device)
            with self._gathered([parameter], is_changed=True):
                parameter.copy_(master)
            self._set_full(parameter, None, master)
            for moment in MOMENTS if steps else ():
                self._set_full(parameter, moment, tensors[f"optimizer.{name}.{moment}"].to(self._device))
        torch.set_rng_state(tensors["rng.torch"])
        self.version = int(values["version"])
        self._rate.load_state(values)

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

    def _gathered(self, parameters: Sequence[Tensor], *, is_changed: bool = False) -> AbstractContextManager[Any]:
        if self._stage < 3:
            return nullcontext()
        context: AbstractContextManager[Any] = self._deepspeed.zero.GatheredParameters(
            list(parameters), modifier_rank=0 if is_changed else None
        )
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

    def _make_states(self, num_updates: float) -> None:
        """Create zero moments as after `num_updates` steps; AdamW creates moments only at its first step."""
        self._adam.state.clear()
        if not num_updates:
            return
        for master in self._masters():
            moments = {moment: torch.zeros_like(master) for moment in MOMENTS}
            self._adam.state[master] = {
                "step": torch.tensor(num_updates, device=_step_device(self._adam, master)),
                **moments,
            }
        link = getattr(self._engine.optimizer, "_lazy_init_hp_params_optimizer_state", None)
        if link is not None:
            self._engine.optimizer._hp_optimizer_states_linked = False
            link()

    def _full(self, parameter: Tensor, moment: str | None) -> Tensor:
        """The float32 master of a parameter, or one of its moments, gathered from all ranks."""
        utils = self._deepspeed.utils
        if self._stage == 0:
            return parameter if moment is None else self._adam.state[parameter][moment]
        if moment is None:
            full: Tensor = utils.safe_get_full_fp32_param(parameter)
        else:
            full = utils.safe_get_full_optimizer_state(parameter, moment)
        return full.view(getattr(parameter, "ds_shape", parameter.shape))

    def _set_full(self, parameter: Any, moment: str | None, value: Tensor) -> None:
        if self._stage == 0:
            if moment is not None:
                self._adam.state[parameter][moment].copy_(value)
            return
        if self._stage == 3:  # DeepSpeed's setter requires a size divisible by the number of ranks
            own, _ = self._engine.optimizer._get_fp32_opt_state_partition(
                parameter, release_swap_buffers=False, optim_state_key=moment
            )
            padded = torch.zeros(own.numel() * self._ranks.size, dtype=torch.float32, device=value.device)
            padded[: value.numel()] = value.reshape(-1)
            own.copy_(padded.chunk(self._ranks.size)[self._ranks.rank])
            return
        utils = self._deepspeed.utils
        if moment is None:
            utils.safe_set_full_fp32_param(parameter, value)
        else:
            utils.safe_set_full_optimizer_state(parameter, value, moment)


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


def _step_device(adam: torch.optim.Optimizer, master: Tensor) -> torch.device:
    """Device of AdamW's step counter: the device of the moments if AdamW is fused, else the CPU."""
    return master.device if adam.defaults.get("fused") else torch.device("cpu")
