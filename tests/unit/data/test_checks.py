"""Which rows the admission accepts, how it refuses the others, and the summary of rows that the ledger receives."""

import json
import math
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipelinerl_core.data.checks import check_groups, split_groups
from pipelinerl_core.data.codec import encode_rollouts, origins_in
from pipelinerl_core.data.schema import ROLLOUT_SCHEMA
from pipelinerl_core.errors import SchemaMismatch
from pipelinerl_core.roles.hub.recovery import summarize
from pipelinerl_core.types import FinishReason, GroupRef, Origin, Outcome, TurnSpan, WeightSpan
from tests.builders import group_named
from tests.rollout_rows import build_group, group_ref
from tests.unit.data.rollout_case import ORIGINS, TURNS, by_hand

MAX_TOKENS = 64


def ref_of(rollouts) -> GroupRef:
    return replace(group_ref(rollouts), origins=origins_in(encode_rollouts("run", rollouts)))


def check(*rollouts) -> None:
    """The rows of one group, which its message names rightly."""
    check_groups([ref_of(rollouts)], encode_rollouts("run", rollouts))


def joined(groups) -> pa.RecordBatch:
    return pa.concat_batches([encode_rollouts("run", group) for group in groups])


def changed(batch: pa.RecordBatch, name: str, values) -> pa.RecordBatch:
    index = batch.schema.get_field_index(name)
    field = batch.schema.field(index)
    return batch.set_column(index, field, values if isinstance(values, pa.Array) else pa.array(values, field.type))


# ---- any rows: the same verdict as rule by rule and row by row ----


@st.composite
def spans(draw, num_tokens: int):
    """Spans that cover a completion, with versions that do not decrease."""
    edges = sorted(draw(st.sets(st.integers(1, max(1, num_tokens - 1)), max_size=3)))
    edges = [0, *(edge for edge in edges if edge < num_tokens), num_tokens]
    versions = sorted(draw(st.lists(st.integers(0, 5), min_size=len(edges) - 1, max_size=len(edges) - 1)))
    return tuple(map(WeightSpan, versions, edges, edges[1:])) if num_tokens else ()


@st.composite
def rollouts_of_groups(draw):
    """Groups with completions of all lengths, of several versions, turns and actors each, scored or not."""
    groups = []
    for group_id in draw(st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True)):
        group = []
        for rollout in build_group(group_id, group_id=group_id, size=draw(st.integers(1, 4))):
            length = draw(st.integers(0, 12))
            is_scored = draw(st.integers(0, 9)) > 0
            edges = sorted(draw(st.sets(st.integers(0, length), max_size=4)))
            turns = tuple(map(TurnSpan, edges[::2], edges[1::2]))
            mask = np.array([not turns or any(turn.start <= t < turn.end for turn in turns) for t in range(length)])
            group.append(
                replace(
                    rollout,
                    completion_token_ids=rollout.completion_token_ids[:length],
                    rollout_logprobs=np.where(mask, rollout.rollout_logprobs[:length], 0).astype(np.float32),
                    loss_mask=mask.astype(np.bool_),
                    weight_spans=draw(spans(length)),
                    turn_spans=turns,
                    origins=draw(st.sampled_from([(), (Origin("b", 1, 1),)])) if length else (),
                    reward=float(draw(st.integers(0, 1))) if is_scored else None,
                    outcome=Outcome.SCORED if is_scored else Outcome.ERROR,
                    finish_reason=draw(st.sampled_from(FinishReason)),
                )
            )
        groups.append(group)
    return groups


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rollouts_of_groups())
def test_sound_groups_pass_and_are_summarized_together_as_one_by_one(groups):
    refs, batch = [ref_of(group) for group in groups], joined(groups)
    check_groups(refs, batch, max_tokens_per_row=MAX_TOKENS)
    parts = split_groups(batch)
    assert [part.to_pylist() for part in parts] == [encode_rollouts("run", group).to_pylist() for group in groups]
    for ref, part in zip(refs, parts, strict=True):
        check_groups([ref], part, max_tokens_per_row=MAX_TOKENS)
    summaries = summarize(refs, batch)
    expected = [summary for ref, part in zip(refs, parts, strict=True) for summary in summarize([ref], part)]
    assert summaries == expected
    for group, summary in zip(groups, summaries, strict=True):
        scored = [rollout for rollout in group if rollout.outcome is Outcome.SCORED]
        counts = Counter()
        for version, start, end in (span for rollout in scored for span in rollout.weight_spans):
            counts[version] += end - start
        assert list(summary.tokens_by_version.items()) == sorted(counts.items())
        assert summary.rewards == tuple(rollout.reward for rollout in scored)
        assert summary.lengths.length_sum == sum(rollout.num_tokens**2 for rollout in group)


