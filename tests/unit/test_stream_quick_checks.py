"""The fast look at all rows of a write, against the rules one by one."""

import dataclasses

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl_core.errors import SchemaMismatch
from pipelinerl_core.roles.hub_store import summarize
from pipelinerl_core.roles.hub_summaries import summarize_all
from pipelinerl_core.stream import checks
from pipelinerl_core.stream.codec import encode_rollouts
from pipelinerl_core.stream.quick_checks import are_sound
from pipelinerl_core.testing.rollout_rows import build_group, group_ref
from pipelinerl_core.types import FinishReason, Outcome, TurnSpan, WeightSpan

MAX_TOKENS = 64


@st.composite
def spans(draw, num_tokens: int):
    """Spans that cover a completion, with versions that do not decrease."""
    edges = sorted(draw(st.sets(st.integers(1, max(1, num_tokens - 1)), max_size=3)))
    edges = [0, *(edge for edge in edges if edge < num_tokens), num_tokens]
    versions = sorted(draw(st.lists(st.integers(0, 5), min_size=len(edges) - 1, max_size=len(edges) - 1)))
    return tuple(map(WeightSpan, versions, edges, edges[1:])) if num_tokens else ()


@st.composite
def rollouts_of_groups(draw):
    """Groups with completions of all lengths, of several versions each, scored or not."""
    groups = []
    is_plain = draw(st.booleans())  # all tokens of one version, as long as no weights are swapped
    for group_id in draw(st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True)):
        group = []
        for rollout in build_group(group_id, group_id=group_id, size=draw(st.integers(1, 4))):
            length = draw(st.integers(1 if is_plain else 0, 12))
            is_scored = draw(st.integers(0, 9)) > 0
            group.append(
                dataclasses.replace(
                    rollout,
                    completion_token_ids=rollout.completion_token_ids[:length],
                    rollout_logprobs=rollout.rollout_logprobs[:length],
                    loss_mask=rollout.loss_mask[:length],
                    weight_spans=(WeightSpan(4, 0, length),) if is_plain else draw(spans(length)),
                    reward=float(draw(st.integers(0, 1))) if is_scored else None,
                    outcome=Outcome.SCORED if is_scored else Outcome.ERROR,
                    finish_reason=draw(st.sampled_from(FinishReason)),
                )
            )
        groups.append(group)
    return groups


def joined(groups) -> pa.RecordBatch:
    return pa.concat_batches([encode_rollouts("run", group) for group in groups])


@settings(max_examples=150, deadline=None)
@given(rollouts_of_groups())
def test_groups_are_summarized_together_as_one_by_one(groups):
    refs = [group_ref(group) for group in groups]
    expected = [summarize(ref, encode_rollouts("run", group)) for ref, group in zip(refs, groups, strict=True)]
    found = summarize_all(refs, joined(groups))
    assert found == expected
    assert [list(one.tokens_by_version) for one in found] == [list(one.tokens_by_version) for one in expected]


@settings(max_examples=150, deadline=None)
@given(rollouts_of_groups())
def test_what_is_found_sound_at_once_is_sound(groups):
    refs, batch = [group_ref(group) for group in groups], joined(groups)
    checks.check_groups(refs, batch, max_tokens_per_row=MAX_TOKENS)
    is_scored = all(rollout.outcome is Outcome.SCORED for group in groups for rollout in group)
    assert are_sound(refs, batch, MAX_TOKENS) == is_scored


def changed(batch: pa.RecordBatch, name: str, values) -> pa.RecordBatch:
    index = batch.schema.get_field_index(name)
    field = batch.schema.field(index)
    return batch.set_column(index, field, values if isinstance(values, pa.Array) else pa.array(values, field.type))


def spanned(rows) -> list:
    return [[{"version": v, "start": s, "end": e} for v, s, e in row] for row in rows]


