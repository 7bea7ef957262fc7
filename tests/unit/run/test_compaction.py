"""Compacted commits: the same commits count and are read, in few requests and a bounded amount of memory."""

import contextlib
import gc
import io

import pyarrow.parquet as pq
import pytest

from pipelinerl_core.data.codec import encode_rollouts, to_segment
from pipelinerl_core.errors import BrokenRecord, MissingObject, StoreError
from pipelinerl_core.report.live_view import run_status
from pipelinerl_core.roles.actor.main import take_life
from pipelinerl_core.roles.hub.recovery import read_stored_state
from pipelinerl_core.roles.trainer.retrain import restore
from pipelinerl_core.run import commits as commits_module
from pipelinerl_core.run.commits import read_commits
from pipelinerl_core.run.compacted import StepRange, encode_commits, list_commits
from pipelinerl_core.run.compaction import FILE_STEPS, MARGIN_STEPS, compact_commits, is_due
from pipelinerl_core.run.follow import RunFollower
from pipelinerl_core.run.history import counted_commit_keys, is_complete, read_commit, take_epoch
from pipelinerl_core.run.records import (
    COMMITS_PREFIX,
    COMPACTED_COMMITS_PREFIX,
    CheckpointRef,
    Commit,
    commit_key,
    rollout_key,
)
from tests.builders import commit_record, put_commit, put_epoch, put_run, small_config, weight_manifest
from tests.counting_store import CountingStore
from tests.fakes import MemoryStore
from tests.rollout_rows import build_group

STEPS = 400
TAKEOVER = 150
"""The second trainer adopts the commits up to this step; the first one has written two more."""


def metrics_of(step):
    return {"reward/mean": step / 7, "reward/std": 0.5, "train/loss": 1 / 3}


@pytest.fixture
def run():
    """Two trainers: epoch 2 to step 152, epoch 4 from step 151 on, beside a fenced commit of epoch 2 at step 200."""
    store = MemoryStore()
    put_run(store, small_config())
    put_epoch(store, 2)
    put_epoch(store, 4, parent=2, adopted_through=TAKEOVER)
    for step in [*range(TAKEOVER + 3), 200]:
        put_commit(store, step, 2, metrics=metrics_of(step), committed_at=float(step))
    for step in range(TAKEOVER + 1, STEPS + 1):
        put_commit(store, step, 4, metrics=metrics_of(step), committed_at=float(step))
    return store


def facts(store):
    """What the commits say, however they are stored."""
    keys = counted_commit_keys(store)
    commits = read_commits(store)
    for step in (0, 127, TAKEOVER, TAKEOVER + 1, STEPS):
        assert read_commit(store, keys[step]) == commits[step]
    return keys, dict(commits)


def test_compacted_commits_count_and_are_read_as_before(run):
    before = facts(run)
    assert compact_commits(run) == 4
    assert [str(file.commits_key) for file in list_commits(run).files] == [
        "compacted/commits/00000000-00000127.2.parquet",
        "compacted/commits/00000128-00000150.2.parquet",
        "compacted/commits/00000151-00000255.4.parquet",
        "compacted/commits/00000256-00000383.4.parquet",
    ]
    assert facts(run) == before
    fenced = [commit_key(step, 2) for step in (151, 152, 200)]
    newest = [commit_key(step, 4) for step in range(384, STEPS + 1)]
    assert run.list(COMMITS_PREFIX) == sorted([*fenced, *newest])
    assert compact_commits(run) == 0
    assert is_complete(run, STEPS)
    assert not is_complete(run, STEPS + 1)
    with pytest.raises(MissingObject, match=r"no object 'commits/00000151\.3\.json'"):
        read_commit(run, commit_key(151, 3))


def test_a_commit_is_read_although_one_listing_lacks_the_compacted_objects(run, monkeypatch):
    """Seed 2242 of the simulation: a starting trainer ended, whose listing was from before the compaction."""
    keys = counted_commit_keys(run)
    compact_commits(run)
    wrong, real = [COMPACTED_COMMITS_PREFIX], run.list

    def listed(prefix):
        if prefix in wrong:
            wrong.remove(prefix)
            return []
        return real(prefix)

    monkeypatch.setattr(run, "list", listed)
    assert read_commit(run, keys[5]).step == 5


