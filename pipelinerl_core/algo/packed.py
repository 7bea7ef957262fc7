"""The tensors of one forward pass: several sequences one after the other, without padding.

Whatever depends on the data is decided on the CPU, where a pack is made: a GPU that is asked how many tokens a mask
leaves must finish everything before it can answer.

Shapes: T = packed tokens, S = sequences, one per rollout, K = contexts, one per sequence and one per branch of it,
L = longest context, N = sampled tokens, those whose log-probability matters, M = those of them that are trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackLayout:
    """Where the contexts of a pack are, for attention: a token sees earlier tokens of its context."""

    lengths: tuple[int, ...]
    """Tokens of each context; here, so that no device is asked for them."""
    slots_T: Tensor
    """int64, context * L + position: the place of each token in a padded [K, L] arrangement."""
    cu_seqlens: Tensor
    """[K + 1] int32, where each context begins, and T; the name that flash attention gave it."""
    context_T: Tensor
    """int32, the context of each token."""
    block_masks: dict[int | None, Any] = field(default_factory=dict)
    """Masks of flex attention, by sliding window: made once for all layers (training/attention.py)."""

    @property
    def num_contexts(self) -> int:
        """K."""
        return len(self.lengths)

    @property
    def longest(self) -> int:
        """L."""
        return max(self.lengths)

    def to(self, device: torch.device) -> "PackLayout":
        """The same on a device."""
        return PackLayout(
            lengths=self.lengths,
            slots_T=moved(self.slots_T, device),
            cu_seqlens=moved(self.cu_seqlens, device),
            context_T=moved(self.context_T, device),
        )


def layout_of(lengths: Sequence[int]) -> PackLayout:
    """The layout, on the CPU, of contexts of these lengths (1 or more), one after the other."""
    lengths_K = np.asarray(lengths, dtype=np.int64)
    ends_K = np.cumsum(lengths_K)
    context_T = np.repeat(np.arange(len(lengths_K)), lengths_K)
    positions_T = np.arange(len(context_T)) - np.repeat(ends_K - lengths_K, lengths_K)
    return PackLayout(
        lengths=tuple(lengths_K.tolist()),
        slots_T=torch.from_numpy(context_T * int(lengths_K.max()) + positions_T),
        cu_seqlens=torch.from_numpy(np.concatenate([[0], ends_K]).astype(np.int32)),
        context_T=torch.from_numpy(context_T.astype(np.int32)),
    )


def window_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """[L, L] bool: whether a query sees a key, in causal attention to the `window` newest tokens."""
    is_seen_LL = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return is_seen_LL if window is None else is_seen_LL.triu(1 - window)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device. A copy from the CPU to a GPU uses pinned memory, so that the CPU does not wait."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch:
    """One pack. The last token of a context is not in it: nothing that is sampled comes after it.

    Example: prompts [7, 8] and [9], completions [1, 2] and [3, 4, 5] -> T = 6, N = 5
        input_ids     7 8 1 9 3 4          source        1 2 3 4 5
        position_ids  0 1 2 0 1 2          target_ids    1 2 3 4 5
        context_T     0 0 0 1 1 1          sequence_N    0 0 1 1 1
    """

    input_ids_T: Tensor
    """int64"""
    position_ids_T: Tensor
    """int64, from 0 in every context."""
    layout: PackLayout
    row_S: Tensor
    """int64, index of each sequence in the list that was packed."""
    source_N: Tensor
    """int64, the packed token whose hidden state predicts the sampled token."""
    target_ids_N: Tensor
    """int64, the sampled token."""
    sequence_N: Tensor
    """int64, the sequence of the sampled token, 0 .. S - 1."""
    rollout_logprobs_N: Tensor
    """float32"""
    versions_N: Tensor
    """int64, the weight version that sampled the token."""
    advantages_N: Tensor
    """float32"""
    loss_weights_N: Tensor
    """float32"""
    trained_M: Tensor
    """int64, places among the N of those that are trained, in their order: where loss_mask is True."""
    needs_backward: bool = True
    """False: every advantage is 0 and the loss has no other terms, so that the gradient is 0."""

    @property
    def is_empty(self) -> bool:
        """Whether the pack has no row. Such a pack is one masked token, so that all ranks run the same operations."""
        return self.row_S.numel() == 0

    @property
    def num_sequences(self) -> int:
        """S; 1 for an empty pack, whose token belongs to a sequence 0."""
        return max(1, self.row_S.numel())

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.input_ids_T.numel()

    def to(self, device: torch.device) -> "PackedBatch":
        """The same pack on a device; itself when it is there already."""
        if self.input_ids_T.device == device:
            return self
        names = [name for name in self.__dataclass_fields__ if name not in ("layout", "needs_backward")]
        tensors = {name: moved(getattr(self, name), device) for name in names}
        return PackedBatch(layout=self.layout.to(device), needs_backward=self.needs_backward, **tensors)
