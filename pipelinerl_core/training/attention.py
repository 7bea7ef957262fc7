"""Attention over packed sequences, as an attention function of transformers.

Every other layer works on the packed tokens alone. Attention scatters queries, keys and values into one padded row
per sequence, runs a causal kernel, and gathers the results back. Padding stands right of the real tokens, so the
causal rule alone keeps it away from them and no mask is needed.

Shapes: B = 1, T = packed tokens, S = sequences, L = longest sequence, H = heads, D = head size, F = H * D.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from pipelinerl_core.algo.packed import PackLayout
from pipelinerl_core.errors import ConfigError

PACKED_ATTENTION = "pipelinerl_packed"
"""Name for `set_attn_implementation`. No mask function is registered under it, so transformers builds no mask."""


class _Pad(torch.autograd.Function):
    """[T, F] -> [S * L, F], zeros elsewhere. Slots are unique: a copy forward and a copy backward."""

    @staticmethod
    def forward(ctx: Any, packed_TF: Tensor, slots_T: Tensor, num_slots: int) -> Tensor:
        ctx.save_for_backward(slots_T)
        return packed_TF.new_zeros(num_slots, packed_TF.shape[1]).index_copy_(0, slots_T, packed_TF)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slots_T,) = ctx.saved_tensors
        return grad.index_select(0, slots_T), None, None


class _Unpad(torch.autograd.Function):
    """[S * L, F] -> [T, F], the inverse of _Pad."""

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
    """Causal attention inside each packed sequence; `layout` arrives through the keyword arguments of the model.

    Keys and values may have fewer heads than queries (grouped-query attention). Returns [B, T, H, D].
    Raises ConfigError when a sliding window would cut a sequence, and ValueError without a layout.
    """
    if layout is None:
        raise ValueError("packed attention needs layout=PackLayout(...) in the call of the model")
    if sliding_window is not None and layout.longest > sliding_window:
        raise ConfigError(
            f"a sequence of {layout.longest} tokens is longer than the model's sliding window of {sliding_window}; "
            "only full attention is supported. Lower rollouts.max_tokens or take a model with full attention"
        )
    attended_SHLD = scaled_dot_product_attention(
        _pad_heads(query_BHTD, layout),
        _pad_heads(key_BHTD, layout),
        _pad_heads(value_BHTD, layout),
        is_causal=True,
        scale=scaling,
        dropout_p=dropout,
        enable_gqa=key_BHTD.shape[1] != query_BHTD.shape[1],
    )
    num_heads, num_tokens = query_BHTD.shape[1:3]
    attended = attended_SHLD.transpose(1, 2).reshape(layout.num_sequences * layout.longest, -1)
    packed_TF: Tensor = _Unpad.apply(attended, layout.slots_T)  # type: ignore[no-untyped-call]
    return packed_TF.view(1, num_tokens, num_heads, -1), None


def _pad_heads(packed_BHTD: Tensor, layout: PackLayout) -> Tensor:
    """[B, H, T, D] -> [S, H, L, D]."""
    num_heads, num_tokens, head_dim = packed_BHTD.shape[1:]
    packed_TF = packed_BHTD.transpose(1, 2).reshape(num_tokens, num_heads * head_dim)
    num_slots = layout.num_sequences * layout.longest
    padded: Tensor = _Pad.apply(packed_TF, layout.slots_T, num_slots)  # type: ignore[no-untyped-call]
    return padded.view(layout.num_sequences, layout.longest, num_heads, head_dim).transpose(1, 2)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
