"""Converts rollouts and training rows to Arrow record batches and segment bytes, and back.

Token columns are built from one flat array and offsets, and read as numpy views, without Python lists.
Shapes: P = prompt tokens, C = completion tokens, R = rows, S = weight spans (version, start, end).
"""

import itertools
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike, NDArray

from pipelinerl_core.data.schema import BATCH_SCHEMA, COMPONENT_TYPE, ORIGIN_TYPE, ROLLOUT_SCHEMA, SPAN_TYPE, conform
from pipelinerl_core.errors import SchemaMismatch
from pipelinerl_core.types import (
    FinishReason,
    Origin,
    Outcome,
    RewardComponent,
    Rollout,
    Sampler,
    TrainingRow,
    TurnSpan,
    WeightSpan,
)

T = TypeVar("T")

_SCALARS = (
    "group_id", "rollout_index", "attempt", "lease_id", "prompt_id", "source", "env", "task", "actor", "group_size",
)  # fmt: skip
_RESULTS = ("reward", "outcome", "finish_reason", "error")
_SAMPLER = ("temperature", "top_p", "seed")
_LIMITS = ("max_tokens", "started_at", "finished_at", "scored_at")
_TOKENS: dict[str, DTypeLike] = {
    "prompt_token_ids": np.int32,
    "completion_token_ids": np.int32,
    "rollout_logprobs": np.float32,
    "loss_mask": np.bool_,
}
_FLAT_COLUMNS = (*_TOKENS, "loss_mask_trained", "token_ids")
_FLAT_WITH_NULLS = "trainer_logprobs"
# Bytes per prompt token, and per completion token with its log-probability and its bit of the mask.
_TOKEN_BYTES = (
    (ROLLOUT_SCHEMA.get_field_index("prompt_token_ids"), 4),
    (ROLLOUT_SCHEMA.get_field_index("completion_token_ids"), 8 + 1 / 8),
)
_TASK = ROLLOUT_SCHEMA.get_field_index("task")
_BYTES_BESIDE_TOKENS = 300
SEGMENT_OPTIONS = pa.ipc.IpcWriteOptions(compression="zstd")
_CHECKSUMS = b"crc32"
"""Footer entry of a segment: the CRC-32 checksums of the values of its batches, in order, separated by commas."""


def encode_rollouts(run_id: str, rollouts: Sequence[Rollout]) -> pa.RecordBatch:
    """One row per rollout, ROLLOUT_SCHEMA. Raises SchemaMismatch if a value does not fit its column."""
    return record_batch(_rollout_columns(run_id, rollouts), ROLLOUT_SCHEMA)


def encode_batch(run_id: str, step: int, rows: Sequence[TrainingRow]) -> pa.RecordBatch:
    """The rows of a step in training order, BATCH_SCHEMA. Advantages and loss_weight are stored as float32."""
    columns = _rollout_columns(run_id, [row.rollout for row in rows])
    columns["step"] = [step] * len(rows)
    columns["order"] = list(range(len(rows)))
    columns["loss_mask_trained"] = list_column([row.loss_mask for row in rows], np.bool_)
    columns["advantage"] = [row.advantage for row in rows]
    columns["loss_weight"] = [row.loss_weight for row in rows]
    columns["turn_advantages"] = [row.turn_advantages or None for row in rows]
    columns["trainer_logprobs"] = [row.trainer_logprobs for row in rows]
    return record_batch(columns, BATCH_SCHEMA)


def decode_rollouts(batch: pa.RecordBatch) -> list[Rollout]:
    """The rollouts of a batch; token arrays are read-only views of the batch, masks are copies.

    A view keeps the whole batch in memory, so copy arrays that are kept for long.
    """
    return _decode(conform(batch, ROLLOUT_SCHEMA))


