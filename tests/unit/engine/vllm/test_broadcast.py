"""vLLM's engine in broadcast groups, on a core that is none: which broadcast it takes, in whose name. Real gloo."""

import asyncio
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pipelinerl_core.engine.vllm import engine as engine_module
from pipelinerl_core.engine.vllm.core import CoreLoad, CoreOutput
from pipelinerl_core.engine.vllm.engine import VLLMEngine
from pipelinerl_core.errors import EngineError, SwapError
from pipelinerl_core.interfaces import BroadcastGroup, TensorMeta, WeightUpdate
from pipelinerl_core.roles.actor.broadcast_subscriber import BroadcastSubscriber
from pipelinerl_core.types import EngineRequest, FinishReason, Sampler, WeightSpan
from pipelinerl_core.weights.broadcast import read_group
from pipelinerl_core.weights.subscribe import WeightSubscriber
from tests.snapshots import snapshot_of
from tests.unit.weights.gloo_case import broadcast_publisher, connect, receive

DEADLINE_SECONDS = 60.0
REQUEST = EngineRequest(request_id="r", prompt_token_ids=np.array([1, 2], np.int32), max_tokens=1, sampler=Sampler())


def weights(version):
    """One weight: the tree of a broadcast has room for as many as it is deep."""
    return {"w": torch.full((3,), float(version))}


class Core:
    """Holds one number for its weights, and forgets nothing that it was given."""

    is_dead = False
    settings = SimpleNamespace(sleeps=False)

    def __init__(self):
        self.load = CoreLoad()
        self.loaded = []
        """(the version that is in the weights, the version they are called)."""
        self.num_starts = 0
        self.collective = None

    async def start(self):
        self.num_starts += 1

    async def close(self):
        self.collective = None

    async def pause(self, *, clear_cache):
        pass

    async def resume(self):
        pass

    async def set_version(self, version):
        pass

    async def join(self, group, first_rank):
        self.collective = await asyncio.to_thread(connect, group, first_rank)

    async def load_weights(self, path, version):
        self.loaded.append((int(path), version))

    async def receive_weights(self, layout, version, seconds):
        (meta,) = layout
        tensor = torch.empty(meta.shape)
        await asyncio.to_thread(receive, self.collective, tensor)
        self.loaded.append((int(tensor[0]), version))


class Staged:
    """A file is the number that is in it."""

    current = None

    def check(self, tensors, *, is_partial):
        pass

    def check_layout(self, tensors):
        pass

    def stage(self, update):
        return str(int(update.tensors["w"][0]))

    def set_current(self, path):
        self.current = path

    def close(self):
        pass


def make_engine(core, kv="keep"):
    return VLLMEngine(core, Staged(), slots=2, max_len=8, vocab_size=8, eos_token_ids=(), kv=kv)


def broadcast(version, index, group=7):
    return WeightUpdate(version=version, tensors={}, num_bytes=1, group=group, broadcast_index=index)


def by_file(version):
    return WeightUpdate(version=version, tensors=weights(version), num_bytes=1)


# ---- a group of one trainer and three engines ----------------------------------------------------------------------


class Worker(threading.Thread):
    """Another actor's only worker: takes every broadcast until the group ends."""

    def __init__(self, group, rank):
        super().__init__(daemon=True)
        self._group, self._rank = group, rank
        self.start()

    def run(self):
        tensor = torch.empty(3)
        try:
            collective = connect(self._group, self._rank)
            while True:
                receive(collective, tensor)
        except RuntimeError:  # another member has left
            return


@pytest.fixture
def publisher(store):
    with broadcast_publisher(store, 1, DEADLINE_SECONDS) as publisher:
        yield publisher


def publish(publisher, version, groups):
    """groups: actor -> the group that it says it is in."""
    actors = {f"{name}/1": sample(group) for name, group in groups.items()}
    return publisher.publish(version, snapshot_of(weights(version)), durable=False, actors=actors)


def sample(group):
    return SimpleNamespace(at=1.0, counters=SimpleNamespace(broadcast_group=group))


