"""What rows must satisfy before the hub or the trainer takes them in. R = rows, C = completion tokens."""

import math

import numpy as np
import pyarrow as pa

from pipelinerl_core.errors import SchemaMismatch
from pipelinerl_core.stream.codec import flat_list, origins_in, origins_of, spans_of
from pipelinerl_core.stream.schema import ROLLOUT_SCHEMA
from pipelinerl_core.types import FinishReason, GroupRef, Outcome

MAX_TOKENS_PER_ROW = 1 << 24
"""Prompt or completion tokens of one rollout; far beyond any model, it only bounds what a broken peer can send."""

_PER_TOKEN = ("rollout_logprobs", "loss_mask")
_SAME_IN_GROUP = ("run_id", "group_id", "attempt", "lease_id", "prompt_id", "actor", "group_size")


def check_rows(batch: pa.RecordBatch, *, max_tokens_per_row: int = MAX_TOKENS_PER_ROW) -> None:
    """Raises SchemaMismatch (column, row, value, rule) unless the rows of one group message can be trained."""
    if batch.num_rows == 0:
        raise SchemaMismatch("a group message has no rows; it carries at least one rollout")
    _check_nulls(batch)
    _check_group(batch)
    _check_lengths(batch, max_tokens_per_row)
    _check_spans(batch)
    _check_results(batch)
    _check_origins(batch)


def check_group(ref: GroupRef, batch: pa.RecordBatch) -> None:
    """Raises SchemaMismatch unless checked rows are those that `ref` names."""
    offsets, _ = flat_list(batch.column("completion_token_ids"))
    found = (
        batch.column("group_id")[0].as_py(),
        batch.column("attempt")[0].as_py(),
        batch.column("actor")[0].as_py(),
        batch.num_rows,
        int(offsets[-1] - offsets[0]),
    )
    named = (ref.group_id, ref.attempt, ref.actor, ref.num_rollouts, ref.num_tokens)
    if found != named:
        raise SchemaMismatch(
            f"rows are (group_id, attempt, actor, rollouts, tokens) = {found}, their message names {named}"
        )
    if origins_in(batch) != ref.origins:
        raise SchemaMismatch(f"rows have origins {origins_in(batch)}, their message names {ref.origins}")


def _check_nulls(batch: pa.RecordBatch) -> None:
    for field in ROLLOUT_SCHEMA:
        column = batch.column(field.name)
        if not field.nullable and column.null_count:
            raise SchemaMismatch(f"column {field.name!r} holds {column.null_count} nulls; every row needs a value")
        if pa.types.is_list(field.type) and not field.nullable and column.values.null_count:
            raise SchemaMismatch(f"column {field.name!r} holds nulls inside its lists")


def _check_group(batch: pa.RecordBatch) -> None:
    for name in _SAME_IN_GROUP:
        values = set(batch.column(name).to_pylist())
        if len(values) > 1:
            raise SchemaMismatch(f"column {name!r} differs within one group message: {sorted(values)[:4]}")
    group_size = batch.column("group_size")[0].as_py()
    indices = batch.column("rollout_index").to_pylist()
    if len(set(indices)) < len(indices) or not all(0 <= index < group_size for index in indices):
        raise SchemaMismatch(f"rollout_index {indices} must be distinct and in [0, group_size={group_size})")


def _check_lengths(batch: pa.RecordBatch, max_tokens_per_row: int) -> None:
    lengths_R = np.diff(flat_list(batch.column("completion_token_ids"))[0])
    for name in _PER_TOKEN:
        found_R = np.diff(flat_list(batch.column(name))[0])
        if not np.array_equal(found_R, lengths_R):
            row = int(np.flatnonzero(found_R != lengths_R)[0])
            raise SchemaMismatch(
                f"row {row}: {name} has {found_R[row]} values for {lengths_R[row]} completion tokens; one each"
            )
    prompts_R = np.diff(flat_list(batch.column("prompt_token_ids"))[0])
    longest = int(max(lengths_R.max(), prompts_R.max()))
    if longest > max_tokens_per_row:
        raise SchemaMismatch(f"a row has {longest} tokens, the limit is {max_tokens_per_row}")
    if int(prompts_R.min()) == 0:
        raise SchemaMismatch(
            f"row {int(prompts_R.argmin())}: prompt_token_ids is empty; a prompt has at least one token"
        )
    offsets, values = flat_list(batch.column("rollout_logprobs"))
    logprobs = values[offsets[0] : offsets[-1]]
    _, mask = flat_list(batch.column("loss_mask"))
    mask = mask[batch.column("loss_mask").offsets[0].as_py() :][: len(logprobs)]
    if not np.isfinite(logprobs).all() or np.any(logprobs[~mask] != 0):
        raise SchemaMismatch("rollout_logprobs must be finite, and 0 where loss_mask is false")


def _check_spans(batch: pa.RecordBatch) -> None:
    lengths = np.diff(flat_list(batch.column("completion_token_ids"))[0]).tolist()
    for row, (spans, length) in enumerate(zip(spans_of(batch.column("weight_spans")), lengths, strict=True)):
        end, version = 0, 0
        for span in spans:
            if span.start != end or span.end <= span.start or span.version < version:
                raise SchemaMismatch(
                    f"row {row}: weight_spans {[tuple(item) for item in spans]} must follow each other without gaps, "
                    "versions not decreasing"
                )
            end, version = span.end, span.version
        if end != length:
            raise SchemaMismatch(f"row {row}: weight_spans cover {end} of {length} completion tokens")


def _check_origins(batch: pa.RecordBatch) -> None:
    lengths = np.diff(flat_list(batch.column("completion_token_ids"))[0]).tolist()
    for row, (origins, length) in enumerate(zip(origins_of(batch.column("origins")), lengths, strict=True)):
        counts = [origin.num_tokens for origin in origins]
        if any(count <= 0 for count in counts) or sum(counts) > length:
            raise SchemaMismatch(f"row {row}: origins {counts} of {length} completion tokens; each has at least one")


def _check_results(batch: pa.RecordBatch) -> None:
    rewards = batch.column("reward").to_pylist()
    outcomes = batch.column("outcome").to_pylist()
    for row, (reward, outcome) in enumerate(zip(rewards, outcomes, strict=True)):
        if outcome not in tuple(Outcome):
            raise SchemaMismatch(f"row {row}: outcome {outcome!r} is none of {[str(word) for word in Outcome]}")
        if (outcome == Outcome.ERROR) != (reward is None):
            raise SchemaMismatch(f"row {row}: reward {reward} with outcome {outcome}; null exactly with error")
        if reward is not None and not math.isfinite(reward):
            raise SchemaMismatch(f"row {row}: reward {reward} is not a finite number")
    for row, word in enumerate(batch.column("finish_reason").to_pylist()):
        if word not in tuple(FinishReason):
            raise SchemaMismatch(
                f"row {row}: finish_reason {word!r} is none of {[str(item) for item in FinishReason]}"
            )
