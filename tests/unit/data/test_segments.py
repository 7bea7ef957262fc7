"""The segment log: what is sealed when, and how groups are read back."""

import pytest

from pipelinerl_core.data.codec import decode_rollouts, encode_rollouts, from_segment, to_segment
from pipelinerl_core.data.segments import SegmentName, SegmentReader, SegmentWriter, parse_rollout_key
from pipelinerl_core.errors import MissingObject, SchemaMismatch, StoreError
from pipelinerl_core.storage.local import FileStore
from tests.builders import ManualClock
from tests.rollout_rows import build_group, group_ref


@pytest.fixture
def store(tmp_path):
    return FileStore(tmp_path)


def make_writer(store, clock=None, **limits):
    limits = {"max_seconds": 1.0, "max_bytes": 1 << 20, **limits}
    return SegmentWriter(store, "actor-0", 3, "run", clock=clock or ManualClock(100.0), **limits)


def append(writer, group_id, *, run_id="run", epoch=3, num_tokens=12):
    rollouts = build_group(0, group_id=group_id, num_tokens=num_tokens)
    writer.append(encode_rollouts(run_id, rollouts), group_ref(rollouts, actor_epoch=epoch))
    return rollouts


def test_groups_wait_for_the_oldest_ones_age_then_share_a_segment(store):
    clock = ManualClock(100.0)
    writer = make_writer(store, clock)
    assert writer.seal_due() is None
    append(writer, 0)
    clock.now += 0.9
    append(writer, 1)
    assert writer.seal_due() is None
    assert store.list("") == []
    clock.now += 0.1
    assert writer.seal_due() == (0, ((0, 0), (1, 0)))
    assert store.list("") == ["rollouts/actor-0/000003/00000000.arrow"]
    assert writer.seal_due() is None
    append(writer, 2)
    assert writer.seal() == (1, ((2, 0),))
    assert writer.seal() is None


def test_size_seals_before_age(store):
    writer = make_writer(store, max_bytes=10_000)
    append(writer, 0)
    assert writer.seal_due() is None
    append(writer, 1, num_tokens=200)
    assert writer.seal_due() == (0, ((0, 0), (1, 0)))


def test_a_failed_write_is_repeated_with_the_same_bytes(store, monkeypatch):
    writer = make_writer(store)
    append(writer, 0)
    written = []

    def failing(key, data, **options):
        written.append((key, bytes(data)))
        raise StoreError("away")

    with monkeypatch.context() as patch:
        patch.setattr(store, "put", failing)
        with pytest.raises(StoreError):
            writer.seal()
    append(writer, 1)
    assert writer.seal_due() == (0, ((0, 0),))
    assert (store.list("")[0], store.get(store.list("")[0])) == written[0]
    assert writer.seal() == (1, ((1, 0),))


def test_groups_of_another_run_or_epoch_do_not_enter(store):
    writer = make_writer(store)
    with pytest.raises(SchemaMismatch, match="run 'other'"):
        append(writer, 0, run_id="other")
    with pytest.raises(SchemaMismatch, match="epoch 4"):
        append(writer, 0, epoch=4)
    assert writer.seal() is None


def test_a_group_reads_back_from_its_segment(store):
    writer = make_writer(store)
    append(writer, 5)
    expected = append(writer, 6)
    writer.seal()
    reader = SegmentReader(store)
    decoded = decode_rollouts(reader.read_group("actor-0", 3, 0, 6, 0))
    assert [row.completion_token_ids.tolist() for row in decoded] == [
        row.completion_token_ids.tolist() for row in expected
    ]
    assert reader.groups_in("rollouts/actor-0/000003/00000000.arrow") == [
        group_ref(build_group(0, group_id=group_id), actor_epoch=3) for group_id in (5, 6)
    ]
    with pytest.raises(MissingObject, match="no group 7 attempt 0"):
        reader.read_group("actor-0", 3, 0, 7, 0)
    with pytest.raises(MissingObject, match=r"00000001\.arrow"):
        reader.read_group("actor-0", 3, 1, 6, 0)


def test_groups_share_record_batches_of_a_bounded_size(store, monkeypatch):
    monkeypatch.setattr("pipelinerl_core.data.segments._BATCH_BYTES", 10_000)
    writer = make_writer(store)
    expected = [append(writer, group_id, num_tokens=num) for group_id, num in enumerate([12, 12, 12, 200, 12])]
    writer.seal()
    (key,) = store.list("")
    batches = from_segment(store.get(key))
    assert [batch.num_rows for batch in batches] == [24, 8, 8]
    reader = SegmentReader(store)
    for group_id, rollouts in enumerate(expected):
        decoded = decode_rollouts(reader.read_group("actor-0", 3, 0, group_id, 0))
        for row, rollout in zip(decoded, rollouts, strict=True):
            assert row.rollout_index == rollout.rollout_index
            assert row.completion_token_ids.tolist() == rollout.completion_token_ids.tolist()
            assert row.rollout_logprobs.tolist() == rollout.rollout_logprobs.tolist()
            assert row.loss_mask.tolist() == rollout.loss_mask.tolist()
            assert row.weight_spans == rollout.weight_spans
    assert [ref.num_tokens for ref in reader.groups_in(key)] == [96, 96, 96, 1600, 96]


def test_a_segment_with_a_record_batch_per_group_is_read_as_before(store):
    groups = [build_group(0, group_id=group_id) for group_id in (3, 4)]
    key = "rollouts/actor-0/000003/00000000.arrow"
    store.put(key, to_segment([encode_rollouts("run", rollouts) for rollouts in groups]))
    reader = SegmentReader(store)
    assert reader.groups_in(key) == [group_ref(rollouts, actor_epoch=3) for rollouts in groups]
    assert reader.read_group("actor-0", 3, 0, 4, 0).equals(encode_rollouts("run", groups[1]))


def test_the_cache_is_small_and_spares_the_store(store, monkeypatch):
    writer = make_writer(store)
    for group_id in range(3):
        append(writer, group_id)
        writer.seal()
    reads = []
    get = store.get
    monkeypatch.setattr(store, "get", lambda key: (reads.append(key), get(key))[1])
    reader = SegmentReader(store, cached_segments=2)
    for seq in (0, 1, 0, 2, 0, 1):
        reader.read_group("actor-0", 3, seq, seq, 0)
    assert [parse_rollout_key(key).seq for key in reads] == [0, 1, 2, 1]


def test_listing_leaves_out_segments_below_the_low_water_mark(store):
    writer = make_writer(store)
    for group_id in range(3):
        append(writer, group_id)
        writer.seal()
    assert [name.seq for name in SegmentReader(store).segments()] == [0, 1, 2]
    assert SegmentReader(store).segments({"actor-0/3": 2}) == [SegmentName("actor-0", 3, 2)]


def test_a_damaged_segment_is_named(store):
    writer = make_writer(store)
    append(writer, 0)
    writer.seal()
    (key,) = store.list("")
    store.put(key, store.get(key)[:-20])
    with pytest.raises(SchemaMismatch, match=key):
        SegmentReader(store).groups_in(key)


def test_another_key_is_no_segment():
    with pytest.raises(ValueError, match="no rollout segment"):
        parse_rollout_key("partials/actor-0/000003/00000000.arrow")
