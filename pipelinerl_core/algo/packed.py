"""The tensors of one forward pass: several sequences one after the other, without padding.

Whatever depends on the data is decided on the CPU, where a pack is made: a GPU that is asked how many tokens a mask
leaves must finish everything before it can answer.

A context may continue the first tokens of another context, its parent: rollouts of one prompt then have the prompt in
the pack once. Contexts without a parent come first.

Shapes: T = packed tokens, S = sequences, one per rollout, K = contexts, one per sequence and one per branch of it,
N = sampled tokens, whose log-probability matters, M = sampled tokens that are trained. In a band: X = contexts, Y =
width of their arrangement, U = parents, Z = longest prefix.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Int64Array = NDArray[np.int64]


class Parent(NamedTuple):
    """The beginning of a context that continues another one."""

    context: int
    """Index of the parent, a context without a parent."""
    num_tokens: int
    """Tokens of the parent, 1 or more, that the context sees before its own tokens."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prefixes:
    """The parents' first tokens that the contexts of a band see, in a padded arrangement [U, Z]."""

    longest: int
    """Z."""
    number_X: Tensor
    """int64, 0 .. U - 1, the prefix of each context."""
    lengths_X: Tensor
    """int64, tokens of the prefix that each context sees."""
    tokens: Tensor
    """int64, the packed tokens of all prefixes, each token once, and"""
    slots: Tensor
    """int64, prefix * Z + position: their places."""
    num: int
    """U."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Band:
    """Neighbouring contexts that padded attention computes at once, in an arrangement [X, Y]."""

    lengths: tuple[int, ...]
    """Own tokens of each context."""
    width: int
    """Y."""
    slots: Tensor
    """int64, context * Y + position: the places of their tokens."""
    prefixes: Prefixes | None = None
    """Set if prefixes are longer than own tokens: their keys and values are an arrangement of their own."""
    copied: Tensor | None = None
    """int64. Set if prefixes are shorter than own tokens: the packed tokens of the prefix of each context. Their keys
    and values are copied into the arrangement, so that causal attention needs no mask."""
    copied_slots: Tensor | None = None
    """int64, the places of `copied` in the arrangement."""

    @property
    def num_tokens(self) -> int:
        """Own tokens of all contexts."""
        return self.slots.numel()

    def mask(self, window: int | None) -> Tensor | None:
        """Whether a query sees a key of prefix and own tokens, within the `window` newest: bool, [X, 1, Y, Z + Y], or
        [Y, Y] without prefixes. None: what is causal."""
        if self.prefixes is None:
            is_cut = window is not None and window < self.width
            return window_mask(self.width, window, self.slots.device) if is_cut else None
        own_Y = torch.arange(self.width, device=self.slots.device)
        prefix_Z = torch.arange(self.prefixes.longest, device=self.slots.device)
        ahead_XYZ = self.prefixes.lengths_X[:, None, None] + own_Y[:, None] - prefix_Z
        seen_XYZ = ahead_XYZ > own_Y[:, None]
        if window is not None:
            seen_XYZ = seen_XYZ & (ahead_XYZ < window)
        own_YY = window_mask(self.width, window, self.slots.device)
        return torch.cat([seen_XYZ, own_YY.expand(len(self.lengths), -1, -1)], dim=2)[:, None]

    def to(self, device: torch.device) -> "Band":
        prefixes = self.prefixes and replace(self.prefixes, **_on(device, self.prefixes))
        return replace(self, **_on(device, self), prefixes=prefixes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Keys:
    """The keys of a pack for flash attention: for each context those of its prefix, then its own."""

    tokens: Tensor
    """int64, the packed token of each key."""
    cu_seqlens: Tensor
    """[K + 1] int32, where the keys of each context begin, and their number."""
    longest: int
    """Most keys of a context."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackLayout:
    """Where the contexts of a pack are, for attention: a token sees earlier tokens of its context, and what its
    context continues."""

    lengths: tuple[int, ...]
    """Tokens of each context; here, so that no device is asked for them. Without the tokens of a parent."""
    parents: tuple[Parent, ...]
    """Of the contexts that have one, which are the last ones."""
    bands: tuple[Band, ...]
    """All contexts in their order, for padded attention."""
    cu_seqlens: Tensor
    """[K + 1] int32, where each context begins, and T; the name that flash attention gave it."""
    context_T: Tensor
    """int32, the context of each token."""
    keys: Keys | None = None
    """For flash attention; None without parents."""
    masks: dict[Any, Any] = field(default_factory=dict)
    """Masks that attention has made for this pack, once for all layers (training/attention.py)."""

    @property
    def num_roots(self) -> int:
        """K - X."""
        return len(self.lengths) - len(self.parents)

    def to(self, device: torch.device) -> "PackLayout":
        bands = tuple(band.to(device) for band in self.bands)
        keys = self.keys and replace(self.keys, **_on(device, self.keys))
        return replace(self, **_on(device, self), bands=bands, keys=keys, masks={})