def is_sound_row(row) -> bool:
    """The rules of a row, one value after the other."""
    length, mask, turns = len(row["completion_token_ids"]), row["loss_mask"], row["turn_spans"]
    reached = newest = 0
    for span in row["weight_spans"]:
        if span["start"] != reached or span["end"] <= reached or not newest <= span["version"] < 1 << 31:
            return False
        reached, newest = span["end"], span["version"]
    ends = [0, *(turn["end"] for turn in turns or ())]
    counts = [origin["num_tokens"] for origin in row["origins"] or ()]
    components, rewards = row["reward_components"] or (), row["turn_rewards"]
    times = [row[name] for name in ("started_at", "finished_at", "scored_at", "temperature", "top_p")]
    return (
        reached == length == len(mask) == len(row["rollout_logprobs"]) <= MAX_TOKENS
        and 0 < len(row["prompt_token_ids"]) <= MAX_TOKENS
        and min(row["prompt_token_ids"] + row["completion_token_ids"]) >= 0
        and all(abs(logprob) <= 1e6 * live for logprob, live in zip(row["rollout_logprobs"], mask, strict=True))
        and all(end <= turn["start"] < turn["end"] <= length for end, turn in zip(ends, turns or (), strict=False))
        and (turns is None or (len(turns) > 0 and all(map(in_a_turn(turns), np.flatnonzero(mask)))))
        and (
            rewards is None
            or (len(rewards) == len(turns or ()) > 1 and all(abs(reward) <= 1e9 for reward in rewards))
        )
        and are_branches(row["branch_starts"] or (), mask)
        and is_task(row["task"])
        and all(count > 0 for count in counts)
        and sum(counts) <= length
        and all(0 <= time <= 1e11 for time in times)
        and all(component["name"] and abs(component["value"]) <= 1e9 for component in components)
        and len({component["name"] for component in components}) == len(components)
        and row["outcome"] in ("scored", "error")
        and row["finish_reason"] in ("stop", "length", "abort")
        and (row["reward"] is None) == (row["outcome"] == "error")
        and (row["reward"] is None or abs(row["reward"]) <= 1e9)
    )


def are_branches(starts, mask):
    before = [0, *starts]
    return all(last < start < len(mask) and not mask[start] for last, start in zip(before, starts, strict=False))


def is_task(text):
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def in_a_turn(turns):
    return lambda token: any(turn["start"] <= token < turn["end"] for turn in turns)


def is_sound_group(ref: GroupRef, rows) -> bool:
    same = ("run_id", "group_id", "attempt", "lease_id", "prompt_id", "actor", "group_size")
    numbers, first = [row["rollout_index"] for row in rows], rows[0]
    return (
        all(is_sound_row(row) for row in rows)
        and all(row[name] == first[name] for row in rows for name in same)
        and len(set(numbers)) == len(numbers)
        and 0 <= min(numbers) <= max(numbers) < first["group_size"]
        and (first["group_id"], first["attempt"], first["actor"]) == (ref.group_id, ref.attempt, ref.actor)
        and sum(len(row["completion_token_ids"]) for row in rows) == ref.num_tokens
        and origins_in(pa.RecordBatch.from_pylist(rows, schema=ROLLOUT_SCHEMA)) == ref.origins
    )


