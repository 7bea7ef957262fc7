"""The blocks that flex attention computes for a pack, from the lengths of its sequences.

torch's `create_block_mask` evaluates the mask for all T * T pairs of tokens on the device. For sequences in a row
this is not necessary: queries of a block attend to a block of keys before them if the last key is in the sequence of
the first query, and no pair of the two blocks is masked if both blocks are inside one sequence.

Shapes: T = packed tokens, Q and K = blocks of queries and of keys, as many.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from pipelinerl_core.algo.packed import PackLayout, moved

BLOCK_TOKENS = 128
"""Tokens of a block; flex attention's own choice."""

BoolArray = NDArray[np.bool_]
_Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def block_mask(layout: PackLayout, window: int | None) -> BlockMask:
    """Mask of causal attention inside each sequence, within the `window` newest tokens if given; cached per pack."""
    key = ("blocks", window)
    if key not in layout.masks:
        layout.masks[key] = _make(layout, window)
    made: BlockMask = layout.masks[key]
    return made


def _make(layout: PackLayout, window: int | None) -> BlockMask:
    partial_QK, whole_QK = blocks(layout.lengths, window)
    context_T = layout.context_T
    if layout.parents:
        partial_QK |= _prefix_blocks(layout)
        whole_QK &= ~partial_QK
        position_T, begin_T, end_T = (moved(table, context_T.device) for table in _prefix_tables(layout))
        is_seen = _continuation_mask(context_T, position_T, begin_T, end_T, window)
    else:
        is_seen = _context_mask(context_T, window)
    num_tokens = context_T.numel()
    (kv, kv_indices), (full_kv, full_kv_indices), (q, q_indices), (full_q, full_q_indices) = (
        [moved(table, context_T.device) for table in _ordered(used)]
        for used in (partial_QK, whole_QK, partial_QK.T, whole_QK.T)
    )
    return BlockMask(
        seq_lengths=(num_tokens, num_tokens),
        kv_num_blocks=kv,
        kv_indices=kv_indices,
        full_kv_num_blocks=full_kv,
        full_kv_indices=full_kv_indices,
        q_num_blocks=q,
        q_indices=q_indices,
        full_q_num_blocks=full_q,
        full_q_indices=full_q_indices,
        BLOCK_SIZE=(BLOCK_TOKENS, BLOCK_TOKENS),
        mask_mod=is_seen,
    )


# The masks are compiled: they may read tensors and numbers, and must not change a tensor in place. A number or a list
# that differs from pack to pack would compile them again and again.
def _context_mask(context_T: Tensor, window: int | None) -> _Mask:
    def is_seen(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (context_T[query] == context_T[key]) & (query >= key)
        return seen if window is None else seen & (query - key < window)

    return is_seen


def _continuation_mask(
    context_T: Tensor, position_T: Tensor, begin_T: Tensor, end_T: Tensor, window: int | None
) -> _Mask:
    """Of each token: position in its context, with the prefix; and where its prefix begins and ends in the pack."""

    def is_seen(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        in_context = (context_T[query] == context_T[key]) & (query >= key)
        in_prefix = (key >= begin_T[query]) & (key < end_T[query])
        seen = in_context | in_prefix
        return seen if window is None else seen & (position_T[query] - position_T[key] < window)

    return is_seen


def _prefix_tables(layout: PackLayout) -> list[Tensor]:
    """Three [T] int32; without a parent begin and end are 0."""
    starts_K = np.cumsum([0, *layout.lengths])[:-1]
    sizes_K = np.array([0] * layout.num_roots + [parent.num_tokens for parent in layout.parents])
    begins_K = np.array([0] * layout.num_roots + [starts_K[parent.context] for parent in layout.parents])
    num_tokens = layout.context_T.numel()
    positions_T = np.arange(num_tokens) + np.repeat(sizes_K - starts_K, layout.lengths)
    tables = (positions_T, np.repeat(begins_K, layout.lengths), np.repeat(begins_K + sizes_K, layout.lengths))
    return [torch.from_numpy(table.astype(np.int32)) for table in tables]


def _prefix_blocks(layout: PackLayout) -> BoolArray:
    """[Q, K], pairs of a block with queries of a context and a block with keys of its prefix."""
    starts = np.cumsum([0, *layout.lengths])
    num_blocks = -(-int(starts[-1]) // BLOCK_TOKENS)
    used_QK = np.zeros((num_blocks, num_blocks), dtype=np.bool_)
    for context, parent in enumerate(layout.parents, start=layout.num_roots):
        queries = slice(starts[context] // BLOCK_TOKENS, (starts[context + 1] - 1) // BLOCK_TOKENS + 1)
        begin = starts[parent.context]
        keys = slice(begin // BLOCK_TOKENS, (begin + parent.num_tokens - 1) // BLOCK_TOKENS + 1)
        used_QK[queries, keys] = True
    return used_QK


def blocks(lengths: tuple[int, ...], window: int | None) -> tuple[BoolArray, BoolArray]:
    """Two [Q, K]: pairs of blocks that are partly masked, and pairs of blocks that are not masked at all."""
    context_T = np.repeat(np.arange(len(lengths)), lengths)
    num_tokens = len(context_T)
    first_Q = np.arange(0, num_tokens, BLOCK_TOKENS)
    last_Q = np.minimum(first_Q + BLOCK_TOKENS, num_tokens) - 1
    opening_Q, closing_Q = context_T[first_Q], context_T[last_Q]
    is_before_QK = np.tri(len(first_Q), k=-1, dtype=np.bool_)
    # A block of earlier keys shares a sequence with the queries only if its last token does with the first query.
    some_QK = is_before_QK & (closing_Q[None] == opening_Q[:, None])
    is_filled_Q = last_Q - first_Q + 1 == BLOCK_TOKENS
    all_QK = is_before_QK & (opening_Q[None] == closing_Q[:, None]) & is_filled_Q[:, None]
    if window is not None:
        some_QK &= first_Q[:, None] - last_Q[None] < window
        all_QK &= last_Q[:, None] - first_Q[None] < window
    return (some_QK & ~all_QK) | np.eye(len(first_Q), dtype=np.bool_), all_QK


def _ordered(used_QK: BoolArray) -> tuple[Tensor, Tensor]:
    """[1, 1, Q] number of used blocks in each row, [1, 1, Q, K] their indices before all other indices; int32."""
    order_QK = np.argsort(~used_QK, axis=1, kind="stable").astype(np.int32)
    num_Q = used_QK.sum(axis=1, dtype=np.int32)
    return torch.from_numpy(num_Q)[None, None], torch.from_numpy(order_QK)[None, None]