GOOD = [(0, 0, 12)]
FAULTS = {
    "run_id": ["run"] * 5 + ["other"],
    "group_id": [1, 1, 1, 2, 2, 3],
    "attempt": [0, 0, 0, 0, 1, 0],
    "actor": ["actor-0"] * 5 + ["actor-1"],
    "lease_id": ["a", "a", "b", "c", "c", "c"],
    "prompt_id": ["a", "a", "a", "c", "c", "d"],
    "group_size": [3, 3, 3, 2, 2, 2],
    "rollout_index": [0, 1, 1, 0, 1, 2],
    "reward": [0.0, 1.0, float("nan"), 0.0, 1.0, 0.0],
    "outcome": ["scored"] * 5 + ["fine"],
    "finish_reason": ["stop"] * 5 + ["tired"],
    "weight_spans": spanned([GOOD] * 5 + [[(0, 0, 11)]]),
    "completion_token_ids": [[1] * 12] * 5 + [[1] * 11],
    "rollout_logprobs": [[-1.0] * 12] * 5 + [[-1.0] * 11 + [float("inf")]],
    "prompt_token_ids": [[1]] * 5 + [[]],
    "loss_mask": [[True] * 12] * 5 + [[True] * 11 + [False]],
    "started_at": [0.0] * 5 + [-1.0],
    "finished_at": [0.0] * 5 + [float("nan")],
    "scored_at": [0.0] * 5 + [1.1e11],
    "temperature": [1.0] * 5 + [float("inf")],
    "top_p": [1.0] * 5 + [-0.5],
    "turn_spans": [None] * 5 + [[{"start": 0, "end": 11}]],
}
BAD_SPANS = (
    [(0, 1, 12)], [(0, 0, 6), (0, 7, 12)], [(2, 0, 6), (1, 6, 12)], [(0, 0, 13)], [], [(-1, 0, 12)],
    [(1 << 31, 0, 12)], [(0, 0, 6), (0, 6, 6), (0, 6, 12)], [(0, 0, 6), (0, 3, 12)],
)  # fmt: skip


@pytest.fixture
def sound():
    groups = [build_group(0, group_id=group_id, size=3) for group_id in (1, 2)]
    return [group_ref(group) for group in groups], joined(groups)


@pytest.mark.parametrize("name", FAULTS)
def test_rows_with_a_fault_are_not_found_sound(sound, name):
    refs, batch = sound
    assert are_sound(refs, batch, MAX_TOKENS)
    bad = changed(batch, name, FAULTS[name])
    assert not are_sound(refs, bad, MAX_TOKENS)
    with pytest.raises(SchemaMismatch):
        checks.check_groups(refs, bad, max_tokens_per_row=MAX_TOKENS)


@pytest.mark.parametrize("row", BAD_SPANS)
@pytest.mark.parametrize("first", [GOOD, [(0, 0, 5), (1, 5, 12)]])
def test_spans_with_a_fault_are_not_found_sound(sound, first, row):
    refs, batch = sound
    good = changed(batch, "weight_spans", spanned([first] * 6))
    assert are_sound(refs, good, MAX_TOKENS)
    bad = changed(batch, "weight_spans", spanned([first] * 3 + [row] + [first] * 2))
    assert not are_sound(refs, bad, MAX_TOKENS)
    with pytest.raises(SchemaMismatch):
        checks.check_groups(refs, bad, max_tokens_per_row=MAX_TOKENS)


@pytest.mark.parametrize("field", ["group_id", "attempt", "num_tokens", "actor", "num_rollouts"])
def test_rows_that_their_message_does_not_name_are_not_found_sound(sound, field):
    refs, batch = sound
    value = getattr(refs[1], field)
    refs[1] = dataclasses.replace(refs[1], **{field: value + (1 if isinstance(value, int) else "x")})
    assert not are_sound(refs, batch, MAX_TOKENS)
    assert not are_sound([], batch, MAX_TOKENS)


def test_rows_with_turns_go_the_long_way_round(sound):
    refs, batch = sound
    turned = changed(batch, "turn_spans", [None] * 5 + [[TurnSpan(0, 5), TurnSpan(5, 12)]])
    assert not are_sound(refs, turned, MAX_TOKENS)
    checks.check_groups(refs, turned, max_tokens_per_row=MAX_TOKENS)


def test_too_long_rows_are_not_found_sound(sound):
    refs, batch = sound
    assert not are_sound(refs, batch, 11)


@pytest.mark.parametrize("name", ["prompt_token_ids", "completion_token_ids"])
def test_a_negative_token_is_not_found_sound(sound, name):
    refs, batch = sound
    rows = batch.column(name).to_pylist()
    rows[4][0] = -1
    assert not are_sound(refs, changed(batch, name, rows), MAX_TOKENS)
    with pytest.raises(SchemaMismatch, match="tokens from 0 on"):
        checks.check_groups(refs, changed(batch, name, rows), max_tokens_per_row=MAX_TOKENS)


def test_a_column_with_a_null_is_not_found_sound(sound):
    refs, batch = sound
    arrays = list(batch.columns)
    index = batch.schema.get_field_index("seed")
    arrays[index] = pa.array([None, *range(5)], pa.int64())
    assert not are_sound(refs, pa.RecordBatch.from_arrays(arrays, schema=batch.schema), MAX_TOKENS)


def test_a_logprob_where_the_mask_is_false_is_not_found_sound(sound):
    refs, batch = sound
    masks = np.ones((6, 12), np.bool_)
    masks[5, 3] = False
    masked = changed(batch, "loss_mask", masks.tolist())
    assert not are_sound(refs, masked, MAX_TOKENS)
    logprobs = np.where(masks, -1.0, 0.0).astype(np.float32).tolist()
    assert are_sound(refs, changed(masked, "rollout_logprobs", logprobs), MAX_TOKENS)
