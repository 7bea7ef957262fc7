"""A role on a work pool, with a server that only remembers the states it is told."""

import uuid

import pytest
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Completed, Crashed, Failed, Running

from tasks import placement
from tasks.placement import DeployedMember
from tasks.supervise import SETTLED_SECONDS, RoleFailed


class Server:
    """Flow runs by id, in order of their start."""

    def __init__(self) -> None:
        self.states: dict[uuid.UUID, State | None] = {}
        self.is_away = False

    def run_deployment(self, deployment, parameters, **options) -> FlowRun:
        if self.is_away:
            raise ConnectionError("no server")
        run = FlowRun(flow_id=uuid.uuid4(), state=Running())
        self.states[run.id] = run.state
        return run

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def read_flow_run(self, run_id):
        if self.states[run_id] is None:
            raise ObjectNotFound(Exception())
        return FlowRun(id=run_id, flow_id=uuid.uuid4(), state=self.states[run_id])

    def set_flow_run_state(self, run_id, state):
        self.states[run_id] = state

    @property
    def newest(self) -> uuid.UUID:
        return list(self.states)[-1]


@pytest.fixture
def server(monkeypatch) -> Server:
    server = Server()
    monkeypatch.setattr(placement, "run_deployment", server.run_deployment)
    monkeypatch.setattr(placement, "get_client", lambda sync_client: server)
    monkeypatch.setattr(placement, "_POLL_DEPLOYMENT_SECONDS", 0.0)
    return server


def member(max_restarts: int = 2) -> DeployedMember:
    return DeployedMember("actor/actor", {"name": "actor-0"}, "actor-0", max_restarts)


def test_a_crashed_flow_run_is_replaced_until_the_restarts_in_a_row_are_used_up(server):
    actor = member(max_restarts=2)
    for num_runs in (1, 2):
        assert len(server.states) == num_runs
        server.states[server.newest] = Crashed()
        assert not actor.has_ended()
        actor.check()
    server.states[server.newest] = Crashed(message="exit code -9")
    assert actor.has_ended()
    with pytest.raises(RoleFailed, match="exit code -9"):
        actor.check()
    assert len(server.states) == 3


def test_a_long_life_starts_the_count_again(server, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(placement.time, "monotonic", lambda: now[0])
    actor = member(max_restarts=1)
    for num_runs in range(2, 6):
        now[0] += SETTLED_SECONDS
        server.states[server.newest] = Crashed()
        assert not actor.has_ended()
        assert len(server.states) == num_runs
    server.states[server.newest] = Crashed()
    now[0] += 1
    assert actor.has_ended()


@pytest.mark.parametrize("state", [Cancelled(), Completed(), None])
def test_one_that_was_cancelled_deleted_or_is_done_is_not_replaced_and_is_no_failure(server, state):
    actor = member()
    server.states[server.newest] = state
    assert actor.has_ended()
    actor.check()
    assert len(server.states) == 1


def test_one_that_failed_by_itself_has_used_up_its_restarts_already(server):
    actor = member()
    server.states[server.newest] = Failed(message="wrong configuration")
    assert actor.has_ended()
    with pytest.raises(RoleFailed, match="wrong configuration"):
        actor.check()


def test_while_the_server_is_away_the_replacement_waits(server):
    actor = member()
    server.states[server.newest] = Crashed()
    server.is_away = True
    assert not actor.has_ended()
    assert len(server.states) == 1
    server.is_away = False
    assert not actor.has_ended()
    assert len(server.states) == 2


def test_after_stop_nothing_is_replaced(server):
    actor = member()
    actor.stop()
    assert server.states[server.newest].name == "Cancelling"
    server.states[server.newest] = Crashed()
    assert actor.has_ended()
    assert len(server.states) == 1
