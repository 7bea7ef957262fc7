"""The rules of checks.py over all rows of a write at once, for what they nearly always are: sound.

A question to Arrow or numpy costs about as much as comparing a thousand values, whether it is about the rows of one
group or of a dozen. What is not found sound here may still be: the long way round decides, and says what is wrong.
"""

import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelinerl_core.ranges import MAX_LOGPROB, MAX_REWARD, MAX_SECONDS, MAX_STEP
from pipelinerl_core.stream.codec import flat_values
from pipelinerl_core.stream.schema import ROLLOUT_SCHEMA
from pipelinerl_core.types import FinishReason, GroupRef, Outcome

_AT = {name: index for index, name in enumerate(ROLLOUT_SCHEMA.names)}  # asking by index is the cheaper way
_OUTCOMES = frozenset(str(word) for word in Outcome if word is not Outcome.ERROR)
_FINISH_REASONS = frozenset(str(word) for word in FinishReason)
_REALS = ("started_at", "finished_at", "scored_at", "temperature", "top_p")
_TOKENS = ("prompt_token_ids", "completion_token_ids")
_SAME_IN_GROUP = ("run_id", "lease_id", "prompt_id")  # beside those that a reference names


def are_sound(refs: Sequence[GroupRef], batch: pa.RecordBatch, max_tokens_per_row: int) -> bool:
    """Whether `checks.check_groups` would surely let rows of ROLLOUT_SCHEMA pass; False says nothing."""
    sizes = [ref.num_rollouts for ref in refs]
    if not sizes or min(sizes) < 1 or sum(sizes) != batch.num_rows:
        return False
    try:
        batch.validate(full=True)  # offsets that point outside would be followed by every question below
    except pa.ArrowInvalid:
        return False
    if not has_no_nulls(batch):
        return False
    bounds = _bounds(batch, "completion_token_ids")
    lengths = list(map(operator.sub, bounds[1:], bounds))
    return (
        _are_named(refs, batch, sizes)
        and _have_tokens(refs, bounds, sizes)
        and _are_lengths_sound(batch, bounds, lengths, max_tokens_per_row)
        and are_logprobs_sound(batch)
        and not out_of_range(batch)
        and _column(batch, "turn_spans").null_count == batch.num_rows
        and _are_spans_sound(batch, lengths)
        and _are_results_sound(batch)
    )


def _are_named(refs: Sequence[GroupRef], batch: pa.RecordBatch, sizes: list[int]) -> bool:
    """Whether every row is of the group that is to be there, and its number within it."""
    group_sizes = _values(batch, "group_size")
    firsts = [group_sizes[start] for start in _starts(sizes)]
    return (
        _values(batch, "group_id") == _spread([ref.group_id for ref in refs], sizes)
        and _values(batch, "attempt") == _spread([ref.attempt for ref in refs], sizes)
        and _values(batch, "actor") == _spread([ref.actor for ref in refs], sizes)
        and _values(batch, "rollout_index") == list(itertools.chain.from_iterable(map(range, sizes)))
        and group_sizes == _spread(firsts, sizes)
        and all(map(operator.ge, firsts, sizes))
        and not any(ref.origins for ref in refs)
        and _column(batch, "origins").null_count == batch.num_rows
        and all(_are_alike(_values(batch, name), sizes) for name in _SAME_IN_GROUP)
    )


def _are_alike(values: list[Any], sizes: list[int]) -> bool:
    """Whether each group has one value in all of its rows."""
    return values == _spread([values[start] for start in _starts(sizes)], sizes)


def _starts(sizes: list[int]) -> Iterator[int]:
    """Where each group begins; its end after the last of them is left out."""
    return itertools.accumulate(sizes[:-1], initial=0)


def _spread(values: list[Any], sizes: list[int]) -> list[Any]:
    """The value of each group, once per row."""
    return list(itertools.chain.from_iterable(map(itertools.repeat, values, sizes)))


def _have_tokens(refs: Sequence[GroupRef], bounds: list[int], sizes: list[int]) -> bool:
    ends = [bounds[row] for row in itertools.accumulate(sizes)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)] == [ref.num_tokens for ref in refs]


def _are_lengths_sound(batch: pa.RecordBatch, bounds: list[int], lengths: list[int], max_tokens: int) -> bool:
    prompt_bounds = _bounds(batch, "prompt_token_ids")
    prompts = list(map(operator.sub, prompt_bounds[1:], prompt_bounds))
    return (
        bounds[0] == prompt_bounds[0] == 0  # as in all that came over the wire
        and _bounds(batch, "rollout_logprobs") == bounds
        and _bounds(batch, "loss_mask") == bounds
        and min(prompts) > 0
        and max(*prompts, *lengths) <= max_tokens
    )


