"""Chooses the kind of attention: the configured kind, or the fastest kind that works on the model's device."""

import logging
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._triton import has_triton

from pipelinerl_core.algo.packed import PackLayout, Parent, layout_of
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.training import attention
from pipelinerl_core.training.attention import (
    ATTENTION_FUNCTIONS,
    FLEX_ATTENTION,
    FLOAT32_ATTENTION,
    PACKED_ATTENTION,
    VARLEN_ATTENTION,
)

AttentionKind = Literal["auto", "padded", "varlen", "flex"]
"""Values of `learner.attention`."""
ATTENTION_NAMES = {"padded": PACKED_ATTENTION, "varlen": VARLEN_ATTENTION, "flex": FLEX_ATTENTION}
"""Kind -> name for `set_attn_implementation`."""

# In the order in which "auto" tries them on a GPU.
_FAST = ("varlen", "flex")
# Packs of the trial: more than one block of flex attention, a sequence of one token, ends inside of a block; and less
# than a block. The last sequence continues another one.
_PACKS = (((5, 150, 1, 130, 9), (Parent(1, 140),)), ((5, 60, 20), (Parent(1, 50),)))
# Largest difference from padded attention, relative to the largest value: rounding of the type.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}

_log = logging.getLogger(__name__)


class Heads(NamedTuple):
    """Shape, type and device of the inputs of attention."""

    num: int
    num_kv: int
    size: int
    dtype: torch.dtype
    device: torch.device


def choose_attention(kind: AttentionKind, heads: Heads) -> str:
    """Name for `set_attn_implementation`. Kinds other than padded are first compared with padded attention.

    Raises ConfigError if the configured kind does not work; "auto" then logs a warning and tries the next kind.
    """
    if kind == "padded":
        return PACKED_ATTENTION
    if kind == "auto" and heads.device.type != "cuda":
        return FLOAT32_ATTENTION if heads.dtype == torch.bfloat16 else PACKED_ATTENTION
    if kind != "auto":
        problem = missing_for(kind, heads) or trial(kind, heads)
        if problem is not None:
            raise ConfigError(f"learner.attention={kind}: {problem}. Set learner.attention=auto")
        return ATTENTION_NAMES[kind]
    for candidate in _FAST:
        if missing_for(candidate, heads) is None:
            problem = trial(candidate, heads)
            if problem is None:
                _log.info("attention over packs: %s", candidate)
                return ATTENTION_NAMES[candidate]
            _log.warning("attention: %s does not work here (%s); trying the next kind", candidate, problem)
    return PACKED_ATTENTION


def missing_for(kind: str, heads: Heads) -> str | None:
    """Why a kind of attention cannot work here; None: no reason found without a trial."""
    if heads.device.type != "cuda":
        return f"the model is on {heads.device}, this kind of attention needs a GPU"
    if kind == "varlen" and heads.dtype not in (torch.bfloat16, torch.float16):
        return f"flash attention does not support {str(heads.dtype).removeprefix('torch.')}"
    if kind == "varlen" and attention.varlen_attn is None:
        return f"torch {torch.__version__} has no varlen_attn"
    if kind == "flex" and not has_triton():
        return "torch cannot compile for this GPU (Triton is missing)"
    return None


def trial(kind: str, heads: Heads) -> str | None:
    """Compare a kind of attention with padded attention on small packs, forward and backward; None: equal."""
    problems = (_trial(kind, heads, lengths, parents) for lengths, parents in _PACKS)
    return next((problem for problem in problems if problem is not None), None)


def _trial(kind: str, heads: Heads, lengths: tuple[int, ...], parents: tuple[Parent, ...]) -> str | None:
    layout = layout_of(lengths, parents).to(heads.device)
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, num, sum(lengths), heads.size) for num in (heads.num, heads.num_kv, heads.num_kv)]
    inputs = [torch.randn(shape, generator=generator).to(heads.device, heads.dtype) for shape in shapes]
    wanted = _results(PACKED_ATTENTION, inputs, layout)
    try:
        results = _results(ATTENTION_NAMES[kind], inputs, layout)
    except Exception as error:  # noqa: BLE001 - kernels and compilers raise many types of errors
        return f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"
    differences = [
        ((result - other).abs().max() / other.abs().max()).item()
        for result, other in zip(results, wanted, strict=True)
    ]
    tolerance = _TOLERANCE[heads.dtype]
    if all(difference <= tolerance for difference in differences):  # False for a nan
        return None
    return f"relative difference from padded attention {max(differences):.2g} (at most {tolerance:g})"


@torch.enable_grad()
def _results(name: str, inputs: list[Tensor], layout: PackLayout) -> list[Tensor]:
    """The output of attention, and the gradients of the sum of its squares."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    attended, _ = ATTENTION_FUNCTIONS[name](torch.nn.Module(), *leaves, None, layout=layout)
    return [attended.detach(), *torch.autograd.grad(attended.float().square().sum(), leaves)]
