"""Steps are committed in order or not at all; actors that cannot read the newest version get it once more.

Tests wait for the private futures of a committer: its public calls raise the error that is under test, or do not show
that no second publication follows.
"""

import re
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from pipelinerl_core.errors import Fenced, PipelineRLError, StoreError
from pipelinerl_core.messages import Ack, ActorSample
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.roles.trainer.committer import Committer, ComputedStep
from pipelinerl_core.roles.trainer.retrain import _checkpoints
from pipelinerl_core.run import compaction
from pipelinerl_core.run.compacted import StepRange, list_commits
from pipelinerl_core.run.history import counted_commit_keys, read_commit, take_epoch
from pipelinerl_core.run.records import CheckpointRef, commit_key, complete_checkpoints
from pipelinerl_core.training.live_state import LiveState
from pipelinerl_core.types import FileEntry
from pipelinerl_core.weights.memory import private_memory
from pipelinerl_core.weights.subscribe import WeightSubscriber
from tests.builders import put_commit, put_epoch
from tests.fakes import MemoryStore
from tests.snapshots import snapshot_of
from tests.waiting import wait_for

WEIGHTS = {"w": torch.arange(4.0)}


class Link:
    """Acknowledges; remembers the announced manifests, and the epochs that announced them."""

    def __init__(self):
        self.manifests, self.epochs = [], []

    def request(self, message, rows=None):
        self.manifests.append(message.manifest)
        self.epochs.append(message.epoch)
        return Ack(re=0)


def without_rows(step, memory=private_memory):
    """A step with weights alone."""
    return ComputedStep(
        step=step,
        weights=snapshot_of(WEIGHTS, memory),
        state=None,
        batch=None,
        reserved=None,
        reserved_at=0.0,
        computed_at=0.0,
    )


@pytest.fixture
def parts(store, shm):
    link = Link()
    config = load_config("quickstart", ["weights.durable_every=1000"])
    committer = Committer(store, config, run_id="run", epoch=put_epoch(store, 2), link=link)
    for step in (0, 1):
        committer.submit(without_rows(step, committer._publisher.memory))
    committer.flush()
    yield store, link, committer
    committer.close()


def sample(version):
    return ActorSample(
        at=0.0, engine_version=0, running=0, waiting=0, concurrency=1, num_tokens=0, running_seconds=0.0,
        counters={"unreadable_version": version},
    )  # fmt: skip


def test_a_version_that_an_actor_cannot_read_is_published_again_once(parts):
    store, link, committer = parts
    announced = link.manifests[-1]
    assert (announced.version, announced.key) == (1, None)
    Path(announced.shm).write_bytes(b"damaged")
    for _ in range(3):
        committer.republish_if_unreadable(
            {"a/1": sample(-1), "b/1": sample(1)}, 1, lambda: snapshot_of(WEIGHTS, committer._publisher.memory)
        )
        committer.flush()
        if committer._republishing is not None:
            committer._republishing.result(10)
    assert len(link.manifests) == 3
    again = link.manifests[-1]
    assert (again.version, again.files, again.key) == (1, announced.files, "weights/00000001.2")
    assert torch.equal(WeightSubscriber(store).fetch(again).tensors["w"], WEIGHTS["w"])
    assert torch.equal(WeightSubscriber(store).fetch(announced).tensors["w"], WEIGHTS["w"])


def test_a_published_version_is_stored_if_commits_without_a_version_follow_it(store, shm):
    link = Link()
    config = load_config("quickstart", ["weights.durable_every=1000", "weights.publish_every=2"])
    committer = Committer(store, config, run_id="run", epoch=put_epoch(store, 2), link=link)
    for step in range(4):
        committer.submit(without_rows(step, committer._publisher.memory))
    committer.flush()
    committer.close()
    assert [manifest and manifest.key for manifest in link.manifests] == [
        "weights/00000000.2", None, "weights/00000002.2", None,
    ]  # fmt: skip


def test_between_published_versions_the_newest_version_replaces_one_that_an_actor_cannot_read(store):
    link = Link()
    config = load_config("quickstart", ["weights.publish_every=3", "weights.transport=object_store"])
    committer = Committer(store, config, run_id="run", epoch=put_epoch(store, 2), link=link)
    for step in range(5):
        committer.submit(without_rows(step, committer._publisher.memory))
    committer.flush()
    for unreadable in (3, 3, 4):  # the second report is an old one, the third is of an actor that is gone
        committer.republish_if_unreadable({"a/1": sample(unreadable)}, 4, lambda: snapshot_of(WEIGHTS))
        if committer._republishing is not None:
            committer._republishing.result(10)
        assert link.manifests[-1].version == 4
    committer.submit(without_rows(5, committer._publisher.memory))
    committer.flush()
    assert committer.manifest.version == 4  # also for a hub that starts now, although commit 5 names no version
    old = sample(3).model_copy(update={"at": -60.0})  # of an actor that is gone
    committer.republish_if_unreadable({"a/1": old, "b/1": sample(-1)}, 5, lambda: snapshot_of(WEIGHTS))
    assert committer._republishing is None
    committer.close()
    versions = [manifest and manifest.version for manifest in link.manifests]
    assert versions == [0, None, None, 3, None, 4, None]


