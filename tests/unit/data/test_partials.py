"""The log of open groups: written, joined, taken over, removed; and the progress of a rollout, which is logged."""

import itertools
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl_core.data import partials
from pipelinerl_core.data.codec import from_segment, to_segment
from pipelinerl_core.data.partials import PartialLog, PartialReader, decode_partials, encode_partials, join_rows
from pipelinerl_core.errors import SchemaMismatch, StoreError
from pipelinerl_core.rollouts.progress import Progress
from pipelinerl_core.run.records import partial_key
from pipelinerl_core.types import (
    Chunk,
    Completion,
    FinishReason,
    Origin,
    Outcome,
    PartialRow,
    PreviousHolder,
    WeightSpan,
)
from tests.builders import partial_row as row
from tests.fakes import MemoryStore


def assert_same(actual, expected):
    """Rows hold arrays, which `==` does not compare to one bool."""
    for name in PartialRow.__dataclass_fields__:
        left, right = getattr(actual, name), getattr(expected, name)
        assert np.array_equal(left, right) if isinstance(right, np.ndarray) else left == right, name


def log(store, actor="a", epoch=1):
    return PartialLog(store, actor=actor, epoch=epoch)


def segment_keys(store):
    return store.list("partials")


ENDED = {
    "finish_reason": FinishReason.STOP,
    "reward": 0.5,
    "outcome": Outcome.SCORED,
    "origins": (Origin("b", 2, 1),),
}


def test_rows_come_back_as_they_were_written():
    rows = [row(), row(3, 2, index=1, **ENDED), row(4, 0, finish_reason=FinishReason.LENGTH)]
    (batch,) = from_segment(to_segment([encode_partials(rows)]))
    for actual, expected in zip(decode_partials(batch), rows, strict=True):
        assert_same(actual, expected)


@pytest.mark.parametrize("wrong", [{"weight_spans": ()}, {"rollout_logprobs": np.zeros(2, np.float32)}])
def test_rows_whose_parts_do_not_fit_are_refused(wrong):
    with pytest.raises(SchemaMismatch, match="differ in length"):
        decode_partials(encode_partials([replace(row(), **wrong)]))


def test_rows_are_joined_by_their_offsets():
    known = join_rows([row(0, 3), row(3, 2, version=8), row(0, 4, index=1, **ENDED), row(5, 1, version=8)])
    assert known[0].token_ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert known[0].weight_spans == (WeightSpan(7, 0, 3), WeightSpan(8, 3, 6))
    assert (known[1].finish_reason, known[1].reward) == (FinishReason.STOP, 0.5)


def test_tokens_after_a_gap_are_dropped():
    known = join_rows([row(0, 3), row(5, 2), row(7, 1, **ENDED)])
    assert known[0].token_ids.tolist() == [0, 1, 2]
    assert known[0].finish_reason is None
    assert join_rows([row(2, 3)]) == {}


def test_a_later_row_replaces_the_tokens_of_its_range():
    known = join_rows([row(0, 4, version=7), row(2, 3, version=9)])
    assert known[0].weight_spans == (WeightSpan(7, 0, 2), WeightSpan(9, 2, 5))
    again = join_rows([row(0, 4, version=7), row(0, 5, version=9)])  # the completion names exact versions at its end
    assert again[0].weight_spans == (WeightSpan(9, 0, 5),)


def test_the_next_holder_reads_each_rollout_from_the_newest_holder_that_logged_the_rollout(store):
    log(store, "a", 1).write([row(0, 3, index=0), row(0, 2, index=1)])
    log(store, "b", 9).write([row(0, 3, index=0, attempt=1, origins=(Origin("a", 1, 2),))])
    # Actor c died before its first write.
    holders = [PreviousHolder("c", 4, 2), PreviousHolder("b", 9, 1), PreviousHolder("a", 1, 0)]
    taken = PartialReader(store).read_continuations(5, holders)
    assert taken[0].origins == (Origin("a", 1, 2), Origin("b", 9, 1))
    assert taken[1].origins == (Origin("a", 1, 2),)
    assert sorted(taken) == [0, 1]
    assert PartialReader(store).read_continuations(6, holders) == {}


def test_the_holders_of_each_group_are_read_from_the_logs_in_the_store(store):
    log(store, "a", 1).write([row(), row(group_id=6)])
    log(store, "b", 2).write([row(attempt=1000)])
    holders = PartialReader(store).holders()
    assert holders == {5: [PreviousHolder("b", 2, 1000), PreviousHolder("a", 1, 0)], 6: [PreviousHolder("a", 1, 0)]}


