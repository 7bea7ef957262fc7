"""The rows of `bench stream`: GROUP_SIZE completions of one length, made at next to no cost.

Tokens, log-probabilities and masks are the same arrays in every group; only the columns that identify a group are
made anew. To build them from tokens costs an actor more than to send them, and is no part of the channel.
"""

import functools
import struct
import time

import numpy as np
import pyarrow as pa

from pipelinerl_core.data.codec import list_column, span_column
from pipelinerl_core.data.schema import ROLLOUT_SCHEMA
from pipelinerl_core.messages import Lease
from pipelinerl_core.types import GroupRef, WeightSpan

GROUP_SIZE = 8
RUN_ID = "bench"
ACTOR_EPOCH = 1
_AT = {name: index for index, name in enumerate(ROLLOUT_SCHEMA.names)}
_CODES = {pa.int64(): "q", pa.int32(): "i", pa.float64(): "d"}  # of the struct module
_PROMPT_TOKENS = 64
_VOCABULARY = 32_000


class Rows:
    """Makes groups whose completions have `num_tokens` tokens each."""

    def __init__(self, num_tokens: int, seed: int = 0) -> None:
        self.num_tokens = num_tokens
        rng = np.random.default_rng(seed)
        rows = range(GROUP_SIZE)
        columns = {
            "run_id": [RUN_ID] * GROUP_SIZE,
            "rollout_index": list(rows),
            "source": ["sums"] * GROUP_SIZE,
            "env": ["sums"] * GROUP_SIZE,
            "group_size": [GROUP_SIZE] * GROUP_SIZE,
            "prompt_token_ids": _tokens(rng, _PROMPT_TOKENS),
            "completion_token_ids": _tokens(rng, num_tokens),
            "rollout_logprobs": list_column([-rng.random(num_tokens, dtype=np.float32) for _ in rows], np.float32),
            "loss_mask": list_column([np.ones(num_tokens, np.bool_)] * GROUP_SIZE, np.bool_),
            "turn_spans": [None] * GROUP_SIZE,
            "reward": [float(row % 2) for row in rows],
            "outcome": ["scored"] * GROUP_SIZE,
            "finish_reason": ["length"] * GROUP_SIZE,
            "error": [None] * GROUP_SIZE,
            "temperature": [1.0] * GROUP_SIZE,
            "top_p": [1.0] * GROUP_SIZE,
            "seed": list(rows),
            "max_tokens": [num_tokens] * GROUP_SIZE,
            "started_at": [0.0] * GROUP_SIZE,
            "scored_at": [0.0] * GROUP_SIZE,
            "origins": [None] * GROUP_SIZE,
        }
        arrays = {
            name: values if isinstance(values, pa.Array) else pa.array(values, ROLLOUT_SCHEMA.field(name).type)
            for name, values in columns.items()
        }
        self._columns = [arrays.get(name) for name in ROLLOUT_SCHEMA.names]
        self._spans = (-1, pa.nulls(GROUP_SIZE))

    def of(self, lease: Lease, actor: pa.Array, version: int) -> pa.RecordBatch:
        """The rows of a leased group, sampled by weights `version`; `finished_at` is the Unix time of this call."""
        if self._spans[0] != version:
            row = (WeightSpan(version, 0, self.num_tokens),)
            self._spans = (version, span_column([row] * GROUP_SIZE))
        columns = self._columns.copy()
        columns[_AT["group_id"]] = _same(lease.group_id, pa.int64())
        columns[_AT["attempt"]] = _same(lease.attempt, pa.int32())
        columns[_AT["lease_id"]] = _same_text(lease.lease_id)
        columns[_AT["prompt_id"]] = _same_text(lease.prompt.prompt_id)
        columns[_AT["actor"]] = actor
        columns[_AT["weight_spans"]] = self._spans[1]
        columns[_AT["finished_at"]] = _same(time.time(), pa.float64())
        return pa.RecordBatch.from_arrays(columns, schema=ROLLOUT_SCHEMA)


def _same(number: float, kind: pa.DataType) -> pa.Array:
    """The number in every row, from its bytes: the fastest way into Arrow."""
    data = struct.pack(_CODES[kind], number) * GROUP_SIZE
    return pa.Array.from_buffers(kind, GROUP_SIZE, [None, pa.py_buffer(data)])


def _same_text(text: str) -> pa.Array:
    data = text.encode()
    buffers = [None, _offsets(len(data)), pa.py_buffer(data * GROUP_SIZE)]
    return pa.Array.from_buffers(pa.string(), GROUP_SIZE, buffers)


@functools.cache
def _offsets(length: int) -> pa.Buffer:
    return pa.py_buffer(np.arange(GROUP_SIZE + 1, dtype=np.int32) * np.int32(length))


def group_ref(lease: Lease, actor: str, num_tokens: int) -> GroupRef:
    """The name of such a group."""
    return GroupRef(
        group_id=lease.group_id,
        attempt=lease.attempt,
        actor=actor,
        actor_epoch=ACTOR_EPOCH,
        num_rollouts=GROUP_SIZE,
        num_tokens=GROUP_SIZE * num_tokens,
    )


def _tokens(rng: np.random.Generator, num: int) -> pa.ListArray:
    return list_column([rng.integers(0, _VOCABULARY, num, dtype=np.int32) for _ in range(GROUP_SIZE)], np.int32)
