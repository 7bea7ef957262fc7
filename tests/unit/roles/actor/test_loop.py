"""What the actor's loops do between the engine and the hub, without either."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from pipelinerl_core.config import load_config
from pipelinerl_core.errors import SwapError
from pipelinerl_core.messages import Ack
from pipelinerl_core.roles.actor.finished_group import FinishedGroup
from pipelinerl_core.roles.actor.loop import Actor, ActorParts
from pipelinerl_core.testing.fakes import MemoryStore
from pipelinerl_core.types import SwapReport
from tests.builders import group_named, weight_manifest


class Link:
    """Answers every request; remembers what was asked for in one visit of a thread."""

    boot_id = "boot"
    registered = None
    on_nudge = None

    def __init__(self):
        self.groups = []

    def request(self, message, rows=None):
        self.groups.append(message.ref.group_id)
        return Ack(re=0)

    def request_all(self, messages):
        return [self.request(message, rows) for message, rows in messages]


class Engine:
    """Refuses the first `failures` swaps."""

    def __init__(self, failures):
        self.weight_version = 0
        self.failures = failures
        self.num_swaps = 0

    def stats(self):
        return SimpleNamespace(num_tokens=0)

    async def swap(self, update):
        self.num_swaps += 1
        if self.num_swaps <= self.failures:
            raise SwapError("vLLM starts again")
        self.weight_version = update.version
        return SwapReport(version=update.version, pause_seconds=0.0, num_bytes=0, num_running=0)


def actor(link, engine=None):
    subscriber = SimpleNamespace(fetch=lambda manifest: SimpleNamespace(version=manifest.version))
    parts = ActorParts(
        engine=engine, scorer=None, codec=None, subscriber=subscriber, segments=None, store=MemoryStore()
    )
    return Actor(load_config("quickstart"), parts, run_id="run", name="a", epoch=1, link=lambda registration: link)


def group(group_id):
    ref = group_named(group_id, num_rollouts=8, num_tokens=80)
    return FinishedGroup(ref, f"lease-{group_id}", rows=None)


async def turns(number=50):
    for _ in range(number):
        await asyncio.sleep(0.002)


@pytest.mark.parametrize(("credit", "first"), [(10, [0, 1, 2, 3, 4]), (3, [0, 1, 2])])
def test_groups_that_are_finished_leave_together_as_far_as_credit_goes(credit, first, monkeypatch):
    visits = []

    async def main():
        link = Link()
        one = actor(link)
        send = one._send
        monkeypatch.setattr(
            one, "_send", lambda groups: visits.append([g.ref.group_id for g in groups]) or send(groups)
        )
        for group_id in range(5):
            one._unsent.put_nowait(group(group_id))
        loop = asyncio.create_task(one._send_loop())
        await turns()
        assert visits == []  # without credit nothing leaves
        one._credit = credit
        one._credit_granted.set()
        end = time.monotonic() + 60
        while len(link.groups) < len(first) and time.monotonic() < end:
            await turns(1)
        await turns()
        loop.cancel()
        return link.groups

    # A thread per group would let each wait for a turn of the loop, which lasts as long as a decode step.
    assert asyncio.run(main()) == first
    assert visits == [first]


@pytest.mark.parametrize(("failures", "is_given_up"), [(0, False), (2, False), (3, True)])
def test_a_swap_that_fails_is_tried_again_and_given_up_after_the_third_time(failures, is_given_up):
    async def main():
        engine = Engine(failures)
        one = actor(Link(), engine)
        loop = asyncio.create_task(one._swap_loop())
        for _ in range(5):  # the hub offers the newest version with every sync
            tried, end = engine.num_swaps, time.monotonic() + 60
            one._newest = weight_manifest(7)
            one._newer.set()
            while engine.num_swaps == tried and engine.weight_version != 7 and not loop.done():
                assert time.monotonic() < end
                await turns(1)
            await turns(10)
        if is_given_up:
            with pytest.raises(SwapError, match="starts again"):
                await loop
        loop.cancel()
        return engine.weight_version, len(one._swaps)

    assert asyncio.run(main()) == ((0, 0) if is_given_up else (7, 1))
