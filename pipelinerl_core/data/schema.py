"""The Arrow schemas of rollouts, partial rollouts and training batches.

The field metadata describes each column, and the schema metadata contains the version. A reader rejects other
versions.
"""

import pyarrow as pa

from pipelinerl_core.errors import SchemaMismatch

SCHEMA_VERSION = "3"
"""Version of all three schemas; any change other than of descriptions increments the version."""

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
    "Earlier actor epochs that sampled the first tokens, before `actor` continued the rollout; null for none.",
    nullable=True,
)
_COMPONENTS = _field(
    "reward_components",
    pa.list_(COMPONENT_TYPE),
    "Components of the reward, before their weights; null if the verifier returned one number.",
    nullable=True,
)

_ROLLOUT_FIELDS = [
    _field("run_id", pa.string(), "Run that the rollout belongs to."),
    _field("group_id", pa.int64(), "Position of the group in the prompt ledger."),
    _field("rollout_index", pa.int32(), "Place within the group, 0 .. group_size - 1."),
    _field("attempt", pa.int32(), "Number of the group's lease that produced the rollout; grows with each lease."),
    _field("lease_id", pa.string(), "Id of the lease that produced the rollout."),
    _field("prompt_id", pa.string(), "Hex digest of the prompt's source and text."),
    _field("source", pa.string(), "Name of the prompt source."),
    _field("env", pa.string(), "Name of the verifier or environment that scored the rollout."),
    _field(
        "task",
        pa.string(),
        "JSON object: the columns of the prompt's row, or the environment's task, each cut after 1,000 characters.",
    ),
    _field("actor", pa.string(), "Actor that finished the rollout."),
    _field("group_size", pa.int32(), "Number of rollouts of the group."),
    _field("prompt_token_ids", _IDS, "[P] tokens of the prompt."),
    _field(
        "completion_token_ids",
        _IDS,
        "[C] tokens after the prompt: sampled tokens, with the end token if there is one, and tokens between turns.",
    ),
    _field(
        "rollout_logprobs", _LOGPROBS, "[C] log-probability of each token when sampled, 0 where loss_mask is false."
    ),
    _field(
        "weight_spans",
        pa.list_(SPAN_TYPE),
        "Weight version that sampled the tokens [start, end); the spans cover [0, C). Tokens between turns have the "
        "version of the token before them.",
    ),
    _field("loss_mask", _MASK, "[C] true on tokens that were sampled and may be trained."),
    _field(
        "turn_spans",
        pa.list_(TURN_TYPE),
        "Tokens [start, end) of each turn, in order; tokens between turns were not sampled. Null for one turn.",
        nullable=True,
    ),
    _field(
        "turn_rewards",
        pa.list_(pa.float32()),
        "Parts of the reward that belong to single turns, one per turn; null without such parts.",
        nullable=True,
    ),
    _field(
        "branch_starts",
        _IDS,
        "Offsets in the completion where a branch begins, a context of its own: its tokens follow neither the prompt "
        "nor earlier tokens. Null without branches.",
        nullable=True,
    ),
    _field("reward", pa.float32(), "Score; null with outcome error.", nullable=True),
    _field("outcome", pa.string(), "scored; or error if the engine, the verifier or the environment failed."),
    _field("finish_reason", pa.string(), "stop, length or abort."),
    _field(
        "error",
        pa.string(),
        "Error of the engine, the verifier or the environment, one line; null without an error. With outcome scored: "
        "the environment took too long.",
        nullable=True,
    ),
    _field("temperature", pa.float64(), "Sampling temperature."),
    _field("top_p", pa.float64(), "Probability mass of nucleus sampling."),
    _field("seed", pa.int64(), "Seed of the sampling noise, one per rollout."),
    _field("max_tokens", pa.int32(), "Limit of completion tokens."),
    _field("started_at", pa.float64(), "Unix seconds when the first token was requested."),
    _field(
        "finished_at",
        pa.float64(),
        "Unix seconds when the last token was sampled; with an environment, after the episode.",
    ),
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
        _field("attempt", pa.int32(), "Number of the group's lease under which the row was written."),
        _field(
            "start",
            pa.int32(),
            "Offset of these tokens in the completion; they replace all earlier tokens from there on.",
        ),
        _field("token_ids", _IDS, "Tokens since the previous row of the rollout; all tokens if start is 0."),
        _field(
            "rollout_logprobs",
            _LOGPROBS,
            "Log-probability of each of these tokens when sampled; 0 for tokens between turns.",
        ),
        _field(
            "weight_spans",
            pa.list_(SPAN_TYPE),
            "Weight versions of these tokens; start and end count from the start of the completion.",
        ),
        _field("finish_reason", pa.string(), "stop, length or abort; null while unfinished.", nullable=True),
        _field("reward", pa.float32(), "Score; null while not scored.", nullable=True),
        _field("outcome", pa.string(), "scored or error; null while not scored.", nullable=True),
        _ORIGINS,
        _COMPONENTS,
        _field(
            "notes",
            pa.list_(pa.string()),
            "New notes of an episode, JSON texts: prompt, turns, recorded values; all of them if start is 0.",
            nullable=True,
        ),
    ],
)
"""One row for each rollout of an open group and each write of the log, if the rollout has changed."""

