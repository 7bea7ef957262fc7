"""Rules that rows must satisfy before the hub or the trainer accepts them.

Each rule is one comparison over all rows of a write, because one call of Arrow or numpy costs about as much as
comparing a thousand values. The error names the first value that breaks a rule, and its row.
Shapes: G = groups, R = rows, T = completion tokens of all rows, S = spans of all rows.
"""

import itertools
import json
import re
import reprlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelinerl_core.data.codec import flat_list, flat_structs, structs_of, total_origins
from pipelinerl_core.data.schema import ROLLOUT_SCHEMA, conform
from pipelinerl_core.errors import SchemaMismatch
from pipelinerl_core.ranges import COMPONENT_NAME, MAX_COMPONENTS, MAX_LOGPROB, MAX_REWARD, MAX_SECONDS, MAX_STEP
from pipelinerl_core.types import BoolArray, FinishReason, GroupRef, Origin, Outcome, RewardComponent

MAX_TOKENS_PER_ROW = 1 << 24
"""Limit of prompt or completion tokens of one rollout. Larger than for any model: bounds messages of faulty peers."""

MAX_TASK_CHARS = 1 << 20
"""Limit of a task: bounds what a faulty peer sends."""

_SAME_IN_GROUP = ("run_id", "group_id", "attempt", "lease_id", "prompt_id", "actor", "group_size")
_REALS = ("started_at", "finished_at", "scored_at", "temperature", "top_p")
_REQUIRED = [field.name for field in ROLLOUT_SCHEMA if not field.nullable]
_LISTS = [field.name for field in ROLLOUT_SCHEMA if pa.types.is_list(field.type)]
_WORDS = {"outcome": [str(word) for word in Outcome], "finish_reason": [str(word) for word in FinishReason]}

_Columns = dict[str, pa.Array]


def check_groups(
    refs: Sequence[GroupRef], batch: pa.RecordBatch, *, max_tokens_per_row: int = MAX_TOKENS_PER_ROW
) -> None:
    """Raises SchemaMismatch (row, column, value, rule) unless the rows can be trained and belong to `refs`.

    The rows of each group are adjacent, and the groups are in the order of `refs`.
    """
    batch = conform(batch)
    starts_G = _starts(refs, batch.num_rows)
    columns = _check_rows(batch, max_tokens_per_row)
    _check_identity(columns, starts_G)
    _check_refs(columns, refs, starts_G)


def split_groups(batch: pa.RecordBatch) -> list[pa.RecordBatch]:
    """The rows of each group as views of the batch. Raises SchemaMismatch for rows that cannot be trained."""
    batch = conform(batch)
    if batch.num_rows == 0:
        return []
    columns = _check_rows(batch, MAX_TOKENS_PER_ROW)
    keys_R = np.stack([columns["group_id"].to_numpy(), columns["attempt"].to_numpy()])
    starts_G = np.concatenate([[0], np.flatnonzero(np.diff(keys_R).any(axis=0)) + 1, [batch.num_rows]])
    _check_identity(columns, starts_G)
    return _parts(batch, starts_G)


def rows_of_groups(refs: Sequence[GroupRef], batch: pa.RecordBatch) -> list[pa.RecordBatch]:
    """The rows of each group as views of the batch. Call `check_row_count` first: Arrow crashes on a short column."""
    return _parts(batch, _starts(refs, batch.num_rows))


def check_row_count(refs: Sequence[GroupRef], batch: pa.RecordBatch) -> None:
    """Raises SchemaMismatch if the batch is invalid, or has more or fewer rows than its groups."""
    _validate(batch, full=False)
    _starts(refs, batch.num_rows)


def _starts(refs: Sequence[GroupRef], num_rows: int) -> NDArray[np.int64]:
    """[G + 1] index of the first row of each group, and the number of rows."""
    sizes = [ref.num_rollouts for ref in refs]
    if not sizes or 0 in sizes or sum(sizes) != num_rows:
        raise SchemaMismatch(f"{num_rows} rows, their message names groups of {sizes[:8]}; each has at least one")
    return np.array([*itertools.accumulate(sizes, initial=0)])


def _parts(batch: pa.RecordBatch, starts_G: NDArray[np.int64]) -> list[pa.RecordBatch]:
    return [batch.slice(start, end - start) for start, end in itertools.pairwise(starts_G.tolist())]


def _validate(batch: pa.RecordBatch, *, full: bool) -> None:
    try:
        batch.validate(full=full)
    except pa.ArrowInvalid as error:
        raise SchemaMismatch(f"invalid Arrow record batch: {str(error).splitlines()[0]}") from None