def test_a_damaged_segment_costs_the_tokens_from_its_gap_on_and_no_more(store):
    partial_log = log(store)
    for start in (0, 3, 6):
        partial_log.write([row(start, 3), row(start, 3, index=1)])
    store.put(partial_key("a", 1, 1), b"torn")
    taken = PartialReader(store).read_continuations(5, [PreviousHolder("a", 1, 0)])
    assert [len(taken[index].token_ids) for index in (0, 1)] == [3, 3]


def test_segments_without_an_open_group_are_removed(store):
    partial_log = log(store)
    partial_log.write([row(group_id=1)])
    partial_log.write([row(group_id=1), row(group_id=2)])
    partial_log.write([row(group_id=2)])
    partial_log.forget([(1, 0)])
    assert segment_keys(store) == [partial_key("a", 1, 1), partial_key("a", 1, 2)]
    partial_log.forget([(2, 0), (3, 0)])
    assert segment_keys(store) == []
    partial_log.write([row(group_id=4)])
    assert segment_keys(store) == [partial_key("a", 1, 3)], "a number is never used twice"


def test_rows_that_could_not_be_written_are_written_with_the_next_call(store, monkeypatch):
    partial_log = log(store)
    put = store.put

    def fail(*_arguments, **_more):
        raise StoreError("503")

    monkeypatch.setattr(store, "put", fail)
    partial_log.write([row(0, 3)])
    monkeypatch.setattr(store, "put", put)
    partial_log.write([])
    partial_log.write([row(3, 2)])
    assert len(PartialReader(store).read_continuations(5, [PreviousHolder("a", 1, 0)])[0].token_ids) == 5


class SlowStore(MemoryStore):
    """Each read of an object takes 40 ms on the clock `now_seconds`; `num_reads` counts the reads by key."""

    def __init__(self):
        super().__init__()
        self.now_seconds = 0.0
        self.num_reads = Counter()

    def get(self, key):
        self.now_seconds += 0.04
        self.num_reads[key] += 1
        return super().get(key)


def inherited(store, actor, *, groups, segments):
    """Write a log of `segments` objects; returns (group_id, holder) of each of its `groups` groups."""
    partial_log = log(store, actor)
    for number in range(segments):
        partial_log.write([row(0, 3, group_id=number % groups)])
    return [(group_id, PreviousHolder(actor, 1, 0)) for group_id in range(groups)]


@pytest.fixture
def slow_store(monkeypatch):
    """The listing of a log is valid for 2 s: the tests count seconds, so they must not depend on the default."""
    monkeypatch.setattr(partials, "_CACHE_SECONDS", 2.0)
    return SlowStore()


def test_a_log_that_takes_longer_to_read_than_its_listing_is_valid_is_read_once(slow_store):
    leases = [lease for actor in "ab" for lease in inherited(slow_store, actor, groups=12, segments=60)]
    reader = PartialReader(slow_store, clock=lambda: slow_store.now_seconds)
    for group_id, holder in leases:
        assert len(reader.read_continuations(group_id, [holder])[0].token_ids) == 3
    assert len(slow_store.num_reads) == 120
    assert set(slow_store.num_reads.values()) == {1}


def test_a_log_that_grows_is_listed_again_and_only_its_new_segments_are_read(slow_store):
    ((_, holder),) = inherited(slow_store, "a", groups=1, segments=2)
    reader = PartialReader(slow_store, clock=lambda: slow_store.now_seconds)
    assert len(reader.read_continuations(0, [holder])[0].token_ids) == 3
    slow_store.put(partial_key("a", 1, 2), to_segment([encode_partials([row(3, 2, group_id=0)])]))
    slow_store.now_seconds += 3.0
    assert len(reader.read_continuations(0, [holder])[0].token_ids) == 5
    assert set(slow_store.num_reads.values()) == {1}


def test_after_an_error_of_the_store_reading_continues_from_the_failed_segment(slow_store, monkeypatch):
    ((_, holder),) = inherited(slow_store, "a", groups=1, segments=5)
    reader = PartialReader(slow_store, clock=lambda: slow_store.now_seconds)
    get = slow_store.get

    def fail_at_3(key):
        if key == partial_key("a", 1, 3):
            raise StoreError("503")
        return get(key)

    monkeypatch.setattr(slow_store, "get", fail_at_3)
    with pytest.raises(StoreError):
        reader.read_continuations(0, [holder])
    monkeypatch.setattr(slow_store, "get", get)
    assert reader.read_continuations(0, [holder])
    assert (len(slow_store.num_reads), set(slow_store.num_reads.values())) == (5, {1})


