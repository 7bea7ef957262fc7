"""A whole run: hub, actors, trainer and a supervisor that starts each of them again."""

import contextlib
import io
import traceback
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from pipelinerl_core.config import RunConfig
from pipelinerl_core.data.segments import SegmentWriter
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.roles.actor import loop as actor_loop
from pipelinerl_core.roles.actor import main as actor_main
from pipelinerl_core.roles.actor.loop import Actor, ActorParts
from pipelinerl_core.roles.hub import main as hub_main
from pipelinerl_core.roles.runtime import hub_link
from pipelinerl_core.roles.runtime.hub_link import HubLink
from pipelinerl_core.roles.runtime.process import exit_codes
from pipelinerl_core.roles.trainer import main as trainer_main
from pipelinerl_core.rollouts.player import SingleTurns, TextCodec
from pipelinerl_core.run import hub_status
from pipelinerl_core.run.context import RunContext
from pipelinerl_core.run.history import is_complete
from pipelinerl_core.run.records import RUN_KEY
from pipelinerl_core.tools.audit import Audit
from pipelinerl_core.weights.subscribe import WeightSubscriber
from tests.builders import run_record, small_config
from tests.simulation.faults import plan
from tests.simulation.network import NETWORK, SimulatedClient, SimulatedServer
from tests.simulation.parts import ScriptedEngine, ScriptedLearner, ScriptedScorer
from tests.simulation.primitives import Event, Loop, Time, installed, process, running
from tests.simulation.store import Disk, PlainStore, SimulatedStore
from tests.simulation.world import Process, World

_PROCESS = SimpleNamespace(create_time=lambda: 0.0, memory_info=lambda: SimpleNamespace(rss=0))
PSUTIL = SimpleNamespace(Process=lambda: _PROCESS)
CODEC = TextCodec(encode=lambda prompt: np.array([5, 6, 7], np.int32), decode=lambda ids: "x" * int(ids.sum() % 7))


class Simulation:
    """The processes and the store of one run."""

    def __init__(self, world: World, config: RunConfig, num_actors: int = 1) -> None:
        self.world, self.config = world, config
        self.disk = Disk(world)
        record = run_record(config)
        self.record = record
        self.disk.objects[RUN_KEY] = record.model_dump_json().encode()
        self.processes: dict[str, Process] = {}
        self.pids: dict[int, Process] = {}
        self.names = ["hub", "trainer", *(f"actor-{index}" for index in range(num_actors))]
        self.ended: set[str] = set()
        self.errors: list[str] = []
        self.trace: list[str] = []
        NETWORK.servers.clear()
        for name in self.names:
            self.start(name)

    def context(self, own: Process) -> RunContext:
        store: ObjectStore = SimulatedStore(self.disk, own)
        return RunContext(store=store, record=self.record, config=self.config, token="token")

    def note(self, text: str) -> None:
        """A line of the trace."""
        self.trace.append(f"{self.world.now:.3f} {text}")

    def start(self, name: str, host: str = "host") -> None:
        own = Process(self.world, name, host, 1000 + len(self.pids))
        self.processes[name] = self.pids[own.pid] = own
        own.on_end.append(self._ended)
        role = {"hub": self._hub, "trainer": self._trainer}.get(name, self._actor)
        own.start(lambda: self._guarded(lambda: role(own)))

    def _guarded(self, body: Callable[[], None]) -> int:
        try:
            return exit_codes(lambda: body() or 0)()
        except Exception as error:  # noqa: BLE001 - a traceback and exit code 1
            self.errors.append("".join(traceback.format_exception(error)))
            return 1

    def _ended(self, own: Process) -> None:
        self.note(f"{own.name} ({own.pid}) ends: {own.code}")
        if self.processes[own.name] is not own:
            return
        if own.code == 0:
            self.ended.add(own.name)
        elif own.code in (2, 5, 6):
            self.errors.append(f"{own.name}: exit code {own.code}")
            self.ended.add(own.name)
        else:
            self.world.at(self.world.now + 0.5, lambda: self.start(own.name))

    # ---- roles -----------------------------------------------------------------------------------------------

    def _hub(self, own: Process) -> None:
        hub_main.HubProcess(self.context(own)).run(Event())

    def _trainer(self, own: Process) -> None:
        from pipelinerl_core.roles.runtime.monitor import RoleMonitor

        context = self.context(own)
        trainer_main.train(context, Event(), RoleMonitor("trainer", "trainer", "run"))

    def _actor(self, own: Process) -> None:
        context, name = self.context(own), own.name

        async def run() -> None:
            epoch = actor_main.next_epoch(context.store, name)
            engine = ScriptedEngine(self.config.engine.concurrency)
            segments = SegmentWriter(
                context.store, actor=name, epoch=epoch, run_id="run", max_seconds=self.config.store.segment_seconds,
                max_bytes=self.config.store.segment_bytes, clock=Time.monotonic,
            )  # fmt: skip
            parts = ActorParts(
                engine=engine, players={"": SingleTurns(engine, ScriptedScorer(), CODEC, self.config)},
                subscriber=WeightSubscriber(context.store), segments=segments, store=context.store,
            )  # fmt: skip

            def link(registration: Any) -> HubLink:
                return HubLink(context.store, token="token", role="actor", name=name, registration=registration,
                               is_over=lambda: is_complete(context.store, self.config.trainer.steps))  # fmt: skip

            await Actor(self.config, parts, run_id="run", name=name, epoch=epoch, link=link).run(Event())

        loop = Loop()
        loop.run_until_complete(run())

    @property
    def is_finished(self) -> bool:
        return self.ended >= set(self.names)


