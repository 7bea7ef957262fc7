"""A whole run: hub, actors, trainer and a supervisor that starts each of them again."""

import contextlib
import dataclasses
import hashlib
import io
import logging
import random
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pyarrow as pa

from pipelinerl_core.channel import connection, dispatcher, server
from pipelinerl_core.config import RunConfig
from pipelinerl_core.data import codec
from pipelinerl_core.data.segments import SegmentWriter
from pipelinerl_core.errors import (
    DeadlineExceeded,
    EngineError,
    Expelled,
    Fenced,
    HubUnavailable,
    ParityError,
    PipelineRLError,
    StoreUnavailable,
)
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.roles.actor import loop as actor_loop
from pipelinerl_core.roles.actor import main as actor_main
from pipelinerl_core.roles.actor.evaluating import ActorEvaluation
from pipelinerl_core.roles.actor.loop import Actor, ActorParts
from pipelinerl_core.roles.evaluator import main as evaluator_main
from pipelinerl_core.roles.hub import main as hub_main
from pipelinerl_core.roles.hub import rows as hub_rows
from pipelinerl_core.roles.hub import service
from pipelinerl_core.roles.runtime import evaluation, hub_link, monitor
from pipelinerl_core.roles.runtime.hub_link import HubLink
from pipelinerl_core.roles.runtime.process import exit_codes
from pipelinerl_core.roles.runtime.task import Task
from pipelinerl_core.roles.trainer import main as trainer_main
from pipelinerl_core.roles.trainer import retrain
from pipelinerl_core.rollouts.player import SingleTurns, TextCodec
from pipelinerl_core.run import compaction, history, hub_status
from pipelinerl_core.run.context import RunContext
from pipelinerl_core.run.evaluations import SCHEDULED
from pipelinerl_core.run.history import is_complete, read_epochs
from pipelinerl_core.run.records import CONTROL_KEY, RUN_KEY
from pipelinerl_core.supervision.run_roles import is_over
from pipelinerl_core.telemetry.metrics import METRICS
from pipelinerl_core.tools.gc import collect
from pipelinerl_core.weights.subscribe import WeightSubscriber
from tests.builders import run_record, small_config
from tests.simulation import preemption
from tests.simulation.faults import plan, schedule
from tests.simulation.network import NETWORK, SimulatedFlight, hub_client, open_exchange
from tests.simulation.oracle import check, weights_of
from tests.simulation.parts import ScriptedEngine, ScriptedLearner, ScriptedScorer, text_of
from tests.simulation.primitives import Event, Loop, Time, installed, process, running
from tests.simulation.store import Disk, PlainStore, SimulatedStore
from tests.simulation.world import Process, World

_PROCESS = SimpleNamespace(create_time=lambda: 0.0, memory_info=lambda: SimpleNamespace(rss=0))
PSUTIL = SimpleNamespace(Process=lambda: _PROCESS)
CODEC = TextCodec(encode=lambda prompt: np.array([5, 6, 7], np.int32), decode=text_of)


# The flow stops the roles this long after the trainer has ended; by then the hub has ended by itself.
_END_SECONDS = 8.0
# Between the request to stop and SIGKILL.
_STOP_SECONDS = 5.0