def layout_of(lengths: Sequence[int], parents: Sequence[Parent] = ()) -> PackLayout:
    """The layout, on the CPU, of contexts of these lengths (1 or more), one after the other.

    parents: of the last contexts; each is a context before all of them.
    """
    lengths_K = np.asarray(lengths, dtype=np.int64)
    ends_K = np.cumsum(lengths_K)
    context_T = np.repeat(np.arange(len(lengths_K)), lengths_K)
    return PackLayout(
        lengths=tuple(lengths_K.tolist()),
        parents=tuple(parents),
        bands=_bands(lengths_K, ends_K - lengths_K, parents),
        cu_seqlens=torch.from_numpy(np.concatenate([[0], ends_K]).astype(np.int32)),
        context_T=torch.from_numpy(context_T.astype(np.int32)),
        keys=_keys(ends_K - lengths_K, lengths_K, parents) if parents else None,
    )


def _keys(starts_K: Int64Array, lengths_K: Int64Array, parents: Sequence[Parent]) -> Keys:
    own = [start + np.arange(length) for start, length in zip(starts_K, lengths_K, strict=True)]
    prefixes = [starts_K[parent.context] + np.arange(parent.num_tokens) for parent in parents]
    num_roots = len(own) - len(parents)
    own[num_roots:] = [np.concatenate(pair) for pair in zip(prefixes, own[num_roots:], strict=True)]
    sizes_K = [len(tokens) for tokens in own]
    return Keys(
        tokens=torch.from_numpy(np.concatenate(own)),
        cu_seqlens=torch.from_numpy(np.cumsum([0, *sizes_K]).astype(np.int32)),
        longest=max(sizes_K),
    )


def _bands(lengths_K: Int64Array, starts_K: Int64Array, parents: Sequence[Parent]) -> tuple[Band, ...]:
    """With parents, a band ends where lengths or prefixes have halved: rollouts of one prompt differ more than
    neighbours in a pack of rollouts by length."""
    if not parents:
        return (_band(lengths_K),)
    num_roots = len(lengths_K) - len(parents)
    prefix_K = np.array([1] * num_roots + [parent.num_tokens for parent in parents])
    bands, begin = [], 0
    for context in range(1, len(lengths_K) + 1):
        is_end = context in (num_roots, len(lengths_K)) or any(
            max(sizes[context], sizes[begin]) > 2 * min(sizes[context], sizes[begin])
            for sizes in (lengths_K, prefix_K)
        )
        if is_end:
            own = parents[begin - num_roots : context - num_roots] if begin >= num_roots else ()
            bands.append(
                _continued(lengths_K[begin:context], starts_K, own) if own else _band(lengths_K[begin:context])
            )
            begin = context
    return tuple(bands)


