"""Weights from memory to memory: groups form, break and form again, over real gloo."""

import contextlib
import multiprocessing
import threading
import time
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from pipelinerl_core.errors import BroadcastError
from pipelinerl_core.roles.trainer.broadcasting import joined_groups
from pipelinerl_core.run.records import broadcast_key
from pipelinerl_core.weights.broadcast import (
    WeightBroadcaster,
    read_group,
)
from pipelinerl_core.weights.files import metas_of
from pipelinerl_core.weights.subscribe import WeightSubscriber
from tests.snapshots import snapshot_of
from tests.unit.weights.gloo_case import JOIN_POINTS, broadcast_publisher, connect, join_until, receive
from tests.waiting import wait_for

WEIGHTS = {
    "b.weight": torch.arange(6.0).reshape(2, 3),
    "a.bias": torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
    "c": torch.tensor(3.0),
}
DEADLINE_SECONDS = 10.0


class Member(threading.Thread):
    """One worker of an actor: joins, and receives as many versions as it is told to."""

    all: ClassVar[list] = []

    def __init__(self, group, rank, num_versions=1):
        super().__init__(daemon=True)
        self.group, self.rank, self.num_versions = group, rank, num_versions
        self.received = []
        self.may_leave = threading.Event()
        """One that left while the sender still connects would break the meeting."""
        if num_versions:
            self.may_leave.set()
        Member.all.append(self)
        self.start()

    def run(self):
        with contextlib.suppress(RuntimeError):  # the trainer gave the group up
            self._receive()

    def _receive(self):
        collective = connect(self.group, self.rank)
        for _ in range(self.num_versions):
            version = {}
            for meta in self.group.layout:
                version[meta.name] = torch.empty(meta.shape, dtype=getattr(torch, meta.dtype))
                receive(collective, version[meta.name])
            self.received.append(version)
        self.may_leave.wait(60)


@pytest.fixture(autouse=True)
def no_member_is_left():
    yield
    while Member.all:
        member = Member.all.pop()
        member.join(timeout=60)
        assert not member.is_alive()


@pytest.fixture
def make(store):
    made = []

    def _make(workers=1, deadline_seconds=DEADLINE_SECONDS):
        made.append(
            WeightBroadcaster(
                store, epoch=3, workers_per_actor=workers, host="127.0.0.1", deadline_seconds=deadline_seconds,
                on_gpu=False,
            )
        )  # fmt: skip
        return made[-1]

    yield _make
    for broadcaster in made:
        broadcaster.close()


def formed(broadcaster, store, actors, num_versions=1):
    """The members of a group of these actors, all of which have met and said so."""
    assert broadcaster.ensure_group(dict.fromkeys(actors, 0), WEIGHTS) is False
    group = read_group(store, broadcaster.number)
    members = [Member(group, rank, num_versions) for rank in range(1, group.world_size)]
    joined = dict.fromkeys(actors, group.number)
    wait_for(lambda: broadcaster.ensure_group(joined, WEIGHTS), "a group that has met")
    for member in members:
        member.may_leave.set()
    return members


def assert_equal(actual, expected=WEIGHTS):
    torch.testing.assert_close(actual, dict(expected), rtol=0, atol=0)


def test_every_worker_of_every_actor_receives_every_version(make, store):
    broadcaster = make(workers=2)
    members = formed(broadcaster, store, ["actor-0", "actor-1"], num_versions=2)
    group = read_group(store, broadcaster.number)
    assert group.world_size == 5
    assert group.first_ranks == {"actor-0": 1, "actor-1": 3}
    assert [meta.name for meta in group.layout] == ["a.bias", "b.weight", "c"]
    later = {name: tensor + 1 for name, tensor in WEIGHTS.items()}
    broadcaster.send(WEIGHTS)
    broadcaster.send(later)
    for member in members:
        member.join(timeout=60)
        assert_equal(member.received[0])
        assert_equal(member.received[1], later)


def test_nothing_is_broadcast_before_all_have_met_and_said_so(make, store):
    broadcaster = make()
    assert broadcaster.ensure_group({}, WEIGHTS) is False
    assert broadcaster.number == 0
    assert broadcaster.ensure_group({"actor-0": 0}, WEIGHTS) is False
    number = broadcaster.number
    assert number > 3_000_000
    assert broadcaster.ensure_group({"actor-0": 0}, WEIGHTS) is False  # still waited for
    Member(read_group(store, number), 1)
    time.sleep(0.5)
    assert broadcaster.ensure_group({"actor-0": 0}, WEIGHTS) is False  # it has met, but has not said so
    wait_for(lambda: broadcaster.ensure_group({"actor-0": number}, WEIGHTS), "a group that has met")
    assert broadcaster.number == number