BATCH_SCHEMA = _schema(
    "batch",
    [
        *_ROLLOUT_FIELDS,
        _field("step", pa.int64(), "Optimizer step that trained the row."),
        _field("order", pa.int32(), "Position of the row within the step, from 0."),
        _field("loss_mask_trained", _MASK, "[C] loss_mask after the lag rule."),
        _field("advantage", pa.float32(), "Advantage of all tokens of the row; with turn_advantages, of turn 0."),
        _field("loss_weight", pa.float32(), "Weight of each token of the row in the loss."),
        _field(
            "turn_advantages",
            pa.list_(pa.float32()),
            "Advantage of the tokens of each turn; null for one advantage per row.",
            nullable=True,
        ),
        _field(
            "trainer_logprobs",
            pa.list_(pa.float32()),
            "[C] Log-probability under the weights that the step trained, nats; 0 if not sampled. Null without "
            "store.trainer_logprobs, and for a row that the step did not compute.",
            nullable=True,
        ),
    ],
)
"""The rows of one step as they were trained, in training order."""
_ADDED = {"trainer_logprobs"}
"""Columns that rows of this version may lack, because an earlier release wrote them: null."""


def check_schema(schema: pa.Schema, expected: pa.Schema = ROLLOUT_SCHEMA) -> None:
    """Raises SchemaMismatch, which names the difference, if rows of `schema` cannot be read as `expected`."""
    ours = _metadata(expected)
    theirs = _metadata(schema)
    name, version = ours["schema"], theirs.get("schema_version", "")
    if theirs.get("schema") != name:
        raise SchemaMismatch(
            f"the rows have schema {theirs.get('schema', 'without a name')!r}; this reader requires {name!r}"
        )
    if version != SCHEMA_VERSION:
        raise SchemaMismatch(
            f"{name} schema version {version!r:.40} cannot be read: this release reads {SCHEMA_VERSION}. "
            "Use the release that wrote the rows"
        )
    for field in expected:
        index = schema.get_field_index(field.name)
        if index < 0 and field.name in _ADDED:
            continue
        if index < 0:
            raise SchemaMismatch(f"{name} rows lack the column {field.name!r} ({field.type})")
        if schema.field(index).type != field.type:
            raise SchemaMismatch(f"{name} column {field.name!r} is {schema.field(index).type}, not {field.type}")
    extra = [column for column in schema.names if expected.get_field_index(column) < 0]
    if extra:
        raise SchemaMismatch(f"{name} rows of version {version} have columns that this version lacks: {extra}")


def conform(batch: pa.RecordBatch, expected: pa.Schema = ROLLOUT_SCHEMA) -> pa.RecordBatch:
    """Check the rows and return them with the columns of `expected`, in order."""
    if batch.schema.equals(expected, check_metadata=True):
        return batch
    check_schema(batch.schema, expected)
    try:
        batch.validate()
    except pa.ArrowInvalid as error:
        raise SchemaMismatch(f"invalid Arrow record batch: {str(error).splitlines()[0]}") from None
    return pa.RecordBatch.from_arrays(
        [
            batch.column(field.name) if field.name in batch.schema.names else pa.nulls(len(batch), field.type)
            for field in expected
        ],
        schema=expected,
    )


def _metadata(schema: pa.Schema) -> dict[str, str]:
    return {
        key.decode(errors="replace"): value.decode(errors="replace") for key, value in (schema.metadata or {}).items()
    }