EDGES = {
    "int": st.sampled_from([-(1 << 31), -1, 0, 1, 2, 5, 11, 12, 13, (1 << 31) - 1]),
    "double": st.sampled_from([math.nan, -math.inf, -1e-30, -0.0, 0.5, 1e6, 1.1e6, 1e9, 1.1e9, 1e11, 1.1e11]),
    "bool": st.booleans(),
    "string": st.sampled_from(["", "run", "scored", "error", "stop", "actor-1", "{}", "[]"]),
}
EDGES |= {"int32": EDGES["int"], "int64": EDGES["int"] | st.just(1 << 31), "float": EDGES["double"]}


def values_of(kind: pa.DataType):
    if pa.types.is_list(kind):
        return st.lists(values_of(kind.value_type), max_size=3)
    if pa.types.is_struct(kind):
        return st.fixed_dictionaries({field.name: values_of(field.type) for field in kind})
    return EDGES[str(kind)]


@st.composite
def rows_with_faults(draw):
    """Rows of groups with some values at and beyond their limits."""
    groups = draw(rollouts_of_groups())
    rows = joined(groups).to_pylist()
    for _ in range(draw(st.integers(0, 2))):
        field = draw(st.sampled_from(list(ROLLOUT_SCHEMA)))
        place = draw(st.integers(0, len(rows) - 1))
        old = rows[place][field.name]
        if isinstance(old, list) and old and draw(st.booleans()):
            old[draw(st.integers(0, len(old) - 1))] = draw(values_of(field.type.value_type))
        else:
            rows[place][field.name] = draw(values_of(field.type) | st.sampled_from([old, *([None] * field.nullable)]))
    return [ref_of(group) for group in groups], rows


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rows_with_faults())
def test_rows_pass_exactly_if_every_rule_holds_row_by_row(case):
    refs, rows = case
    batch = pa.RecordBatch.from_pylist(rows, schema=ROLLOUT_SCHEMA)
    parts, start = [], 0
    for ref in refs:
        parts.append(batch.slice(start, ref.num_rollouts).to_pylist())
        start += ref.num_rollouts
    is_sound = all(is_sound_group(ref, part) for ref, part in zip(refs, parts, strict=True))
    with nullcontext() if is_sound else pytest.raises(SchemaMismatch):
        check_groups(refs, batch, max_tokens_per_row=MAX_TOKENS)


# ---- one rule each ----


def spanned(rows) -> list:
    return [[{"version": v, "start": s, "end": e} for v, s, e in row] for row in rows]