@contextlib.contextmanager
def replaced_machinery(simulation: Callable[[], Simulation]) -> Iterator[None]:
    """Flight, processes and torch replaced by simulated parts."""

    @contextlib.contextmanager
    def learners(*_: Any) -> Iterator[Any]:
        yield mock.Mock(build=lambda config: ScriptedLearner())

    def mark(pid: int) -> str:
        own = simulation().pids.get(pid)
        return f"boot/{pid}" if own is not None and own.is_alive else ""

    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (hub_main, "HubServer", SimulatedServer), (hub_main, "own_descriptors", lambda: None),
            (hub_link, "HubClient", SimulatedClient), (hub_status, "process_mark", mark),
            (hub_main, "give_back_freed_memory", lambda: None),
            (trainer_main, "open_learners", learners), (trainer_main, "freeze_startup_objects", lambda: None),
            (trainer_main, "token_digests", lambda config: {}),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(target, name, value))
        from pipelinerl_core.roles.hub import heartbeat

        stack.enter_context(mock.patch.object(heartbeat, "process_mark", mark))
        stack.enter_context(mock.patch.object(heartbeat, "os", SimpleNamespace(getpid=lambda: process().pid)))
        stack.enter_context(mock.patch.object(heartbeat, "psutil", PSUTIL))
        stack.enter_context(mock.patch.object(hub_main, "psutil", PSUTIL))
        stack.enter_context(mock.patch.object(actor_loop, "psutil", PSUTIL))
        yield


def simulate(seed: int, steps: int = 20, num_faults: int = 0) -> Simulation:
    """A run of `steps` steps with faults."""
    config = small_config(
        trainer={"steps": steps, "rescore_share": 0.0}, weights={"transport": "object_store"},
        rollouts={"max_tokens": 16, "group_size": 2}, checkpoint={"every_seconds": 0.5}, eval={"num_prompts": 0},
        engine={"concurrency": 8}, schedule={"max_lag": 2},
    )  # fmt: skip
    own, box = World(seed), []
    NETWORK.loses = 0.0
    with installed(), replaced_machinery(lambda: box[0]), running(own):
        simulation = Simulation(own, config, 2)
        box.append(simulation)
        plan(simulation, num_faults, until=0.15 * steps + 0.3 * num_faults)
        try:
            own.run(lambda: simulation.is_finished, until=900.0)
            paused = max(process.paused_until for process in simulation.pids.values())
            own.run(lambda: simulation.is_finished, until=paused + 900.0)
        except BaseException as error:  # noqa: BLE001 - a finding, with its trace
            simulation.errors.append("".join(traceback.format_exception(error)))
    if not simulation.is_finished:
        simulation.errors.append(f"not finished at {own.now}: {simulation.ended}")
    audit = Audit(PlainStore(simulation.disk), config).run().document
    simulation.audit = audit
    if not audit["closes"] or audit["lost"] or audit["trained_twice"] or audit["commits"] != steps + 1:
        simulation.errors.append(f"audit: {audit}")
    return simulation


def errors_of(seed: int, steps: int, num_faults: int) -> list[str]:
    """What is wrong with a run; its roles print nothing."""
    with contextlib.redirect_stderr(io.StringIO()):
        return simulate(seed, steps, num_faults).errors
