"""Whether a start forgets that its run was to drain: a person's does, the automation's does not."""

import uuid
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta

import pytest
from prefect.client.schemas.objects import State
from prefect.states import AwaitingRetry, Cancelled, Completed, Crashed, Failed, Pending, Running, Scheduled

from pipelinerl.tasks import automations
from pipelinerl.tasks.automations import OUTAGE_MESSAGE, RESUME_MESSAGE
from pipelinerl.tasks.drain_request import clear_earlier_drain_request
from pipelinerl_core.run.drain import ask_to_drain, wants_drain
from tests.fakes import MemoryStore

FIRST = [Scheduled(), Pending(), Running()]
RESUMED = [Crashed(message="no heartbeat"), AwaitingRetry(message=RESUME_MESSAGE), Pending(), Running()]
RETRIED = [Crashed(), AwaitingRetry(message="Retry from the UI"), Pending(), Running()]
OUTAGE = [AwaitingRetry(message=f"{OUTAGE_MESSAGE} (s3://bucket/runs/r-1)"), Pending(), Running()]
QUEUED = [*RESUMED[:2], State(type="SCHEDULED", name="AwaitingConcurrencySlot"), *RESUMED[2:]]


class Server:
    """A Prefect server that stores the states of one flow run."""

    def __init__(self, states: list[State]) -> None:
        begun = datetime(2026, 1, 1, tzinfo=UTC)
        self.states = [
            state.model_copy(update={"timestamp": begun + timedelta(seconds=index)})
            for index, state in enumerate(states)
        ]
        self.is_away = False

    def read_flow_run_states(self, flow_run_id: uuid.UUID) -> list[State]:
        if self.is_away:
            raise ConnectionError("no server")
        return self.states[::-1]


def is_kept(monkeypatch, server: Server) -> bool:
    monkeypatch.setattr(automations, "get_client", lambda sync_client: nullcontext(server))
    store = MemoryStore()
    ask_to_drain(store, by="this test")
    clear_earlier_drain_request(store, str(uuid.uuid4()))
    return wants_drain(store)


@pytest.mark.parametrize("states", [FIRST, [], FIRST + RETRIED, FIRST + RESUMED + RETRIED, FIRST + OUTAGE + RETRIED])
def test_a_start_of_a_run_clears_an_earlier_drain_request(monkeypatch, states):
    assert not is_kept(monkeypatch, Server(states))


@pytest.mark.parametrize(
    "states", [FIRST + RESUMED, FIRST + RESUMED * 2, FIRST + RETRIED + RESUMED, FIRST + QUEUED, FIRST + OUTAGE]
)
def test_a_drain_outlives_a_crash_that_the_automation_mends(monkeypatch, states):
    assert is_kept(monkeypatch, Server(states))


def test_where_the_server_cannot_say_the_run_goes_on(monkeypatch):
    server = Server(FIRST + RESUMED)
    server.is_away = True
    assert not is_kept(monkeypatch, server)


def test_without_a_drain_request_prefect_is_not_asked(monkeypatch):
    monkeypatch.setattr(automations, "get_client", lambda sync_client: pytest.fail("asked"))
    clear_earlier_drain_request(MemoryStore(), str(uuid.uuid4()))


LATE = [Crashed(message="no heartbeat"), *FIRST[2:]]


@pytest.mark.parametrize(
    ("states", "name"),
    [
        (FIRST + RESUMED, None),
        (FIRST, None),
        ([*FIRST, *LATE, Completed(), *RESUMED[1:]], "Completed"),
        ([*FIRST, *LATE, Cancelled(), *QUEUED[1:]], "Cancelled"),
        (
            [*FIRST, *LATE, Cancelled(), RESUMED[1], *RESUMED[1:]],
            "Cancelled",
        ),  # runner and worker report a crash each
        ([*FIRST, *LATE, Cancelled(), RESUMED[1], Pending(), *RESUMED[1:]], "Cancelled"),
        (FIRST + RESUMED[:2] + RESUMED[1:], None),
        ([*FIRST, *LATE, Failed(name="GivenUp"), *RESUMED[1:]], "GivenUp"),
        ([*FIRST, Completed(), *RETRIED[1:]], None),  # a user starts it again
    ],
)
def test_a_resume_that_comes_after_the_end_of_the_flow_run_leaves_it_ended(monkeypatch, states, name):
    monkeypatch.setattr(automations, "get_client", lambda sync_client: nullcontext(Server(states)))
    ended = automations.ended_before_resume(uuid.uuid4())
    assert (ended.name if ended is not None else None) == name


def test_a_resume_goes_on_if_the_server_does_not_answer(monkeypatch):
    server = Server([*FIRST, *LATE, Completed(), *RESUMED[1:]])
    server.is_away = True
    monkeypatch.setattr(automations, "get_client", lambda sync_client: nullcontext(server))
    assert automations.ended_before_resume(uuid.uuid4()) is None
