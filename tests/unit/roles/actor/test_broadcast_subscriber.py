"""An actor's engine in broadcast groups: what it joins, and which versions reach it how."""

import asyncio
from dataclasses import asdict, replace

import pytest
from pydantic import TypeAdapter

from pipelinerl_core.errors import EngineError, StoreUnavailable
from pipelinerl_core.interfaces import BroadcastReceiver
from pipelinerl_core.roles.actor import broadcast_subscriber
from pipelinerl_core.roles.actor.broadcast_subscriber import BroadcastSubscriber
from pipelinerl_core.types import WeightManifest
from pipelinerl_core.weights.broadcast import WeightBroadcaster, read_group
from tests.builders import weight_manifest

MANIFEST = weight_manifest(5, key="weights/5.1")


class Receiver:
    """Joins at once, or fails to."""

    def __init__(self, error=None):
        self.group = 0
        self.needs_weights = False
        self.joined = []
        self._error = error

    async def join(self, group, first_rank):
        if self._error is not None:
            raise self._error
        self.joined.append((group.number, first_rank))
        self.group = group.number


@pytest.fixture
def group(store):
    broadcaster = WeightBroadcaster(
        store, epoch=1, workers_per_actor=2, host="127.0.0.1", deadline_seconds=60, on_gpu=False
    )
    broadcaster.ensure_group({"actor-0": 0, "actor-1": 0}, {})
    yield read_group(store, broadcaster.number)
    broadcaster.close()


def attend(receiver, store, manifests, name="actor-1"):
    assert isinstance(receiver, BroadcastReceiver)

    async def main():
        subscriber = BroadcastSubscriber(receiver, store, name=name)
        for manifest in manifests:
            subscriber.join(manifest)
            if subscriber._joining is not None:
                await subscriber._joining
        await subscriber.close()
        return subscriber

    return asyncio.run(main())


def test_a_group_is_joined_once_with_the_ranks_of_the_group(store, group):
    receiver = Receiver()
    offered = replace(MANIFEST, group=group.number)
    subscriber = attend(receiver, store, [MANIFEST, offered, offered])
    assert receiver.joined == [(group.number, 3)]
    assert subscriber.group == group.number


def test_a_group_without_this_actor_is_not_joined(store, group):
    receiver = Receiver()
    attend(receiver, store, [replace(MANIFEST, group=group.number)], name="actor-7")
    assert receiver.joined == []


def test_a_group_is_tried_again_after_an_outage_of_the_store(store, group, caplog, monkeypatch):
    def unavailable(*_):
        monkeypatch.undo()
        raise StoreUnavailable("503")

    monkeypatch.setattr(broadcast_subscriber, "read_group", unavailable)
    receiver = Receiver()
    attend(receiver, store, [replace(MANIFEST, group=group.number)] * 2)
    assert receiver.joined == [(group.number, 3)]
    assert caplog.text.count("tries again: 503") == 1


@pytest.mark.parametrize("number", [None, 77])
def test_a_group_that_cannot_be_joined_is_left_alone(store, group, number, caplog):
    receiver = Receiver(EngineError("nobody there"))
    subscriber = attend(receiver, store, [replace(MANIFEST, group=number or group.number)] * 2)
    assert subscriber.group == 0
    assert caplog.text.count("not joined") == 1


def test_versions_reach_the_engine_by_broadcast_in_its_group_and_by_file_else(store):
    receiver = Receiver()
    subscriber = BroadcastSubscriber(receiver, store, name="actor-0")
    sent = replace(MANIFEST, group=9, is_broadcast=True, key=None)
    durable = replace(sent, key=MANIFEST.key)
    assert (
        subscriber.should_swap(sent, 4),
        subscriber.should_swap(durable, 4),
        subscriber.should_swap(MANIFEST, 4),
    ) == (False, True, True)
    assert subscriber.update(durable) is None
    receiver.group = 9
    sent = replace(sent, broadcast_index=3)
    assert (
        subscriber.should_swap(sent, 4),
        subscriber.should_swap(sent, 5),
        subscriber.should_swap(MANIFEST, 5),
    ) == (True, False, False)
    update = subscriber.update(sent)
    assert (update.version, update.group, update.broadcast_index, dict(update.tensors)) == (5, 9, 3, {})


def test_a_manifest_of_before_broadcasts_were_counted_is_read():
    values = asdict(replace(MANIFEST, group=9, is_broadcast=True, key=None))
    del values["broadcast_index"]
    assert TypeAdapter(WeightManifest).validate_python(values).broadcast_index == 0


def test_lost_weights_are_wanted_again_from_a_file(store):
    receiver = Receiver()
    receiver.needs_weights = True
    subscriber = BroadcastSubscriber(receiver, store, name="actor-0")
    sent = replace(MANIFEST, group=9, is_broadcast=True, key=None)
    assert (
        subscriber.should_swap(MANIFEST, 5),
        subscriber.should_swap(sent, 5),
        subscriber.should_swap(MANIFEST, 6),
    ) == (True, False, False)
