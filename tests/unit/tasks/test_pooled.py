"""A role of a work pool whose worker is gone: no process signals its flow run any more."""

import uuid
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
from prefect.client.schemas.objects import State
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Cancelling, Completed, Crashed, Running

from pipelinerl.tasks import pooled
from pipelinerl_core.errors import ConfigError, StoreUnavailable
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.run.context import RunContext
from tests.builders import run_record
from tests.fakes import MemoryStore

DEADLINE_LOOKS = 100


class Server:
    """Knows the state of the flow run; None when it was deleted."""

    def __init__(self, state: State | Exception | None) -> None:
        self.state = state

    def read_flow_run(self, run_id: uuid.UUID):
        if self.state is None:
            raise ObjectNotFound(Exception())
        if isinstance(self.state, Exception):
            raise self.state
        return SimpleNamespace(state=self.state)


class RunRoles:
    """One role, which ends by itself after so many looks."""

    num_looks = DEADLINE_LOOKS
    newest: "RunRoles"

    def __init__(self, run) -> None:
        self.looks = 0
        self.is_stopped = False
        RunRoles.newest = self

    def start(self, name: str) -> None: ...

    def wait(self, seconds: float) -> None: ...

    def has_ended(self, name: str) -> bool:
        self.looks += 1
        return self.looks > self.num_looks

    def stop(self) -> None:
        self.is_stopped = True


@pytest.fixture
def follow(monkeypatch):
    record = run_record(run_id="of-this-test")
    config = load_config("quickstart", ["placement.kind=work_pools"])
    run = RunContext(store=MemoryStore(), record=record, config=config, token="")
    monkeypatch.setattr(pooled, "open_run", lambda url: run)
    monkeypatch.setattr(pooled, "load_token", lambda run_id: "token")
    monkeypatch.setattr(pooled, "RunRoles", RunRoles)
    monkeypatch.setattr(pooled, "STATE_SECONDS", 0.0)
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", str(uuid.uuid4()))

    def follow(state: State | Exception | None) -> State | None:
        monkeypatch.setattr(pooled, "get_client", lambda sync_client: nullcontext(Server(state)))
        ended = pooled.run_pooled("memory://test", "actor-0")
        assert RunRoles.newest.is_stopped
        return ended

    return follow


def test_a_run_whose_roles_are_on_one_host_takes_no_role_of_a_worker(follow, monkeypatch):
    run = pooled.open_run("")
    monkeypatch.setattr(pooled, "open_run", lambda url: replace(run, config=load_config("quickstart")))
    with pytest.raises(ConfigError, match=r"roles run on the host of its flow run \(placement\.kind=local\)"):
        pooled.run_pooled("memory://test", "actor-7")


@pytest.mark.parametrize(
    ("state", "end"),
    [(Cancelling(), "Cancelled"), (Cancelled(), "Cancelled"), (Crashed(), "Crashed"), (None, "Cancelled")],
)
def test_a_role_ends_once_its_flow_run_is_over_on_the_server_and_keeps_the_state_of_that_flow_run(follow, state, end):
    ended = follow(state)
    assert ended is not None
    assert ended.name == end
    assert RunRoles.newest.looks < DEADLINE_LOOKS


@pytest.mark.parametrize("state", [Running(), ConnectionError("no server")])
def test_a_role_continues_while_its_flow_run_runs_or_has_an_unknown_state(follow, state):
    assert follow(state) is None
    assert RunRoles.newest.looks > DEADLINE_LOOKS


def test_a_role_that_ends_by_itself_is_not_cancelled(follow, monkeypatch):
    monkeypatch.setattr(RunRoles, "num_looks", 0)
    assert follow(Completed()) is None


def test_a_role_ended_by_an_outage_of_the_store_is_crashed_so_that_the_train_flow_replaces_the_role(
    follow, monkeypatch
):
    def fail(self, name):
        raise StoreUnavailable("actor-0: ended because the store did not answer")

    monkeypatch.setattr(RunRoles, "has_ended", fail)
    assert follow(Running()).is_crashed()