def are_logprobs_sound(batch: pa.RecordBatch) -> bool:
    """Whether they are in their range, and 0 where the mask is false."""
    logprobs = flat_values(_column(batch, "rollout_logprobs")).to_numpy()
    if not np.abs(logprobs).max(initial=0) <= MAX_LOGPROB:  # nor is a nan
        return False
    mask = flat_values(_column(batch, "loss_mask"))
    return mask.true_count == len(mask) or not np.any(logprobs[~mask.to_numpy(zero_copy_only=False)] != 0)


def out_of_range(batch: pa.RecordBatch) -> str:
    """The columns of which one has a number out of its range, of those that no other rule bounds; empty for none."""
    reals = np.concatenate([_column(batch, name).to_numpy() for name in _REALS])
    if not (reals.min() >= 0 and reals.max() <= MAX_SECONDS):  # nor is a nan
        return f"{', '.join(_REALS)}: numbers from 0 to {MAX_SECONDS:g}"
    if any(flat_values(_column(batch, name)).to_numpy().min(initial=0) < 0 for name in _TOKENS):
        return f"{', '.join(_TOKENS)}: tokens from 0 on"
    return ""


def _are_spans_sound(batch: pa.RecordBatch, lengths: list[int]) -> bool:
    """Whether the spans of each row follow each other from 0 to its length, versions from 0 and not decreasing."""
    bounds, version, start, end = spans_of_rows(batch)
    if len(version) and version.max() > MAX_STEP:
        return False
    if len(version) == len(lengths) == len(bounds) - 1 and bounds == list(range(len(bounds))):
        return not start.any() and end.tolist() == lengths and min(lengths) > 0 and bool(version.min() >= 0)
    bounds_R, lengths_R = np.array(bounds), np.array(lengths)
    has_spans = bounds_R[1:] > bounds_R[:-1]
    if np.any(lengths_R[~has_spans]) or np.any(end <= start):
        return False
    reached, newest = np.zeros_like(start), np.zeros_like(version)
    reached[1:], newest[1:] = end[:-1], version[:-1]
    firsts = bounds_R[:-1][has_spans]
    reached[firsts] = newest[firsts] = 0
    lasts = bounds_R[1:][has_spans] - 1
    return bool(
        np.array_equal(start, reached)
        and np.all(version >= newest)
        and np.array_equal(end[lasts], lengths_R[has_spans])
    )


def _are_results_sound(batch: pa.RecordBatch) -> bool:
    reward = _column(batch, "reward")
    return bool(
        reward.null_count == 0
        and (np.abs(reward.to_numpy()) <= MAX_REWARD).all()
        and _OUTCOMES.issuperset(_values(batch, "outcome"))
        and _FINISH_REASONS.issuperset(_values(batch, "finish_reason"))
    )


def spans_of_rows(batch: pa.RecordBatch) -> tuple[list[int], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Weight spans as (bounds [R + 1], version [S], start [S], end [S]): of row i are [bounds[i] : bounds[i + 1]]."""
    column = _column(batch, "weight_spans")
    bounds = column.offsets.to_pylist()
    structs: pa.StructArray = column.values.slice(bounds[0], bounds[-1] - bounds[0])
    if bounds[0]:
        bounds = [bound - bounds[0] for bound in bounds]
    version, start, end = (structs.field(index).to_numpy() for index in range(3))
    return bounds, version, start, end


def _bounds(batch: pa.RecordBatch, name: str) -> list[int]:
    bounds: list[int] = _column(batch, name).offsets.to_pylist()
    return bounds


def _column(batch: pa.RecordBatch, name: str) -> pa.Array:
    return batch.column(_AT[name])


def _values(batch: pa.RecordBatch, name: str) -> list[Any]:
    values: list[Any] = _column(batch, name).to_pylist()
    return values


def _validity_places() -> list[int]:
    """Where the buffers of a batch have the validity of a column without nulls, or of the values in its lists."""
    places = []
    place = 1  # after the validity of the rows themselves
    for field in ROLLOUT_SCHEMA:
        is_list = pa.types.is_list(field.type)
        if not field.nullable:
            places += [place, place + 2] if is_list else [place]
        place += _num_buffers(field.type)
    return places


def _num_buffers(kind: pa.DataType) -> int:
    """Arrow's layout: validity, then offsets and values as the type has them, children after their parent."""
    if pa.types.is_list(kind):
        return 2 + _num_buffers(kind.value_type)
    if pa.types.is_struct(kind):
        return 1 + sum(_num_buffers(field.type) for field in kind)
    return 3 if pa.types.is_string(kind) else 2


_VALIDITY_AT = _validity_places()


def has_no_nulls(batch: pa.RecordBatch) -> bool:
    """Whether no column that must have a value in each row has a bitmap of nulls: there hardly ever is one."""
    buffers = batch.to_struct_array().buffers()
    return all(buffers[place] is None for place in _VALIDITY_AT)