GOOD = [(0, 0, 12)]
FAULTS = {
    "run_id": (["run"] * 5 + ["other"], "row 5: run_id is 'other' after 'run'; the column differs within one group"),
    "group_id": ([1, 1, 1, 2, 2, 3], "row 5: group_id is 3 after 2"),
    "attempt": ([0, 0, 0, 0, 1, 0], "row 4: attempt is 1 after 0"),
    "task": (["{}"] * 5 + ["[]"], "row 5: task is no JSON object"),
    "branch_starts": ([None] * 5 + [[3]], "row 5: branch_starts has 3, where loss_mask is true"),
    "actor": (["actor-0"] * 5 + ["actor-1"], "row 5: actor is 'actor-1' after 'actor-0'"),
    "lease_id": (["a", "a", "b", "c", "c", "c"], "row 2: lease_id is 'b' after 'a'"),
    "prompt_id": (["a", "a", "a", "c", "c", "d"], "row 5: prompt_id is 'd' after 'c'"),
    "group_size": ([3, 3, 3, 2, 2, 2], r"row 5: rollout_index is 2; .* in \[0, group_size=2\)"),
    "rollout_index": ([0, 1, 1, 0, 1, 2], "row 2: rollout_index is 1; the rows of a group have distinct numbers"),
    "reward": ([0.0, 1.0, math.nan, 0.0, 1.0, 0.0], "row 2: reward nan is not a finite number within 1e.09 of 0"),
    "outcome": (["scored"] * 5 + ["fine"], r"row 5: outcome is 'fine', none of \['scored', 'error'\]"),
    "finish_reason": (["stop"] * 5 + ["tired"], "row 5: finish_reason is 'tired', none of"),
    "weight_spans": (spanned([GOOD] * 5 + [[(0, 0, 11)]]), "row 5: weight_spans cover 11 of 12 completion tokens"),
    "completion_token_ids": ([[1] * 12] * 5 + [[1] * 11], "row 5: rollout_logprobs has 12 values for 11 completion"),
    "rollout_logprobs": (
        [[-1.0] * 12] * 5 + [[-1.0] * 11 + [math.inf]],
        "row 5: rollout_logprobs holds inf; ",
    ),
    "prompt_token_ids": ([[1]] * 5 + [[]], "row 5: prompt_token_ids has 0 tokens, the limit is 64; at least 1"),
    "loss_mask": ([[True] * 12] * 5 + [[True] * 11 + [False]], "row 5: .* and 0 where loss_mask is false"),
    "started_at": ([0.0] * 5 + [-1.0], r"row 5: started_at is -1.0; numbers from 0 to 1e\+11"),
    "finished_at": ([0.0] * 5 + [math.nan], "row 5: finished_at is nan"),
    "scored_at": ([0.0] * 5 + [1.1e11], "row 5: scored_at is 110000000000.0"),
    "temperature": ([1.0] * 5 + [math.inf], "row 5: temperature is inf"),
    "top_p": ([1.0] * 5 + [-0.5], "row 5: top_p is -0.5"),
    "reward_components": (
        [None] * 5 + [[{"name": "mean value", "value": 1.0}]],
        "row 5: reward_components is .* different names",
    ),
    "turn_spans": (
        [None] * 5 + [[TurnSpan(0, 11)]],
        "row 5: loss_mask is true at token 11, in none of",
    ),
}
BAD_SPANS = (
    [(0, 1, 12)], [(0, 0, 6), (0, 7, 12)], [(2, 0, 6), (1, 6, 12)], [(0, 0, 13)], [], [(-1, 0, 12)],
    [(1 << 31, 0, 12)], [(0, 0, 6), (0, 6, 6), (0, 6, 12)], [(0, 0, 6), (0, 3, 12)],
    [(0, 0, 6), (0, 7, 13)],
)  # fmt: skip


@pytest.fixture
def sound():
    groups = [build_group(0, group_id=group_id, size=3) for group_id in (1, 2)]
    return [group_ref(group) for group in groups], joined(groups)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_refused_with_its_row_its_column_and_the_rule(sound, name):
    refs, batch = sound
    check_groups(refs, batch, max_tokens_per_row=MAX_TOKENS)
    values, says = FAULTS[name]
    with pytest.raises(SchemaMismatch, match=says):
        check_groups(refs, changed(batch, name, values), max_tokens_per_row=MAX_TOKENS)


@pytest.mark.parametrize("row", BAD_SPANS)
@pytest.mark.parametrize("first", [GOOD, [(0, 0, 5), (1, 5, 12)]])
def test_weight_spans_with_a_fault_are_refused(sound, first, row):
    refs, batch = sound
    check_groups(refs, changed(batch, "weight_spans", spanned([first] * 6)))
    with pytest.raises(SchemaMismatch, match="row 3: weight_spans"):
        check_groups(refs, changed(batch, "weight_spans", spanned([first] * 3 + [row] + [first] * 2)))


