"""What rows must satisfy before the hub or the trainer takes them in."""

import itertools
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from pipelinerl_core.errors import SchemaMismatch
from pipelinerl_core.ranges import MAX_LOGPROB, MAX_REWARD, MAX_STEP
from pipelinerl_core.stream.codec import list_lengths, origins_of, rows_of, span_lists, total_origins
from pipelinerl_core.stream.quick_checks import are_logprobs_sound, are_sound, has_no_nulls, out_of_range
from pipelinerl_core.stream.schema import ROLLOUT_SCHEMA, conform
from pipelinerl_core.types import BoolArray, FinishReason, GroupRef, Int32Array, Outcome

MAX_TOKENS_PER_ROW = 1 << 24
"""Prompt or completion tokens of one rollout; far beyond any model, it only bounds what a broken peer can send."""

_PER_TOKEN = ("rollout_logprobs", "loss_mask")
_SAME_IN_GROUP = ("run_id", "group_id", "attempt", "lease_id", "prompt_id", "actor", "group_size")
_AT = {name: index for index, name in enumerate(ROLLOUT_SCHEMA.names)}  # asking by index is the cheaper way
_OUTCOMES = frozenset(str(word) for word in Outcome)
_FINISH_REASONS = frozenset(str(word) for word in FinishReason)


def check_rows(batch: pa.RecordBatch, *, max_tokens_per_row: int = MAX_TOKENS_PER_ROW) -> None:
    """Raises SchemaMismatch (column, row, value, rule) unless the rows of one group message can be trained.

    The hub does this for every group, so it asks Arrow as little as possible: each question costs about as much as
    comparing a thousand values.
    """
    batch = conform(batch)
    if batch.num_rows == 0:
        raise SchemaMismatch("a group message has no rows; it carries at least one rollout")
    _check_each_row(batch, max_tokens_per_row)
    _check_group(_Identity(batch), slice(0, batch.num_rows))


def check_group(ref: GroupRef, batch: pa.RecordBatch) -> None:
    """Raises SchemaMismatch unless checked rows are those that `ref` names."""
    _check_ref(ref, _Identity(conform(batch)), slice(0, batch.num_rows))


def check_groups(
    refs: Sequence[GroupRef], batch: pa.RecordBatch, *, max_tokens_per_row: int = MAX_TOKENS_PER_ROW
) -> None:
    """`check_rows` and `check_group` for the rows of several groups, one group after the other."""
    batch = conform(batch)
    if are_sound(refs, batch, max_tokens_per_row):
        return
    places = _places(refs, batch.num_rows)
    _check_each_row(batch, max_tokens_per_row)
    identity = _Identity(batch)
    for ref, rows in zip(refs, places, strict=True):
        _check_group(identity, rows)
        _check_ref(ref, identity, rows)


def split_groups(batch: pa.RecordBatch) -> list[pa.RecordBatch]:
    """The rows of each group of a batch, which are views; `check_rows` for all of them."""
    batch = conform(batch)
    if batch.num_rows == 0:
        return []
    _check_each_row(batch, MAX_TOKENS_PER_ROW)
    identity = _Identity(batch)
    keys = list(zip(identity.columns["group_id"], identity.columns["attempt"], strict=True))
    starts = [row for row, key in enumerate(keys) if row == 0 or key != keys[row - 1]]
    places = [slice(start, end) for start, end in itertools.pairwise([*starts, len(keys)])]
    for rows in places:
        _check_group(identity, rows)
    return [batch.slice(rows.start, rows.stop - rows.start) for rows in places]


def apart(refs: Sequence[GroupRef], batch: pa.RecordBatch) -> list[pa.RecordBatch]:
    """The rows of each group, which are views. Ask `check_places` first: Arrow dies of a column that is too short."""
    return [batch.slice(rows.start, rows.stop - rows.start) for rows in _places(refs, batch.num_rows)]


def check_places(refs: Sequence[GroupRef], batch: pa.RecordBatch) -> None:
    """Raises SchemaMismatch when the batch is none, or has more or fewer rows than its groups."""
    _validate(batch, full=False)
    _places(refs, batch.num_rows)


def _places(refs: Sequence[GroupRef], num_rows: int) -> list[slice]:
    sizes = [ref.num_rollouts for ref in refs]
    if sum(sizes) != num_rows or 0 in sizes:
        raise SchemaMismatch(f"{num_rows} rows, their message names groups of {sizes[:8]}; each has at least one")
    return [slice(end - size, end) for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]