def _band(lengths_X: Int64Array) -> Band:
    return Band(lengths=tuple(lengths_X.tolist()), width=int(lengths_X.max()), slots=_padded_slots(lengths_X))


def _continued(lengths_X: Int64Array, starts_K: Int64Array, parents: Sequence[Parent]) -> Band:
    """The band of contexts with these parents. Queries of the prefix cost less than a mask if the prefix is short."""
    prefix_X = np.array([parent.num_tokens for parent in parents])
    if prefix_X.max() > lengths_X.max():
        return replace(_band(lengths_X), prefixes=_prefixes(starts_K, parents))
    width = int((prefix_X + lengths_X).max())
    rows_X = np.arange(len(parents)) * width
    copied = [starts_K[parent.context] + np.arange(parent.num_tokens) for parent in parents]
    return Band(
        lengths=tuple(lengths_X.tolist()),
        width=width,
        slots=torch.from_numpy(_ranges(rows_X + prefix_X, lengths_X)),
        copied=torch.from_numpy(np.concatenate(copied)),
        copied_slots=torch.from_numpy(_ranges(rows_X, prefix_X)),
    )


def _prefixes(starts_K: Int64Array, parents: Sequence[Parent]) -> Prefixes:
    sizes: dict[int, int] = {}
    for context, num_tokens in parents:
        sizes[context] = max(num_tokens, sizes.get(context, 0))
    number = {context: index for index, context in enumerate(sizes)}
    tokens = [starts_K[context] + np.arange(size) for context, size in sizes.items()]
    return Prefixes(
        longest=max(sizes.values()),
        number_X=torch.tensor([number[parent.context] for parent in parents]),
        lengths_X=torch.tensor([parent.num_tokens for parent in parents]),
        tokens=torch.from_numpy(np.concatenate(tokens)),
        slots=_padded_slots(np.array(list(sizes.values()))),
        num=len(sizes),
    )


def _padded_slots(lengths_K: Int64Array) -> Tensor:
    """int64, context * longest + position of each token of contexts of these lengths."""
    return torch.from_numpy(_ranges(np.arange(len(lengths_K)) * int(lengths_K.max()), lengths_K))


def _ranges(starts_K: Int64Array, lengths_K: Int64Array) -> Int64Array:
    """All integers from each start on, as many as each length says."""
    shifts_K = starts_K - (np.cumsum(lengths_K) - lengths_K)
    integers: Int64Array = np.repeat(shifts_K, lengths_K) + np.arange(int(lengths_K.sum()))
    return integers


def _on(device: torch.device, layout: Any) -> dict[str, Any]:
    """The tensors of a dataclass on a device, by name."""
    values = {entry.name: getattr(layout, entry.name) for entry in fields(layout)}
    return {name: moved(value, device) for name, value in values.items() if isinstance(value, Tensor)}


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

    Example: prompt [7, 8] with completions [1, 2] and [3, 4, 5] -> T = 5, N = 5
        input_ids     7 8 1 3 4            source        1 2 1 3 4
        position_ids  0 1 2 2 3            target_ids    1 2 3 4 5
        context_T     0 0 0 1 1            context 1 has Parent(context=0, num_tokens=2)
    """

    input_ids_T: Tensor
    """int64"""
    position_ids_T: Tensor
    """int64, from 0 in every context, or after the tokens of its parent."""
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

    @property
    def row_tokens(self) -> int:
        """Tokens of its contexts if each had the tokens of its parent itself."""
        return self.num_tokens + sum(parent.num_tokens for parent in self.layout.parents)

    def to(self, device: torch.device) -> "PackedBatch":
        """The same pack on a device; itself when it is there already."""
        if self.input_ids_T.device == device:
            return self
        names = [name for name in self.__dataclass_fields__ if name not in ("layout", "needs_backward")]
        tensors = {name: moved(getattr(self, name), device) for name in names}
        return PackedBatch(layout=self.layout.to(device), needs_backward=self.needs_backward, **tensors)