@pytest.mark.parametrize(
    "change", [{"group_id": 4}, {"attempt": 1}, {"actor": "x"}, {"num_rollouts": 7}, {"num_tokens": 1}]
)
def test_rows_that_are_not_those_of_their_message_are_refused(sound, change):
    (first, second), batch = sound
    with pytest.raises(SchemaMismatch, match="their message names"):
        check_groups([first, replace(second, **change)], batch)


def test_a_message_without_groups_or_without_rows_is_refused(sound):
    (ref, _), batch = sound
    for refs, rows in (([], batch), ([], batch.slice(0, 0)), ([ref], batch.slice(0, 0))):
        with pytest.raises(SchemaMismatch, match="each has at least one"):
            check_groups(refs, rows)
    assert split_groups(batch.slice(0, 0)) == []


def test_a_message_must_name_the_origins_of_its_rows():
    rows = encode_rollouts("run", [replace(by_hand(0), origins=ORIGINS), replace(by_hand(1), origins=ORIGINS[:1])])
    ref = group_named(
        2**40, attempt=1, actor_epoch=5, origins=(Origin("actor-0", 1700000009, 1), Origin("actor-7", 1700000000, 4))
    )
    check_groups([ref], rows)
    with pytest.raises(SchemaMismatch, match=r"row 0: the rows of this group are .* their message names"):
        check_groups([replace(ref, origins=())], rows)
    assert ref.shares() == {("actor-0", 5): 5, ("actor-0", 1700000009): 1, ("actor-7", 1700000000): 4}


@pytest.mark.parametrize("counts", [(0,), (3, -1), (4, 2)])
def test_origins_that_cannot_be_are_refused(counts):
    origins = tuple(Origin("a", 1, count) for count in counts)
    with pytest.raises(SchemaMismatch, match="row 1: origins"):
        check(by_hand(0), replace(by_hand(1), origins=origins))


@pytest.mark.parametrize(("name", "limit"), [("rollout_logprobs", 1e6), ("reward", 1e9), ("top_p", 1e11)])
def test_a_number_at_its_limit_passes_and_a_number_beyond_is_refused(sound, name, limit):
    refs, batch = sound
    for value in (limit, 1.1 * limit):
        values = [[-value] * 12] * 6 if name == "rollout_logprobs" else [value] * 6
        with nullcontext() if value == limit else pytest.raises(SchemaMismatch, match=f"row 0: {name}"):
            check_groups(refs, changed(batch, name, values))


@pytest.mark.parametrize("name", ["prompt_token_ids", "completion_token_ids"])
def test_a_negative_token_is_refused(sound, name):
    refs, batch = sound
    rows = batch.column(name).to_pylist()
    rows[4][0] = -1
    with pytest.raises(SchemaMismatch, match=f"row 4: {name} holds -1; tokens are numbers from 0 on"):
        check_groups(refs, changed(batch, name, rows))


def test_a_logprob_where_the_mask_is_false_is_refused(sound):
    refs, batch = sound
    masks = np.ones((6, 12), np.bool_)
    masks[5, 3] = False
    masked = changed(batch, "loss_mask", masks.tolist())
    with pytest.raises(SchemaMismatch, match=r"row 5: rollout_logprobs holds -0.* 0 where loss_mask is false"):
        check_groups(refs, masked)
    check_groups(refs, changed(masked, "rollout_logprobs", np.where(masks, -1.0, 0.0).astype(np.float32).tolist()))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rollout_logprobs": np.zeros(4, np.float32)}, "row 1: rollout_logprobs has 4 values for 5"),
        ({"loss_mask": np.ones(6, np.bool_)}, "row 1: loss_mask has 6 values for 5"),
        ({"rollout_index": 2}, "row 1: rollout_index is 2"),
        ({"rollout_index": -1}, "row 1: rollout_index is -1"),
        ({"reward": 0.0}, "row 1: reward with outcome 'error' has a value: True; null exactly with error"),
        ({"outcome": Outcome.SCORED}, "row 1: reward with outcome 'scored' has a value: False"),
        ({"source": "x" * 10**6, "lease_id": "y" * 10**6}, "row 1: lease_id is 'y{12}...y{13}' after 'lease'; "),
    ],
)
def test_a_row_that_cannot_be_trained_is_refused_with_the_rule(change, says):
    with pytest.raises(SchemaMismatch, match=says):
        check(by_hand(0), replace(by_hand(1), **change))