def test_a_version_of_an_earlier_trainer_is_published_again_in_the_name_of_this_trainer(parts):
    """The hub refuses an earlier trainer's messages."""
    _, link, committer = parts
    committer.newest = committer.newest.model_copy(update={"epoch": 1})
    committer.republish_if_unreadable({"a/1": sample(1)}, 1, lambda: snapshot_of(WEIGHTS))
    committer._republishing.result(10)
    assert link.epochs[-1] == 2


class Stateful:
    """A learner with a state."""

    def __init__(self, version):
        self.version = version

    def state(self):
        return LiveState({"w": torch.zeros(1)}, {"version": self.version})


def test_a_stop_saves_the_state_after_the_newest_commit_of_this_trainer(parts):
    store, _, committer = parts
    committer.save_state(Stateful(2))  # its step is not committed
    assert complete_checkpoints(store.list("checkpoints")) == []
    committer.save_state(Stateful(1))
    assert complete_checkpoints(store.list("checkpoints")) == [CheckpointRef(step=1, epoch=2)]
    commits = counted_commit_keys(store)
    assert list(_checkpoints(store, commits, 1)) == [CheckpointRef(step=1, epoch=2)]
    assert list(_checkpoints(store, commits, 0)) == []
    committer.save_state(Stateful(1))  # for the second time
    assert list(_checkpoints(store, {**commits, 1: commit_key(1, 3)}, 0)) == []


@pytest.mark.parametrize(("told", "version"), [(-1, 1), (0, 1), (1, 2)])
def test_no_version_is_published_again_unless_the_newest_version_is_unreadable(parts, told, version):
    _, link, committer = parts

    def weights():
        raise AssertionError("no snapshot is needed")

    committer.republish_if_unreadable({"a/1": sample(told)}, version, weights)
    assert len(link.manifests) == 2


def test_a_commit_that_its_successor_has_not_adopted_is_not_announced(parts, monkeypatch):
    store, link, committer = parts
    put = store.put

    def take_over_first(key, data, **options):
        if key == commit_key(2, 2):  # it has just seen that nobody took over
            take_epoch(store, "trainer", adopted_through=1)
        put(key, data, **options)

    monkeypatch.setattr(store, "put", take_over_first)
    committer.submit(without_rows(2))
    with pytest.raises(Fenced, match="trainer epoch 2 was taken over by epoch 3 "):
        committer.flush()
    assert [manifest.version for manifest in link.manifests] == [0, 1]
    assert committer.newest.step == max(counted_commit_keys(store)) == 1


# ---- a write that fails --------------------------------------------------------------------------------------------

PATIENCE_SECONDS = 60
FAILURES = {
    "weights": r"weights/00000002\.2/model\.safetensors",
    "batch": r"batches/00000002\.2/0000\.arrow",
    "checkpoint": r"checkpoints/00000002\.2/state-00001\.safetensors",
    "commit": r"commits/00000002\.2\.json",
}


class FailingStore(MemoryStore):
    """Fails one write, once: as soon as it may."""

    def __init__(self, pattern):
        super().__init__()
        self.pattern, self.may_fail, self.has_failed = pattern, threading.Event(), False

    def put(self, key, data, *, create_only=False):
        if re.fullmatch(self.pattern, key) and not self.has_failed:
            assert self.may_fail.wait(PATIENCE_SECONDS)
            self.has_failed = True
            raise StoreError(f"{key}: the disk is away")
        super().put(key, data, create_only=create_only)


def committer_of(store, epoch=2):
    config = load_config("quickstart", ["weights.transport=object_store"])
    return Committer(store, config, run_id="run", epoch=put_epoch(store, epoch), link=None)


def committer_at_1(store):
    committer = committer_of(store)
    for step in (0, 1):
        committer.submit(computed(store, step))
    committer.flush()
    return committer


def computed(store, step):
    """A step with weights, state and an upload of its batch that is under way."""
    batch = Future()

    def upload():
        key = f"batches/{step:08d}.2/0000.arrow"
        try:
            store.put(key, b"rows")
        except StoreError as error:
            batch.set_exception(error)
        else:
            batch.set_result(FileEntry(name=key, size=4, digest=""))

    threading.Thread(target=upload).start()
    return ComputedStep(
        step=step, weights=snapshot_of(WEIGHTS),
        state=LiveState({"w": torch.zeros(1)}, {"version": step}), batch=batch, reserved=None,
        reserved_at=0.0, computed_at=0.0,
    )  # fmt: skip


def steps_in(store):
    return [key.rpartition("/")[2].split(".")[0] for key in store.list("commits")]