def test_a_trainer_compacts_once_for_each_object():
    assert [step for step in range(3 * FILE_STEPS) if is_due(step)] == [15, 143, 271]
    store = MemoryStore()
    put_epoch(store, 2)
    for step in range(143):
        put_commit(store, step, 2)
    assert compact_commits(store) == 0  # step 127 is 15 steps behind
    put_commit(store, 143, 2)
    assert compact_commits(store) == 1
    assert len(store.list(COMMITS_PREFIX)) == MARGIN_STEPS


class FailingStore:
    """A store whose process dies with the n-th write or deletion, before or after the request."""

    def __init__(self, store, number, *, is_done):
        self._store, self._left, self._is_done = store, number, is_done

    def __getattr__(self, name):
        return getattr(self._store, name)

    def put(self, key, data):
        self._request(lambda: self._store.put(key, data))

    def delete(self, keys):
        for key in list(keys):  # a process may die in the middle of a deletion
            self._request(lambda key=key: self._store.delete([key]))

    def _request(self, request):
        self._left -= 1
        if self._left < 0:
            raise StoreError("dead")
        if self._left > 0 or self._is_done:
            request()


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("number", [1, 2, 3, 129, 130, 131, 153, 154])
def test_a_crash_during_the_compaction_loses_nothing_and_the_next_compaction_completes(run, number, is_done):
    before = facts(run)
    with pytest.raises(StoreError, match="dead"):
        compact_commits(FailingStore(run, number, is_done=is_done))
    assert facts(run) == before
    compact_commits(run)
    assert facts(run) == before
    assert len(run.list(COMMITS_PREFIX)) == 3 + 17


class BusyStore:
    """A store in which something happens before the n-th request."""

    def __init__(self, store, number, happens):
        self._store, self._left, self._happens = store, number, happens

    def __getattr__(self, name):
        def request(*arguments, **more):
            self._left -= 1
            if self._left == 0:
                self._happens()
            return getattr(self._store, name)(*arguments, **more)

        return request if name in ("get", "put", "list", "delete") else getattr(self._store, name)


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 8, 300])
def test_a_reader_that_reads_during_a_compaction_misses_nothing(run, number):
    before = facts(run)
    assert facts(BusyStore(run, number, lambda: compact_commits(run))) == before


@pytest.mark.parametrize("number", [1, 2, 3, 6, 100, 134, 135])
def test_two_processes_that_compact_at_once_write_the_same(run, number):
    before = facts(run)
    with contextlib.suppress(MissingObject):  # originals that the other process has moved: the trainer tries later
        compact_commits(BusyStore(run, number, lambda: compact_commits(run)))
    assert facts(run) == before
    compact_commits(run)
    assert facts(run) == before


def test_a_takeover_between_writing_and_deleting_adopts_the_same_commits(run):
    before = facts(run)
    observed = []

    class TakenOver(FailingStore):
        def delete(self, keys):
            if list(keys) and not observed:
                observed.append(take_epoch(run, "trainer", max(counted_commit_keys(run))))
                observed.append(facts(run))
            self._store.delete(keys)

    compact_commits(TakenOver(run, 10**6, is_done=True))
    epoch, during = observed
    assert epoch.adopted_through == STEPS
    assert during == before
    put_commit(run, 5, 2, metrics={"train/loss": 9.0})  # a stopped trainer of epoch 2 writes once more
    assert counted_commit_keys(run) == before[0]
    assert compact_commits(run) == 0


def test_a_follower_delivers_each_commit_once_across_a_compaction(run):
    follower = RunFollower(run)
    assert follower.refresh().steps == list(range(STEPS + 1))
    compact_commits(run)
    assert follower.refresh().steps == []
    put_commit(run, STEPS + 1, 4)
    assert follower.refresh().steps == [STEPS + 1]
    fresh = RunFollower(run)
    assert fresh.refresh().steps == list(range(STEPS + 2))
    assert [commit.step for commit in fresh.commits.values()] == list(range(STEPS + 2))


def flipped(data):
    """One byte of the records is different."""
    columns = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(0)
    at = next(
        column for column in map(columns.column, range(columns.num_columns)) if column.path_in_schema == "record"
    )
    place = at.data_page_offset + at.total_compressed_size // 2
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda data: data[:-40], "is damaged"),
        (lambda data: flipped(data), "is damaged"),
        (lambda data: b"", "is damaged"),
    ],
)
def test_a_damaged_object_is_named(run, damage, says):
    compact_commits(run)
    key = "compacted/commits/00000000-00000127.2.parquet"
    run.put(key, damage(run.get(key)))
    with pytest.raises(BrokenRecord, match=f"00000000-00000127.2.parquet {says}"):
        read_commit(run, commit_key(3, 2))
    assert read_commit(run, commit_key(200, 4)).step == 200


