"""Collate rows into packs of tensors.

Shapes: T = packed tokens, S = sequences, K = contexts (algo/packed.py), N = sampled tokens, M = trained tokens,
P = prompt tokens, C = completion tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipelinerl_core.algo.packed import PackedBatch, layout_of
from pipelinerl_core.algo.staleness import token_versions
from pipelinerl_core.batching.pack import Packing, pack, share
from pipelinerl_core.types import Rollout, TrainingRow

Int64Array = NDArray[np.int64]


class PackBatcher:
    """Packs rows by a token budget, deterministically: equal rows give equal packs.

    Packs are made one by one as they are taken, so that a GPU computes the first ones meanwhile.
    """

    def __init__(self, pack_tokens: int, packing: Packing = "sorted", *, skips_backward: bool = False) -> None:
        """`pack_tokens` is the budget of one pack, in tokens of its forward pass; `packing` is a way of `pack`.

        skips_backward: rows whose advantages are all 0, or whose weight is 0, are in packs of their own, which need
        no backward pass.
        """
        self._pack_tokens = pack_tokens
        self._packing: Packing = packing
        self._skips_backward = skips_backward

    def rows(self, rows: Sequence[TrainingRow]) -> Iterator[PackedBatch]:
        """Packs with every sampled token of the rows once; rows without a sampled token are left out."""
        for part in self._parts(rows):
            for positions in pack(_lengths(rows, part), self._pack_tokens, self._packing):
                yield self._collate(rows, [part[position] for position in positions])

    def plan(self, rows: Sequence[TrainingRow], ranks: int) -> list[list[list[int]]]:
        """For each rank its packs, each a list of indices into `rows`: equally many packs on every rank.

        A pack that is missing is an empty list.
        """
        plan: list[list[list[int]]] = [[] for _ in range(ranks)]
        for part in self._parts(rows) or [[]]:
            shares = share(_lengths(rows, part), self._pack_tokens, ranks, self._packing)
            for own, packs in zip(plan, shares, strict=True):
                own += [[part[position] for position in positions] for positions in packs]
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
        return [part for part in parts if part]

    def _collate(self, rows: Sequence[TrainingRow], indices: Sequence[int]) -> PackedBatch:
        packed = collate(rows, indices)
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


def _lengths(rows: Sequence[TrainingRow], indices: Sequence[int]) -> list[int]:
    return [num_forward_tokens(rows[index].rollout) for index in indices]


def num_forward_tokens(rollout: Rollout) -> int:
    """Tokens of a rollout in a forward pass: all but the last of each context, which predicts no sampled token."""
    return len(rollout.prompt_token_ids) + rollout.num_tokens - 1 - len(rollout.branch_starts)


def collate(rows: Sequence[TrainingRow], indices: Sequence[int]) -> PackedBatch:
    """One pack of the rows at `indices`, in that order.

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
    lengths_S = np.array([num_forward_tokens(row.rollout) for row in chosen], dtype=np.int64)
    starts_S = np.cumsum(lengths_S) - lengths_S
    lengths_K = np.array([length for row in chosen for length in _context_lengths(row.rollout)], dtype=np.int64)
    positions_T = np.arange(lengths_S.sum()) - np.repeat(np.cumsum(lengths_K) - lengths_K, lengths_K)
    sampled = [np.flatnonzero(row.rollout.loss_mask) for row in chosen]
    counts_S = np.array([len(offsets) for offsets in sampled], dtype=np.int64)
    # The token before completion token c is at position P + c - 1 of its sequence.
    first_sources_S = starts_S + np.array([len(row.rollout.prompt_token_ids) for row in chosen]) - 1
    return PackedBatch(
        input_ids_T=_int64(np.concatenate([_inputs(row.rollout) for row in chosen])),
        position_ids_T=_int64(positions_T),
        layout=layout_of([length for length in lengths_K.tolist() if length]),
        row_S=_int64(np.array(indices)),
        source_N=_int64(
            np.repeat(first_sources_S, counts_S)
            + np.concatenate([_sources(row.rollout, offsets) for row, offsets in zip(chosen, sampled, strict=True)])
        ),
        target_ids_N=_int64(_select([row.rollout.completion_token_ids for row in chosen], sampled)),
        sequence_N=_int64(np.repeat(np.arange(len(chosen)), counts_S)),
        rollout_logprobs_N=_float32(_select([row.rollout.rollout_logprobs for row in chosen], sampled)),
        versions_N=_int64(_select([_versions(row.rollout) for row in chosen], sampled)),
        advantages_N=_float32(_advantages(chosen, sampled, counts_S)),
        loss_weights_N=_float32(np.repeat([row.loss_weight for row in chosen], counts_S)),
        trained_M=torch.from_numpy(np.flatnonzero(_select([row.loss_mask for row in chosen], sampled))),
    )


def _context_lengths(rollout: Rollout) -> list[int]:
    """Tokens in a forward pass of each context: all but its last. A branch of one token has none."""
    (_, end), *branches = rollout.contexts
    return [len(rollout.prompt_token_ids) + end - 1, *(stop - start - 1 for start, stop in branches)]


def _inputs(rollout: Rollout) -> NDArray[np.int32]:
    ids = rollout.completion_token_ids
    (_, end), *branches = rollout.contexts
    parts = [ids[start : stop - 1] for start, stop in branches]
    return np.concatenate([rollout.prompt_token_ids, ids[: end - 1], *parts])


def _sources(rollout: Rollout, offsets: Int64Array) -> Int64Array:
    """The forward token that predicts each completion token at `offsets`, counted from the prompt's last token.

    Nothing predicts the first token of a branch, which was not sampled: the token before it stands in.
    """
    if not rollout.branch_starts:
        return offsets
    # Each earlier context lacks its last token.
    return offsets - np.searchsorted(rollout.branch_starts, offsets, side="right")


def _versions(rollout: Rollout) -> NDArray[np.int32]:
    return token_versions(rollout.weight_spans, rollout.num_tokens)


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