@pytest.mark.parametrize(
    "joined",
    [
        lambda number: {"a": 0, "b": number},
        lambda number: {"a": number},
        lambda number: {"a": number, "b": number, "c": 0},
    ],
    ids=["one has left", "one is gone", "one has come"],
)
def test_other_actors_make_another_group(make, store, joined):
    broadcaster = make()
    formed(broadcaster, store, ["a", "b"])
    broadcaster.send(WEIGHTS)
    number = broadcaster.number
    assert broadcaster.next_index == 2
    actors = joined(number)
    assert broadcaster.ensure_group(actors, WEIGHTS) is False
    assert broadcaster.number > number
    assert broadcaster.next_index == 1
    assert set(read_group(store, broadcaster.number).first_ranks) == set(actors)


def test_a_group_that_never_meets_gives_way_to_another(make, store):
    broadcaster = make(deadline_seconds=1.0)
    broadcaster.ensure_group({"a": 0}, WEIGHTS)
    number = broadcaster.number
    wait_for(lambda: broadcaster.ensure_group({"a": 0}, WEIGHTS) or broadcaster.number != number, "another group")
    assert broadcaster.number > number


@pytest.mark.parametrize("point", JOIN_POINTS)
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_the_actor_that_ends_or_stops_in_a_join_is_named(make, store, caplog, point, how):
    broadcaster = make(deadline_seconds=3.0)
    broadcaster.ensure_group({"a": 0, "b": 0, "c": 0}, WEIGHTS)
    group = read_group(store, broadcaster.number)
    lost = multiprocessing.get_context("spawn").Process(target=join_until, args=(group, 2, point, how), daemon=True)
    lost.start()
    try:
        members = [Member(group, rank) for rank in (1, 3)]
        wait_for(lambda: broadcaster.number == 0, "the end of the group")
        for member in members:
            member.join(30)
        assert [member.received for member in members] == [[], []]
    finally:
        lost.kill()
        lost.join(30)
    (text,) = [record.getMessage() for record in caplog.records if "not connected" in record.getMessage()]
    assert text.startswith(f"broadcast group {group.number} not connected: b: ")
    joined = {"a": 0, "c": 0}  # the lease of `b` has expired
    assert broadcaster.ensure_group(joined, WEIGHTS) is False
    assert set(read_group(store, broadcaster.number).first_ranks) == {"a", "c"}


def test_a_member_that_is_not_there_ends_the_broadcast_and_the_group(make, store):
    broadcaster = make()
    for member in formed(broadcaster, store, ["a", "b"], num_versions=0):  # they have joined and receive nothing
        member.join(timeout=60)
    started = time.monotonic()
    with pytest.raises(BroadcastError, match=r"broadcast group 300000\d of \['a', 'b'\] is closed"):
        broadcaster.send({name: torch.zeros(1_000_000) if name == "c" else t for name, t in WEIGHTS.items()})
    assert time.monotonic() - started < 3 * DEADLINE_SECONDS
    assert broadcaster.number == 0


# ---- versions -----------------------------------------------------------------------------------------------------


def sample(group=0, at=100.0):
    return SimpleNamespace(at=at, counters=SimpleNamespace(broadcast_group=group))


def test_actors_count_with_their_newest_epoch_until_they_are_silent():
    actors = {
        "a/1": sample(7, at=99.0),
        "a/2": sample(8),
        "b/1": sample(),
        "gone/1": sample(7, at=80.0),
    }
    assert joined_groups(actors, silent_seconds=10) == {"a": 8, "b": 0}
    assert joined_groups({}, silent_seconds=10) == {}


@pytest.fixture
def publisher(store):
    with broadcast_publisher(store, 3, DEADLINE_SECONDS) as publisher:
        yield publisher


def publish(publisher, version, actors, durable=False):
    return publisher.publish(version, snapshot_of(WEIGHTS), durable=durable, actors=actors)


def broadcasting(publisher, store, num_versions):
    """A publisher whose one actor has joined, the member, and the sample of the actor."""
    first = publish(publisher, 1, {"a/1": sample(0)})
    assert (first.is_broadcast, first.broadcast_index, first.key is None) == (False, 0, False)
    member = Member(read_group(store, first.group), 1, num_versions)
    actors = {"a/1": sample(first.group)}
    wait_for(lambda: publish(publisher, 2, actors).is_broadcast, "a version that is broadcast")
    member.may_leave.set()
    return member, actors


