"""The Arrow schemas of rollouts, partial rollouts and training batches, declared once.

A sentence about each column travels in its field metadata; the version travels in the schema metadata. A reader takes
any minor version of its own major version (it may have more columns) and refuses every other one by name.
"""

import pyarrow as pa

from pipelinerl_core.errors import SchemaMismatch

SCHEMA_VERSION = "1.3"
"""major.minor of all three schemas; a new column is a new minor version, anything else a new major one."""

SPAN_TYPE = pa.struct(
    [
        pa.field("version", pa.int64(), nullable=False),
        pa.field("start", pa.int32(), nullable=False),
        pa.field("end", pa.int32(), nullable=False),
    ]
)
ORIGIN_TYPE = pa.struct(
    [
        pa.field("actor", pa.string(), nullable=False),
        pa.field("epoch", pa.int64(), nullable=False),
        pa.field("num_tokens", pa.int32(), nullable=False),
    ]
)
COMPONENT_TYPE = pa.struct(
    [pa.field("name", pa.string(), nullable=False), pa.field("value", pa.float64(), nullable=False)]
)
TURN_TYPE = pa.struct([pa.field("start", pa.int32(), nullable=False), pa.field("end", pa.int32(), nullable=False)])


def _field(name: str, kind: pa.DataType, description: str, *, nullable: bool = False) -> pa.Field:
    return pa.field(name, kind, nullable=nullable, metadata={"description": description})


def _schema(name: str, fields: list[pa.Field]) -> pa.Schema:
    return pa.schema(fields, metadata={"schema": name, "schema_version": SCHEMA_VERSION})


_IDS = pa.list_(pa.int32())
_LOGPROBS = pa.list_(pa.float32())
_MASK = pa.list_(pa.bool_())

_ORIGINS = _field(
    "origins",
    pa.list_(ORIGIN_TYPE),
    "Actor epochs that sampled the first tokens, before this one took the rollout over; null for none.",
    nullable=True,
)
_COMPONENTS = _field(
    "reward_components",
    pa.list_(COMPONENT_TYPE),
    "Components of the reward, before their weights; null if the verifier returned one number.",
    nullable=True,
)
_SINCE = {"origins": 1, "turn_advantages": 2, "reward_components": 3}
"""Columns that came with a later minor version than 0; rows of an earlier one are read as if they were null."""

_ROLLOUT_FIELDS = [
    _field("run_id", pa.string(), "Run that the rollout belongs to."),
    _field("group_id", pa.int64(), "Position of the group in the prompt ledger."),
    _field("rollout_index", pa.int32(), "Place within the group, 0 .. group_size - 1."),
    _field("attempt", pa.int32(), "Which lease of the group produced it; grows with every new lease."),
    _field("lease_id", pa.string(), "Lease under which it was produced."),
    _field("prompt_id", pa.string(), "Hex digest of the prompt's source and text."),
    _field("source", pa.string(), "Name of the prompt source."),
    _field("env", pa.string(), "Name of the verifier that scored it."),
    _field("actor", pa.string(), "Actor that finished it."),
    _field("group_size", pa.int32(), "Rollouts of the group."),
    _field("prompt_token_ids", _IDS, "[P] tokens of the prompt."),
    _field("completion_token_ids", _IDS, "[C] sampled tokens, with the end token if there is one."),
    _field(
        "rollout_logprobs", _LOGPROBS, "[C] log-probability of each token when sampled, 0 where loss_mask is false."
    ),
    _field(
        "weight_spans", pa.list_(SPAN_TYPE), "Weight version that sampled tokens [start, end); they cover [0, C)."
    ),
    _field("loss_mask", _MASK, "[C] true on tokens that were sampled and may be trained."),
    _field(
        "turn_spans",
        pa.list_(TURN_TYPE),
        "Tokens [start, end) of each turn, in order; what is between them was not sampled. Null for one turn.",
        nullable=True,
    ),
    _field("reward", pa.float32(), "Score; null with outcome error.", nullable=True),
    _field("outcome", pa.string(), "scored, or error when the verifier failed."),
    _field("finish_reason", pa.string(), "stop, length or abort."),
    _field("error", pa.string(), "One line about what failed; null if nothing did.", nullable=True),
    _field("temperature", pa.float64(), "Sampling temperature."),
    _field("top_p", pa.float64(), "Nucleus of the sampling."),
    _field("seed", pa.int64(), "Key of the sampling noise, one per rollout."),
    _field("max_tokens", pa.int32(), "Limit of the completion."),
    _field("started_at", pa.float64(), "Unix seconds when the first token was asked for."),
    _field("finished_at", pa.float64(), "Unix seconds when the last token was sampled."),
    _field("scored_at", pa.float64(), "Unix seconds when the reward was known."),
    _ORIGINS,
    _COMPONENTS,
]

