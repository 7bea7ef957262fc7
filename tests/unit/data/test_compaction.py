"""Compacted rollouts have the rows of batches and of untrained groups; decided segments go, also after crashes."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelinerl_core.data import compaction as rollouts
from pipelinerl_core.data.codec import decode_batch, encode_rollouts, to_segment
from pipelinerl_core.data.compaction import compact_rollouts, list_rollouts, read_rollouts, removable_through
from pipelinerl_core.data.schema import BATCH_SCHEMA
from pipelinerl_core.data.trained import TrainedRows
from pipelinerl_core.errors import BrokenRecord, MissingObject, StoreError
from pipelinerl_core.messages import FateRecord
from pipelinerl_core.report.facts import collect
from pipelinerl_core.roles.runtime.observed_store import ObservedStore
from pipelinerl_core.run import compaction
from pipelinerl_core.run.commits import read_commits
from pipelinerl_core.run.compacted import StepRange
from pipelinerl_core.run.history import accept_lost_commits
from pipelinerl_core.run.records import batch_key, checkpoint_prefix, parse_step_key, rollout_key
from pipelinerl_core.storage.local import FileStore
from pipelinerl_core.telemetry.role_metrics import RoleMetrics
from pipelinerl_core.types import Outcome
from tests.builders import put_commit, put_epoch, put_run, small_config
from tests.counting_store import CountingStore
from tests.fakes import MemoryStore
from tests.rollout_rows import build_rollout
from tests.synthetic_run import put_batch, training_row

STEPS, EPOCH, ACTOR_EPOCH = 20, 2, 1
COMPACTED = [StepRange(0, 7, EPOCH), StepRange(8, 15, EPOCH)]
STALE_STEP = 9
"""The commit of this step drops group 0."""


@pytest.fixture(autouse=True)
def _small_objects(monkeypatch):
    monkeypatch.setattr(compaction, "FILE_STEPS", 8)
    monkeypatch.setattr(compaction, "MARGIN_STEPS", 2)


def group(group_id, *, attempt=0):
    rng = np.random.default_rng(group_id)
    return [
        build_rollout(rng, group_id=group_id, attempt=attempt, rollout_index=index, group_size=2, num_tokens=5)
        for index in range(2)
    ]


def fate(group_id, name="trained", attempt=0):
    return FateRecord(group_id=group_id, attempt=attempt, fate=name, num_tokens=10)


def put_segment(store, seq, *groups, epoch=ACTOR_EPOCH):
    rows = [encode_rollouts("run", rollouts) for rollouts in groups]
    store.put(rollout_key("actor-0", epoch, seq), to_segment([pa.concat_batches(rows)]))


def put_step(store, step):
    """Step n trains group n, whose rows are in segment n."""
    groups, fates, batches = [], [], ()
    if step:
        groups, fates = [group(step)], [fate(step)]
        batches = put_batch(
            store, step, EPOCH, [training_row(rollout, advantage=step / 7) for rollout in group(step)]
        )
    if step == STALE_STEP:
        groups.append(group(0, attempt=3))
        fates.append(fate(0, "dropped_stale", attempt=3))
    if groups:
        put_segment(store, step, *groups)
    is_open = (0,) if step < STALE_STEP else ()
    put_commit(store, step, EPOCH, fates=tuple(fates), batches=batches, next_group_id=step + 1, open_groups=is_open)


@pytest.fixture
def run():
    store = MemoryStore()
    put_run(store, small_config())
    put_epoch(store, EPOCH)
    for step in range(STEPS + 1):
        put_step(store, step)
    put_segment(store, STEPS + 1, group(10_000))
    compaction.compact_commits(store)
    return store


def segments(store):
    return [int(key[-14:-6]) for key in store.list("rollouts")]


def test_the_rows_are_those_of_the_batches_and_the_dropped_group(run):
    batches = {step: pa.ipc.open_file(run.get(batch_key(step, EPOCH, 0))).read_all() for step in range(1, STEPS + 1)}
    assert compact_rollouts(run) == 2
    assert list_rollouts(run) == COMPACTED
    first, second = (read_rollouts(run, steps) for steps in COMPACTED)
    assert first["step"].to_pylist() == [step for step in range(1, 8) for _ in range(2)]
    assert set(first["fate"].to_pylist()) == {"trained"}
    for step in range(1, 8):
        rows = first.filter(pa.compute.equal(first["step"], step)).select(BATCH_SCHEMA.names)
        assert rows.to_pylist() == batches[step].to_pylist()
    assert {parse_step_key(key)[0] for key in run.list("batches/")} == set(range(16, STEPS + 1))
    trained, commits = TrainedRows(run), read_commits(run)
    for step in [*range(1, STEPS + 1), 3, 12]:
        (rows,) = trained.batches(commits[step])
        assert rows.schema.equals(BATCH_SCHEMA, check_metadata=True)
        assert rows.to_pylist() == batches[step].to_pylist()
    assert trained.batches(commits[0]) == []
    dropped = second.filter(pa.compute.equal(second["fate"], "dropped_stale"))
    assert dropped["group_id"].to_pylist() == [0, 0]
    assert dropped["step"].to_pylist() == [STALE_STEP] * 2
    sampled = [list(rollout.completion_token_ids) for rollout in group(0)]
    assert dropped["completion_token_ids"].to_pylist() == sampled
    assert dropped["advantage"].null_count == 2


def test_rollouts_without_a_reward_of_trained_groups_are_kept(run):
    failed = [replace(rollout, reward=None, outcome=Outcome.ERROR, error="timed out") for rollout in group(3)[:1]]
    put_segment(run, 3, [*failed, *group(3)[1:]])
    put_commit(
        run, 3, EPOCH, fates=(fate(3),), next_group_id=4, open_groups=(0,), metrics={"rollouts/error_fraction": 0.5},
        batches=put_batch(run, 3, EPOCH, [training_row(group(3)[1], advantage=1.0)]),
    )  # fmt: skip
    run.delete(list(run.list("compacted")))
    for step in range(8):
        if step != 3:
            put_step(run, step)
    compaction.compact_commits(run)
    compact_rollouts(run)
    rows = read_rollouts(run, COMPACTED[0])
    rows = rows.filter(pa.compute.equal(rows["group_id"], 3))
    assert list(zip(rows["fate"].to_pylist(), rows["error"].to_pylist(), strict=True)) == [
        ("trained", None), ("failed", "timed out"),
    ]  # fmt: skip
    (trained,) = TrainedRows(run).batches(read_commits(run)[3])
    assert len(trained) == 1


def test_no_directory_of_a_compacted_batch_stays(run, tmp_path):
    store = FileStore(tmp_path)
    for key in run.list(""):
        store.put(key, run.get(key))
    compact_rollouts(ObservedStore(store, RoleMetrics("trainer", "trainer", "r")))  # as a trainer does
    assert {int(path.name.partition(".")[0]) for path in (tmp_path / "batches").iterdir()} == set(
        range(16, STEPS + 1)
    )


def test_segments_whose_groups_are_all_decided_go(run):
    put_segment(run, 0, group(1), group(9_999))  # group 9,999 is undecided
    put_segment(run, 5, group(2), epoch=7)
    compact_rollouts(run)
    assert segments(run) == [0, 16, 17, 18, 19, 20, 21]


def test_a_second_call_does_nothing_and_reads_no_segment(run):
    compact_rollouts(run)
    counted = CountingStore(run)
    assert compact_rollouts(counted) == 0
    assert counted.total == 6  # listings, and the epoch


def test_objects_are_cut_by_tokens(run, monkeypatch):
    monkeypatch.setattr(rollouts, "FILE_TOKENS", 30)
    assert compact_rollouts(run) == 6
    ranges = [(0, 3), (4, 6), (7, 7), (8, 9), (10, 12), (13, 15)]
    assert [(steps.first, steps.last) for steps in list_rollouts(run)] == ranges
    assert compact_rollouts(run) == 0


class DyingStore:
    """Raises StoreError from the n-th write or deletion on, before the request has an effect."""

    def __init__(self, store, allowed):
        self._store = store
        self._allowed = allowed

    def __getattr__(self, name):
        return getattr(self._store, name)

    def put(self, key, data, **options):
        self._use()
        self._store.put(key, data, **options)

    def delete(self, keys):
        self._use()
        self._store.delete(keys)

    def _use(self):
        self._allowed -= 1
        if self._allowed < 0:
            raise StoreError("the process died")


@pytest.mark.parametrize("allowed", range(5))
def test_a_crash_at_any_write_loses_no_row(run, allowed):
    with pytest.raises(StoreError, match="died"):
        compact_rollouts(DyingStore(run, allowed))
    compact_rollouts(run)
    assert [len(read_rollouts(run, steps)) for steps in COMPACTED] == [14, 18]
    trained, commits = TrainedRows(run), read_commits(run)
    assert [sum(map(len, trained.batches(commits[step]))) for step in range(1, STEPS + 1)] == [2] * STEPS
    for step in range(STEPS + 1, STEPS + 8):  # what a crash before the deletion left goes with the next objects
        put_step(run, step)
    compaction.compact_commits(run)
    compact_rollouts(run)
    assert segments(run)[0] >= STEPS
    assert min(parse_step_key(key)[0] for key in run.list("batches/")) >= STEPS


def test_a_missing_or_damaged_batch_keeps_its_segments_until_the_batch_can_be_read(run, caplog):
    key = batch_key(3, EPOCH, 0)
    whole = run.get(key)
    run.put(rollout_key("actor-0", ACTOR_EPOCH, STALE_STEP), b"torn")
    other = run.get(batch_key(4, EPOCH, 0))  # intact in itself
    for damage in (lambda: run.put(key, b"torn"), lambda: run.put(key, other), lambda: run.delete([key])):
        damage()
        compact_rollouts(run)
        assert list_rollouts(run) == COMPACTED[1:]
        assert len(read_rollouts(run, COMPACTED[1])) == 16  # without the two rows of the torn segment
        assert segments(run)[:7] == [1, 2, 3, 4, 5, 6, 7]
        assert min(parse_step_key(name)[0] for name in run.list("batches/")) < 3
        assert "rollouts of steps 0 to 7 are not compacted, their segments stay" in caplog.text
    run.put(key, whole)
    assert compact_rollouts(run) == 1
    assert len(read_rollouts(run, COMPACTED[0])) == 14
    assert segments(run)[0] == STALE_STEP
    run.put(COMPACTED[0].rollouts_key, b"torn")
    with pytest.raises(BrokenRecord, match="is damaged"):
        read_rollouts(run, COMPACTED[0])


def test_the_report_reads_compacted_rollouts_instead_of_their_batches(run):
    before = collect(run)
    compact_rollouts(run)
    counted = CountingStore(run)
    after = collect(counted)
    assert counted.requests["get compacted"] == 4  # of commits and rollouts
    assert counted.requests["get batches"] == STEPS - 15
    assert [step.step for step in after.steps] == list(range(1, STEPS + 1))
    for step_before, other in zip(before.steps, after.steps, strict=True):
        assert step_before.trained == other.trained
        for name in ("rewards", "lengths", "sizes", "spreads", "versions", "lags"):
            assert np.array_equal(getattr(step_before, name), getattr(other, name))


def test_rows_that_are_compacted_while_a_reader_reads_are_read(run):
    trained, commits = TrainedRows(run), read_commits(run)
    compact_rollouts(run)
    (rows,) = trained.batches(commits[3])
    assert [row.advantage for row in decode_batch(rows)] == pytest.approx([3 / 7] * 2)
    run.put(COMPACTED[1].rollouts_key, b"torn")
    with pytest.raises(BrokenRecord, match="is damaged"):
        trained.batches(commits[12])
    run.delete([COMPACTED[1].rollouts_key])
    with pytest.raises(MissingObject, match="step 12 are not in compacted/rollouts"):
        TrainedRows(run).batches(commits[12])


def put_checkpoint(store, step, epoch=EPOCH):
    store.put(f"{checkpoint_prefix(step, epoch)}/manifest.json", b"{}")


def test_rows_beyond_those_to_keep_are_removed_if_no_start_needs_them(run):
    compact_rollouts(run)
    put_checkpoint(run, 0)
    put_checkpoint(run, 18)
    run.put(f"{checkpoint_prefix(20, EPOCH)}/state-00001.safetensors", b"")  # not complete
    put_checkpoint(run, 17, epoch=EPOCH + 1)  # of no commit that counts
    put_checkpoint(run, STEPS + 5)
    compact_rollouts(run, keep=1)
    assert list_rollouts(run) == COMPACTED  # if the checkpoint of step 18 is damaged, a start begins at step 0
    put_checkpoint(run, 14)
    compact_rollouts(run, keep=14)
    assert list_rollouts(run) == COMPACTED
    run.put(batch_key(7, EPOCH, 0), b"left by a crash")
    compact_rollouts(run, keep=13)
    assert list_rollouts(run) == COMPACTED[1:]
    assert not run.exists(batch_key(7, EPOCH, 0))
    assert removable_through(run, 1) == 18
    assert removable_through(run, 0) == removable_through(run, 30) == -1
    counted = CountingStore(run)
    assert compact_rollouts(counted, keep=1) == 0  # step 15 is after the older checkpoint
    assert counted.requests["get rollouts"] == 0
    assert list_rollouts(run) == COMPACTED[1:]
    facts = collect(run)
    assert [step.step for step in facts.steps] == list(range(8, STEPS + 1))


def test_batches_stay_beside_an_object_that_lacks_their_rows(run, caplog):
    batches = {key: run.get(key) for key in run.list("batches/")}
    compact_rollouts(run)
    for step in (3, 9):
        run.put(batch_key(step, EPOCH, 0), batches[batch_key(step, EPOCH, 0)])
    table = read_rollouts(run, COMPACTED[0])
    sink = pa.BufferOutputStream()
    pq.write_table(table.filter(pa.compute.not_equal(table["step"], 3)), sink)
    run.put(COMPACTED[0].rollouts_key, sink.getvalue().to_pybytes())
    compact_rollouts(run)
    assert run.exists(batch_key(3, EPOCH, 0))
    assert not run.exists(batch_key(9, EPOCH, 0))
    assert "batches of steps 0 to 7 stay beside their compacted rows" in caplog.text


def test_batches_that_stay_beside_a_damaged_object_are_read(run):
    commit = read_commits(run)[3]
    batches = {entry.name: run.get(entry.name) for entry in commit.batches}
    (rows,) = TrainedRows(run).batches(commit)
    compact_rollouts(run)
    run.put(COMPACTED[0].rollouts_key, run.get(COMPACTED[0].rollouts_key)[:-100])
    with pytest.raises(BrokenRecord, match="is damaged"):
        TrainedRows(run).batches(commit)
    for name, data in batches.items():
        run.put(name, data)
    assert TrainedRows(run).batches(commit) == [rows]


def test_commits_that_were_given_up_delete_no_segment(run):
    for step in range(STEPS + 1, 32):
        put_step(run, step)
    compaction.compact_commits(run)
    compact_rollouts(run)
    run.delete([COMPACTED[1].commits_key])
    run.delete(
        [StepRange(16, 23, EPOCH).rollouts_key]
    )  # as if the trainer had been killed before it wrote the object
    accept_lost_commits(run, is_final=True)
    put_segment(run, 0, group(8, attempt=3000), epoch=9)
    compact_rollouts(run)
    assert run.exists(rollout_key("actor-0", 9, 0))


def test_an_object_with_rows_of_several_steps_in_a_row_group_is_read(run):
    batches = {step: pa.ipc.open_file(run.get(batch_key(step, EPOCH, 0))).read_all() for step in range(1, 8)}
    compact_rollouts(run)
    sink = pa.BufferOutputStream()
    pq.write_table(read_rollouts(run, COMPACTED[0]), sink, row_group_size=3)
    run.put(COMPACTED[0].rollouts_key, sink.getvalue().to_pybytes())
    trained, commits = TrainedRows(run), read_commits(run)
    for step in range(1, 8):
        (rows,) = trained.batches(commits[step])
        assert rows.to_pylist() == batches[step].to_pylist()


def test_rows_that_cannot_be_read_back_are_not_stored_and_the_batches_stay(run, monkeypatch):
    class Losing(pq.ParquetWriter):
        def write_table(self, table, **options):
            super().write_table(table.slice(1), **options)

    before = run.list("batches/")
    monkeypatch.setattr(rollouts.pq, "ParquetWriter", Losing)
    with pytest.raises(BrokenRecord, match="cannot be read back"):
        compact_rollouts(run)
    assert list_rollouts(run) == []
    assert run.list("batches/") == before