def test_a_version_is_broadcast_and_in_no_store_once_its_actors_have_joined(publisher, store):
    member, actors = broadcasting(publisher, store, 1)
    manifest = publish(publisher, 3, actors)
    assert manifest.is_broadcast
    assert (manifest.key, manifest.shm, manifest.broadcast_index) == (None, None, 1)
    assert publisher.deliver() is None
    member.join(timeout=60)
    assert_equal(member.received[0])
    assert publisher.store_if_unreachable(actors) is None
    durable = publish(publisher, 4, actors, durable=True)
    assert (durable.is_broadcast, durable.broadcast_index) == (True, 2)
    assert durable.key is not None


def test_a_broadcast_that_fails_goes_through_the_store(publisher, store):
    member, actors = broadcasting(publisher, store, 0)
    manifest = publish(publisher, 3, actors)
    assert manifest.is_broadcast
    member.join(timeout=60)
    big = snapshot_of({**WEIGHTS, "c": torch.zeros(1_000_000)})  # more than the sockets' buffers take
    publisher._newest = publisher._newest[0], big
    again = publisher.deliver()
    assert (again.version, again.is_broadcast) == (3, False)
    assert_equal(dict(WeightSubscriber(store).fetch(again).tensors), dict(big.tensors))
    assert publisher.store_if_unreachable({"a/1": sample(0)}) is None  # it can be read already


def test_an_actor_that_comes_later_finds_the_newest_version_in_the_store(publisher, store):
    _, actors = broadcasting(publisher, store, 1)
    publish(publisher, 3, actors)
    publisher.deliver()
    again = publisher.store_if_unreachable({**actors, "b/1": sample(0)})
    assert (again.version, again.is_broadcast) == (3, False)
    assert_equal(dict(WeightSubscriber(store).fetch(again).tensors))
    assert publisher.store_if_unreachable({**actors, "b/1": sample(0)}) is None


def test_a_group_is_an_object_of_the_run(make, store):
    broadcaster = make()
    broadcaster.ensure_group({"a": 0}, WEIGHTS)
    assert store.exists(broadcast_key(broadcaster.number))
    assert read_group(store, broadcaster.number).layout == metas_of(WEIGHTS)


def test_a_group_that_is_lost_during_the_query_has_its_number_or_zero(make, store):
    class Losing(WeightBroadcaster):
        """The thread that connects drops the group right after the first read of the attribute."""

        def __getattribute__(self, name):
            value = super().__getattribute__(name)
            if name == "_group" and value is not None:
                self._group = None
            return value

    broadcaster = make()
    broadcaster.ensure_group({"a": 0}, WEIGHTS)
    number = broadcaster.number
    broadcaster.__class__ = Losing
    assert broadcaster.number in (number, 0)


def test_a_group_that_never_met_does_not_end_the_next_group(make, store, monkeypatch):
    class Alone:
        """No receiver joins; `connect` fails once the test allows it."""

        port = 1

        def __init__(self, *arguments):
            self.may_fail = threading.Event()
            meetings.append(self)

        def wait(self, state, is_closed):
            assert self.may_fail.wait(60)
            raise BroadcastError("its members did not come")

    meetings = []

    class Slow(WeightBroadcaster):
        """The thread that connects stops after it has read the current group."""

        has_looked, may_go_on = threading.Event(), threading.Event()

        def __getattribute__(self, name):
            value = super().__getattribute__(name)
            if name == "_group" and threading.current_thread().name == "broadcast-connect":
                Slow.has_looked.set()
                assert Slow.may_go_on.wait(60)
            return value

    monkeypatch.setattr("pipelinerl_core.weights.broadcast.Meeting", Alone)
    monkeypatch.setattr("pipelinerl_core.weights.broadcast._THREAD_END_SECONDS", 0.0)
    broadcaster = make()
    broadcaster.__class__ = Slow
    broadcaster.ensure_group({"a": 0}, WEIGHTS)
    first, (thread,) = meetings[0], broadcaster._threads
    first.may_fail.set()
    wait_for(lambda: Slow.has_looked.is_set() or not thread.is_alive(), "the end of the first rendezvous")
    broadcaster.ensure_group({"a": 0, "b": 0}, WEIGHTS)
    second, number = meetings[1], broadcaster.number
    Slow.may_go_on.set()
    thread.join(60)
    assert broadcaster.number == number != 0
    second.may_fail.set()
    wait_for(lambda: broadcaster.number == 0, "the failure of the second rendezvous")
