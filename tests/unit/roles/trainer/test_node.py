"""When the ranks on another host wait for the next start of rank 0, and when they end."""

import threading
from types import SimpleNamespace

import pytest

from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.roles.runtime.monitor import RoleMonitor
from pipelinerl_core.roles.trainer import node
from pipelinerl_core.roles.trainer.node import run_node
from pipelinerl_core.roles.trainer.rendezvous import announce_rendezvous
from pipelinerl_core.run import hub_status
from pipelinerl_core.run.drain import ask_to_drain
from pipelinerl_core.run.records import HUB_KEY, RendezvousRecord, commit_key
from tests.builders import hub_record
from tests.fakes import MemoryStore
from tests.synthetic_run import put_record

STEPS = 3


class World:
    """A run whose time passes while the node waits; `turns` says what else happens at which second."""

    def __init__(self, monkeypatch):
        self.store = MemoryStore()
        self.stop = threading.Event()
        self.joined = []
        """Epochs of rank 0 that the node has joined."""
        self.lets_go = {}
        """Epoch -> whether rank 0 told the ranks to end; more may happen in the call."""
        self.seconds = 0
        self.turns = {}
        self.hub_beats = True
        self.stop.wait = self.wait
        monkeypatch.setattr(node, "run_ranks", self.run_ranks)
        clock = SimpleNamespace(monotonic=lambda: float(self.seconds), sleep=self.wait)
        monkeypatch.setattr(hub_status, "time", clock)

    def wait(self, seconds):
        self.seconds += 1
        self.turns.get(self.seconds, lambda: None)()
        if self.hub_beats:
            self.beat()
        assert self.seconds < 1000, "the node has waited for ever"
        return self.stop.is_set()

    def run_ranks(self, context, meeting, *others):
        self.joined.append(meeting.epoch)
        return self.lets_go[meeting.epoch]()

    def beat(self):
        hub = hub_record(beat=self.seconds + 5e8)
        put_record(self.store, HUB_KEY, hub)

    def meet(self, epoch, lets_go):
        """Rank 0 starts; `lets_go` is its life."""
        self.lets_go[epoch] = lets_go
        announce_rendezvous(
            self.store, RendezvousRecord(epoch=epoch, where="tcp:h:1", size=2, per_node=1, device="cpu", seconds=1.0)
        )

    def drain(self):
        ask_to_drain(self.store, by="this test")

    def commit(self, step):
        self.store.put(commit_key(step, 1), b"")

    def run(self):
        config = load_config("quickstart", [f"trainer.steps={STEPS}"])
        context = SimpleNamespace(store=self.store, config=config)
        run_node(context, 1, self.stop, RoleMonitor("trainer", "trainer-node-1"))
        return self.joined


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


def test_a_node_leaves_with_rank_0_when_the_run_is_over(world):
    world.meet(1, lambda: world.commit(STEPS) or True)
    assert world.run() == [1]
    assert world.seconds == 0


def test_a_drain_after_rank_0_was_stopped_does_not_end_the_ranks(world):
    world.meet(1, lambda: True)  # stopped by somebody, and started again
    world.turns = {5: world.drain, 9: lambda: world.meet(4, lambda: True)}
    assert world.run() == [1, 4]


def test_a_rank_0_that_fails_after_the_last_commit_finds_its_ranks_again(world):
    world.meet(1, lambda: world.commit(STEPS))
    world.turns = {300: lambda: world.meet(4, lambda: True)}
    assert world.run() == [1, 4]


@pytest.mark.parametrize("is_over", ["drain", "commit"])
def test_a_node_that_comes_after_rank_0_has_left_for_good_leaves_too(world, is_over):
    if is_over == "drain":
        world.drain()
    else:
        world.commit(STEPS)
    world.meet(1, lambda: False)  # nobody is there any more

    def end_of_the_hub():
        world.hub_beats = False

    world.turns = {50: end_of_the_hub}
    assert world.run() == [1]
    assert 50 + 120 <= world.seconds < 50 + 125


def test_a_node_waits_without_a_hub_while_there_is_work(world):
    world.hub_beats = False
    world.turns = {400: lambda: world.meet(1, lambda: world.commit(STEPS) or True)}
    assert world.run() == [1]
