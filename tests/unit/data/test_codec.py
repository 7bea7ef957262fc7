"""Rollouts to Arrow and back, segments, and schema refusals."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipelinerl_core.data.codec import (
    decode_batch,
    decode_rollouts,
    encode_batch,
    encode_rollouts,
    from_message,
    from_segment,
    to_message,
    to_segment,
)
from pipelinerl_core.data.schema import (
    BATCH_SCHEMA,
    PARTIAL_SCHEMA,
    ROLLOUT_SCHEMA,
    check_schema,
    conform,
)
from pipelinerl_core.errors import SchemaMismatch
from pipelinerl_core.types import FinishReason, Outcome, Rollout, TrainingRow, TurnSpan, WeightSpan
from tests.unit.data.rollout_case import COMPONENTS, TURNS, by_hand

GOLDEN = Path(__file__).parents[2] / "golden"


def assert_equal(actual, expected) -> None:
    for item in fields(Rollout):
        left, right = getattr(actual, item.name), getattr(expected, item.name)
        if isinstance(right, np.ndarray):
            assert left.dtype == right.dtype, item.name
            assert left.tolist() == right.tolist(), item.name
        else:
            assert left == right, item.name
            assert type(left) is type(right), item.name


def test_every_field_survives_by_hand():
    rollouts = [by_hand(0), by_hand(1)]
    batch = encode_rollouts("run-1", rollouts)
    assert batch.schema.names == ROLLOUT_SCHEMA.names
    assert batch.column("run_id").to_pylist() == ["run-1", "run-1"]
    assert batch.column("completion_token_ids").to_pylist() == [[10, 11, 12, 13, 14]] * 2
    assert batch.column("weight_spans").to_pylist()[0] == [
        {"version": 7, "start": 0, "end": 3},
        {"version": 8, "start": 3, "end": 5},
    ]
    assert batch.column("turn_spans").to_pylist() == [None, None]
    assert batch.column("reward").to_pylist() == [0.5, None]
    for actual, expected in zip(decode_rollouts(batch), rollouts, strict=True):
        assert_equal(actual, expected)


float32s = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def random_rollouts(draw):
    count = draw(st.integers(0, 5))
    tokens = st.integers(-(2**31), 2**31 - 1)
    made = []
    for index in range(count):
        length = draw(st.integers(0, 7))
        reward = draw(st.none() | float32s)
        cut = draw(st.integers(0, length))
        spans = tuple(WeightSpan(*span) for span in ((1, 0, cut), (2**40, cut, length)) if span[1] < span[2])
        made.append(
            replace(
                by_hand(),
                rollout_index=index,
                prompt_token_ids=np.array(draw(st.lists(tokens, max_size=4)), np.int32),
                completion_token_ids=np.array(draw(st.lists(tokens, min_size=length, max_size=length)), np.int32),
                rollout_logprobs=np.array(draw(st.lists(float32s, min_size=length, max_size=length)), np.float32),
                loss_mask=np.array(draw(st.lists(st.booleans(), min_size=length, max_size=length)), np.bool_),
                weight_spans=spans,
                reward=reward,
                outcome=Outcome.ERROR if reward is None else Outcome.SCORED,
                error=draw(st.none() | st.text(max_size=5)),
                finish_reason=draw(st.sampled_from(FinishReason)),
                turn_spans=draw(st.sampled_from([(), (TurnSpan(0, 1),), TURNS])),
                reward_components=draw(st.sampled_from([(), COMPONENTS[:1], COMPONENTS])),
            )
        )
    return made


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(random_rollouts(), st.integers(0, 4))
def test_any_rollouts_survive_encoding_slicing_and_a_segment(rollouts, start):
    batch = encode_rollouts("run", rollouts)
    batch.validate(full=True)
    sliced = batch.slice(start)
    (stored,) = from_segment(to_segment([sliced]), "key")
    for candidate in (sliced, stored):
        for actual, expected in zip(decode_rollouts(candidate), rollouts[start:], strict=True):
            assert_equal(actual, expected)


def test_decoded_tokens_are_views_of_the_batch():
    batch = encode_rollouts("run", [by_hand()])
    (rollout,) = decode_rollouts(batch)
    values = batch.column("completion_token_ids").values.to_numpy()
    assert np.shares_memory(rollout.completion_token_ids, values)
    assert not rollout.completion_token_ids.flags.writeable


def test_a_value_that_does_not_fit_names_its_column():
    with pytest.raises(SchemaMismatch, match="'rollout_index'"):
        encode_rollouts("run", [replace(by_hand(), rollout_index=2**31)])
    with pytest.raises(SchemaMismatch, match="'turn_spans'"):
        encode_rollouts("run", [replace(by_hand(), turn_spans=(TurnSpan(0, 2**31),))])


def test_training_rows_survive_with_their_order_and_both_masks():
    masks = [np.array([False, False, False, True, False]), np.array([True] * 4 + [False])]
    rows = [
        TrainingRow(rollout=by_hand(1), loss_mask=masks[0], advantage=-0.5, loss_weight=0.125),
        TrainingRow(rollout=by_hand(0), loss_mask=masks[1], advantage=2 / 3, loss_weight=0.1),
    ]
    batch = encode_batch("run", 9, rows)
    assert batch.schema.equals(BATCH_SCHEMA, check_metadata=True)
    assert batch.column("step").to_pylist() == [9, 9]
    decoded = decode_batch(from_segment(to_segment([batch]))[0])
    assert [row.rollout.rollout_index for row in decoded] == [1, 0]
    assert [row.loss_mask.tolist() for row in decoded] == [mask.tolist() for mask in masks]
    assert [row.rollout.loss_mask.tolist() for row in decoded] == [by_hand().loss_mask.tolist()] * 2
    assert [row.advantage for row in decoded] == [-0.5, float(np.float32(2 / 3))]
    assert [row.loss_weight for row in decoded] == [0.125, float(np.float32(0.1))]
    with pytest.raises(SchemaMismatch, match=r"not in training order: order is \[1, 0\]"):
        decode_batch(batch.take(pa.array([1, 0])))


def test_rows_of_a_message_are_views_of_its_bytes():
    batch = encode_rollouts("run", [by_hand(0), by_hand(1)])
    data = memoryview(to_message(batch))
    received = from_message(data, ROLLOUT_SCHEMA)
    assert received.equals(batch, check_metadata=True)
    memory = np.frombuffer(data, np.uint8)
    assert all(np.shares_memory(rollout.completion_token_ids, memory) for rollout in decode_rollouts(received))


def with_turns(rollout_index, advantage, *turn_advantages):
    rollout = replace(by_hand(rollout_index), turn_spans=TURNS)
    return TrainingRow(
        rollout=rollout,
        loss_mask=rollout.loss_mask,
        advantage=advantage,
        loss_weight=0.1,
        turn_advantages=turn_advantages,
    )


def test_turns_and_their_advantages_survive_and_are_null_without():
    plain = replace(with_turns(0, 0.5), rollout=by_hand(0))
    batch = encode_batch("run", 9, [with_turns(1, 1 / 3, 1 / 3, -0.5), plain])
    turns = [{"start": 0, "end": 2}, {"start": 2, "end": 4}]
    assert batch.column("turn_spans").to_pylist() == [turns, None]
    assert batch.column("turn_advantages").to_pylist() == [[float(np.float32(1 / 3)), -0.5], None]
    decoded = decode_batch(from_segment(to_segment([batch]))[0])
    assert [row.rollout.turn_spans for row in decoded] == [TURNS, ()]
    assert [row.rollout.num_turns for row in decoded] == [2, 1]
    assert [row.turn_advantages for row in decoded] == [(float(np.float32(1 / 3)), -0.5), ()]
    assert encode_batch("run", 9, [plain]).column("turn_advantages").null_count == 1
    with pytest.raises(SchemaMismatch, match="row 1: 1 turn_advantages, 2 turns; one each"):
        decode_batch(encode_batch("run", 9, [plain, with_turns(1, 0.5, 0.5)]))


# ---- segments as bytes ----


def test_a_segment_that_is_cut_at_any_place_is_refused():
    data = to_segment([encode_rollouts("run", [by_hand()])])
    for size in range(0, len(data), 97):
        with pytest.raises(SchemaMismatch, match=r"rollouts/a/1\.arrow"):
            from_segment(data[:size], "rollouts/a/1.arrow")


def test_a_column_of_another_type_whose_values_do_not_exist_is_a_damaged_segment():
    """As a changed bit of the schema makes it (simulation, seed 100,000 and later)."""
    column = pa.array([2**62], pa.int64()).view(pa.duration("s"))
    batch, sink = pa.RecordBatch.from_arrays([column], ["group_id"]), pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    with pytest.raises(SchemaMismatch, match="key: torn or corrupt"):
        from_segment(sink.getvalue(), "key")


def test_no_flipped_byte_changes_the_values_that_are_read():
    batch = encode_rollouts("run", [by_hand(0), by_hand(1)])
    data = to_segment([batch])
    refused = 0
    for position in range(0, len(data), 29):
        damaged = bytearray(data)
        damaged[position] ^= 0x41
        try:
            (read_batch,) = [conform(part) for part in from_segment(bytes(damaged), "key")]
            assert read_batch.to_pydict() == batch.to_pydict()
        except SchemaMismatch:
            refused += 1
    assert refused > 0


# ---- schemas ----


def with_version(schema: pa.Schema, version: str) -> pa.Schema:
    return schema.with_metadata({**schema.metadata, b"schema_version": version.encode()})


@pytest.mark.parametrize("schema", [ROLLOUT_SCHEMA, PARTIAL_SCHEMA, BATCH_SCHEMA])
def test_every_column_has_a_description(schema):
    assert all(field.metadata[b"description"].endswith(b".") for field in schema)
    check_schema(schema, schema)


@pytest.mark.parametrize("version", ["1.4", "2", "3.0", ""])
def test_another_version_is_refused_by_name(version):
    with pytest.raises(SchemaMismatch, match=f"version '{version}' cannot be read: this release reads 3. Use the"):
        check_schema(with_version(ROLLOUT_SCHEMA, version))


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (ROLLOUT_SCHEMA.remove(ROLLOUT_SCHEMA.get_field_index("group_size")), "lack the column 'group_size'"),
        (ROLLOUT_SCHEMA.set(1, pa.field("group_id", pa.string())), "'group_id' is string, not int64"),
        (ROLLOUT_SCHEMA.remove_metadata(), "without a name"),
        (ROLLOUT_SCHEMA.append(pa.field("novelty", pa.float32())), "columns that this version lacks: .'novelty'"),
        (PARTIAL_SCHEMA, "'partial'; this reader requires 'rollout'"),
    ],
)
def test_a_wrong_schema_is_refused_and_the_message_names_the_difference(schema, says):
    with pytest.raises(SchemaMismatch, match=says):
        check_schema(schema)
