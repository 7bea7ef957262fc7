"""The KV cache of a fixed number of slots, and the attention function that reads and writes the cache.

A forward pass runs over one flat row of N tokens: first one token for each of the slots 0 .. R-1 (decode), then the
padded prompts of newly admitted sequences (prefill). All layers of a decoder except attention treat every token
alike, so the model's own code runs unchanged; only attention needs to know which token is in which slot. Both parts
share one pass: a newly admitted slot decodes its last prompt token in the pass that stores the tokens before.

Shape suffixes: S slots, R decoded slots (a prefix of S), P prefilled sequences, T padded prefill length,
N = R + P * T, K keys attended by decode, L max_len, H query heads, G key/value heads, Q = H / G, D head dimension.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface

from pipelinerl_core.algo.packed import window_mask
from pipelinerl_core.errors import EngineError

ATTENTION_NAME = "pipelinerl_slots"

# Arguments of attention functions that change the result and that `_slot_attention` does not implement.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask")


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Which slot and position each token of a forward pass belongs to."""

    slots_R: Tensor
    """int64 0 .. R-1; empty for a pass that only prefills."""
    positions_R: Tensor
    """int64 position of the decoded token in its sequence."""
    mask_RK: Tensor
    """Additive mask of decode: 0 up to the slot's own position, -inf beyond."""
    prefill_slots_P: Tensor | None
    """int64 slot of each prefilled sequence, from position 0; None without prefill."""
    prefill_length: int
    """T"""
    window_masks: dict[int, Tensor] = field(default_factory=dict)
    """Masks of decode by sliding window: made once for all layers of a pass."""

    def mask_of(self, window: int | None) -> Tensor:
        """The mask of decode, [R, K], of a layer that attends to the `window` newest tokens, or to all."""
        if window is None or window >= self.mask_RK.shape[1]:
            return self.mask_RK
        if window not in self.window_masks:
            keys_K = torch.arange(self.mask_RK.shape[1], device=self.mask_RK.device)
            is_old_RK = keys_K <= self.positions_R[:, None] - window
            self.window_masks[window] = self.mask_RK.masked_fill(is_old_RK, -math.inf)
        return self.window_masks[window]


class SlotMemory:
    """One K and one V tensor [S, G, L, D] per layer; the first pass allocates them in the model's shape and type."""

    def __init__(self, slots: int, max_len: int) -> None:
        self.slots = slots
        self.max_len = max_len
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.layout: Layout | None = None

    def attach(self, model: Any) -> None:
        """Make every attention module of `model` use this memory. No other engine can use the model from here on."""
        model.set_attn_implementation(ATTENTION_NAME)
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                module.slot_memory = self

    def move(self, sources: Tensor, targets: Tensor, num_keys: int) -> None:
        """Copy the first num_keys keys and values of some slots to others."""
        for stores in (self.keys, self.values):
            for store_SGLD in stores.values():
                store_SGLD[targets, :, :num_keys] = store_SGLD[sources, :, :num_keys]

    def clear(self) -> None:
        self.keys.clear()
        self.values.clear()

    def attend(
        self,
        layer: int,
        q_NHD: Tensor,
        k_NGD: Tensor,
        v_NGD: Tensor,
        scaling: float | None,
        window: int | None = None,
    ) -> Tensor:
        """Store keys and values of this pass, then attend, to the `window` newest tokens if given.

        Returns [N, H, D].
        """
        layout = self.layout
        if layout is None:
            raise EngineError("slot attention was called outside of a pass: only the engine may call its model")
        store = self._layer(layer, k_NGD, v_NGD)
        if layout.prefill_slots_P is None:
            return self._decode(layout, store, q_NHD, k_NGD, v_NGD, scaling, window)
        # Before decode: the decode of a newly admitted slot reads what prefill stores in the same pass.
        n = len(layout.slots_R)
        prefilled_NHD = self._prefill(layout, store, q_NHD[n:], k_NGD[n:], v_NGD[n:], scaling, window)
        if n == 0:
            return prefilled_NHD
        decoded_NHD = self._decode(layout, store, q_NHD[:n], k_NGD[:n], v_NGD[:n], scaling, window)
        return torch.cat((decoded_NHD, prefilled_NHD))

    def _decode(
        self,
        layout: Layout,
        store: tuple[Tensor, Tensor],
        q_RHD: Tensor,
        k_RGD: Tensor,
        v_RGD: Tensor,
        scaling: float | None,
        window: int | None,
    ) -> Tensor:
        """One query position per slot, over the keys up to its own position."""
        keys_SGLD, values_SGLD = store
        keys_SGLD[layout.slots_R, :, layout.positions_R] = k_RGD
        values_SGLD[layout.slots_R, :, layout.positions_R] = v_RGD
        num_rows, num_keys = layout.mask_RK.shape
        # Query heads that share a key head become query positions, which avoids a copy of K and V per query head.
        q_RGQD = q_RHD.reshape(num_rows, k_RGD.shape[1], -1, q_RHD.shape[-1])
        out_RGQD = functional.scaled_dot_product_attention(
            q_RGQD,
            keys_SGLD[:num_rows, :, :num_keys],
            values_SGLD[:num_rows, :, :num_keys],
            attn_mask=layout.mask_of(window)[:, None, None],
            scale=scaling,
        )
        return out_RGQD.reshape(num_rows, q_RHD.shape[1], -1)

    def _prefill(
        self,
        layout: Layout,
        store: tuple[Tensor, Tensor],
        q_NHD: Tensor,
        k_NGD: Tensor,
        v_NGD: Tensor,
        scaling: float | None,
        window: int | None,
    ) -> Tensor:
        """Causal attention within each padded sequence. Keys of padding are overwritten before any read."""
        num_tokens = layout.prefill_length
        q_PHTD, k_PGTD, v_PGTD = (
            x.reshape(-1, num_tokens, *x.shape[1:]).transpose(1, 2) for x in (q_NHD, k_NGD, v_NGD)
        )
        for store_SGLD, x_PGTD in zip(store, (k_PGTD, v_PGTD), strict=True):
            store_SGLD[layout.prefill_slots_P, :, :num_tokens] = x_PGTD
        is_cut = window is not None and window < num_tokens
        out_PHTD = functional.scaled_dot_product_attention(
            q_PHTD,
            k_PGTD,
            v_PGTD,
            attn_mask=window_mask(num_tokens, window, q_NHD.device) if is_cut else None,
            is_causal=not is_cut,
            scale=scaling,
            enable_gqa=q_NHD.shape[1] != k_NGD.shape[1],
        )
        return out_PHTD.transpose(1, 2).flatten(0, 1)

    def _layer(self, layer: int, k_NGD: Tensor, v_NGD: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in self.keys:
            for stores, x_NGD in ((self.keys, k_NGD), (self.values, v_NGD)):
                _, num_groups, head_dim = x_NGD.shape
                stores[layer] = x_NGD.new_zeros((self.slots, num_groups, self.max_len, head_dim))
        return self.keys[layer], self.values[layer]


def _slot_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls by name."""
    memory: SlotMemory = module.slot_memory
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise EngineError(f"the model's attention uses {name}, which the embedded engine does not support")
    query_NHD, key_NGD, value_NGD = (x[0].transpose(0, 1) for x in (query, key, value))
    attended_NHD = memory.attend(module.layer_idx, query_NHD, key_NGD, value_NGD, scaling, sliding_window)
    return attended_NHD[None], None


AttentionInterface.register(ATTENTION_NAME, _slot_attention)