def test_an_object_with_other_commits_than_its_name_says_is_refused(run):
    compact_commits(run)
    first, second = (file.commits_key for file in list_commits(run).files[:2])
    run.put(first, run.get(second))
    with pytest.raises(BrokenRecord, match="does not contain the commits in its name"):
        read_commit(run, commit_key(3, 2))


# ---- a run of 100,000 steps ---------------------------------------------------------------------------------------

LONG = 100_000
ACTORS = [f"actor-{index}/1" for index in range(12)]
SEGMENT = to_segment([encode_rollouts("run", build_group(0, group_id=0))])


@pytest.fixture(scope="module")
def long_run():
    """A run of 100,000 steps with twelve segments each, of which a checkpoint is in every tenth; rewards differ."""
    store = MemoryStore()
    put_run(store, small_config(trainer={"steps": 2 * LONG}))
    put_epoch(store, 1, "hub")
    put_epoch(store, 2)
    template = commit_record(0, 2)
    last = LONG // FILE_STEPS * FILE_STEPS - 1
    for first in range(0, last, FILE_STEPS):
        file = StepRange(first, first + FILE_STEPS - 1, 2)
        commits = [
            template.model_copy(update={"step": step} | values_of(step)) for step in range(first, file.last + 1)
        ]
        store.put(
            file.commits_key, encode_commits([commit.model_dump_json().encode() for commit in commits], commits)
        )
        store.put(file.rollouts_key, b"")  # no start reads compacted rollouts
    for step in range(last + 1, LONG + 1):
        put_commit(store, step, 2, low_water=dict.fromkeys(ACTORS, LONG), **values_of(step))
        for index in range(len(ACTORS)):
            store.put(rollout_key(f"actor-{index}", 1, step), SEGMENT)
    return store


def values_of(step):
    return {
        "metrics": {"reward/mean": step / LONG, "reward/std": 0.0},
        "manifest": weight_manifest(step),
        "checkpoint": CheckpointRef(step=step // 10 * 10, epoch=2),
    }  # fmt: skip


class NoLearner:
    def load_state(self, files, values):
        raise AssertionError("there is no checkpoint")


def resume(store):
    keys = counted_commit_keys(store)
    assert max(keys) == LONG
    newest = read_commit(store, keys[LONG])
    read_commit(store, keys[0])
    return newest


def start_actor(store):
    assert take_life(store, "actor-3") >= 2


@pytest.mark.parametrize(
    "start", [read_stored_state, start_actor, run_status, resume, lambda store: RunFollower(store).refresh()]
)
def test_a_start_after_100_000_steps_and_1_200_000_segments_needs_fewer_than_200_requests(long_run, start):
    store = CountingStore(long_run)
    start(store)
    assert store.total <= 200, store.requests


def test_a_reader_of_all_commits_reads_each_compacted_object_once_and_keeps_few_commits(long_run):
    store = CountingStore(long_run)
    follower = RunFollower(store)
    follower.refresh()
    steps = range(200 * FILE_STEPS)
    assert [follower.commits[step].step for step in steps] == list(steps)
    assert [follower.commits[step].step for step in steps[::FILE_STEPS]] == list(steps[::FILE_STEPS])
    assert store.requests["get compacted"] == 200
    gc.collect()
    alive = sum(type(instance) is Commit for instance in gc.get_objects())
    assert alive <= 5 * FILE_STEPS + 200


def test_objects_beyond_the_limit_of_memory_are_read_again(run, monkeypatch):
    before = facts(run)
    compact_commits(run)
    monkeypatch.setattr(commits_module, "_FILE_BYTES", 1)
    commits = read_commits(run)
    assert [dict(commits), dict(commits)] == [before[1], before[1]]
    assert len(commits._bytes) == 1


def test_the_newest_checkpoint_is_found_without_reading_the_later_commits(long_run):
    store = CountingStore(long_run)
    keys = counted_commit_keys(store)
    newest = {step: key for step, key in keys.items() if step > LONG - 15}
    with pytest.raises(Exception, match="no intact checkpoint"):
        restore(store, NoLearner(), newest, LONG)
    assert store.requests["get commits"] <= 4
