"""A role on a work pool, with a server that only remembers the states it is told.

Tests put fake members into the private table of RunRoles: its start would need deployments and a Prefect server.
"""

import json
import math
import socket
import subprocess
import sys
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import UTC, datetime
from functools import partial
from types import SimpleNamespace

import pytest
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Completed, Crashed, Failed, Running, Scheduled
from prefect.types.names import BlockDocumentName
from pydantic import TypeAdapter

from pipelinerl.flows.cli.deployment import SHIPPED
from pipelinerl.tasks import placement
from pipelinerl.tasks.placement import DeployedRole, LocalRole, RunRoles, secret_name
from pipelinerl_core.errors import ConfigError, DeadlineExceeded, Fenced, PipelineRLError, TrainingDiverged
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.run.context import open_run
from pipelinerl_core.run.evaluations import SCHEDULED
from pipelinerl_core.run.records import EpochRecord, eval_key
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.supervision import run_roles
from pipelinerl_core.supervision.fit import container_bytes
from pipelinerl_core.supervision.supervise import STABLE_SECONDS, RoleFailed
from tests.builders import epoch_record
from tests.fakes import MemoryStore
from tests.synthetic_run import Shape, write_run


class Server:
    """Flow runs by id, in order of their start."""

    def __init__(self) -> None:
        self.states: dict[uuid.UUID, State | None] = {}
        self.runs: list[FlowRun] = []
        self.is_away = False
        self.resumed_at = 0.0
        self.parameters: dict = {}
        self.started: list[tuple] = []
        """Deployment, parameters and job variables of each start."""
        self.keys: list[str] = []
        """Of each start, by which the server knows a request that is sent again."""
        self.template: dict = {}
        self.owners: dict[uuid.UUID, uuid.UUID] = {}

    def read_flow_runs(self, flow_run_filter, sort):
        states, tags = flow_run_filter.state.type.any_, flow_run_filter.tags.all_
        alive = [run for run in self.runs if self.states[run.id].type in states and set(tags) <= set(run.tags)]
        return alive[::-1]

    def read_deployment_by_name(self, name):
        return SimpleNamespace(work_pool_name=name.partition("/")[0])

    def read_work_pool(self, name):
        return SimpleNamespace(base_job_template=self.template)

    def run_deployment(self, deployment, parameters, **options) -> FlowRun:
        if self.is_away:
            raise ConnectionError("no server")
        self.started.append((deployment, parameters, options["job_variables"]))
        self.keys.append(options["idempotency_key"])
        run = FlowRun(flow_id=uuid.uuid4(), state=Running(), parameters=parameters, tags=options["tags"])
        self.runs.append(run)
        self.states[run.id] = run.state
        return run

    def read_flow_run(self, run_id):
        if self.states[run_id] is None:
            raise ObjectNotFound(Exception())
        return FlowRun(
            id=run_id, flow_id=uuid.uuid4(), state=self.states[run_id], parameters=self.parameters,
            parent_task_run_id=self.owners.get(run_id),
        )  # fmt: skip

    def read_task_run(self, task_run_id):
        if task_run_id not in self.states:
            raise ObjectNotFound(Exception())
        return SimpleNamespace(flow_run_id=task_run_id)  # a task for each flow run that starts others

    def set_flow_run_state(self, run_id, state, force=False):
        self.states[run_id] = state

    @property
    def newest(self) -> uuid.UUID:
        return list(self.states)[-1]


@pytest.fixture
def server(monkeypatch) -> Server:
    server = Server()
    monkeypatch.setattr(placement, "run_deployment", server.run_deployment)
    monkeypatch.setattr(placement, "get_client", lambda sync_client: nullcontext(server))
    monkeypatch.setattr(placement, "_POLL_DEPLOYMENT_SECONDS", 0.0)
    monkeypatch.setattr(placement, "last_resume_at", lambda store: server.resumed_at)
    return server