@pytest.mark.parametrize("pattern", FAILURES.values(), ids=FAILURES)
def test_no_step_is_committed_after_an_uncommitted_step(pattern):
    store = FailingStore(pattern)
    committer = committer_at_1(store)
    for step in (2, 3):
        committer.submit(computed(store, step))
    store.may_fail.set()  # the store is back for the step after it
    with pytest.raises(StoreError, match="the disk is away"):
        committer.flush()
    with pytest.raises(PipelineRLError, match=r"step 3 is not committed, .* step before it was not: .*disk is away"):
        committer.flush()
    assert steps_in(store) == ["00000000", "00000001"]
    committer.submit(computed(store, 4))
    with pytest.raises(PipelineRLError, match="step 4 is not committed"):
        committer.flush()
    committer.close()
    assert steps_in(store) == ["00000000", "00000001"]

    newest = committer.newest
    successor = committer_of(store, epoch=3)
    successor.adopt(newest)
    for step in (2, 3):
        successor.submit(computed(store, step))
    successor.flush()
    successor.close()
    assert steps_in(store) == ["00000000", "00000001", "00000002", "00000003"]


@pytest.mark.parametrize(
    "call",
    [
        lambda committer, store: committer.submit(computed(store, 3)),
        lambda committer, store: committer.republish_if_unreadable({}, 2, lambda: snapshot_of(WEIGHTS)),
    ],
    ids=["submit", "attend"],
)
def test_a_commit_that_has_failed_surfaces_at_the_next_call(call):
    store = FailingStore(FAILURES["weights"])
    committer = committer_at_1(store)
    committer.submit(computed(store, 2))
    store.may_fail.set()
    (pending,) = committer._pending
    assert isinstance(pending.exception(PATIENCE_SECONDS), StoreError)
    with pytest.raises(StoreError, match="the disk is away"):
        call(committer, store)
    committer.close()


def test_a_committer_begins_where_its_run_is(store):
    committer = committer_of(store)
    committer.submit(computed(store, 1))
    with pytest.raises(PipelineRLError, match=r"step 1 is not committed, .* was not: the newest commit is -1"):
        committer.flush()
    committer.close()
    assert steps_in(store) == []


class StubbornStore:
    """A store that cannot delete."""

    def __init__(self, store):
        self._store = store

    def __getattr__(self, name):
        return getattr(self._store, name)

    def delete(self, keys):
        raise StoreError("read only")


@pytest.mark.parametrize("is_stubborn", [False, True])
def test_the_store_holds_as_many_versions_as_are_kept_however_many_steps_there_are(store, caplog, is_stubborn):
    config = load_config(
        "quickstart", ["weights.durable_every=1", "weights.keep=4", "weights.transport=object_store"]
    )
    wrapped = StubbornStore(store) if is_stubborn else store
    committer = Committer(wrapped, config, run_id="run", epoch=put_epoch(store, 2), link=Link())
    for step in range(30):
        committer.submit(without_rows(step))
    committer.flush()
    committer.close()
    versions = sorted({int(key.split("/")[1].split(".")[0]) for key in store.list("weights")})
    due = [step for step in range(30) if config.evaluates(step)][-2:]
    assert versions == (list(range(30)) if is_stubborn else sorted({0, 26, 27, 28, 29, *due}))
    assert ("not removed: read only" in caplog.text) == is_stubborn


def test_old_commits_are_compacted_while_the_trainer_goes_on_and_after_a_start(store, shm, monkeypatch):
    monkeypatch.setattr(compaction, "FILE_STEPS", 8)
    monkeypatch.setattr(compaction, "MARGIN_STEPS", 2)
    config, epoch = load_config("quickstart"), put_epoch(store, 2)
    committer = Committer(store, config, run_id="run", epoch=epoch, link=Link())
    for step in range(20):
        committer.submit(without_rows(step))
    committer.flush()
    newest = [commit_key(step, 2) for step in range(16, 20)]
    wait_for(lambda: list_commits(store).originals == newest, "the compaction of old commits")
    committer.close()
    assert list_commits(store).files == [StepRange(0, 7, 2), StepRange(8, 15, 2)]
    assert list_commits(store).originals == newest
    store.delete([StepRange(8, 15, 2).commits_key])  # as if the previous trainer had died before the compaction
    for step in range(8, 16):
        put_commit(store, step, 2)
    adopting = Committer(store, config, run_id="run", epoch=epoch, link=Link())
    adopting.adopt(read_commit(store, newest[-1]))
    wait_for(lambda: list_commits(store).originals == newest, "the compaction of the adopted commits")
    adopting.close()
    assert list_commits(store).originals == newest


@pytest.mark.parametrize("error", [StoreError("no answer"), OSError("disk"), MemoryError(), ValueError("rows")])
def test_whatever_ends_a_compaction_is_in_the_log(store, monkeypatch, caplog, error):
    def fail(store, keep):
        raise error

    monkeypatch.setattr("pipelinerl_core.roles.trainer.committer.compact_rollouts", fail)
    committer = committer_of(store)
    committer.adopt(read_commit(store, put_commit(store, 0, 2)))

    def failures():
        return [
            entry for entry in caplog.records if "old commits or rollouts are not compacted" in entry.getMessage()
        ]

    wait_for(failures, "the log line of the compaction")
    committer.close()
    [record] = failures()
    assert bool(record.exc_info) == (not isinstance(error, StoreError))