def decode_batch(batch: pa.RecordBatch) -> list[TrainingRow]:
    """The training rows of a batch, in training order.

    Raises SchemaMismatch if the rows are in another order, or if a row has turn_advantages but not one per turn.
    """
    batch = conform(batch, BATCH_SCHEMA)
    order_R = batch.column("order").to_numpy()
    if np.any(np.diff(order_R) != 1):
        raise SchemaMismatch(f"batch rows are not in training order: order is {order_R.tolist()}")
    rollouts = _decode(batch)
    turn_advantages = _numbers_of(batch.column("turn_advantages"))
    for row, (rollout, advantages) in enumerate(zip(rollouts, turn_advantages, strict=True)):
        if advantages and len(advantages) != rollout.num_turns:
            raise SchemaMismatch(f"row {row}: {len(advantages)} turn_advantages, {rollout.num_turns} turns; one each")
    return [
        TrainingRow(
            rollout=rollout,
            loss_mask=loss_mask,
            advantage=advantage,
            loss_weight=loss_weight,
            turn_advantages=advantages,
            trainer_logprobs=logprobs if len(logprobs) else None,
        )
        for rollout, loss_mask, advantage, loss_weight, advantages, logprobs in zip(
            rollouts,
            rows_of(batch.column("loss_mask_trained")),
            batch.column("advantage").to_pylist(),
            batch.column("loss_weight").to_pylist(),
            turn_advantages,
            rows_of(batch.column("trainer_logprobs")),
            strict=True,
        )
    ]


def flat_list(column: pa.ListArray) -> tuple[NDArray[Any], NDArray[Any]]:
    """(offsets [R + 1] from 0, values) of a list column: row i is values[offsets[i] : offsets[i + 1]]."""
    offsets = column.offsets.to_numpy()
    values = column.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))  # only the bits of this slice
    return offsets - offsets[0], values.to_numpy(zero_copy_only=False)


def rows_of(column: pa.ListArray) -> list[NDArray[Any]]:
    """Each row of a list column as a view of its values."""
    offsets, values = flat_list(column)
    bounds = offsets.tolist()
    return [values[start:end] for start, end in itertools.pairwise(bounds)]


def row_bytes(batch: pa.RecordBatch) -> int:
    """Estimated bytes of these rows without the array that they may be a slice of; ten times faster than Arrow."""
    num_bytes = batch.num_rows * _BYTES_BESIDE_TOKENS
    for index, token_bytes in _TOKEN_BYTES:
        offsets = batch.column(index).offsets.to_numpy()
        num_bytes += math.ceil(int(offsets[-1] - offsets[0]) * token_bytes)
    tasks = batch.column(_TASK)
    offsets = np.frombuffer(tasks.buffers()[1], np.int32)[tasks.offset : tasks.offset + len(tasks) + 1]
    return int(num_bytes + offsets[-1] - offsets[0]) if len(tasks) else num_bytes


def flat_structs(column: pa.ListArray) -> tuple[NDArray[Any], list[NDArray[Any]]]:
    """(offsets [R + 1] from 0, values of each field) of a list column of numbers in structs; a null row has none."""
    column = column.fill_null([]) if column.null_count else column
    offsets = column.offsets.to_numpy()
    structs: pa.StructArray = column.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    fields = [structs.field(index).to_numpy(zero_copy_only=False) for index in range(structs.type.num_fields)]
    return offsets - offsets[0], fields


def spans_of(column: pa.ListArray) -> list[tuple[WeightSpan, ...]]:
    """Weight spans of each row."""
    offsets, fields = flat_structs(column)
    spans = [WeightSpan(*values) for values in zip(*(field.tolist() for field in fields), strict=True)]
    return [tuple(spans[start:end]) for start, end in itertools.pairwise(offsets.tolist())]


def structs_of(column: pa.ListArray, kind: Callable[..., T]) -> list[tuple[T, ...]]:
    """The structs of each row, each as a `kind`; none for a null row."""
    if column.null_count == len(column):
        return [()] * len(column)
    return [tuple(kind(**struct) for struct in row or ()) for row in column.to_pylist()]


def struct_column(rows: Sequence[Sequence[Origin | RewardComponent]], kind: pa.DataType) -> pa.Array:
    """The inverse of `structs_of`; null for a row without structs."""
    return pa.array([[struct._asdict() for struct in row] or None for row in rows], pa.list_(kind))


