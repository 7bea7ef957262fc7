"""Low-rank adapters (LoRA, arXiv:2106.09685): W + s * B @ A, where W is frozen and A and B are trained.

peft adds the adapters to the linear layers of the decoder blocks. The trainer publishes merged weights under the
names of the base model, or, with weights.content=adapters, only the factors, which the receiver merges with the same
function. A checkpoint has the adapters.

Shapes: O, I = outputs and inputs of a linear layer, R = rank of its adapter.
"""

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from pipelinerl_core.algo.adapters import factor_names, is_factor, merge
from pipelinerl_core.config.learners import LearnerConfig
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.interfaces import TensorMeta

# What peft inserts into names: the wrapped layer, and the adapter's name between factor and `weight`.
_BASE, _OWN_NAME = ".base_layer.", re.compile(r"\.(lora_[AB])\.default\.")


@dataclass(frozen=True, slots=True, eq=False)
class PublishedWeight:
    """One published weight, and the parameters that the weight is computed from."""

    name: str
    """The name in the base model."""
    base: Tensor
    """The base weight; [O, I] if the weight has an adapter."""
    adapter: tuple[Tensor, Tensor] | None
    """A [R, I] and B [O, R]; None: no adapter."""
    scale: float

    @property
    def parts(self) -> list[Tensor]:
        """The parameters that `copy_to` reads."""
        return [self.base, *(self.adapter or ())]

    @property
    def meta(self) -> TensorMeta:
        """Name, type and shape; also while DeepSpeed has divided the parameter among the ranks."""
        shape = tuple(getattr(self.base, "ds_shape", self.base.shape))
        return TensorMeta(self.name, str(self.base.dtype).removeprefix("torch."), shape)

    @torch.no_grad()
    def copy_to(self, target: Tensor) -> None:
        """Write W + s * B @ A, computed in float32 and rounded once to the type of W."""
        target.copy_(self.base if self.adapter is None else merge(self.base, *self.adapter, self.scale))


def add_adapters(model: Any, config: LearnerConfig, seed: int) -> None:
    """Freeze the model and add adapters of rank `config.lora_rank` to its linear layers, in place.

    A depends only on `seed`, and B is 0: adapters are equal on every rank and at every start, and the outputs of the
    model do not change. The state of torch's generator does not change.

    Raises ConfigError if the model has no layer of a name in `lora_targets`, or if peft is not installed.
    """
    targets = _targets(model, config.lora_targets)
    try:
        import peft  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"learner.lora_rank={config.lora_rank}: peft cannot be imported ({error}). Run `make install`, or set "
            "learner.lora_rank=0"
        ) from None
    settings = peft.LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_scale * config.lora_rank,
        target_modules=targets,
        lora_dropout=0.0,
        bias="none",
    )
    with torch.random.fork_rng(devices=[]):  # peft draws adapters on the CPU for every device
        torch.manual_seed(seed)
        # Beside a config of transformers, peft would move targets to the experts in one tensor.
        peft.inject_adapter_in_model(settings, torch.nn.ModuleDict({"model": model}))
    model.eval()  # new modules are in training mode


def share_frozen(model: Any) -> Any:
    """A copy of the model's modules that shares the parameters, so that `add_adapters` changes only the original."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def trained_parameters(model: Any) -> dict[str, Tensor]:
    """The parameters that the optimizer changes, by name, tied ones once: the adapters if any, else all weights."""
    return {_clean(name): parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def published_weights(model: Any, scale: float, *, adapters_alone: bool = False) -> list[PublishedWeight]:
    """Every weight of the base model, tied ones once, in the model's order; `scale` is s.

    With adapters_alone: the factors of the adapters instead.
    """
    named = {_clean(name): parameter for name, parameter in model.named_parameters()}
    return [
        PublishedWeight(name, parameter, None if adapters_alone else _adapter(named, name), scale)
        for name, parameter in named.items()
        if is_factor(name) == adapters_alone
    ]


def _adapter(named: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor] | None:
    if not name.endswith(".weight"):
        return None
    a_RI, b_OR = (named.get(factor) for factor in factor_names(name))
    return None if a_RI is None or b_OR is None else (a_RI, b_OR)


def _clean(name: str) -> str:
    return _OWN_NAME.sub(r".\1.", name.replace(_BASE, "."))


def _targets(model: Any, chosen: Sequence[str]) -> list[str]:
    there = list(_linear_layers(model))
    kinds = sorted({name.rpartition(".")[2] for name in there})
    unknown = sorted(set(chosen) - set(kinds))
    if unknown or not there:
        raise ConfigError(
            f"learner.lora_targets: the decoder blocks of {type(model).__name__} have no linear layer "
            f"{', '.join(unknown)}".rstrip()
            + (f". Choose from {', '.join(kinds)}" if there else ". Set learner.lora_rank=0")
        )
    return [name for name in there if not chosen or name.rpartition(".")[2] in chosen]


def _linear_layers(model: Any) -> Iterator[str]:
    """Full names of the linear layers in the decoder blocks: without head and embeddings."""
    for block_name, block in model.named_modules():
        if isinstance(block, GradientCheckpointingLayer):
            for name, layer in block.named_modules():
                if isinstance(layer, torch.nn.Linear):
                    yield f"{block_name}.{name}"
