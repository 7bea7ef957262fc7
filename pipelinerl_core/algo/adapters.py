"""Low-rank adapters (LoRA) as those see them who publish and who receive them: W + s * B @ A.

Trainer and actor merge with the same function, so that an engine has the same bits in both cases.

Shapes: O, I = outputs and inputs of a linear layer, R = rank of its adapter.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_FACTOR = re.compile(r"\.lora_[AB]\.weight$")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterNote:
    """The values that merging adapters requires in addition to their factors."""

    scale: float
    """s."""
    dtype: str
    """Type of the merged weights, as torch calls it, without "torch."."""
    base_digest: str
    """Digest of the frozen weights that the adapters belong to (`weights.base.BaseWeights.digest`)."""


class Adapters(dict[str, Tensor]):
    """Factors by name (`<layer>.lora_A.weight` and `lora_B`), in place of all weights, with their note."""

    def __init__(self, factors: Mapping[str, Tensor], note: AdapterNote) -> None:
        super().__init__(factors)
        self.note = note

    def pairs(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(name of the adapted weight, A [R, I], B [O, R]) of each adapter.

        Raises ValueError for a name that is not the name of a factor, and for a factor without the other factor.
        """
        for name in sorted({_FACTOR.sub("", name) if is_factor(name) else "" for name in self}):
            a_RI, b_OR = (self.get(factor) for factor in factor_names(f"{name}.weight"))
            if a_RI is None or b_OR is None:
                raise ValueError(f"{name or 'one of them'}: not the two factors of an adapter")
            yield f"{name}.weight", a_RI, b_OR


def factor_names(weight: str) -> tuple[str, str]:
    """Names of the factors A and B of a weight `<layer>.weight`."""
    layer = weight.removesuffix(".weight")
    return f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"


def is_factor(name: str) -> bool:
    """Whether it is the name of a factor."""
    return _FACTOR.search(name) is not None


@torch.no_grad()
def merge(base_OI: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float) -> Tensor:
    """[O, I] W + s * B @ A in float32, rounded once to the type of W; on the device of W."""
    # Copies: where in memory a factor begins, which differs between a parameter and a file, may choose the kernel.
    a_RI, b_OR = (torch.clone(factor, memory_format=torch.contiguous_format).float() for factor in (a_RI, b_OR))
    return torch.addmm(base_OI.float(), b_OR, a_RI, alpha=scale).to(base_OI.dtype)
