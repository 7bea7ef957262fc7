"""Attention over packed sequences, as attention functions of transformers without a dense mask.

All other layers treat every packed token alike. Attention has three kinds:

    padded   scatter queries, keys and values into one padded row per sequence, run torch's causal kernel, gather the
             results. Padding is right of the real tokens, so causal attention already excludes padding.
             Any device and type; cost S * L^2. A sliding window is a mask of this kernel. Contexts that continue
             others are further calls, one for similar lengths, with copies of the keys and values of their prefix.
    float32  padded attention with queries, keys and values in float32, for models in bfloat16 on a CPU. The backward
             pass of torch's kernel is slow there in bfloat16: one layer forward and backward takes 89 ms, in float32
             22 ms (32 sequences of 41 tokens, 9 heads of size 64, one core with avx512_bf16).
    varlen   torch's flash attention, with the first token of each sequence as an argument. GPU, bfloat16 or float16.
             A context that continues another one gets copies of the keys and values of its prefix.
    flex     torch's flex attention, compiled, with a mask of the blocks of the pack. GPU, any type.

`learner.attention` chooses (training/attention_choice.py).

Shapes: B = 1, T = packed tokens, H = heads, D = head size, F = H * D; of a band of contexts X, Y, U, Z as in
algo/packed.py.
"""

import inspect
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

from pipelinerl_core.algo.packed import Band, PackLayout, Prefixes
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

_NO_DECODING = {"FORCE_USE_FLEX_ATTENTION": True}
"""For a pack shorter than a block torch would take the kernel for decoding, which has no configuration for many
numbers of tokens and heads ("No choices exist for backend")."""


