"""AdamW over float32 master weights, with linear warm-up and decay, and its exact state.

If the model's parameters are float32, they are the masters. Otherwise the masters are float32 copies: bfloat16
would round an update of relative size 1e-4 to zero.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from pipelinerl_core.config.learners import LearnerConfig
from pipelinerl_core.errors import TrainingDiverged

_BETA1 = 0.9  # AdamW's usual decay of the first moment

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of AdamW's moments of each parameter."""


def learning_rate(step: int, config: LearnerConfig, num_steps: int) -> float:
    """Learning rate of step 1 .. num_steps: linear warm-up to lr, times a linear decay from 1 to final_lr_share over
    decay_steps, or all steps."""
    warm_up = min(1.0, step / max(1, config.warmup_steps))
    decay = 1.0 - (1.0 - config.final_lr_share) * min(1.0, step / (config.decay_steps or num_steps))
    return config.peak_lr * warm_up * decay


def make_adam(parameters: Sequence[Tensor], config: LearnerConfig) -> torch.optim.AdamW:
    """The optimizer of every learner."""
    # The fused kernel does one pass over memory: 0.6 ms, foreach 2.2 ms, for 0.8 M parameters on one core.
    return torch.optim.AdamW(
        parameters, lr=config.peak_lr, betas=(_BETA1, config.beta2), weight_decay=config.weight_decay, fused=True
    )


def num_updates_tensor(num_updates: float, adam: torch.optim.Optimizer, master: Tensor) -> Tensor:
    """AdamW's counter of steps: on the device of the moments if AdamW is fused, else on the CPU."""
    return torch.tensor(num_updates, device=master.device if adam.defaults.get("fused") else None)


class MasterOptimizer:
    """Owns the masters, and copies them to the model's parameters after every step."""

    def __init__(self, parameters: Mapping[str, Tensor], config: LearnerConfig, *, rests: bool = False) -> None:
        """`parameters`: name -> parameter, tied parameters once; their order is the order of gradients.

        rests: outside of `on_device`, moments and masters that are no parameters are in host memory.
        """
        self._parameters = dict(parameters)
        self._masters = {
            name: parameter if parameter.dtype == torch.float32 else parameter.detach().float().requires_grad_()
            for name, parameter in parameters.items()
        }
        self._config = config
        self._adam = make_adam(list(self._masters.values()), config)
        self._rests = rests
        self._on_host: dict[str, Tensor] = {}
        self._rest()

    @property
    def parameters(self) -> list[Tensor]:
        return list(self._parameters.values())

    @property
    def has_own_masters(self) -> bool:
        """Whether every master is another tensor than its parameter."""
        return all(self._masters[name] is not parameter for name, parameter in self._parameters.items())

    def zero_grad(self) -> None:
        for master in self._masters.values():
            master.grad = None

    def add_grads(self, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of one pack, in the order of `parameters`, to the masters' sums, in float32."""
        for master, gradient in zip(self._masters.values(), gradients, strict=True):
            if gradient is not None:
                master.grad = gradient.float() if master.grad is None else master.grad.add_(gradient)

    def gradients(self) -> list[Tensor]:
        """The gradient sums in the order of `parameters`, zeros for a missing gradient; may be changed in place."""
        for master in self._masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        return [master.grad for master in self._masters.values() if master.grad is not None]

    def grad_norm(self) -> Tensor:
        """[] global norm of the gradient sums."""
        return torch.nn.utils.get_total_norm(
            [tensor.grad for tensor in self._masters.values() if tensor.grad is not None]
        )

    def step(self, grad_norm: Tensor, *, learning_rate: float) -> None:
        """Clip by the global norm and take one step."""
        torch.nn.utils.clip_grads_with_norm_(self._masters.values(), self._config.clip_norm, grad_norm)
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        self._adam.step()
        self._copy_to_model()

    def state(self) -> dict[str, Tensor]:
        """The optimizer's own tensors: weights.<name> (the masters), optimizer.<name>.<moment>."""
        tensors = {f"weights.{name}": master for name, master in self._masters.items()}
        for name, master in self._masters.items():
            for key, value in self._adam.state.get(master, {}).items():
                tensors[f"optimizer.{name}.{key}"] = value
        return tensors

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """The block in which gradients and steps are possible, also with rests."""
        if self._rests:
            device = self.parameters[0].device
            for _, tensor in self._movable():
                tensor.data = tensor.data.to(device, non_blocking=True)
        try:
            yield
        except TrainingDiverged:  # the groups are quarantined, and the learner goes on
            self._rest()
            raise
        self._rest()

    @torch.no_grad()
    def _rest(self) -> None:
        """With rests: free the gradients, and move masters and moments to host memory, pinned for a GPU."""
        if not self._rests:
            return
        self.zero_grad()
        is_pinned = self.parameters[0].device.type == "cuda"
        for key, tensor in self._movable():
            if key not in self._on_host:
                self._on_host[key] = torch.empty_like(tensor, device="cpu", pin_memory=is_pinned)
            tensor.data = self._on_host[key].copy_(tensor, non_blocking=True)
        if is_pinned:
            torch.cuda.synchronize()

    def _movable(self) -> list[tuple[str, Tensor]]:
        parameters = {id(parameter) for parameter in self.parameters}
        return [(name, tensor) for name, tensor in self.state().items() if id(tensor) not in parameters]

    def forget_moments(self) -> None:
        """Be as before the first step."""
        self._adam.state.clear()

    def own(self, name: str, moment: str | None) -> Tensor:
        """[M] elements of the master of a parameter, or of a moment, which is created; a view."""
        master = self._masters[name]
        if moment is None:
            return master.view(-1)
        state = self._adam.state[master]
        if moment not in state:
            state[moment] = torch.zeros_like(master)
        return torch.as_tensor(state[moment]).view(-1)

    def set_num_updates(self, name: str, num_updates: float) -> None:
        master = self._masters[name]
        self._adam.state[master]["step"] = num_updates_tensor(num_updates, self._adam, master)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """The block in which the caller changes masters and moments."""
        yield
        self._rest()
        self._copy_to_model()

    @torch.no_grad()
    def _copy_to_model(self) -> None:
        for name, master in self._masters.items():
            if self._parameters[name] is not master:
                self._parameters[name].copy_(master)