def test_a_log_whose_reads_hang_delays_no_other_log(store, monkeypatch):
    leases = [lease for actor in "ab" for lease in inherited(store, actor, groups=1, segments=1)]
    may_read, get = threading.Event(), store.get

    def wait_for_a(key):
        assert not key.startswith("partials/a/") or may_read.wait(60)
        return get(key)

    monkeypatch.setattr(store, "get", wait_for_a)
    reader = PartialReader(store)
    with ThreadPoolExecutor(2) as threads:
        first, second = (threads.submit(reader.read_continuations, group_id, [holder]) for group_id, holder in leases)
        try:
            assert second.result(60)
            assert not first.done()
        finally:
            may_read.set()
        assert first.result(60)


# ---- progress -----------------------------------------------------------------------------------------------------


def chunk(start, num, version, completion=None):
    return Chunk(
        request_id="r",
        token_ids=np.arange(start, start + num, dtype=np.int32),
        rollout_logprobs=-np.arange(start, start + num, dtype=np.float32),
        weight_version=version,
        completion=completion,
    )


def completion(num, *spans):
    return Completion(
        token_ids=np.arange(num, dtype=np.int32),
        rollout_logprobs=-np.arange(num, dtype=np.float32),
        weight_spans=tuple(WeightSpan(*span) for span in spans),
        finish_reason=FinishReason.STOP,
    )


def merged(spans):
    """The spans (version, start, end), with neighbours of the same version as one span."""
    by_version = (list(group) for _, group in itertools.groupby(spans, key=lambda span: span[0]))
    return [(group[0][0], group[0][1], group[-1][2]) for group in by_version]


# (tokens of a chunk, versions that the engine has swapped in before the chunk, whether the log is flushed after it)
CHUNKS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1), st.booleans()), max_size=12)


@settings(deadline=None)
@given(CHUNKS, st.booleans())
def test_the_logged_rows_add_up_to_the_completion_wherever_they_are_cut(chunks, chunks_name_exact_versions):
    progress = Progress(group_id=5, rollout_index=0, attempt=0)
    rows, num, version, spans = [], 0, 0, []
    for num_new, num_swaps, is_flushed in chunks:
        version += num_swaps
        progress.add(chunk(num, num_new, version))
        if num_new:
            spans = [*spans, (version, num, num + num_new)]
        num += num_new
        if is_flushed:
            rows.append(progress.growth())
    if num and not chunks_name_exact_versions:
        spans = [(version + 1, 0, num)]
    end = completion(num, *merged(spans))
    progress.add(chunk(num, 0, version, end))
    progress.finish(FinishReason.STOP)
    rows.append(progress.growth())
    progress.score(1.0)
    rows.append(progress.growth())
    assert progress.growth() is None
    (known,) = join_rows([row for row in rows if row is not None]).values()
    assert known.token_ids.tolist() == end.token_ids.tolist()
    assert known.rollout_logprobs.tolist() == end.rollout_logprobs.tolist()
    assert known.weight_spans == end.weight_spans
    assert (known.finish_reason, known.reward, known.outcome) == (FinishReason.STOP, 1.0, Outcome.SCORED)


def test_tokens_that_were_taken_over_are_logged_by_their_new_holder():
    taken = replace(row(0, 4), origins=(Origin("a", 1, 4),))
    progress = Progress(group_id=5, rollout_index=0, attempt=1, restored=taken)
    assert progress.completion().token_ids.tolist() == [0, 1, 2, 3]
    assert progress.completion().finish_reason is FinishReason.ABORT
    first = progress.growth()
    assert (first.start, first.end, first.attempt) == (0, 4, 1)
    progress.add(chunk(4, 2, 8))
    second = progress.growth()
    assert (second.start, second.origins) == (4, (Origin("a", 1, 4),))
    assert second.weight_spans == (WeightSpan(8, 4, 6),)


@pytest.mark.parametrize(
    ("outcome", "reward", "expected"),
    [(Outcome.SCORED, 0.5, (Outcome.SCORED, 0.5)), (Outcome.ERROR, None, (None, None)), (None, None, (None, None))],
)
def test_a_reward_is_taken_over_and_an_error_is_not(outcome, reward, expected):
    taken = row(0, 4, finish_reason=FinishReason.STOP, outcome=outcome, reward=reward)
    progress = Progress(group_id=5, rollout_index=0, attempt=1, restored=taken)
    assert (progress.outcome, progress.reward) == expected
    assert progress.finish_reason is FinishReason.STOP