def origins_in(batch: pa.RecordBatch) -> tuple[Origin, ...]:
    """Origins of all rows, summed per actor epoch and sorted."""
    return total_origins(structs_of(batch.column("origins"), Origin))


def total_origins(rows: Sequence[Sequence[Origin]]) -> tuple[Origin, ...]:
    """Origins of several rows, summed per actor epoch and sorted."""
    if not any(rows):
        return ()
    totals: Counter[tuple[str, int]] = Counter()
    for origin in itertools.chain.from_iterable(rows):
        totals[origin.actor, origin.epoch] += origin.num_tokens
    return tuple(Origin(*key, num_tokens) for key, num_tokens in sorted(totals.items()))


def to_segment(batches: Sequence[pa.RecordBatch]) -> bytes:
    """An Arrow IPC file (zstd) of at least one batch of the same schema, with a checksum per batch in the footer."""
    sink = pa.BufferOutputStream()
    footer = {_CHECKSUMS: _checksums(batches)}
    with pa.ipc.new_file(sink, batches[0].schema, options=SEGMENT_OPTIONS, metadata=footer) as writer:
        for batch in batches:
            writer.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def from_segment(data: bytes | memoryview, key: str = "segment") -> list[pa.RecordBatch]:
    """The batches of a segment. Raises SchemaMismatch, which names `key`, for truncated or changed bytes."""
    try:
        reader = pa.ipc.open_file(pa.py_buffer(data))
        batches = [reader.get_batch(index) for index in range(reader.num_record_batches)]
        for batch in batches:
            batch.validate(full=True)
        recorded = (reader.metadata or {}).get(_CHECKSUMS, b"")
        computed = _checksums(batches)
    except Exception as error:  # a changed bit of the schema makes columns of any type, whose values may not exist
        raise SchemaMismatch(f"{key}: torn or corrupt Arrow file: {error}") from error
    if recorded != computed:
        raise SchemaMismatch(f"{key}: its values do not match the checksums in its footer")
    return batches


def to_message(batch: pa.RecordBatch) -> pa.Buffer:
    """The rows for a process that trusts this one: without schema, compression and checksum, which take longer."""
    return batch.serialize()


def from_message(data: memoryview, schema: pa.Schema) -> pa.RecordBatch:
    """The inverse of `to_message`; the columns are views of `data`."""
    return pa.ipc.read_record_batch(pa.py_buffer(data), schema)


def _rollout_columns(run_id: str, rollouts: Sequence[Rollout]) -> dict[str, Any]:
    columns: dict[str, Any] = {"run_id": [run_id] * len(rollouts)}
    for name in (*_SCALARS, *_RESULTS, *_LIMITS):
        columns[name] = [getattr(rollout, name) for rollout in rollouts]
    for name in _SAMPLER:
        columns[name] = [getattr(rollout.sampler, name) for rollout in rollouts]
    for name, dtype in _TOKENS.items():
        columns[name] = list_column([getattr(rollout, name) for rollout in rollouts], dtype)
    columns["weight_spans"] = span_column([rollout.weight_spans for rollout in rollouts])
    columns["origins"] = struct_column([rollout.origins for rollout in rollouts], ORIGIN_TYPE)
    columns["reward_components"] = struct_column([rollout.reward_components for rollout in rollouts], COMPONENT_TYPE)
    columns["turn_spans"] = [rollout.turn_spans or None for rollout in rollouts]
    columns["turn_rewards"] = [rollout.turn_rewards or None for rollout in rollouts]
    columns["branch_starts"] = [rollout.branch_starts or None for rollout in rollouts]
    return columns


