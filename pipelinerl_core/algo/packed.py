"""The tensors of one forward pass: several sequences one after the other, without padding.

Shapes: T = packed tokens, S = sequences, L = longest sequence, N = sampled tokens, those whose
log-probability matters.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackLayout:
    """Where each packed token stands in the padded [S, L] arrangement that attention needs."""

    slots_T: Tensor
    """int64, sequence * L + position."""
    num_sequences: int
    """S"""
    longest: int
    """L"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch:
    """One pack. The last token of a sequence is not in it: nothing that is sampled comes after it.

    Example: prompts [7, 8] and [9], completions [1, 2] and [3, 4, 5] -> T = 6, N = 5
        input_ids     7 8 1 9 3 4          source        1 2 3 4 5
        position_ids  0 1 2 0 1 2          target_ids    1 2 3 4 5
        slots         0 1 2 3 4 5          sequence      0 0 1 1 1
    """

    input_ids_T: Tensor
    """int64"""
    position_ids_T: Tensor
    """int64, from 0 in every sequence."""
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
    loss_mask_N: Tensor
    """bool, False on sampled tokens that are too old to be trained."""

    @property
    def is_empty(self) -> bool:
        """Whether it holds no row: one masked token, so that a rank without work does what the others do."""
        return self.row_S.numel() == 0

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.input_ids_T.numel()

    def to(self, device: torch.device) -> "PackedBatch":
        """The same pack on a device; itself when it is there already."""
        if self.input_ids_T.device == device:
            return self
        layout = PackLayout(
            slots_T=self.layout.slots_T.to(device),
            num_sequences=self.layout.num_sequences,
            longest=self.layout.longest,
        )
        names = [name for name in self.__dataclass_fields__ if name.endswith(("_T", "_S", "_N"))]
        return PackedBatch(layout=layout, **{name: getattr(self, name).to(device) for name in names})