class Settings(NamedTuple):
    """What a seed chooses, beside the faults."""

    config: RunConfig
    num_actors: int
    sync_seconds: float
    """Between two syncs of an actor."""
    step_seconds: float
    """Mean time of an optimizer step."""
    file_steps: int
    """Steps of a compacted object."""
    group_bytes: int
    """Memory of the hub for a group, beside its values."""
    diverges: bool
    """The loss of some steps is not finite."""
    has_errors: bool
    """Some texts have no reward."""
    has_processors: bool
    """Other hosts have another processor, which makes other weights of the same rows."""
    is_preemptive: bool
    """Threads are interrupted between statements, too."""
    first_steps: int
    """Steps of the first start; then `pipelinerl resume` with more steps."""

    @property
    def most_bytes(self) -> int:
        """In the memory of the hub: three times its limit, and groups that actors begin before they must wait."""
        own = self.config
        num_groups = self.num_actors * -(-own.engine.concurrency // own.rollouts.group_size)
        return 3 * own.placement.hub_bytes + num_groups * self.group_bytes

    @property
    def plain(self) -> "Settings":
        """With one actor, and nothing that changes what is stored: without lag the trained rows are the same."""
        config = self.config
        changed = {
            "eval": config.eval.model_copy(update={"num_prompts": 0}),
            "weights": config.weights.model_copy(update={"keep": 0, "durable_every": 1}),
            "checkpoint": config.checkpoint.model_copy(update={"every_seconds": 100.0}),
            "store": config.store.model_copy(update={"partial_log": False, "keep_rows": 0}),
        }
        config = config.model_copy(update=changed)
        return self._replace(config=config, num_actors=1, step_seconds=0.05, first_steps=config.trainer.steps)

    @property
    def first_config(self) -> RunConfig:
        """The configuration of the first start."""
        trainer = self.config.trainer.model_copy(update={"steps": self.first_steps})
        return self.config.model_copy(update={"trainer": trainer})


class NoMetrics:
    """Replaces RoleMetrics and stores nothing. Its methods raise KeyError for an unknown metric."""

    def __init__(self, *_: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda metric, *_, **__: METRICS[metric]


class Simulation:
    """The processes and the store of one run, and its flow: it starts roles again, stops and resumes them."""

    def __init__(self, world: World, settings: Settings) -> None:
        self.world, self.settings, self.config = world, settings, settings.first_config
        config = self.config
        self.disk = Disk(world)
        record = run_record(config)
        self.record = record
        self.whole = RunContext(store=PlainStore(self.disk), record=record, config=config, token="token")
        """The run as a store without faults answers."""
        self.disk.objects[RUN_KEY] = record.model_dump_json().encode()
        self.processes: dict[str, Process] = {}
        """Name of a role -> its newest process."""
        self.pids: dict[int, Process] = {}
        self.names = ["hub", "trainer", *(f"actor-{index}" for index in range(settings.num_actors))]
        self.evaluates_on = config.eval.on if config.eval.num_prompts else ""
        if self.evaluates_on == "own":
            self.names.append("evaluator")
        self.ended: set[str] = set()
        self.gone: set[str] = set()
        """Actors whose machine is gone for good."""
        self.is_stopping = False
        self.has_foreign_engine = False
        self.has_lost_commits = False
        self.errors: list[str] = []
        self.reached: Counter[str] = Counter()
        """What the run has done -> how often."""
        self.trace: list[str] = []
        for name in self.names:
            self.start(name)

    @property
    def digest(self) -> str:
        """Of the store, the time and the choices at the end: a run with the same digest is the same run."""
        state = f"{self.world.now} {self.world.rng.random()}".encode()
        objects = (name.encode() + value for name, value in sorted(self.disk.objects.items()))
        return hashlib.sha256(b"".join([state, *objects])).hexdigest()[:12]

    def scorer(self) -> ScriptedScorer:
        return ScriptedScorer(fails=self.settings.has_errors)

    def learner(self) -> ScriptedLearner:
        own = self.settings
        return ScriptedLearner(own.config.model.dtype, step_seconds=own.step_seconds, diverges=own.diverges,
                               processor=self.processor())  # fmt: skip

    def processor(self) -> str:
        """Of the host of the running process."""
        return "other" if self.settings.has_processors and process().host != "host" else ""

    def context(self, own: Process) -> RunContext:
        store: ObjectStore = SimulatedStore(self.disk, own)
        return RunContext(store=store, record=self.record, config=self.config, token="token")

    def note(self, text: str) -> None:
        """A line of the trace."""
        self.trace.append(f"{self.world.now:.3f} {text}")

    def start(self, name: str, host: str = "host") -> None:
        """Start a role; its process is the one that is started again if it fails."""
        roles = {"hub": self._hub, "trainer": self._trainer, "evaluator": self._evaluator}
        role = roles.get(name, self._actor)
        own = self._process(name, host, role)
        self.processes[name] = own
        if self.is_stopping:
            own.stop.set()

    def command(self, name: str, body: Callable[[SimulatedStore], None]) -> None:
        """Start a command of a user."""
        self._process(name, "host", lambda own: body(SimulatedStore(self.disk, own)))

    def _process(self, name: str, host: str, body: Callable[[Process], None]) -> Process:
        own = Process(self.world, name, host, 1000 + len(self.pids))
        self.pids[own.pid] = own
        own.stop = Event()
        own.on_end.append(self._ended)
        own.start(lambda: self._guarded(own, lambda: body(own)))
        return own

    def _guarded(self, own: Process, body: Callable[[], None]) -> int:
        try:
            return exit_codes(lambda: self._noted(own, body))()
        except Exception as error:  # noqa: BLE001 - a traceback and exit code 1
            self.errors.append("".join(traceback.format_exception(error)))
            return 1

    def _noted(self, own: Process, body: Callable[[], None]) -> int:
        """Run a role; an error that no fault explains is a finding, although the role starts again after it."""
        try:
            body()
        except* (StoreUnavailable, Fenced, DeadlineExceeded, HubUnavailable):  # the last two after a pause of an hour
            raise
        except* EngineError as group:
            self.errors += [repr(error) for error in group.exceptions if not own.has_bad_engine]
            raise
        except* Expelled as group:
            self.errors += [repr(error) for error in group.exceptions if not own.engine_is_foreign]
            raise
        except* ParityError as group:  # all other actors are dead or paused
            self.errors += [repr(error) for error in group.exceptions if not self.has_foreign_engine]
            raise
        except* PipelineRLError as group:
            # The class itself: another hub is live.
            self.errors += [repr(error) for error in group.exceptions if type(error) is not PipelineRLError]
            raise
        return 0

    def _ended(self, own: Process) -> None:
        self.note(f"{own.name} ({own.pid}) ends: {own.code}")
        if self.processes.get(own.name) is not own:
            return
        is_expelled = own.code == 6 and own.engine_is_foreign
        is_final = own.code in (2, 5, 6) and not (own.code == 2 and self.has_foreign_engine)
        if is_final and not is_expelled:
            self.errors.append(f"{own.name}: exit code {own.code}")
        is_gone = own.name in self.gone
        if is_final or is_gone or self.is_stopping or (own.code == 0 and self.is_over):
            self.ended.add(own.name)
        else:
            self.world.at(self.world.now + 0.5, lambda: self._start_again(own))
        if own.name == "trainer" and own.code == 0 and self.is_over:
            self.world.at(self.world.now + (0.5 if self.must_resume else _END_SECONDS), self._stop)
        self.world.is_finished = self.is_finished

    def _start_again(self, ended: Process) -> None:
        if self.processes[ended.name] is ended:  # otherwise a fault has started the role
            self.start(ended.name, ended.host)

    def _stop(self) -> None:
        """The trainer has ended: stop all processes, wherever they run, and resume a run that was drained."""
        if self.is_stopping or "trainer" not in self.ended:
            return
        self.is_stopping = True
        others = [other for other in self.pids.values() if other.is_alive]
        for other in others:
            other.stop.set()

        def end() -> None:
            for other in others:
                other.kill()
            self.ended, self.is_stopping = set(self.names), False
            if self.must_resume:
                self._resume()
            self.world.is_finished = self.is_finished

        self.world.at(self.world.now + _STOP_SECONDS, end)

    def _resume(self) -> None:
        self.note("the run is resumed")
        self.disk.objects.pop(CONTROL_KEY, None)
        self.ended = set(self.gone)
        earlier, host = self.config, self.world.rng.choice(["host", "host-1"])

        def start() -> None:
            for name in self.names:
                if name not in self.gone:
                    self.start(name, host)

        def collect_first(store: SimulatedStore) -> None:
            try:
                collect(store, earlier, with_rollouts=True, dry_run=False, now=True)
            finally:
                self.world.at(self.world.now, start)

        if not is_complete(self.whole.store, earlier.trainer.steps):
            start()
            return
        is_collected = self.world.rng.random() < 0.5
        if is_collected:
            self.note("gc --rollouts")
            self.note_collection(with_rollouts=True)
        self.config = self.settings.config
        self.whole = dataclasses.replace(self.whole, config=self.config)
        if is_collected:
            self.command("gc", collect_first)
        else:
            start()

    def note_collection(self, *, with_rollouts: bool) -> None:
        """Tell the oracle of a gc that begins."""
        self.disk.collects_segments |= with_rollouts
        self.disk.collects_undecided |= with_rollouts and is_complete(self.whole.store, self.config.trainer.steps)

    # ---- roles -----------------------------------------------------------------------------------------------

    def _hub(self, own: Process) -> None:
        hub_main.HubProcess(self.context(own)).run(own.stop)

    def _trainer(self, own: Process) -> None:
        context = self.context(own)
        trainer_main.train(context, own.stop, monitor.RoleMonitor("trainer", "trainer", "run"))

    def _actor(self, own: Process) -> None:
        context, name = self.context(own), own.name

        async def run() -> None:
            epoch = actor_main.take_life(context.store, name)
            engine = ScriptedEngine(
                self.config.engine.concurrency, lambda number: NETWORK.sampled.update({(name, epoch): number})
            )
            segments = SegmentWriter(
                context.store, actor=name, epoch=epoch, run_id="run", max_seconds=self.config.store.segment_seconds,
                max_bytes=self.config.store.segment_bytes, clock=Time.monotonic,
            )  # fmt: skip
            parts = ActorParts(
                engine=engine, players={"": SingleTurns(engine, self.scorer(), CODEC, self.config)},
                subscriber=WeightSubscriber(context.store), segments=segments, store=context.store,
                evaluation=ActorEvaluation(context, engine) if self.evaluates_on == "actors" else None,
            )  # fmt: skip

            def link(registration: Any) -> HubLink:
                return HubLink(context.store, token="token", role="actor", name=name, registration=registration,
                               is_over=lambda: is_complete(context.store, self.config.trainer.steps))  # fmt: skip

            await Actor(self.config, parts, run_id="run", name=name, epoch=epoch, link=link).run(own.stop)

        Loop().run_until_complete(run())

    def _evaluator(self, own: Process) -> None:
        beside = monitor.RoleMonitor("evaluator", "evaluator", "run")
        Loop().run_until_complete(evaluator_main.run(self.context(own), SCHEDULED, None, beside))

    @property
    def must_resume(self) -> bool:
        """Whether a drain was requested before the last step was committed, the user wants more steps, or a trainer
        on another host, whose flow would start it again, has failed between its claim and its adoption of the last
        steps."""
        is_first = self.config.trainer.steps < self.settings.config.trainer.steps
        is_drained = CONTROL_KEY in self.disk.objects
        trainers = [record for record in read_epochs(self.whole.store) if record.role == "trainer"]
        is_claimed = bool(trainers) and trainers[-1].is_claim
        return (is_drained or is_first or is_claimed) and not is_complete(
            self.whole.store, self.settings.config.trainer.steps
        )

    @property
    def is_over(self) -> bool:
        """Whether a role that ends with code 0 has finished its work; otherwise it is started again."""
        return is_over(self.whole)

    @property
    def is_finished(self) -> bool:
        return len(self.ended) == len(self.names) and not self.is_stopping and not self.must_resume


@contextlib.contextmanager
def replaced_machinery(simulation: Callable[[], Simulation], settings: Settings) -> Iterator[None]:
    """Flight, processes and torch replaced by simulated parts."""

    @contextlib.contextmanager
    def learners(*_: Any) -> Iterator[Any]:
        yield mock.Mock(build=lambda config: simulation().learner())

    def task(config: RunConfig, code: str | None) -> Task:
        return Task(config=config, codec=CODEC, scorer=simulation().scorer())

    async def engine(config: RunConfig, **_: Any) -> ScriptedEngine:
        return ScriptedEngine(slots=4)

    def refusal(peer: Any, request: Any, error: Exception) -> Any:
        if not isinstance(error, PipelineRLError):
            simulation().errors.append("".join(traceback.format_exception(error)))
        return real_refusal(peer, request, error)

    def reraise(*_: Any) -> None:
        raise

    real_refusal = dispatcher._refusal

    def mark(pid: int) -> str:
        own = simulation().pids.get(pid)
        return f"boot/{pid}" if own is not None and own.is_alive else ""

    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (server, "_Flight", SimulatedFlight), (hub_main, "own_descriptors", lambda: None),
            (hub_link, "HubClient", hub_client), (hub_status, "process_mark", mark),
            (connection, "_open_exchange", open_exchange), (dispatcher, "_refusal", refusal),
            (connection, "_log", SimpleNamespace(exception=reraise, debug=lambda *_: None)),
            (history, "process_mark", mark), (history, "os", SimpleNamespace(getpid=lambda: process().pid)),
            (hub_main, "give_back_freed_memory", lambda: None),
            (trainer_main, "open_learners", learners), (trainer_main, "freeze_startup_objects", lambda: None),
            (trainer_main, "token_digests", lambda config: {}), (trainer_main, "check_parity", lambda *_: None),
            (history, "processor", lambda: simulation().processor()),
            (retrain, "processor", lambda: simulation().processor()), (evaluation, "build_task", task),
            (evaluator_main, "open_engine", engine),
            (service, "SYNC_SECONDS", settings.sync_seconds), (hub_rows, "GROUP_BYTES", settings.group_bytes),
            (compaction, "FILE_STEPS", settings.file_steps), (compaction, "MARGIN_STEPS", 3),
            (codec, "SEGMENT_OPTIONS", pa.ipc.IpcWriteOptions()),  # compression takes a quarter of the time
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(target, name, value))
        from pipelinerl_core.roles.hub import heartbeat

        stack.enter_context(mock.patch.object(monitor, "RoleMetrics", NoMetrics))
        stack.enter_context(mock.patch.object(heartbeat, "process_mark", mark))
        stack.enter_context(mock.patch.object(heartbeat, "os", SimpleNamespace(getpid=lambda: process().pid)))
        stack.enter_context(mock.patch.object(heartbeat, "psutil", PSUTIL))
        stack.enter_context(mock.patch.object(hub_main, "psutil", PSUTIL))
        stack.enter_context(mock.patch.object(actor_loop, "psutil", PSUTIL))
        yield


def settings_of(seed: int, steps: int) -> Settings:
    rng = random.Random(f"settings {seed}")
    max_lag, group_size, groups = rng.randint(0, 4), rng.randint(2, 4), rng.randint(1, 4)
    kind = rng.choice(["pipeline", "pipeline", "conventional", "april" if max_lag else "pipeline"])
    stale = rng.choice(["mask", "drop", "wait"] if kind == "pipeline" else ["mask", "drop"])
    phases = {"steps_per_phase": rng.randint(1, max_lag + 1)} if kind == "conventional" else {}
    other = random.Random(f"other settings {seed}")
    has_errors = other.random() < 0.3
    has_long_rollouts = other.random() < 0.5
    evaluations = {
        "num_prompts": other.choice([0, 2]), "every_steps": other.choice([3, 7]),
        "on": other.choice(["own", "actors"]),
    }  # fmt: skip
    weights = {
        "transport": "object_store", "keep": other.choice([0, 4, 20]), "durable_every": other.choice([1, 3]),
        "publish_every": other.randint(1, max_lag + 1) if kind == "pipeline" else 1,
    }  # fmt: skip
    config = small_config(
        trainer={"steps": steps, "rescore_share": other.choice([0.0, 0.0, 0.5]), "rescore_alarm": "expel",
                 "groups_per_step": groups},
        schedule={"kind": kind, "max_lag": max_lag, "stale": stale, **phases},
        model={"dtype": other.choice(["float32", "bfloat16"])}, weights=weights, eval=evaluations,
        rollouts={"max_tokens": rng.choice([16, 100, 400] if has_long_rollouts else [4, 16, 40]),
                  "group_size": group_size, "filter_zero_variance": other.random() < 0.3},
        placement={"lease_seconds": 10.0, "hub_bytes": 1 << 20, "hub_host": "10.0.0.1"},
        checkpoint={"every_seconds": rng.choice([0.2, 0.5, 3.0])},
        engine={"concurrency": group_size * rng.randint(1, groups * min(2, max_lag + 1))},
        store={"partial_log": rng.random() < 0.7, "partial_seconds": other.choice([0.1, 0.5, 5.0]),
               "keep_rows": other.choice([0, 0, 6]), "trainer_logprobs": other.random() < 0.3},
    )  # fmt: skip
    return Settings(
        config, num_actors=rng.randint(1, 3), sync_seconds=rng.choice([0.05, 0.2, 0.5]),
        step_seconds=other.choice([0.05, 0.1, 0.4, 1.5]), group_bytes=other.choice([32, 256]) << 10,
        diverges=other.random() < 0.3, has_errors=has_errors, has_processors=other.random() < 0.2,
        is_preemptive=other.random() < 0.5,
        first_steps=other.randint(1, steps) if other.random() < 0.3 else steps,
        file_steps=other.choice([3, 6]),
    )  # fmt: skip


class _Logs(logging.Handler):
    """The log lines of the roles, as lines of the trace."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._simulation = simulation

    def emit(self, record: logging.LogRecord) -> None:
        current = self._simulation.world.current
        name = current.process.name if current is not None else "-"
        with preemption.paused():  # the texts of objects are made here only
            self._simulation.note(f"{name}: {record.getMessage()}")


@contextlib.contextmanager
def logged(simulation: Simulation) -> Iterator[None]:
    """Inside, the trace has the log of every role."""
    handler, logger = _Logs(simulation), logging.getLogger("pipelinerl_core")
    level, logger.propagate = logger.level, False
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = True


@contextlib.contextmanager
def unlogged() -> Iterator[None]:
    """Inside, no text of a log line is made."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def simulate(
    seed: int, steps: int = 20, num_faults: int = 0, kept: Sequence[int] | None = None, *, has_logs: bool = False
) -> Simulation:
    """A run of `steps` steps with faults; kept: indices of the faults that happen, None for all."""
    settings = settings_of(seed, steps)
    simulation = simulated(settings, seed, num_faults, kept, has_logs=has_logs)
    simulation.reached += NETWORK.reached
    objects = simulation.disk.objects
    objects |= {key: data for key, data in simulation.disk.backup.items() if key in objects}
    simulation.errors += check(
        PlainStore(simulation.disk), settings.config, simulation.reached, has_processors=settings.has_processors
    )
    if any(line.endswith(" the run is resumed") for line in simulation.trace):  # then its newest version is evaluated
        del simulation.reached["an evaluation between the first and the last version"]
    is_fixed = not (settings.config.schedule.max_lag or settings.diverges or settings.has_processors)
    if is_fixed and num_faults and not simulation.errors:
        # Without lag the trained rows depend on the configuration only, unless a quarantine is forgotten in a crash.
        undisturbed = simulated(settings.plain, seed)
        simulation.errors += undisturbed.errors
        if weights_of(PlainStore(undisturbed.disk)) != weights_of(PlainStore(simulation.disk)):
            simulation.errors.append("the weights are not those of the run without faults")
    return simulation