def test_too_many_tokens_are_refused(sound):
    refs, batch = sound
    with pytest.raises(SchemaMismatch, match="row 0: completion_token_ids has 12 tokens, the limit is 11"):
        check_groups(refs, batch, max_tokens_per_row=11)


# ---- turns ----


@pytest.mark.parametrize("turns", [[(0, 4)], [(0, 2), (2, 4)], [(0, 1), (3, 5)], [(1, 2), (2, 5)]])
def test_turns_may_follow_each_other_or_leave_tokens_to_the_environment(turns):
    mask = np.array([any(start <= token < end for start, end in turns) for token in range(5)])
    logprobs = np.where(mask, -1.0, 0.0).astype(np.float32)
    made = replace(
        by_hand(1), loss_mask=mask, rollout_logprobs=logprobs, turn_spans=tuple(TurnSpan(*t) for t in turns)
    )
    check(by_hand(0), made)
    check_groups([group_ref([made])], encode_rollouts("run", [by_hand(0), made]).slice(1))


@pytest.mark.parametrize(
    ("turns", "rewards", "says"),
    [
        ([(0, 2), (2, 5)], (1.0,), "row 1: turn_rewards has 1 numbers for 2 turns; null, or one for each"),
        ([], (1.0, 0.0), "row 1: turn_rewards has 2 numbers for 1 turns"),
        ([(0, 2), (2, 5)], (1.0, np.nan), "row 1: turn_rewards holds nan; finite numbers"),
        ([(0, 2), (2, 5)], (1.0, 2e9), "row 1: turn_rewards holds 2000000000.0"),
    ],
)
def test_rewards_of_turns_are_one_finite_number_for_each_turn(turns, rewards, says):
    with pytest.raises(SchemaMismatch, match=says):
        check(by_hand(0), replace(by_hand(1), turn_spans=tuple(TurnSpan(*t) for t in turns), turn_rewards=rewards))


@pytest.mark.parametrize(
    ("turns", "says"),
    [
        ([(0, 2), (2, 6)], r"row 1: turn_spans has \[2, 6\) after 2 of 5 completion tokens"),
        ([(0, 3), (2, 4)], r"row 1: turn_spans has \[2, 4\) after 3 of 5 completion tokens; .* do not overlap"),
        ([(2, 4), (0, 2)], r"\[0, 2\) after 4 of 5 .* in order"),
        ([(0, 2), (2, 2), (2, 4)], r"\[2, 2\) after 2 of 5 .* at least one token each"),
        ([(0, 4), (4, 3)], r"\[4, 3\) after 4 of 5"),
        ([(-1, 4)], r"\[-1, 4\) after 0 of 5"),
        ([(0, 1)] * 6, r"\[0, 1\) after 1 of 5"),
        ([(0, 3)], "row 1: loss_mask is true at token 3, in none of its turn_spans; .* were not sampled"),
        ([(0, 1), (2, 4)], "loss_mask is true at token 1"),
        ([(1, 4)], "loss_mask is true at token 0"),
    ],
)
def test_turns_that_cannot_be_are_refused_with_the_rule(turns, says):
    with pytest.raises(SchemaMismatch, match=says):
        check(by_hand(0), replace(by_hand(1), turn_spans=tuple(TurnSpan(*turn) for turn in turns)))


def test_no_turns_are_null_and_not_an_empty_list():
    batch = encode_rollouts("run", [by_hand(0), by_hand(1)])
    with pytest.raises(SchemaMismatch, match="row 1: turn_spans is empty; null for one turn"):
        split_groups(changed(batch, "turn_spans", [None, []]))