def _require(
    is_right: BoolArray, column: str, rule: str, *facts: NDArray[Any], offsets_R: NDArray[Any] | None = None
) -> None:
    """Raises SchemaMismatch about the first value where `is_right` is false.

    rule: text with a {} for each of `facts`, arrays shaped like `is_right`. offsets_R [R + 1]: index of the first
    value of each row; without it each row has one value.
    """
    if np.count_nonzero(is_right) == len(is_right):  # for few values twice as fast as all()
        return
    index = int(is_right.argmin())
    where = f"row {index}"
    if offsets_R is not None:
        row = int(np.searchsorted(offsets_R, index, side="right")) - 1
        where = f"row {row}" if 0 <= row < len(offsets_R) - 1 else "outside of the rows"  # of a slice
    shown = (reprlib.repr(fact[index : index + 1].tolist()[0]) for fact in facts)
    raise SchemaMismatch(f"{where}: {column} {rule.format(*shown)}")


def _check_rows(batch: pa.RecordBatch, max_tokens_per_row: int) -> _Columns:
    _validate(batch, full=True)  # the rules below would read outside of the buffers if offsets were wrong
    columns = dict(zip(ROLLOUT_SCHEMA.names, batch.columns, strict=True))
    _check_nulls(columns)
    offsets_R, mask_T = _check_tokens(columns, max_tokens_per_row)
    lengths_R = _sizes(offsets_R)
    _check_weight_spans(columns, lengths_R)
    if columns["turn_spans"].null_count < batch.num_rows:
        _check_turn_spans(columns, offsets_R, mask_T)
    if columns["turn_rewards"].null_count < batch.num_rows:
        _check_turn_rewards(columns)
    if columns["branch_starts"].null_count < batch.num_rows:
        _check_branch_starts(columns, offsets_R, mask_T)
    if columns["origins"].null_count < batch.num_rows:
        _check_origins(columns, lengths_R)
    if columns["reward_components"].null_count < batch.num_rows:
        _check_components(columns)
    for name in _REALS:
        real_R = columns[name].to_numpy()
        rule = f"is {{}}; numbers from 0 to {MAX_SECONDS:g}"
        _require((real_R >= 0) & (real_R <= MAX_SECONDS), name, rule, real_R)
    _check_results(columns)
    _check_tasks(columns["task"])
    return columns


def _check_nulls(columns: _Columns) -> None:
    for name in _REQUIRED:
        if columns[name].null_count:
            _require(_is_valid(columns[name]), name, "is null; every row needs a value")
    for name in _LISTS:
        column = columns[name]
        if column.null_count == len(column):
            continue
        values = column.values
        for part in values.flatten() if isinstance(values, pa.StructArray) else [values]:
            if part.null_count:
                offsets_R = column.offsets.to_numpy()
                _require(_is_valid(part), name, "holds a null inside its list", offsets_R=offsets_R)


def _is_valid(column: pa.Array) -> BoolArray:
    is_valid: BoolArray = column.is_valid().to_numpy(zero_copy_only=False)
    return is_valid


def _check_tokens(columns: _Columns, max_tokens_per_row: int) -> tuple[NDArray[Any], BoolArray]:
    """(offsets of the completions [R + 1], loss_mask [T])."""
    for name, lowest in (("prompt_token_ids", 1), ("completion_token_ids", 0)):
        offsets_R, token_T = flat_list(columns[name])
        lengths_R = _sizes(offsets_R)
        rule = f"has {{}} tokens, the limit is {max_tokens_per_row}; at least {lowest}"
        _require((lengths_R >= lowest) & (lengths_R <= max_tokens_per_row), name, rule, lengths_R)
        _require(token_T >= 0, name, "holds {}; tokens are numbers from 0 on", token_T, offsets_R=offsets_R)
    flat = []
    for name in ("rollout_logprobs", "loss_mask"):
        found_offsets_R, value_T = flat_list(columns[name])
        found_R = _sizes(found_offsets_R)
        _require(found_R == lengths_R, name, "has {} values for {} completion tokens; one each", found_R, lengths_R)
        flat.append(value_T)
    logprob_T, mask_T = flat
    is_right_T = np.abs(logprob_T) <= mask_T * np.float32(MAX_LOGPROB)
    rule = f"holds {{}}; each is finite, within {MAX_LOGPROB:g} of 0, and 0 where loss_mask is false"
    _require(is_right_T, "rollout_logprobs", rule, logprob_T, offsets_R=offsets_R)
    return offsets_R, mask_T