async def form(publisher, store, engine):
    """The first broadcast manifest for a group of three, of which `engine` is the last, and the two other workers."""
    actors = dict.fromkeys("abc", 0)
    group = read_group(store, publish(publisher, 1, actors).group)
    others = [Worker(group, group.first_ranks[name]) for name in "ab"]
    await engine.join(group, group.first_ranks["c"])
    actors = dict.fromkeys("abc", group.number)
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (manifest := publish(publisher, 2, actors)).is_broadcast:  # the trainer joins in a thread of its own
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    return manifest, others


async def disband(engine, publisher, others):
    """End the group: every worker leaves when the engine and the publisher have."""
    await engine.close()
    publisher.close()
    for other in others:
        other.join(timeout=60)
        assert not other.is_alive()


async def test_an_engine_that_missed_a_broadcast_does_not_apply_the_missed_version_as_the_next(publisher, store):
    core = Core()
    engine = make_engine(core)
    await engine.open()
    member = BroadcastSubscriber(engine, store, name="c")
    manifest, others = await form(publisher, store, engine)
    group = manifest.group
    # Done for the trainer: the worker above this engine has it, and waits to pass it on.
    assert await asyncio.to_thread(publisher.deliver) is None
    manifest = publish(publisher, 3, dict.fromkeys("abc", group))
    assert (manifest.is_broadcast, manifest.group) == (True, group)
    assert member.should_swap(manifest, engine.weight_version)
    with pytest.raises(SwapError, match=f"3 is broadcast 2 of group {group}, the engine has received 0"):
        await engine.swap(member.update(manifest))
    assert (engine.group, engine.weight_version, core.loaded) == (0, 0, [])
    assert not member.should_swap(manifest, engine.weight_version)
    manifest = publisher.store_if_unreachable(
        {"a/1": sample(group), "b/1": sample(group), "c/1": sample(engine.group)}
    )
    assert member.should_swap(manifest, engine.weight_version)
    assert member.update(manifest) is None
    await engine.swap(WeightSubscriber(store).fetch(manifest))
    assert (core.loaded, core.num_starts) == ([(3, 3)], 0)
    await disband(engine, publisher, others)


async def test_every_broadcast_in_its_turn_is_taken(publisher, store):
    core = Core()
    engine = make_engine(core)
    await engine.open()
    member = BroadcastSubscriber(engine, store, name="c")
    manifest, others = await form(publisher, store, engine)
    for version in (3, 4, 5):
        delivery = asyncio.create_task(asyncio.to_thread(publisher.deliver))
        await engine.swap(member.update(manifest))
        assert await delivery is None
        manifest = publish(publisher, version, dict.fromkeys("abc", manifest.group))
    assert core.loaded == [(2, 2), (3, 3), (4, 4)]
    await disband(engine, publisher, others)


# ---- one engine ----------------------------------------------------------------------------------------------------


class LonelyCore(Core):
    """What it receives is the number of its group and how many broadcasts it has had from it."""

    async def join(self, group, first_rank):
        self.collective = 10 * group.number

    async def receive_weights(self, layout, version, seconds):
        self.collective += 1
        self.loaded.append((self.collective, version))


def group(number):
    return BroadcastGroup(
        number=number, host="", port=0, nccl_id="", world_size=2, first_ranks={"a": 1}, deadline_seconds=1.0,
        layout=(TensorMeta("w", "float32", (3,)),),
    )  # fmt: skip


async def test_a_group_that_sends_other_weights_is_not_joined_and_costs_no_core():
    class OfAnotherModel(Staged):
        def check_layout(self, tensors):
            assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == {"w": ((3,), torch.float32)}
            raise SwapError("no weight of this model")

    core = LonelyCore()
    engine = VLLMEngine(core, OfAnotherModel(), slots=2, max_len=8, vocab_size=8, eos_token_ids=())
    await engine.open()
    with pytest.raises(EngineError, match="broadcast group 7: no weight of this model"):
        await engine.join(group(7), 1)
    assert (engine.group, core.num_starts, core.collective) == (0, 0, None)
    await engine.close()


