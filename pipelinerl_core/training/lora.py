"""Low-rank adapters (LoRA, arXiv:2106.09685): W + s * B @ A, where W is frozen and A and B are trained.

peft puts them beside the linear layers of the decoder blocks. What leaves the trainer is the merged weight under the
base model's own name, so nobody else has to know, or (weights.content=adapters) the factors alone, which the receiver
merges by the same function; what a checkpoint holds are the adapters.

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
from pipelinerl_core.config.training import LearnerConfig
from pipelinerl_core.errors import ConfigError

# peft's wrappers in a name: the layer that is wrapped, and the adapter's own name between factor and `weight`.
_BASE, _OWN_NAME = ".base_layer.", re.compile(r"\.(lora_[AB])\.default\.")


@dataclass(frozen=True, slots=True, eq=False)
class PublishedWeight:
    """One weight as engines know it, and what it is made of."""

    name: str
    """The base model's own name of it."""
    base: Tensor
    """[O, I] where there is an adapter."""
    adapter: tuple[Tensor, Tensor] | None
    """A [R, I] and B [O, R]."""
    scale: float

    @property
    def parts(self) -> list[Tensor]:
        """The parameters that `merged` reads."""
        return [self.base, *(self.adapter or ())]

    @torch.no_grad()
    def merged(self) -> Tensor:
        """W + s * B @ A in float32, rounded once to the type of W; a copy of its own, on the CPU."""
        if self.adapter is None:
            return self.base.detach().to("cpu", copy=True).contiguous()
        return merge(self.base, *self.adapter, self.scale).cpu().contiguous()


def add_adapters(model: Any, config: LearnerConfig, seed: int) -> None:
    """Freeze the model and put adapters of `config.lora_rank` beside its linear layers, in place.

    A is drawn from `seed` alone and B is 0: every rank and every start has the same, and the model computes what it
    did. torch's generator is left as it was.

    Raises ConfigError when a name in `lora_targets` is not there, no layer fits, or peft is not installed.
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
    with torch.random.fork_rng(devices=[]):  # they are drawn on the CPU, whatever the device
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(settings, model)
    model.eval()  # new modules are in training mode


def share_frozen(model: Any) -> Any:
    """The model as it is now, with the same parameters in memory: `add_adapters` changes the original alone."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def trained_parameters(model: Any) -> dict[str, Tensor]:
    """What the optimizer changes, by name, tied ones once: all weights, or the adapters if there are any."""
    return {_clean(name): parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def published_weights(model: Any, scale: float, *, adapters_alone: bool = False) -> list[PublishedWeight]:
    """Every weight of the base model, tied ones once, in its order; `scale` is s. Or the factors as they are."""
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
            + (f". Choose of {', '.join(kinds)}" if there else ". Set learner.lora_rank=0")
        )
    return [name for name in there if not chosen or name.rpartition(".")[2] in chosen]


def _linear_layers(model: Any) -> Iterator[str]:
    """Full names of the linear layers in the decoder blocks: neither head nor embeddings are among them."""
    for block_name, block in model.named_modules():
        if isinstance(block, GradientCheckpointingLayer):
            for name, layer in block.named_modules():
                if isinstance(layer, torch.nn.Linear):
                    yield f"{block_name}.{name}"
