"""Collate rows into packs of tensors.

Shapes: T = packed tokens, S = sequences, K = contexts (algo/packed.py), N = sampled tokens, M = trained tokens,
P = prompt tokens, C = completion tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pipelinerl_core.algo.packed import PackedBatch, Parent, layout_of
from pipelinerl_core.algo.staleness import token_versions
from pipelinerl_core.batching.pack import MOST_KEYS, MOST_OVER_LONGEST, Packing, pack, share
from pipelinerl_core.types import Rollout, TrainingRow

Int64Array = NDArray[np.int64]


class PackBatcher:
    """Packs rows by a token budget, deterministically: equal rows give equal packs.

    Packs are made one by one as they are taken, so that a GPU computes the first ones meanwhile.
    """

    def __init__(
        self,
        pack_tokens: int,
        packing: Packing = "sorted",
        *,
        skips_backward: bool = False,
        skips_forward: bool = False,
        shares_prompts: bool = False,
    ) -> None:
        """`pack_tokens` is the budget of one pack, in tokens of its forward pass; `packing` is a way of `pack`.

        skips_backward: rows whose advantages are all 0, or whose weight is 0, are in packs of their own, which need
        no backward pass. skips_forward: they are in no pack, unless all rows are such rows. shares_prompts: rows of a
        group with equal prompts are in a pack with the prompt once.
        """
        self._skips_forward = skips_forward
        self._pack_tokens = pack_tokens
        self._shares_prompts = shares_prompts
        self._packing: Packing = packing
        self._skips_backward = skips_backward

    def rows(self, rows: Sequence[TrainingRow]) -> Iterator[PackedBatch]:
        """Packs with every sampled token of the rows once, without rows that have no sampled token or are skipped."""
        for part in self._parts(rows):
            units = self._units(rows, part)
            for chosen in pack(self._lengths(rows, units), self._pack_tokens, self._packing):
                yield self._collate(rows, [index for number in chosen for index in units[number]])

    def plan(self, rows: Sequence[TrainingRow], ranks: int) -> list[list[list[int]]]:
        """For each rank its packs, each a list of indices into `rows`: equally many packs on every rank.

        A pack that is missing is an empty list.
        """
        plan: list[list[list[int]]] = [[] for _ in range(ranks)]
        for part in self._parts(rows) or [[]]:
            units = self._units(rows, part, ranks)
            shares = share(self._lengths(rows, units), self._pack_tokens, ranks, self._packing)
            for own, packs in zip(plan, shares, strict=True):
                own += [[index for number in chosen for index in units[number]] for chosen in packs]
        return plan

    def planned(self, rows: Sequence[TrainingRow], packs: Sequence[Sequence[int]]) -> Iterator[PackedBatch]:
        """The packs of one rank of a plan: lists of indices into `rows`, which may be the rows of this rank only."""
        return (self._collate(rows, indices) if indices else empty_pack() for indices in packs)

    def _parts(self, rows: Sequence[TrainingRow]) -> list[list[int]]:
        """Indices of the rows with a sampled token: with a gradient, then without; without empty parts."""
        kept = [index for index, row in enumerate(rows) if row.rollout.loss_mask.any()]
        if not self._skips_backward:
            return [kept] if kept else []
        parts = [[index for index in kept if _has_gradient(rows[index]) is wanted] for wanted in (True, False)]
        parts = [part for part in parts if part]
        return parts[:1] if self._skips_forward else parts

    def _units(self, rows: Sequence[TrainingRow], part: Sequence[int], ranks: int = 1) -> list[list[int]]:
        """Units of rows; a pack takes whole units. A unit is a row, or rows of a group with one prompt, the
        longest first.

        A group is several units if its rows exceed the budget, copy too many keys of the prompt, or, with several
        ranks, exceed the share of a rank.
        """
        if not self._shares_prompts:
            return [[index] for index in part]
        families: dict[tuple[int, bytes], list[int]] = {}
        for index in part:
            rollout = rows[index].rollout
            families.setdefault((rollout.group_id, rollout.prompt_token_ids.tobytes()), []).append(index)
        limit = self._pack_tokens
        if ranks > 1:
            limit = min(limit, sum(self._lengths(rows, list(families.values()))) // ranks)
        units: list[list[int]] = []
        for family in families.values():
            unit: list[int] = []
            family.sort(key=lambda index: -num_forward_tokens(rows[index].rollout))
            # A prompt of about the budget would be computed once per rollout.
            budget = max(limit, int(MOST_OVER_LONGEST * num_forward_tokens(rows[family[0]].rollout)))
            prompt = len(rows[family[0]].rollout.prompt_token_ids)
            tokens = keys = 0
            for index in family:
                length = num_forward_tokens(rows[index].rollout)
                tokens, keys = tokens + length - (prompt if unit else 0), keys + length
                if unit and (tokens > budget or keys > MOST_KEYS * tokens):
                    units.append(unit)
                    unit, tokens, keys = [], length, length
                unit.append(index)
            units.append(unit)
        return units

    def _lengths(self, rows: Sequence[TrainingRow], units: Sequence[Sequence[int]]) -> list[int]:
        """Tokens of each unit in a forward pass."""
        lengths = []
        for unit in units:
            first, *others = (rows[index].rollout for index in unit)
            own = sum(num_forward_tokens(rollout) - len(rollout.prompt_token_ids) for rollout in others)
            lengths.append(num_forward_tokens(first) + own)
        return lengths

    def _collate(self, rows: Sequence[TrainingRow], indices: Sequence[int]) -> PackedBatch:
        packed = collate(rows, indices, shares_prompts=self._shares_prompts)
        if not self._skips_backward or any(_has_gradient(rows[index]) for index in indices):
            return packed
        return replace(packed, needs_backward=False)

    def rollouts(self, rollouts: Sequence[Rollout]) -> Iterator[PackedBatch]:
        """Packs with every completion token of the rollouts once, for scoring: weights and advantages are 0."""
        return self.rows([_unweighted(rollout) for rollout in rollouts])


def empty_pack() -> PackedBatch:
    """A pack without a row: one token, masked, of weight 0."""
    zero_1 = torch.zeros(1, dtype=torch.int64)
    return PackedBatch(
        input_ids_T=zero_1,
        position_ids_T=zero_1,
        layout=layout_of([1]),
        row_S=torch.zeros(0, dtype=torch.int64),
        source_N=zero_1,
        target_ids_N=zero_1,
        sequence_N=zero_1,
        versions_N=zero_1,
        rollout_logprobs_N=torch.zeros(1),
        advantages_N=torch.zeros(1),
        loss_weights_N=torch.zeros(1),
        trained_M=torch.zeros(0, dtype=torch.int64),
    )


def _has_gradient(row: TrainingRow) -> bool:
    return bool(row.loss_weight) and any(row.turn_advantages or (row.advantage,))


def num_forward_tokens(rollout: Rollout) -> int:
    """Tokens of a rollout in a forward pass: all but the last of each context, which predicts no sampled token."""
    return len(rollout.prompt_token_ids) + rollout.num_tokens - 1 - len(rollout.branch_starts)


def collate(rows: Sequence[TrainingRow], indices: Sequence[int], *, shares_prompts: bool = False) -> PackedBatch:
    """One pack of the rows at `indices`, in that order.

    shares_prompts: rows of a group whose prompts are equal have the prompt once, with the first of them.
    Raises ValueError for a row without a prompt, because no token would predict its first token, for weight_spans
    that do not cover the completion, and if turn_advantages is not empty and has not one advantage per turn.
    """
    chosen = [rows[index] for index in indices]
    for row in chosen:
        if len(row.rollout.prompt_token_ids) == 0:
            raise ValueError(
                f"rollout {row.rollout.rollout_index} of group {row.rollout.group_id} has no prompt tokens: "
                "at least one is needed to predict its first token"
            )
    contexts = _contexts([row.rollout for row in chosen], shares_prompts=shares_prompts)
    starts = np.cumsum([0, *(len(context.tokens) for context in contexts)])
    is_used = [len(context.tokens) > 0 for context in contexts]  # a context of one token has no forward pass
    used = [context for context, has_tokens in zip(contexts, is_used, strict=True) if has_tokens]
    places = np.cumsum(is_used) - 1
    parents = [Parent(int(places[context.parent]), context.first) for context in used if context.parent >= 0]
    sampled = [np.flatnonzero(row.rollout.loss_mask) for row in chosen]
    counts_S = np.array([len(offsets) for offsets in sampled], dtype=np.int64)
    sources = [np.empty(row.rollout.num_tokens, dtype=np.int64) for row in chosen]
    for context, start in zip(contexts, starts[:-1], strict=True):
        size = context.end - context.begin
        # The token before the first own token is the last of the prompt. Nothing predicts the first token of a
        # branch, which was not sampled: the token before it in the pack stands in, or the pack's first.
        before = start + len(context.tokens) - size + np.arange(size)
        sources[context.row][context.begin : context.end] = np.maximum(before, 0)
        if context.parent >= 0:
            sources[context.row][context.begin] = starts[context.parent] + context.first - 1
    return PackedBatch(
        input_ids_T=_int64(np.concatenate([context.tokens for context in used])),
        position_ids_T=_int64(np.concatenate([context.first + np.arange(len(context.tokens)) for context in used])),
        layout=layout_of([len(context.tokens) for context in used], parents),
        row_S=_int64(np.array(indices)),
        source_N=_int64(_select(sources, sampled)),
        target_ids_N=_int64(_select([row.rollout.completion_token_ids for row in chosen], sampled)),
        sequence_N=_int64(np.repeat(np.arange(len(chosen)), counts_S)),
        rollout_logprobs_N=_float32(_select([row.rollout.rollout_logprobs for row in chosen], sampled)),
        versions_N=_int64(
            _select([token_versions(row.rollout.weight_spans, row.rollout.num_tokens) for row in chosen], sampled)
        ),
        advantages_N=_float32(_advantages(chosen, sampled, counts_S)),
        loss_weights_N=_float32(np.repeat([row.loss_weight for row in chosen], counts_S)),
        trained_M=torch.from_numpy(np.flatnonzero(_select([row.loss_mask for row in chosen], sampled))),
    )


class _Context(NamedTuple):
    """The tokens of a forward pass that predict completion tokens `begin` to `end` of a row."""

    row: int
    tokens: NDArray[np.int32]
    begin: int
    end: int
    first: int = 0
    """Position of the first token: the tokens of the prompt, if another context has the prompt."""
    parent: int = -1
    """Index of the context that has the prompt."""


def _contexts(rollouts: Sequence[Rollout], *, shares_prompts: bool) -> list[_Context]:
    """All contexts of the rollouts; if some continue another one, these last, by prefix; both from long to short."""
    roots: list[_Context] = []
    continued: list[_Context] = []
    with_prompt: dict[tuple[int, bytes], int] = {}
    for row, rollout in enumerate(rollouts):
        prompt, ids = rollout.prompt_token_ids, rollout.completion_token_ids
        (_, end), *branches = rollout.contexts
        parent = -1
        if shares_prompts:
            parent = with_prompt.setdefault((rollout.group_id, prompt.tobytes()), len(roots))
        if parent in (-1, len(roots)):
            roots.append(_Context(row, np.concatenate([prompt, ids[: end - 1]]), 0, end))
        else:
            continued.append(_Context(row, ids[: end - 1], 0, end, len(prompt), parent))
        roots += [_Context(row, ids[start : stop - 1], start, stop) for start, stop in branches]
    if not continued:
        return roots
    order = sorted(range(len(roots)), key=lambda index: -len(roots[index].tokens))
    place = {index: number for number, index in enumerate(order)}
    # Prefixes within a power of two are neighbours, because attention pads them in a band to the longest.
    continued.sort(key=lambda context: (-context.first.bit_length(), -len(context.tokens)))
    return [roots[index] for index in order] + [
        context._replace(parent=place[context.parent]) for context in continued
    ]


def _advantages(rows: Sequence[TrainingRow], sampled: Sequence[Int64Array], counts_S: Int64Array) -> NDArray[Any]:
    """[N] advantage of each sampled token: of its row, or of its turn."""
    if not any(row.turn_advantages for row in rows):
        return np.repeat([row.advantage for row in rows], counts_S)
    return _select([_token_advantages(row) for row in rows], sampled)


def _token_advantages(row: TrainingRow) -> NDArray[np.float64]:
    """[C] advantage of each completion token; 0 between turns, where no token was sampled."""
    if not row.turn_advantages:
        return np.full(row.rollout.num_tokens, row.advantage)
    advantages_C = np.zeros(row.rollout.num_tokens)
    for turn, advantage in zip(row.rollout.turn_spans, row.turn_advantages, strict=True):
        advantages_C[turn.start : turn.end] = advantage
    return advantages_C


def _select(columns: Sequence[NDArray[Any]], offsets: Sequence[Int64Array]) -> NDArray[Any]:
    return np.concatenate([column[chosen] for column, chosen in zip(columns, offsets, strict=True)])


def _int64(values: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64))


def _float32(values: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float32))


def _unweighted(rollout: Rollout) -> TrainingRow:
    everything_C = np.ones(rollout.num_tokens, dtype=np.bool_)
    return TrainingRow(
        rollout=replace(rollout, loss_mask=everything_C), loss_mask=everything_C, advantage=0.0, loss_weight=0.0
    )