def _check_weight_spans(columns: _Columns, lengths_R: NDArray[Any]) -> None:
    offsets_R, (version_S, start_S, end_S) = flat_structs(columns["weight_spans"])
    reached_S, newest_S = _before(offsets_R, end_S), _before(offsets_R, version_S)
    is_right_S = (start_S == reached_S) & (end_S > start_S) & (version_S >= newest_S) & (version_S <= MAX_STEP)
    rule = (
        "has [{}, {}) of version {} after {} tokens and version {}; weight_spans follow each other without gaps, "
        "versions not decreasing and below 2^31"
    )
    facts = (start_S, end_S, version_S, reached_S, newest_S)
    _require(is_right_S, "weight_spans", rule, *facts, offsets_R=offsets_R)
    covered_R = _sizes(np.concatenate([[0], np.cumsum(end_S - start_S)])[offsets_R])
    _require(covered_R == lengths_R, "weight_spans", "cover {} of {} completion tokens", covered_R, lengths_R)


def _check_turn_spans(columns: _Columns, offsets_R: NDArray[Any], mask_T: BoolArray) -> None:
    turns_R, (start_S, end_S) = flat_structs(columns["turn_spans"])
    has_turns_R, nums_R, lengths_R = _is_valid(columns["turn_spans"]), _sizes(turns_R), _sizes(offsets_R)
    _require(has_turns_R == (nums_R > 0), "turn_spans", "is empty; null for one turn")
    reached_S, length_S = _before(turns_R, end_S), np.repeat(lengths_R, nums_R)
    is_right_S = (start_S >= reached_S) & (end_S > start_S) & (end_S <= length_S)
    rule = (
        "has [{}, {}) after {} of {} completion tokens; turns are in order, do not overlap, and have at least one "
        "token each"
    )
    _require(is_right_S, "turn_spans", rule, start_S, end_S, reached_S, length_S, offsets_R=turns_R)
    edges, first_S = np.zeros(len(mask_T) + 1, np.int8), np.repeat(offsets_R[:-1], nums_R)
    edges[first_S + start_S] += 1
    edges[first_S + end_S] -= 1
    is_right_T = ~mask_T | np.repeat(~has_turns_R, lengths_R) | (np.cumsum(edges[:-1], dtype=np.int8) > 0)
    place_T = np.arange(len(mask_T)) - np.repeat(offsets_R[:-1], lengths_R)
    rule = "is true at token {}, in none of its turn_spans; tokens outside of turn_spans were not sampled"
    _require(is_right_T, "loss_mask", rule, place_T, offsets_R=offsets_R)


def _check_turn_rewards(columns: _Columns) -> None:
    has_rewards_R = _is_valid(columns["turn_rewards"])
    offsets_R, value_S = flat_list(columns["turn_rewards"])
    nums_R, turns_R = _sizes(offsets_R), _sizes(flat_structs(columns["turn_spans"])[0])
    turns_R = np.maximum(turns_R, 1)  # no spans: one turn
    rule = "has {} numbers for {} turns; null, or one for each turn"
    _require(~has_rewards_R | (nums_R == turns_R), "turn_rewards", rule, nums_R, turns_R)
    rule = f"holds {{}}; finite numbers within {MAX_REWARD:g} of 0"
    _require(np.abs(value_S) <= MAX_REWARD, "turn_rewards", rule, value_S, offsets_R=offsets_R)


def _check_branch_starts(columns: _Columns, offsets_R: NDArray[Any], mask_T: BoolArray) -> None:
    branches_R, start_S = flat_list(columns["branch_starts"].fill_null([]))
    nums_R = _sizes(branches_R)
    before_S, length_S = _before(branches_R, start_S), np.repeat(_sizes(offsets_R), nums_R)
    rule = "has {} after {} of {} completion tokens; starts rise, from 1 on"
    is_right_S = (start_S > before_S) & (start_S < length_S)
    _require(is_right_S, "branch_starts", rule, start_S, before_S, length_S, offsets_R=branches_R)
    is_given_S = ~mask_T[np.repeat(offsets_R[:-1], nums_R) + start_S]
    rule = "has {}, where loss_mask is true; the first token of a branch was not sampled"
    _require(is_given_S, "branch_starts", rule, start_S, offsets_R=branches_R)


def _sizes(offsets_R: NDArray[Any]) -> NDArray[Any]:
    """[R] differences of [R + 1] offsets; three times faster than np.diff."""
    sizes_R: NDArray[Any] = offsets_R[1:] - offsets_R[:-1]
    return sizes_R


def _before(offsets_R: NDArray[Any], value_S: NDArray[Any]) -> NDArray[Any]:
    """[S] the preceding value in the same row; 0 for the first value of a row."""
    before = np.concatenate([[0], value_S])
    before[offsets_R[:-1]] = 0
    return before[:-1]