# ---- nulls and views ----


def test_a_null_is_refused_in_a_column_that_needs_a_value(sound):
    refs, batch = sound
    arrays = list(batch.columns)
    arrays[batch.schema.get_field_index("seed")] = pa.array([*range(5), None], pa.int64())
    with pytest.raises(SchemaMismatch, match="row 5: seed is null; every row needs a value"):
        check_groups(refs, pa.RecordBatch.from_arrays(arrays, schema=batch.schema))


@pytest.mark.parametrize("name", ["weight_spans", "turn_spans", "origins"])
@pytest.mark.parametrize("is_whole", [True, False])
def test_nulls_inside_spans_and_origins_are_refused(name, is_whole):
    whole = replace(by_hand(0), origins=ORIGINS, turn_spans=TURNS)
    batch = encode_rollouts("run", [whole, replace(by_hand(1), origins=ORIGINS, turn_spans=TURNS)])
    column = batch.column(name)
    structs, (_, *others) = column.values, column.values.flatten()
    nulls = pa.array([False, False] + [True] * (len(structs) - 2))
    first = structs.field(0) if is_whole else pa.nulls(len(structs), structs.type[0].type)
    fields = [structs.type[index] for index in range(structs.type.num_fields)]
    holed = pa.StructArray.from_arrays([first, *others], fields=fields, mask=nulls if is_whole else None)
    wrong = changed(batch, name, pa.ListArray.from_arrays(column.offsets, holed))
    with pytest.raises(SchemaMismatch, match=f"row {int(is_whole)}: {name} holds a null inside its list"):
        split_groups(wrong)
    with pytest.raises(SchemaMismatch, match=f"{name} holds a null inside its list"):
        split_groups(wrong.slice(0, 1))


def test_a_good_group_passes_also_as_a_view_beside_rows_that_do_not():
    bad = replace(by_hand(0), weight_spans=(), turn_spans=(TurnSpan(0, 9),), reward=math.nan)
    batch = encode_rollouts("run", [bad, by_hand(0), by_hand(1), bad])
    check_groups([group_ref([by_hand(0), by_hand(1)])], batch.slice(1, 2))
    with pytest.raises(SchemaMismatch, match="row 2: weight_spans cover 0 of 5"):
        split_groups(batch.slice(1))
    assert len(split_groups(encode_rollouts("run", build_group(0, group_id=3)).slice(2, 3))) == 1


def test_values_hidden_behind_a_null_row_do_not_count():
    batch = encode_rollouts("run", [replace(by_hand(0), turn_spans=(TurnSpan(3, 9),)), by_hand(1)])
    turns = batch.column("turn_spans")
    hidden = pa.ListArray.from_arrays(
        turns.offsets.slice(0, 3), turns.values, type=turns.type, mask=pa.array([True, True])
    )
    check_groups([ref_of([by_hand(0), by_hand(1)])], changed(batch, "turn_spans", hidden))
    shown = replace(by_hand(1), turn_spans=TURNS)
    batch = encode_rollouts("run", [replace(by_hand(0), turn_spans=(TurnSpan(3, 9),)), shown])
    turns = batch.column("turn_spans")
    hidden = pa.ListArray.from_arrays(turns.offsets, turns.values, type=turns.type, mask=pa.array([True, False]))
    check_groups([ref_of([by_hand(0), shown])], changed(batch, "turn_spans", hidden))


def test_validity_bitmaps_without_a_null_change_nothing(sound):
    refs, batch = sound
    ones = pa.py_buffer(b"\xff" * 8)
    seed, spans = batch.column("seed"), batch.column("weight_spans")
    seed = pa.Array.from_buffers(seed.type, 6, [ones, seed.buffers()[1]])
    spans = pa.ListArray.from_buffers(spans.type, 6, [ones, spans.buffers()[1]], children=[spans.values])
    check_groups(refs, changed(changed(batch, "seed", seed), "weight_spans", spans))