class _Identity:
    """What says whose the rows are, as Python values."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.columns = {name: _column(batch, name).to_pylist() for name in (*_SAME_IN_GROUP, "rollout_index")}
        self.lengths = list_lengths(_column(batch, "completion_token_ids"))
        self.origins = origins_of(_column(batch, "origins"))


def _check_group(identity: _Identity, rows: slice) -> None:
    for name in _SAME_IN_GROUP:
        values = identity.columns[name][rows]
        if values.count(values[0]) < len(values):
            raise SchemaMismatch(f"column {name!r} differs within one group message: {sorted(set(values))[:4]}")
    group_size = identity.columns["group_size"][rows.start]
    indices = identity.columns["rollout_index"][rows]
    if len(set(indices)) < len(indices) or min(indices) < 0 or max(indices) >= group_size:
        raise SchemaMismatch(f"rollout_index {indices} must be distinct and in [0, group_size={group_size})")


def _check_ref(ref: GroupRef, identity: _Identity, rows: slice) -> None:
    group_id, attempt, actor = (identity.columns[name][rows.start] for name in ("group_id", "attempt", "actor"))
    found = (group_id, attempt, actor, rows.stop - rows.start, sum(identity.lengths[rows]))
    named = (ref.group_id, ref.attempt, ref.actor, ref.num_rollouts, ref.num_tokens)
    if found != named:
        raise SchemaMismatch(
            f"rows are (group_id, attempt, actor, rollouts, tokens) = {found}, their message names {named}"
        )
    origins = total_origins(identity.origins[rows])
    if origins != ref.origins:
        raise SchemaMismatch(f"rows have origins {origins}, their message names {ref.origins}")


def _check_each_row(batch: pa.RecordBatch, max_tokens_per_row: int) -> None:
    """What does not depend on where a group ends."""
    _validate(batch, full=True)  # offsets that point outside would be followed by every question below
    _check_nulls(batch)
    lengths = list_lengths(_column(batch, "completion_token_ids"))
    _check_lengths(batch, lengths, max_tokens_per_row)
    _check_logprobs(batch)
    _check_numbers(batch)
    _check_spans(batch, lengths)
    _check_turns(batch)
    _check_results(batch)
    _check_origins(batch, lengths)


def _validate(batch: pa.RecordBatch, *, full: bool) -> None:
    try:
        batch.validate(full=full)
    except pa.ArrowInvalid as error:
        raise SchemaMismatch(f"rows that are no Arrow record batch: {str(error).splitlines()[0]}") from None


def _column(batch: pa.RecordBatch, name: str) -> pa.Array:
    return batch.column(_AT[name])


def _check_nulls(batch: pa.RecordBatch) -> None:
    if has_no_nulls(batch):
        return
    for field in ROLLOUT_SCHEMA:
        column = _column(batch, field.name)
        if not field.nullable and column.null_count:
            raise SchemaMismatch(f"column {field.name!r} holds {column.null_count} nulls; every row needs a value")
        if pa.types.is_list(field.type) and not field.nullable and column.values.null_count:
            raise SchemaMismatch(f"column {field.name!r} holds nulls inside its lists")


def _check_lengths(batch: pa.RecordBatch, lengths: list[int], max_tokens_per_row: int) -> None:
    for name in _PER_TOKEN:
        found = list_lengths(_column(batch, name))
        if found != lengths:
            row = next(row for row, pair in enumerate(zip(found, lengths, strict=True)) if pair[0] != pair[1])
            raise SchemaMismatch(
                f"row {row}: {name} has {found[row]} values for {lengths[row]} completion tokens; one each"
            )
    prompts = list_lengths(_column(batch, "prompt_token_ids"))
    longest = max(*lengths, *prompts)
    if longest > max_tokens_per_row:
        raise SchemaMismatch(f"a row has {longest} tokens, the limit is {max_tokens_per_row}")
    if 0 in prompts:
        raise SchemaMismatch(f"row {prompts.index(0)}: prompt_token_ids is empty; a prompt has at least one token")


def _check_logprobs(batch: pa.RecordBatch) -> None:
    if not are_logprobs_sound(batch):
        raise SchemaMismatch(
            f"rollout_logprobs must be finite, within {MAX_LOGPROB:g} of 0, and 0 where loss_mask is false"
        )


def _check_numbers(batch: pa.RecordBatch) -> None:
    rule = out_of_range(batch)
    if rule:
        raise SchemaMismatch(f"a number is out of its range: {rule}")


def _check_spans(batch: pa.RecordBatch, lengths: list[int]) -> None:
    column = _column(batch, "weight_spans")
    _check_inner_nulls("weight_spans", column)
    bounds, fields = span_lists(column)
    spans = list(zip(*fields, strict=True))
    for row, length in enumerate(lengths):
        reached, newest = 0, 0
        for version, start, end in spans[bounds[row] : bounds[row + 1]]:
            if start != reached or end <= start or not newest <= version <= MAX_STEP:
                raise SchemaMismatch(
                    f"row {row}: weight_spans {spans[bounds[row] : bounds[row + 1]]} must follow each other without "
                    "gaps, versions not decreasing and below 2^31"
                )
            reached, newest = end, version
        if reached != length:
            raise SchemaMismatch(f"row {row}: weight_spans cover {reached} of {length} completion tokens")


def _check_turns(batch: pa.RecordBatch) -> None:
    column = _column(batch, "turn_spans")
    if column.null_count == batch.num_rows:
        return
    _check_inner_nulls("turn_spans", column)
    bounds, has_turns = column.offsets.to_pylist(), column.is_valid().to_pylist()
    start, end = (column.values.field(index).to_numpy() for index in range(2))
    for row, mask_C in enumerate(rows_of(_column(batch, "loss_mask"))):
        if has_turns[row]:
            own = slice(bounds[row], bounds[row + 1])
            _check_turns_of(row, start[own], end[own], mask_C)


def _check_turns_of(row: int, start_K: Int32Array, end_K: Int32Array, mask_C: BoolArray) -> None:
    """K turns of a row, C completion tokens."""
    if len(start_K) == 0:
        raise SchemaMismatch(f"row {row}: turn_spans is empty; null for one turn")
    before_K = np.concatenate([[0], end_K[:-1]])
    wrong = np.flatnonzero((start_K < before_K) | (end_K <= start_K) | (end_K > len(mask_C)))
    if len(wrong):
        turn = wrong[0]
        raise SchemaMismatch(
            f"row {row}: turn_spans has [{start_K[turn]}, {end_K[turn]}) after {before_K[turn]} of {len(mask_C)} "
            "completion tokens; turns are in order, do not overlap, and have at least one token each"
        )
    edges = np.zeros(len(mask_C) + 1, np.int8)
    edges[start_K] += 1
    edges[end_K] -= 1
    between = np.flatnonzero(mask_C & (np.cumsum(edges[:-1], dtype=np.int8) == 0))
    if len(between):
        raise SchemaMismatch(
            f"row {row}: loss_mask is true at token {between[0]}, in none of its turn_spans; what is outside of them "
            "was not sampled"
        )


def _check_inner_nulls(name: str, column: pa.ListArray) -> None:
    """Of lists of structs: has_no_nulls looks neither inside of them nor at columns that may be null."""
    structs: pa.StructArray = column.values
    if structs.null_count or any(child.null_count for child in structs.flatten()):
        raise SchemaMismatch(f"column {name!r} holds nulls inside its lists")


def _check_origins(batch: pa.RecordBatch, lengths: list[int]) -> None:
    column = _column(batch, "origins")
    if column.null_count == batch.num_rows:
        return
    _check_inner_nulls("origins", column)
    for row, (origins, length) in enumerate(zip(origins_of(column), lengths, strict=True)):
        counts = [origin.num_tokens for origin in origins]
        if any(count <= 0 for count in counts) or sum(counts) > length:
            raise SchemaMismatch(f"row {row}: origins {counts} of {length} completion tokens; each has at least one")


def _check_results(batch: pa.RecordBatch) -> None:
    rewards = _column(batch, "reward").to_pylist()
    outcomes = _column(batch, "outcome").to_pylist()
    for row, (reward, outcome) in enumerate(zip(rewards, outcomes, strict=True)):
        if outcome not in _OUTCOMES:
            raise SchemaMismatch(f"row {row}: outcome {outcome!r} is none of {[str(word) for word in Outcome]}")
        if (outcome == Outcome.ERROR) != (reward is None):
            raise SchemaMismatch(f"row {row}: reward {reward} with outcome {outcome}; null exactly with error")
        if reward is not None and not abs(reward) <= MAX_REWARD:  # nor is a nan
            raise SchemaMismatch(f"row {row}: reward {reward} is not a finite number within {MAX_REWARD:g} of 0")
    for row, word in enumerate(_column(batch, "finish_reason").to_pylist()):
        if word not in _FINISH_REASONS:
            raise SchemaMismatch(
                f"row {row}: finish_reason {word!r} is none of {[str(item) for item in FinishReason]}"
            )