def _check_origins(columns: _Columns, lengths_R: NDArray[Any]) -> None:
    for row, origins in enumerate(structs_of(columns["origins"], Origin)):
        counts = [origin.num_tokens for origin in origins]
        if counts and (min(counts) <= 0 or sum(counts) > lengths_R[row]):
            raise SchemaMismatch(
                f"row {row}: origins {counts[:8]} of {lengths_R[row]} completion tokens; each has at least one"
            )


def _check_components(columns: _Columns) -> None:
    for row, components in enumerate(structs_of(columns["reward_components"], RewardComponent)):
        names = [component.name for component in components]
        is_right = (
            len(names) <= MAX_COMPONENTS
            and len(set(names)) == len(names)
            and all(re.fullmatch(COMPONENT_NAME, name) for name in names)
            and all(abs(component.value) <= MAX_REWARD for component in components)  # not NaN
        )
        if not is_right:
            raise SchemaMismatch(
                f"row {row}: reward_components is {reprlib.repr(components)}; at most {MAX_COMPONENTS} different "
                f"names of up to 40 letters, digits, '_', '.' or '-', with finite values within {MAX_REWARD:g} of 0"
            )


def _check_results(columns: _Columns) -> None:
    word_R = {}
    for name, known in _WORDS.items():
        word_R[name] = columns[name].to_numpy(zero_copy_only=False)
        is_known_R = np.array([word in known for word in word_R[name]])
        _require(is_known_R, name, f"is {{}}, none of {known}", word_R[name])
    reward_R, has_reward_R = columns["reward"].to_numpy(zero_copy_only=False), _is_valid(columns["reward"])
    is_right_R = (word_R["outcome"] != Outcome.ERROR.value) == has_reward_R
    rule = "with outcome {} has a value: {}; null exactly with error"
    _require(is_right_R, "reward", rule, word_R["outcome"], has_reward_R)
    is_right_R = ~has_reward_R | (np.abs(reward_R) <= MAX_REWARD)
    _require(is_right_R, "reward", f"{{}} is not a finite number within {MAX_REWARD:g} of 0", reward_R)


def _check_tasks(column: pa.Array) -> None:
    is_right = {text: _is_task(text) for text in set(column.to_pylist())}
    is_right_R = np.array([is_right[text] for text in column.to_pylist()], np.bool_)
    _require(is_right_R, "task", f"is no JSON object of at most {MAX_TASK_CHARS} characters")


def _is_task(text: str) -> bool:
    try:
        return len(text) <= MAX_TASK_CHARS and isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _check_identity(columns: _Columns, starts_G: NDArray[np.int64]) -> None:
    """Rows of a group are equal in _SAME_IN_GROUP and have distinct values of rollout_index."""
    first_R = np.repeat(starts_G[:-1], _sizes(starts_G))
    for name in _SAME_IN_GROUP:
        value_R = columns[name].to_numpy(zero_copy_only=False)
        shared_R = value_R[first_R]
        _require(value_R == shared_R, name, "is {} after {}; the column differs within one group", value_R, shared_R)
    index_R, size_R = columns["rollout_index"].to_numpy(), columns["group_size"].to_numpy()
    _, distinct = np.unique(first_R << 32 | index_R, return_index=True)
    is_new_R = np.zeros(len(index_R), np.bool_)
    is_new_R[distinct] = True
    rule = "is {}; the rows of a group have distinct numbers in [0, group_size={})"
    _require(is_new_R & (index_R >= 0) & (index_R < size_R), "rollout_index", rule, index_R, size_R)


def _check_refs(columns: _Columns, refs: Sequence[GroupRef], starts_G: NDArray[np.int64]) -> None:
    bounds = starts_G.tolist()
    tokens_G = _sizes(flat_list(columns["completion_token_ids"])[0][starts_G]).tolist()
    names_R = list(zip(*(columns[name].to_pylist() for name in ("group_id", "attempt", "actor")), strict=True))
    origins_R = structs_of(columns["origins"], Origin)
    for ref, num_tokens, start, end in zip(refs, tokens_G, bounds, bounds[1:], strict=False):
        actual = (*names_R[start], num_tokens, total_origins(origins_R[start:end]))
        named = (ref.group_id, ref.attempt, ref.actor, ref.num_tokens, ref.origins)
        if actual != named:
            raise SchemaMismatch(
                f"row {start}: the rows of this group are (group_id, attempt, actor, tokens, origins) = "
                f"{reprlib.repr(actual)}, their message names {reprlib.repr(named)}"
            )