def simulated(
    settings: Settings, seed: int, num_faults: int = 0, kept: Sequence[int] | None = None, *, has_logs: bool = False
) -> Simulation:
    """A run with these settings."""
    config = settings.config
    own, box = World(seed), []
    preemption.begin(seed, is_preemptive=settings.is_preemptive)
    NETWORK.begin()
    NETWORK.most_bytes = settings.most_bytes
    with (
        installed(), replaced_machinery(lambda: box[0], settings), running(own), contextlib.ExitStack() as logs
    ):  # fmt: skip
        simulation = Simulation(own, settings)
        box.append(simulation)
        until = config.trainer.steps * (0.1 + settings.step_seconds) + 0.3 * num_faults
        faults = plan(seed, num_faults, config.trainer.steps, until)
        schedule(simulation, faults if kept is None else [faults[index] for index in kept])
        try:
            logs.enter_context(logged(simulation) if has_logs else unlogged())
            own.run(until=900.0)
            paused = max(process.paused_until for process in simulation.pids.values())
            own.run(until=paused + 900.0)
        except BaseException as error:  # noqa: BLE001 - a finding, with its trace
            simulation.errors.append("".join(traceback.format_exception(error)))
    if not simulation.is_finished:
        simulation.errors.append(f"not finished at {own.now}: {simulation.ended}")
    return simulation


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, what roles print is left out."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield


def outcome_of(seed: int, steps: int, num_faults: int) -> tuple[list[str], "Counter[str]"]:
    """What is wrong with a run, and what it has done."""
    with quiet():
        try:
            run = simulate(seed, steps, num_faults)
        except Exception:  # noqa: BLE001 - of the oracle
            return [traceback.format_exc()], Counter()
        return run.errors, run.reached