async def test_a_core_that_cannot_rest_ends_before_the_trainer_uses_its_memory_and_starts_again_afterwards():
    calls = []

    class RestlessCore(LonelyCore):
        async def rest(self):
            raise EngineError("no sleep")

        async def wake(self):
            calls.append("wake")

        async def close(self):
            calls.append("close")

        async def start(self):
            calls.append("start")

    engine = make_engine(RestlessCore())
    await engine.open()
    async with engine.resting():
        calls.append("trainer")
        await asyncio.sleep(0.05)
    while "start" not in calls:  # noqa: ASYNC110 - the restart is a task of the engine
        await asyncio.sleep(0.01)
    assert calls == ["close", "trainer", "start"]
    await engine.close()


async def test_each_group_is_counted_from_its_first_broadcast_on():
    core = LonelyCore()
    engine = make_engine(core)
    await engine.open()
    for number in (7, 8):
        await engine.join(group(number), 1)
        await engine.swap(broadcast(number * 10, 1, number))
        await engine.swap(by_file(number * 10 + 1))  # for an actor outside of the group; it is not counted
        await engine.swap(broadcast(number * 10 + 2, 2, number))
    await engine.close()
    assert core.loaded == [(71, 70), (71, 71), (72, 72), (81, 80), (81, 81), (82, 82)]
    assert core.num_starts == 0


@pytest.mark.parametrize("index", [0, 1, 3], ids=["of an older trainer", "received already", "one is missed"])
async def test_a_broadcast_out_of_turn_ends_the_membership_and_nothing_else(index):
    core = LonelyCore()
    engine = make_engine(core)
    await engine.open()
    await engine.join(group(7), 1)
    await engine.swap(broadcast(1, 1))
    with pytest.raises(SwapError, match=f"version 2 is broadcast {index} of group 7, the engine has received 1"):
        await engine.swap(broadcast(2, index))
    assert (engine.group, engine.weight_version, engine.needs_weights) == (0, 1, False)
    with pytest.raises(SwapError, match="version 2 is broadcast to group 7, the engine is in 0"):
        await engine.swap(broadcast(2, 2))
    await engine.swap(by_file(2))
    await engine.close()
    assert core.loaded == [(71, 1), (2, 2)]
    assert core.num_starts == 0


class BusyCore(LonelyCore):
    """Its one sequence ends when it may."""

    def __init__(self):
        super().__init__()
        self.runs, self.may_end = asyncio.Event(), asyncio.Event()

    async def generate(self, request_id, token_ids, **_):
        self.runs.set()
        await self.may_end.wait()
        yield CoreOutput([1], [0.0], FinishReason.LENGTH, (WeightSpan(0, 0, 1),))


async def test_a_group_that_is_joined_while_a_swap_drains_serves_no_version_of_the_group_before():
    core = BusyCore()
    engine = make_engine(core, kv="drain")
    await engine.open()
    await engine.join(group(7), 1)
    sequence = asyncio.create_task(anext(engine.generate(REQUEST)))
    await core.runs.wait()
    swap = asyncio.create_task(engine.swap(broadcast(1, 1)))
    await asyncio.sleep(0)  # it drains
    await engine.join(group(8), 1)
    core.may_end.set()
    with pytest.raises(SwapError, match="version 1 is broadcast to group 7, the engine is in 8"):
        await swap
    await sequence
    assert (engine.group, core.loaded) == (8, [])
    await engine.swap(broadcast(2, 1, 8))
    await engine.close()
    assert core.loaded == [(81, 2)]
    assert core.num_starts == 0


async def test_a_full_cache_lowers_the_limit_once_per_report_of_the_core_and_so_not_again_in_a_pause(monkeypatch):
    seconds, limits = iter(range(0, 1000, 10)), []
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    core = BusyCore()
    engine = VLLMEngine(core, Staged(), slots=10, max_len=8, vocab_size=8, eos_token_ids=())
    await engine.open()
    requests = [replace(REQUEST, request_id=f"r{i}") for i in range(10)]
    sequences = [asyncio.create_task(anext(engine.generate(request))) for request in requests]
    await core.runs.wait()
    engine.set_paused(True)
    for core.load.num_steps in (1, 1, 1, 2):
        core.load.kv_usage = 0.99
        limits.append(engine.stats().slots)
    assert limits == [8, 8, 8, 6]
    engine.set_paused(False)
    core.may_end.set()
    await asyncio.gather(*sequences)
    await engine.close()