QKV = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values of a layer, [B, heads, T, D]; keys and values may have fewer heads (grouped-query
attention)."""
Attend = Callable[[QKV, PackLayout, float | None, int | None], Tensor]
"""From these, the layout, the scale of the scores, and the window of the layer if it has one, to [B, T, H, D]."""


class _Take(torch.autograd.Function):
    """Rows of a table [rows, F]. The indices are unique, so backward can copy; torch's own index_select would add."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, indices: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.num_rows = table.shape[0]
        return table.index_select(0, indices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (indices,) = ctx.saved_tensors
        return grad.new_zeros(ctx.num_rows, grad.shape[1]).index_copy_(0, indices, grad), None


def _for_transformers(attend: Attend) -> Callable[..., tuple[Tensor, None]]:
    """The attention function of transformers that computes `attend`; without dropout.

    `layout` arrives through the keyword arguments of the model. Raises ValueError without a layout.
    """

    def attention(
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
        if layout is None:
            raise ValueError(
                "the attention of the model gets no layout=PackLayout(...): its layers drop keyword arguments"
            )
        return attend((query_BHTD, key_BHTD, value_BHTD), layout, scaling, sliding_window), None

    return attention


def attend_padded(qkv: QKV, layout: PackLayout, scaling: float | None, window: int | None) -> Tensor:
    """Causal attention inside each packed context."""
    packed = [heads_BHTD.transpose(1, 2)[0].flatten(1) for heads_BHTD in qkv]
    sizes = [heads_BHTD.shape[-1] for heads_BHTD in qkv]  # values may have another size
    num_heads, num_tokens = qkv[0].shape[1:3]
    parts, start = [], 0
    for band in layout.bands:
        tokens = slice(start, start + band.num_tokens)
        queries, keys, values = (
            _padded(*_rows(table, tokens, band, with_copies=place > 0), len(band.lengths), band.width, size)
            for place, (table, size) in enumerate(zip(packed, sizes, strict=True))
        )
        if band.prefixes is not None:
            keys = torch.cat([_prefixed(packed[1], band.prefixes, sizes[1]), keys], dim=2)
            values = torch.cat([_prefixed(packed[2], band.prefixes, sizes[2]), values], dim=2)
        mask = _mask(layout, band, start, window)
        attended = scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=_is_grouped(qkv)
        )
        parts.append(_unpadded(attended, band.slots))
        start = tokens.stop
    attended_TF = torch.cat(parts) if len(parts) > 1 else parts[0]
    return attended_TF.view(1, num_tokens, num_heads, -1)


def _rows(packed_TF: Tensor, own: slice, band: Band, *, with_copies: bool) -> tuple[Tensor, Tensor]:
    """[tokens, F] of a band, with those that it copies from parents, and their slots."""
    if band.copied is None or band.copied_slots is None or not with_copies:
        return packed_TF[own], band.slots
    tokens = torch.cat([packed_TF[own], packed_TF.index_select(0, band.copied)])
    return tokens, torch.cat([band.slots, band.copied_slots])


def _prefixed(packed_TF: Tensor, prefixes: Prefixes, size: int) -> Tensor:
    """[X, H, Z, D] keys or values of the prefix of each context."""
    tokens = _Take.apply(packed_TF, prefixes.tokens)  # type: ignore[no-untyped-call]
    return _padded(tokens, prefixes.slots, prefixes.num, prefixes.longest, size).index_select(0, prefixes.number_X)


def _mask(layout: PackLayout, band: Band, start: int, window: int | None) -> Tensor | None:
    """The band's mask, made once for all layers."""
    key = ("padded", start, window)
    if key not in layout.masks:
        layout.masks[key] = band.mask(window)
    mask: Tensor | None = layout.masks[key]
    return mask


def attend_float32(qkv: QKV, layout: PackLayout, scaling: float | None, window: int | None) -> Tensor:
    """`attend_padded` computed in float32; the result has the type of the queries."""
    query_BHTD, key_BHTD, value_BHTD = qkv
    exact = (query_BHTD.float(), key_BHTD.float(), value_BHTD.float())
    return attend_padded(exact, layout, scaling, window).to(query_BHTD.dtype)


def _padded(tokens: Tensor, slots: Tensor, num_contexts: int, length: int, head_dim: int) -> Tensor:
    """[tokens, F] -> [contexts, H, length, D], zeros where there is no token."""
    padded = tokens.new_zeros(num_contexts * length, tokens.shape[1]).index_copy_(0, slots, tokens)
    return padded.view(num_contexts, length, -1, head_dim).transpose(1, 2)


def _unpadded(padded: Tensor, slots: Tensor) -> Tensor:
    """[contexts, H, length, D] -> [tokens, F]."""
    tokens: Tensor = _Take.apply(padded.transpose(1, 2).flatten(2).flatten(0, 1), slots)  # type: ignore[no-untyped-call]
    return tokens


def attend_varlen(qkv: QKV, layout: PackLayout, scaling: float | None, window: int | None) -> Tensor:
    """`attend_padded` by torch's flash attention, whose work is sum L^2 over the contexts.

    Raises torch's error if torch has no kernel for the device or type.
    """
    query_THD, key_THD, value_THD = (heads_BHTD[0].transpose(0, 1) for heads_BHTD in qkv)
    keys = layout.keys
    if keys is not None:
        key_THD, value_THD = key_THD.index_select(0, keys.tokens), value_THD.index_select(0, keys.tokens)
    # With fewer queries than keys, causal attention gives the last query all keys.
    attended_THD: Tensor = varlen_attn(
        query_THD,
        key_THD,
        value_THD,
        layout.cu_seqlens,
        layout.cu_seqlens if keys is None else keys.cu_seqlens,
        max(layout.lengths),
        max(layout.lengths) if keys is None else keys.longest,
        scale=scaling,
        # Tokens before and after the query. The window of transformers includes the query.
        window_size=(-1 if window is None else window - 1, 0),
        **({"enable_gqa": _is_grouped(qkv)} if _names_gqa() else {}),
    )
    return attended_THD[None]


def attend_flex(qkv: QKV, layout: PackLayout, scaling: float | None, window: int | None) -> Tensor:
    """`attend_padded` by torch's flex attention, over the needed blocks.

    Raises NotImplementedError for gradients on a CPU.
    """
    function = _compiled() if qkv[0].is_cuda else flex_attention
    attended_BHTD: Tensor = function(
        *qkv,
        block_mask=block_mask(layout, window),
        scale=scaling,
        enable_gqa=_is_grouped(qkv),
        kernel_options=_NO_DECODING,
    )
    return attended_BHTD.transpose(1, 2)


def _is_grouped(qkv: QKV) -> bool:
    return qkv[0].shape[1] != qkv[1].shape[1]


@cache
def _names_gqa() -> bool:
    """Whether this torch must be told that there are fewer key heads; before 2.12 it has no such parameter."""
    return "enable_gqa" in inspect.signature(varlen_attn).parameters


@cache
def _compiled() -> Any:
    # dynamic: one kernel for packs of any length. Without compilation flex attention stores all T * T scores, also
    # beyond dynamo's limit of eight variants: masks, gradients and strides make about as many.
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(flex_attention, dynamic=True)


ATTENTION_FUNCTIONS: dict[str, Callable[..., tuple[Tensor, None]]] = {
    PACKED_ATTENTION: _for_transformers(attend_padded),
    FLOAT32_ATTENTION: _for_transformers(attend_float32),
    VARLEN_ATTENTION: _for_transformers(attend_varlen),
    FLEX_ATTENTION: _for_transformers(attend_flex),
}
for _name, _function in ATTENTION_FUNCTIONS.items():
    AttentionInterface.register(_name, _function)