def member(max_restarts: int = 2) -> DeployedRole:
    return DeployedRole("actor/actor", {"run_url": "/runs/one", "name": "actor-0"}, "actor-0", max_restarts)


def test_a_crashed_flow_run_is_replaced_until_the_restarts_in_a_row_are_used_up(server):
    actor = member(max_restarts=2)
    for num_runs in (1, 2):
        assert len(server.states) == num_runs
        server.states[server.newest] = Crashed()
        assert not actor.has_ended()
        actor.check()
    server.states[server.newest] = Crashed(message="exit code -9")
    assert actor.has_ended()
    with pytest.raises(RoleFailed, match=r"exit code -9, after 2 restarts \(placement.max_restarts=2\)"):
        actor.check()
    assert len(server.states) == 3
    assert len({*server.keys}) == 3


def test_a_long_life_starts_the_count_again(server, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(placement.time, "monotonic", lambda: now[0])
    actor = member(max_restarts=1)
    for num_runs in range(2, 6):
        now[0] += STABLE_SECONDS
        server.states[server.newest] = Crashed()
        assert not actor.has_ended()
        assert len(server.states) == num_runs
    server.states[server.newest] = Crashed()
    now[0] += 1
    assert actor.has_ended()


@pytest.mark.parametrize("state", [Cancelled(), Completed(), None])
def test_a_member_that_was_cancelled_or_deleted_or_is_done_is_not_replaced_and_is_no_failure(server, state):
    actor = member()
    server.states[server.newest] = state
    assert actor.has_ended()
    actor.check()
    assert len(server.states) == 1


def test_a_member_that_failed_by_itself_has_used_up_its_restarts_already(server):
    actor = member()
    server.states[server.newest] = Failed(message="wrong configuration")
    assert actor.has_ended()
    with pytest.raises(RoleFailed, match="wrong configuration"):
        actor.check()


@pytest.mark.parametrize("kind", [ConfigError, TrainingDiverged])
def test_an_error_that_nothing_starts_again_keeps_its_kind_and_exit_code(server, kind):
    actor = member()
    server.states[server.newest] = Failed(message=f"Flow run encountered an exception: {kind.__name__}: no")
    assert actor.has_ended()
    with pytest.raises(kind, match=r"its flow run .* is Failed: .* no"):
        actor.check()


def test_a_member_that_another_flow_run_has_started_is_left_to_it_while_that_runs(server):
    member()
    run, owner = server.newest, uuid.uuid4()
    server.owners[run], server.states[owner] = owner, Running()
    equal = member()
    equal.stop()
    assert equal.has_ended()
    assert server.states[run].is_running()
    server.states[owner] = Crashed()
    member().stop()
    assert server.states[run].is_cancelling()


def test_a_member_whose_owner_was_deleted_is_stopped(server):
    member()
    server.owners[server.newest] = uuid.uuid4()
    member().stop()
    assert server.states[server.newest].is_cancelling()


def test_while_the_server_is_away_the_replacement_waits(server):
    actor = member()
    server.states[server.newest] = Crashed()
    server.is_away = True
    assert not actor.has_ended()
    assert len(server.states) == 1
    server.is_away = False
    assert not actor.has_ended()
    assert len(server.states) == 2


def test_a_member_of_an_earlier_start_goes_on_unless_its_flow_run_is_over_or_of_another_name(server):
    member()
    first = server.newest
    for run, name in (("one", "actor-1"), ("two", "actor-0")):
        DeployedRole("actor/actor", {"run_url": f"/runs/{run}", "name": name}, name, 2)
    assert len(server.states) == 3
    again = member()
    assert len(server.states) == 3
    assert not again.has_ended()
    server.states[first] = Cancelled()
    assert again.has_ended()
    assert not member().has_ended()
    assert len(server.states) == 4


def test_a_member_with_settings_from_before_a_resume_is_cancelled_and_replaced(server):
    member()
    server.runs[0].start_time = datetime(2026, 1, 1, tzinfo=UTC)
    member()
    assert len(server.runs) == 1
    server.resumed_at = datetime(2026, 1, 2, tzinfo=UTC).timestamp()
    member()
    assert len(server.runs) == 2
    assert server.states[server.runs[0].id].type == StateType.CANCELLING


def test_the_time_in_the_queue_is_no_life(server, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(placement.time, "monotonic", lambda: now[0])
    actor = member(max_restarts=2)
    while not actor.has_ended():
        for state in (Scheduled(), Running(), Crashed()):
            now[0] += STABLE_SECONDS if state.is_running() else 20  # the time before this state
            server.states[server.newest] = state
            actor.has_ended()
        assert len(server.states) < 9
    assert len(server.states) == 3


def test_a_run_without_a_machine_for_its_trainer_or_all_actors_waits(server, monkeypatch):
    roles = object.__new__(RunRoles)
    roles._members = {"trainer": member(), "actor-0": member(), "actor-1": member()}
    roles._waiting_since = None
    assert not roles.wait_for_machine()
    for names, waits in ((["actor-0"], False), (["actor-0", "actor-1"], True), (["trainer"], True)):
        for role in roles._members.values():
            role._state = Running()
        for name in names:
            roles._members[name]._state = Scheduled()
        assert roles.wait_for_machine() is waits
    monkeypatch.setattr(placement, "MACHINE_SECONDS", 0.0)
    assert not roles.wait_for_machine(), "the wait has an end"


def test_after_stop_nothing_is_replaced(server):
    actor = member()
    actor.stop()
    assert server.states[server.newest].name == "Cancelling"
    server.states[server.newest] = Crashed()
    assert actor.has_ended()
    assert len(server.states) == 1


class Runs:
    """hub.json of a run, a new beat at each look while it beats."""

    def __init__(self, states: list[str]) -> None:
        self.states = states
        self.num_looks = 0
        self.actors = {}

    def read(self, store):
        state = self.states[min(self.num_looks, len(self.states) - 1)]
        self.num_looks += 1
        return SimpleNamespace(live={"state": state, "actors": self.actors}, beat=float(self.num_looks))


@pytest.mark.parametrize(
    ("states", "has_left"),
    [(["run", "run", "run"], False), (["run", "drain", "stopped"], True), (["stopped", *["run"] * 5], False)],
    ids=["lives", "stopped", "started again"],
)
def test_an_actor_that_left_comes_back_only_if_the_hub_does(monkeypatch, states, has_left):
    runs = Runs(states)
    monkeypatch.setattr(run_roles, "read_hub", runs.read)
    monkeypatch.setattr(run_roles, "may_be_live", lambda hub: hub.live["state"] != "stopped")
    monkeypatch.setattr(run_roles, "_POLL_SECONDS", 0.001)
    assert (
        run_roles.hub_has_stopped(SimpleNamespace(store=None), threading.Event(), seconds=0.3 if has_left else 60.0)
        is has_left
    )


def test_waiting_for_a_hub_ends_with_the_flow(monkeypatch):
    stop = threading.Event()
    stop.set()
    monkeypatch.setattr(run_roles, "read_hub", lambda store: None)
    assert run_roles.hub_has_stopped(SimpleNamespace(store=None), stop, seconds=60.0)


def test_an_actor_beside_its_hub_comes_back_however_long_the_hub_is_away(monkeypatch):
    """A hub that another process has told to stop asks the actors to leave; its start may take longer than theirs."""
    stop, run = threading.Event(), SimpleNamespace(store=None)
    stop.set()  # so that nothing waits for the hub
    monkeypatch.setattr(run_roles, "is_over", lambda run: False)
    monkeypatch.setattr(run_roles, "read_hub", lambda store: None)
    assert not run_roles._is_done(run, "actor", stop, has_hub=True)()
    assert run_roles._is_done(run, "actor", stop, has_hub=False)()


class Worker:
    """A role that does not end by itself; the first look at it is where Ctrl-C strikes."""

    def __init__(self, interrupts: list[str]) -> None:
        self.interrupts = interrupts
        self.is_told = False

    def has_ended(self) -> bool:
        if "look" in self.interrupts:
            self.interrupts.remove("look")
            raise KeyboardInterrupt
        return self.is_told

    def is_running(self) -> bool:
        return True

    def check(self) -> None: ...

    def stop(self) -> None:
        self.is_told = True
        if "tell" in self.interrupts:
            self.interrupts.remove("tell")
            raise KeyboardInterrupt


@pytest.mark.parametrize("strikes", [["look"], ["tell"], ["look", "look"], ["tell", "look"]])
def test_after_a_ctrl_c_during_the_stop_every_role_is_stopped(strikes):
    crew = RunRoles(SimpleNamespace(config=SimpleNamespace(placement=SimpleNamespace(kind="local"))))
    members = {"hub": Worker([]), "trainer": Worker(strikes), "actor-0": Worker([]), "actor-1": Worker([])}
    crew._members.update(members)
    with pytest.raises(KeyboardInterrupt):
        crew.stop()
    assert {name for name, member in members.items() if not member.is_told} == set()


@pytest.mark.parametrize(
    ("states", "actors", "is_replaced"),
    [
        (["run"], {"actor-0/17": {}, "actor-10/17": {}}, True),
        (["run"], {"actor-0/17": {}, "actor-10/17": {}}, False),
        (["run"], {}, False),
        (["done"], {}, True),
    ],
    ids=["by another", "only others", "by nobody", "the run is over"],
)
def test_a_fenced_actor_comes_back_if_the_run_lives_without_an_actor_of_its_name(
    monkeypatch, states, actors, is_replaced
):
    runs = Runs(states)
    runs.actors = actors
    monkeypatch.setattr(run_roles, "read_hub", runs.read)
    monkeypatch.setattr(run_roles, "may_be_live", lambda hub: True)
    monkeypatch.setattr(run_roles, "is_over", lambda run: states == ["done"])
    monkeypatch.setattr(run_roles, "_POLL_SECONDS", 0.001)
    monkeypatch.setattr(run_roles, "_HUB_FENCED_SECONDS", 0.0)
    run = SimpleNamespace(store=None, config=build_config({"placement": {"lease_seconds": 0.01}}))
    name = "actor-0" if is_replaced else "actor-1"
    assert run_roles.actor_is_replaced(run, name, threading.Event()) is is_replaced


def test_a_fenced_actor_does_not_come_back_when_the_flow_stops():
    stop = threading.Event()
    stop.set()
    assert run_roles.actor_is_replaced(SimpleNamespace(store=None, config=build_config({})), "actor-0", stop)


def crew_of(kind: str) -> RunRoles:
    """Roles of a run that never started: a start would need deployments and a Prefect server."""
    run = SimpleNamespace(run_id="run-1", config=build_config({"trainer": {"steps": 7}}), store=MemoryStore())
    crew = RunRoles(run)
    crew._is_pooled = kind == "work_pools"
    return crew


class Superseded:
    """A hub that another start has fenced."""

    def has_ended(self) -> bool:
        return True

    def check(self) -> None:
        raise Fenced("hub: another process has taken over this run")

    def stop(self) -> None: ...


def test_a_start_that_is_fenced_leaves_the_roles_of_deployments_to_the_other_start(monkeypatch):
    deleted = []
    monkeypatch.setattr(placement.Secret, "delete", deleted.append)
    crew = crew_of("work_pools")
    elsewhere, here = Worker([]), LocalRole(lambda stop: None, crew._changed)
    here._ended.set()
    crew._members |= {"hub": Superseded(), "trainer": elsewhere, "evaluator-first": here}
    with pytest.raises(Fenced):
        crew.has_ended("trainer")
    crew.stop()
    assert not elsewhere.is_told
    assert here._stop.is_set()
    assert deleted == []


class FailedEvaluator(Superseded):
    """An evaluator that could not be restarted any more."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def check(self) -> None:
        raise self.error


@pytest.mark.parametrize("error", [RoleFailed("exit code 1"), ValueError("int"), ConnectionError("no server")])
def test_an_evaluator_that_fails_ends_no_training_and_is_named_once(caplog, error):
    crew = crew_of("local")
    crew._members |= {"evaluator": FailedEvaluator(error), "trainer": Worker([])}
    assert not crew.has_ended("trainer")
    assert not crew.has_ended("trainer")
    assert [record.message for record in caplog.records] == [f"no further evaluations during training: {error}"]
    crew.wait_until("something", lambda: True, seconds=1)


def test_the_scheduled_evaluator_may_end_before_the_flow_asks_for_its_last_record(tmp_path, monkeypatch):
    write_run(open_store(str(tmp_path / "r-1")), Shape(steps=2))
    run = open_run(f"file://{tmp_path}/r-1")
    monkeypatch.setattr(run_roles, "supervise", lambda *_: SimpleNamespace(stopped=False))
    crew = RunRoles(run)
    with ThreadPoolExecutor() as pool:
        evaluate = partial(pool.submit, run_roles.evaluate, run, SCHEDULED)
        crew._begin("evaluator", LocalRole(evaluate, crew._changed))
    crew.stop(keep_evaluator=True)
    monkeypatch.setattr(crew, "_evaluator", lambda *_: pytest.fail("the record is there"))
    crew.evaluate("last")
    assert not crew._has_evaluator_failed


def test_the_error_of_a_role_that_was_stopped_does_not_prevent_the_last_evaluation():
    crew = crew_of("local")
    crew._members |= {"evaluator": Worker([]), "actor-0": FailedEvaluator(RoleFailed("exit code 1"))}
    with pytest.raises(RoleFailed):
        crew.has_ended("evaluator")
    crew.stop(keep_evaluator=True)
    crew._run.store.put(eval_key(7), b"{}")
    crew.evaluate("last")


def test_the_evaluator_goes_on_alone_until_the_last_version_is_evaluated():
    crew = crew_of("local")
    crew._members |= {"evaluator": Worker([]), "trainer": Worker([]), "hub": Worker([])}
    members = dict(crew._members)
    crew.stop(keep_evaluator=True)
    assert {name for name, member in members.items() if member.is_told} == {"trainer", "hub"}
    looks = []
    crew._on_wait = lambda: looks.append(1) or (len(looks) == 2 and crew._run.store.put(eval_key(7), b"{}"))
    crew.evaluate("last")
    assert len(looks) == 2
    crew.stop()
    assert members["evaluator"].is_told


def test_a_role_is_known_before_its_start():
    crew = crew_of("local")

    def submit(stop):
        crew.stop()  # Ctrl-C comes now
        assert stop.is_set()
        raise KeyboardInterrupt

    member = LocalRole(submit, crew._changed)
    member._ended.set()
    with pytest.raises(KeyboardInterrupt):
        crew._begin("hub", member)


def hub_epoch(epoch: int, pid: int, host: str) -> EpochRecord:
    return epoch_record(epoch, "hub", host=host, pid=pid)


@pytest.mark.parametrize(
    ("pid", "host", "is_ours"),
    [("child", socket.gethostname(), True), (1, socket.gethostname(), False), ("child", "elsewhere", False)],
    ids=["our hub", "another's", "on another host"],
)
def test_a_fenced_trainer_comes_back_if_the_newest_hub_is_of_its_own_start(monkeypatch, pid, host, is_ours):
    monkeypatch.setattr(run_roles, "_HUB_FENCED_SECONDS", 0.0)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        newest = hub_epoch(7, child.pid if pid == "child" else pid, host)
        monkeypatch.setattr(run_roles, "read_epochs", lambda store: [hub_epoch(5, 1, host), newest])
        monkeypatch.setattr(run_roles, "is_over", lambda run: False)
        run = SimpleNamespace(store=None)
        if is_ours:
            assert run_roles.trainer_is_replaced(run, threading.Event()) is False
        else:
            with pytest.raises(Fenced, match="another process has taken over"):
                run_roles.trainer_is_replaced(run, threading.Event())


def named_flow_run(server, monkeypatch, tags, deployment=None) -> list:
    """The updates of the current flow run."""
    own, updates = uuid.uuid4(), []
    server.states[own] = Running()
    server.update_flow_run = lambda run_id, **fields: updates.append((run_id == own, fields))
    monkeypatch.setattr(placement, "flow_run", SimpleNamespace(id=str(own), tags=tags))
    monkeypatch.setattr(placement, "is_deployed", lambda: bool(deployment))
    return updates


@pytest.mark.parametrize("tags", [["team", "pipelinerl.run:one"], ["team"]])
def test_the_flow_run_gets_the_name_the_tag_and_the_place_of_its_run(server, monkeypatch, tags):
    server.parameters = {"preset": "quickstart", "root": ""}
    updates = named_flow_run(server, monkeypatch, tags)
    placement.name_flow_run("one", {"root": "file:///runs"}, is_new=True)
    parameters = {"preset": "quickstart", "root": "file:///runs"}
    assert updates == [(True, {"name": "one", "tags": ["team", "pipelinerl.run:one"], "parameters": parameters})]


@pytest.mark.parametrize(("deployment", "is_new"), [("a-worker", True), ("a-worker", False), (None, True)])
def test_a_worker_creates_no_run_whose_place_the_server_does_not_store(server, monkeypatch, deployment, is_new):
    named_flow_run(server, monkeypatch, [], deployment)
    server.read_flow_run = lambda run_id: (_ for _ in ()).throw(ConnectionError("no server"))
    is_refused = bool(deployment) and is_new
    with pytest.raises(PipelineRLError, match="did not store the location") if is_refused else nullcontext():
        placement.name_flow_run("one", {"root": "file:///runs"}, is_new=is_new)


SIXTEEN = {
    "model": {"path": "Qwen/Qwen2.5-7B", "dtype": "bfloat16"},
    "engine": {"kind": "vllm", "tensor_parallel": 2},
    "trainer": {"ranks": 4, "groups_per_step": 64},
    "weights": {"transport": "nccl"},
    "placement": {"kind": "work_pools", "actors": 6},
}


@pytest.fixture
def pooled_crew(server, monkeypatch):
    """A function: values of the configuration -> roles of a run on work pools, whose token is not stored."""
    monkeypatch.setattr(placement.Secret, "save", lambda *_, **__: None)
    store = SimpleNamespace(url="/runs/run-1", exists=lambda key: False)

    def crew(values) -> RunRoles:
        return RunRoles(SimpleNamespace(run_id="run-1", config=build_config(values), store=store, token="token"))

    return crew


def test_pods_get_the_gpus_and_the_memory_of_the_run(server, pooled_crew):
    server.template = json.loads((SHIPPED.parent / "work_pools" / "kubernetes.json").read_text())
    crew = pooled_crew(SIXTEEN)
    for name in ("trainer", "actor-5"):
        crew.start(name)
    (trainer, parameters, variables), (actor, actor_parameters, actor_variables) = server.started
    assert (trainer, parameters) == ("trainer/trainer", {"run_url": "/runs/run-1"})
    assert (actor, actor_parameters) == ("actor/actor", {"run_url": "/runs/run-1", "name": "actor-5"})
    assert (variables["gpu_count"], variables["shm_size"]) == (4, "2Gi")
    # Two merged models of 15.2 GB, and 2 GiB of vLLM's workers.
    assert (actor_variables["gpu_count"], actor_variables["shm_size"]) == (2, "31Gi")
    # Kubernetes counts shared memory as memory of the pod: `pipelinerl doctor` shows both.
    for role, sent in (("trainer", variables), ("actor", actor_variables)):
        own, shared = container_bytes(build_config(SIXTEEN), role)
        assert sent["memory_request"] == f"{math.ceil((own + shared) / 2**30)}Gi"


@pytest.mark.parametrize("template", ["docker", ""])
def test_pools_without_such_variables_get_none(server, pooled_crew, template):
    if template:
        server.template = json.loads((SHIPPED.parent / "work_pools" / f"{template}.json").read_text())
    pooled_crew(SIXTEEN).start("actor-0")
    assert server.started[0][2] == {}


def test_an_evaluator_of_vllm_is_a_flow_run_on_the_pool_of_actors(server, pooled_crew, monkeypatch):
    """The host of the train flow has neither vLLM nor a GPU."""
    crew = pooled_crew(SIXTEEN)
    monkeypatch.setattr(crew, "wait", lambda seconds: server.states.update({server.newest: Completed()}))
    crew.evaluate("first")
    assert server.started == [("actor/actor", {"run_url": "/runs/run-1", "name": "evaluator-first"}, {})]
    crew = pooled_crew({**SIXTEEN, "eval": {"on": "own"}})
    crew.start("evaluator")
    assert server.started[1][1] == {"run_url": "/runs/run-1", "name": "evaluator-scheduled"}


def test_the_last_evaluation_is_a_flow_run_too_and_needs_the_token(server, pooled_crew, monkeypatch):
    deleted = []
    monkeypatch.setattr(placement.Secret, "delete", deleted.append)
    crew = pooled_crew(SIXTEEN)
    crew.start("actor-0")
    monkeypatch.setattr(crew, "wait", lambda seconds: server.states.update({server.newest: Completed()}))
    crew.stop(keep_evaluator=True)
    crew.evaluate("last")
    crew.evaluate("all", enough=0.7)
    names = [parameters["name"] for _, parameters, _ in server.started]
    assert names == ["actor-0", "evaluator-last", "evaluator-all@0.7"]
    assert deleted == []
    crew.stop()
    assert len(deleted) == 1


def test_an_evaluation_may_wait_for_a_worker_for_longer_than_it_may_take(server, pooled_crew, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(placement.time, "monotonic", lambda: now[0])
    crew = pooled_crew(SIXTEEN)
    states = iter([*[Scheduled()] * 5, *[Running()] * 5])

    def wait(seconds):
        now[0] += crew._run.config.evaluation_seconds / 2
        server.states[server.newest] = next(states)

    monkeypatch.setattr(crew, "wait", wait)
    with pytest.raises(DeadlineExceeded, match="evaluator-first: not done after"):
        crew.evaluate("first")
    assert {state.name for state in states} == {"Running"}, "it ends after the queue"


def test_the_flow_run_of_an_evaluator_evaluates(monkeypatch):
    submitted = []
    monkeypatch.setattr(placement.run_evaluation, "submit", lambda *given: submitted.append(given))
    crew = crew_of("local")
    crew._create("evaluator-last")._submit(None)
    assert submitted[0][1:3] == ("last", None)
    crew._create("evaluator-all@0.7")._submit(None)
    assert (submitted[1][1], submitted[1][3]) == ("all", 0.7)


def test_on_pools_an_embedded_engine_is_evaluated_beside_the_train_flow(pooled_crew):
    crew = pooled_crew({"placement": {"kind": "work_pools"}})
    assert isinstance(crew._create("evaluator"), LocalRole)


@pytest.mark.parametrize("run_id", ["learner.lr-1e-4-s0-1a2b3c4d", "Long_Context-s1-0a1b2c3d"])
def test_the_secret_of_a_run_has_a_name_that_prefect_accepts(run_id):
    assert TypeAdapter(BlockDocumentName).validate_python(secret_name(f"s3://b/{run_id}")).startswith("pipelinerl-l")
    assert secret_name(f"s3://b/{run_id}") != secret_name(f"s3://other/{run_id}")