ROLLOUT_SCHEMA = _schema("rollout", _ROLLOUT_FIELDS)
"""One finished rollout per row."""

PARTIAL_SCHEMA = _schema(
    "partial",
    [
        _field("group_id", pa.int64(), "Position of the group in the prompt ledger."),
        _field("rollout_index", pa.int32(), "Place within the group, 0 .. group_size - 1."),
        _field("attempt", pa.int32(), "Which lease of the group produced it."),
        _field("start", pa.int32(), "Offset of these tokens in the completion."),
        _field("token_ids", _IDS, "Tokens sampled since the flush before."),
        _field("rollout_logprobs", _LOGPROBS, "Log-probability of each of these tokens when sampled."),
        _field(
            "weight_spans", pa.list_(SPAN_TYPE), "Versions of these tokens; start and end count from the completion."
        ),
        _field("finish_reason", pa.string(), "stop, length or abort once it has ended; null before.", nullable=True),
        _field("reward", pa.float32(), "Score once known.", nullable=True),
        _field("outcome", pa.string(), "scored or error once known.", nullable=True),
        _ORIGINS,
        _COMPONENTS,
    ],
)
"""One row per rollout of an open group and flush."""

BATCH_SCHEMA = _schema(
    "batch",
    [
        *_ROLLOUT_FIELDS,
        _field("step", pa.int64(), "Optimizer step that trained the row."),
        _field("order", pa.int32(), "Place of the row within the step, from 0."),
        _field("loss_mask_trained", _MASK, "[C] loss_mask after the lag rule."),
        _field("advantage", pa.float32(), "Advantage of every token of the row, or with turn_advantages of turn 0."),
        _field("loss_weight", pa.float32(), "Weight of each of its tokens in the loss."),
        _field(
            "turn_advantages",
            pa.list_(pa.float32()),
            "Advantage of the tokens of each turn; null for one advantage per row.",
            nullable=True,
        ),
    ],
)
"""The rows of one step as they were trained, in training order."""

ROLLOUT_COLUMNS: tuple[str, ...] = tuple(ROLLOUT_SCHEMA.names)
PARTIAL_COLUMNS: tuple[str, ...] = tuple(PARTIAL_SCHEMA.names)
BATCH_COLUMNS: tuple[str, ...] = tuple(BATCH_SCHEMA.names)


def check_schema(schema: pa.Schema, expected: pa.Schema = ROLLOUT_SCHEMA) -> None:
    """Raises SchemaMismatch, naming what differs, unless rows of `schema` can be read as `expected`."""
    ours = _metadata(expected)
    theirs = _metadata(schema)
    name, version = ours["schema"], theirs.get("schema_version", "")
    if theirs.get("schema") != name:
        raise SchemaMismatch(
            f"rows carry schema {theirs.get('schema', 'without a name')!r}; this reader wants {name!r}"
        )
    major, _, minor = version.partition(".")
    our_major, _, our_minor = ours["schema_version"].partition(".")
    if major != our_major or not minor.isdecimal() or len(minor) > 4:
        raise SchemaMismatch(
            f"{name} schema version {version!r} cannot be read: this reader knows {our_major}.x. "
            "Use the release that wrote it"
        )
    for field in expected:
        index = schema.get_field_index(field.name)
        if index < 0 and int(minor) < _SINCE.get(field.name, 0):
            continue
        if index < 0:
            raise SchemaMismatch(f"{name} rows lack the column {field.name!r} ({field.type})")
        if schema.field(index).type != field.type:
            raise SchemaMismatch(f"{name} column {field.name!r} is {schema.field(index).type}, not {field.type}")
    extra = [column for column in schema.names if expected.get_field_index(column) < 0]
    if extra and int(minor) <= int(our_minor):
        raise SchemaMismatch(f"{name} rows of version {version} have columns that it does not declare: {extra}")


def conform(batch: pa.RecordBatch, expected: pa.Schema = ROLLOUT_SCHEMA) -> pa.RecordBatch:
    """The same rows under `expected` exactly: checked, columns in order.

    Columns of a newer minor version are left out, those that an older one lacks are null.
    """
    if batch.schema.equals(expected, check_metadata=True):
        return batch
    check_schema(batch.schema, expected)
    try:
        batch.validate()  # columns are made below, of as many rows as it claims to have
    except pa.ArrowInvalid as error:
        raise SchemaMismatch(f"rows that are no Arrow record batch: {str(error).splitlines()[0]}") from None
    known = set(batch.schema.names)
    arrays = [
        batch.column(field.name) if field.name in known else pa.nulls(batch.num_rows, field.type)
        for field in expected
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=expected)


def _metadata(schema: pa.Schema) -> dict[str, str]:
    return {
        key.decode(errors="replace"): value.decode(errors="replace") for key, value in (schema.metadata or {}).items()
    }