def record_batch(columns: dict[str, Any], schema: pa.Schema) -> pa.RecordBatch:
    """A record batch from columns, each an array or a list. Raises SchemaMismatch for a value that does not fit."""
    arrays = []
    for field in schema:
        values = columns[field.name]
        try:
            arrays.append(values if isinstance(values, pa.Array) else pa.array(values, field.type))
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            raise SchemaMismatch(f"column {field.name!r} ({field.type}): {error}") from error
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _offsets(lengths: Iterable[int], count: int) -> pa.Array:
    offsets = np.zeros(count + 1, np.int64)
    np.cumsum(np.fromiter(lengths, np.int64, count), out=offsets[1:])
    if offsets[-1] > np.iinfo(np.int32).max:
        raise SchemaMismatch(
            f"{offsets[-1]} values in one list column; a batch can have at most 2^31 - 1. Send fewer rows"
        )
    return pa.array(offsets.astype(np.int32))


def list_column(rows: Sequence[NDArray[Any]], dtype: DTypeLike) -> pa.ListArray:
    """A list column from one array per row."""
    offsets = _offsets((len(row) for row in rows), len(rows))
    flat = np.concatenate([np.zeros(0, dtype), *rows], dtype=dtype, casting="same_kind")
    return pa.ListArray.from_arrays(offsets, pa.array(flat))


def span_column(rows: Sequence[Sequence[WeightSpan]]) -> pa.ListArray:
    """The inverse of `spans_of`."""
    flat_S = np.array([span for row in rows for span in row], np.int64).reshape(-1, 3)
    columns = [pa.array(flat_S[:, index], field.type, safe=True) for index, field in enumerate(SPAN_TYPE)]
    spans = pa.StructArray.from_arrays(columns, fields=list(SPAN_TYPE))
    return pa.ListArray.from_arrays(_offsets((len(row) for row in rows), len(rows)), spans)


def _decode(batch: pa.RecordBatch) -> list[Rollout]:
    names = (*_SCALARS, *_RESULTS, *_LIMITS, *_SAMPLER)
    columns: dict[str, Sequence[Any]] = {name: batch.column(name).to_pylist() for name in names}
    columns.update({name: rows_of(batch.column(name)) for name in _TOKENS})
    columns["weight_spans"] = spans_of(batch.column("weight_spans"))
    columns["origins"] = structs_of(batch.column("origins"), Origin)
    columns["reward_components"] = structs_of(batch.column("reward_components"), RewardComponent)
    columns["turn_spans"] = structs_of(batch.column("turn_spans"), TurnSpan)
    columns["turn_rewards"] = _numbers_of(batch.column("turn_rewards"))
    columns["branch_starts"] = _numbers_of(batch.column("branch_starts"))
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    try:
        return [_rollout(row) for row in rows]
    except ValueError as error:
        raise SchemaMismatch(f"rollout rows have an unknown value: {error}") from error


def _numbers_of(column: pa.ListArray) -> list[tuple[Any, ...]]:
    if column.null_count == len(column):
        return [()] * len(column)
    return [tuple(row or ()) for row in column.to_pylist()]


def _rollout(row: dict[str, Any]) -> Rollout:
    sampler = Sampler(**{name: row.pop(name) for name in _SAMPLER})
    outcome = Outcome(row.pop("outcome"))
    finish_reason = FinishReason(row.pop("finish_reason"))
    return Rollout(sampler=sampler, outcome=outcome, finish_reason=finish_reason, **row)


def _checksums(batches: Sequence[pa.RecordBatch]) -> bytes:
    return ",".join(str(_checksum(batch)) for batch in batches).encode()


def _checksum(batch: pa.RecordBatch) -> int:
    """CRC-32 of names and values of a batch, independent of the memory layout."""
    crc = 0
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        crc = zlib.crc32(name.encode(), crc)
        if name == _FLAT_WITH_NULLS:
            crc = zlib.crc32(np.packbits(column.is_valid().to_numpy(zero_copy_only=False)).data, crc)
        if name == _FLAT_WITH_NULLS or (name in _FLAT_COLUMNS and column.null_count == 0):
            offsets, values = flat_list(column)
            crc = zlib.crc32(offsets.tobytes(), crc)
            crc = zlib.crc32(np.ascontiguousarray(values).data, crc)
        else:
            crc = zlib.crc32(repr(column.to_pylist()).encode(), crc)
    return crc
