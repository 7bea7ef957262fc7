"""An actor whose hub and engine are scripted."""

import asyncio
from types import SimpleNamespace

from pipelinerl_core.errors import SwapError
from pipelinerl_core.messages import Ack
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.roles.actor.loop import Actor, ActorParts
from pipelinerl_core.rollouts.player import SingleTurns
from pipelinerl_core.types import SwapReport
from tests.fakes import MemoryStore


class Link:
    """Answers every request; remembers what was asked for in one visit of a thread."""

    boot_id = "boot"
    registered = None
    on_sync_now = None

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


NO_PLAYERS = {"": SingleTurns(None, None, None, load_config("quickstart"))}
"""For actors that work on no lease."""


def actor(link, engine=None):
    subscriber = SimpleNamespace(fetch=lambda manifest: SimpleNamespace(version=manifest.version))
    parts = ActorParts(engine=engine, players=NO_PLAYERS, subscriber=subscriber, segments=None, store=MemoryStore())
    return Actor(load_config("quickstart"), parts, run_id="run", name="a", epoch=1, link=lambda registration: link)


async def turns(number=50):
    for _ in range(number):
        await asyncio.sleep(0.002)
