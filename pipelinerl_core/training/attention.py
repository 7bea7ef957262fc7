"""Attention over packed sequences, as attention functions of transformers without a dense mask.

All other layers treat every packed token alike. Attention has three kinds:

    padded   scatter queries, keys and values into one padded row per sequence, run torch's causal kernel, gather the
             results. Padding is right of the real tokens, so causal attention already excludes padding.
             Any device and type; cost S * L^2. A sliding window is a mask of this kernel.
    float32  padded attention with queries, keys and values in float32, for models in bfloat16 on a CPU. The backward
             pass of torch's kernel is slow there in bfloat16: one layer forward and backward takes 89 ms, in float32
             22 ms (32 sequences of 41 tokens, 9 heads of size 64, one core with avx512_bf16).
    varlen   torch's flash attention, with the first token of each sequence as an argument. GPU, bfloat16 or float16.
    flex     torch's flex attention, compiled, with a mask of the blocks of the pack. GPU, any type.

`learner.attention` chooses (training/attention_choice.py).

Shapes: B = 1, T = packed tokens, K = contexts, L = longest context, H = heads, D = head size, F = H * D.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from pipelinerl_core.algo.packed import PackLayout, window_mask
from pipelinerl_core.training.block_masks import block_mask

varlen_attn: Any = None
"""Torch's flash attention over packed sequences; None in versions of torch without it."""
with suppress(ImportError):  # the GPU benchmark also runs with older versions of torch
    from torch.nn.attention import varlen

    varlen_attn = varlen.varlen_attn

# Names for `set_attn_implementation`. No mask function is registered under them, so transformers builds no mask.
PACKED_ATTENTION = "pipelinerl_packed"
FLOAT32_ATTENTION = "pipelinerl_float32"
VARLEN_ATTENTION = "pipelinerl_varlen"
FLEX_ATTENTION = "pipelinerl_flex"


class _Unpad(torch.autograd.Function):
    """[S * L, F] -> [T, F]. Slots are unique, so backward can copy; torch's own index_select would add."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, slots_T: Tensor) -> Tensor:
        ctx.save_for_backward(slots_T)
        ctx.num_slots = padded.shape[0]
        return padded.index_select(0, slots_T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TF: Tensor) -> tuple[Tensor, None]:
        (slots_T,) = ctx.saved_tensors
        return grad_TF.new_zeros(ctx.num_slots, grad_TF.shape[1]).index_copy_(0, slots_T, grad_TF), None


def packed_attention(
    module: torch.nn.Module,
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    attention_mask: None,
    *,
    layout: PackLayout | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each packed context; `layout` arrives through the keyword arguments of the model.

    Keys and values may have fewer heads than queries (grouped-query attention). Returns [B, T, H, D].
    Raises ValueError without a layout.
    """
    layout = _needed(layout)
    is_cut = sliding_window is not None and sliding_window < layout.longest
    attended_KHLD = scaled_dot_product_attention(
        _pad_heads(query_BHTD, layout),
        _pad_heads(key_BHTD, layout),
        _pad_heads(value_BHTD, layout),
        attn_mask=window_mask(layout.longest, sliding_window, query_BHTD.device) if is_cut else None,
        is_causal=not is_cut,
        scale=scaling,
        dropout_p=dropout,
        enable_gqa=key_BHTD.shape[1] != query_BHTD.shape[1],
    )
    num_heads, num_tokens = query_BHTD.shape[1:3]
    attended = attended_KHLD.transpose(1, 2).reshape(layout.num_contexts * layout.longest, -1)
    packed_TF: Tensor = _Unpad.apply(attended, layout.slots_T)  # type: ignore[no-untyped-call]
    return packed_TF.view(1, num_tokens, num_heads, -1), None


def float32_attention(
    module: torch.nn.Module,
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    attention_mask: None,
    **options: Any,
) -> tuple[Tensor, None]:
    """`packed_attention` computed in float32; the result has the type of the queries."""
    exact = (query_BHTD.float(), key_BHTD.float(), value_BHTD.float())
    attended, _ = packed_attention(module, *exact, attention_mask, **options)
    return attended.to(query_BHTD.dtype), None


def _pad_heads(packed_BHTD: Tensor, layout: PackLayout) -> Tensor:
    """[B, H, T, D] -> [K, H, L, D]."""
    num_heads, num_tokens, head_dim = packed_BHTD.shape[1:]
    packed_TF = packed_BHTD.transpose(1, 2).reshape(num_tokens, num_heads * head_dim)
    num_slots = layout.num_contexts * layout.longest
    padded = packed_TF.new_zeros(num_slots, packed_TF.shape[1]).index_copy_(0, layout.slots_T, packed_TF)
    return padded.view(layout.num_contexts, layout.longest, num_heads, head_dim).transpose(1, 2)


def varlen_attention(
    module: torch.nn.Module,
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    attention_mask: None,
    *,
    layout: PackLayout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """`packed_attention` by torch's flash attention, whose work is sum L^2 over the contexts. Without dropout.

    Raises ValueError without a layout, and torch's error if torch has no kernel for the device or type.
    """
    layout = _needed(layout)
    query_THD, key_THD, value_THD = (heads[0].transpose(0, 1) for heads in (query_BHTD, key_BHTD, value_BHTD))
    attended_THD = varlen_attn(
        query_THD,
        key_THD,
        value_THD,
        layout.cu_seqlens,
        layout.cu_seqlens,
        layout.longest,
        layout.longest,
        scale=scaling,
        # Tokens before and after the query. The window of transformers includes the query.
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=key_THD.shape[1] != query_THD.shape[1],
    )
    return attended_THD[None], None


def flex_packed_attention(
    module: torch.nn.Module,
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    attention_mask: None,
    *,
    layout: PackLayout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """`packed_attention` by torch's flex attention, over the needed blocks. Without dropout.

    Raises ValueError without a layout, and NotImplementedError for gradients on a CPU.
    """
    layout = _needed(layout)
    function = _compiled() if query_BHTD.is_cuda else flex_attention
    attended_BHTD = function(
        query_BHTD,
        key_BHTD,
        value_BHTD,
        block_mask=block_mask(layout, sliding_window),
        scale=scaling,
        enable_gqa=key_BHTD.shape[1] != query_BHTD.shape[1],
    )
    return attended_BHTD.transpose(1, 2), None


@cache
def _compiled() -> Any:
    # dynamic: one kernel for packs of any length. Without compilation flex attention stores all T * T scores.
    return torch.compile(flex_attention, dynamic=True)


def _needed(layout: PackLayout | None) -> PackLayout:
    if layout is None:
        raise ValueError(
            "the attention of the model gets no layout=PackLayout(...): its layers drop keyword arguments"
        )
    return layout


ATTENTION_FUNCTIONS: dict[str, Callable[..., tuple[Tensor, None]]] = {
    PACKED_ATTENTION: packed_attention,
    FLOAT32_ATTENTION: float32_attention,
    VARLEN_ATTENTION: varlen_attention,
    FLEX_ATTENTION: flex_packed_attention,
}
for _name, _function in ATTENTION_FUNCTIONS.items():
    AttentionInterface.register(_name, _function)
