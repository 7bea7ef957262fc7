"""An outage of the store that is longer than all restarts: the flow run is Crashed, and its next start waits."""

import errno
import os
from contextlib import nullcontext
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace

import pytest
from prefect.exceptions import Pause
from prefect.settings import PREFECT_API_URL, temporary_settings

from pipelinerl.flows import train_flow
from pipelinerl.tasks import outage
from pipelinerl.tasks.automations import restart_automations
from pipelinerl_core.errors import ConfigError, DeadlineExceeded, StoreError, StoreUnavailable
from pipelinerl_core.run.jobs import Job
from pipelinerl_core.supervision.supervise import RoleFailed
from tests.fakes import MemoryStore


class Store(MemoryStore):
    """Fails the first `failures` requests."""

    def __init__(self, failures: int, error: type[StoreError] = StoreUnavailable) -> None:
        super().__init__()
        self.failures, self.error = failures, error
        self.num_requests = 0

    def limited(self, seconds: float) -> "Store":
        return self

    def _answer(self) -> None:
        self.num_requests += 1
        if self.num_requests <= self.failures:
            raise self.error("503")

    def put(self, *args, **kwargs) -> None:
        self._answer()
        super().put(*args, **kwargs)

    def exists(self, key: str) -> bool:
        self._answer()
        return super().exists(key)


class Locked(BaseHTTPRequestHandler):
    """A server of Prefect that wants a login for everything but its health."""

    def do_GET(self):
        self.answer(200 if self.path.endswith("/health") else 401)

    def do_POST(self):
        self.answer(401)

    def answer(self, status):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments):
        pass


def test_a_login_that_is_missing_is_a_wrong_configuration_although_the_health_page_answers():
    with ThreadingHTTPServer(("127.0.0.1", 0), Locked) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/api"
        refused = pytest.raises(ConfigError, match=r"refuses the login \(401 Unauthorized\)\. Set PREFECT_API_AUTH")
        with temporary_settings({PREFECT_API_URL: url}), refused:
            outage.check_prefect(url)
        server.shutdown()


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr(outage, "time", clock)
    return clock


def use(monkeypatch, store):
    monkeypatch.setattr(outage, "open_store", lambda url: store)
    return "s3://bucket/r-1"


def test_a_run_that_an_outage_has_ended_is_in_the_state_that_the_automation_resumes(monkeypatch):
    state = outage.crashed_by_outage(use(monkeypatch, Store(0)), StoreUnavailable("no answer"))
    assert state.is_crashed()
    (resume,) = [automation for automation in restart_automations() if automation.name == "pipelinerl-resume"]
    assert f"prefect.flow-run.{state.name}" in resume.trigger.expect
    assert "`pipelinerl resume r-1` continues the run" in state.message


@pytest.mark.parametrize(
    ("store", "is_crashed"),
    [(Store(99), True), (Store(0), False), (Store(99, StoreError), False)],
    ids=["away", "answers", "refuses"],
)
def test_a_role_that_failed_for_another_reason_is_an_outage_only_while_the_store_is_away(
    monkeypatch, store, is_crashed
):
    state = outage.crashed_by_outage(use(monkeypatch, store), RoleFailed("killed by SIGKILL"))
    assert (state is not None) == is_crashed


def test_the_train_flow_returns_the_state_and_fails_as_before_without_an_outage(monkeypatch):
    run = SimpleNamespace(store=SimpleNamespace(url=use(monkeypatch, Store(0))))
    monkeypatch.setattr(train_flow, "open_job", lambda *_, **__: (run, None))
    errors = iter([StoreUnavailable("503"), RoleFailed("exited with code 1")])

    def fail(*_):
        raise next(errors)

    monkeypatch.setattr(train_flow, "train_opened", fail)
    job = Job.__new__(Job)
    assert train_flow.train_run(job).is_crashed()
    with pytest.raises(RoleFailed):
        train_flow.train_run(job)


def test_a_repeated_start_waits_until_the_store_takes_objects(monkeypatch, clock, caplog):
    store = Store(500)
    use(monkeypatch, store)
    outage.await_store("s3://bucket/runs")
    assert store.num_requests == 501
    assert store.list("") == []
    assert clock.now == 500 * outage._POLL_SECONDS
    assert len([record for record in caplog.records if "for the store" in record.getMessage()]) == 1


def test_the_wait_for_the_store_has_a_deadline(monkeypatch, clock):
    use(monkeypatch, Store(10**9))
    with pytest.raises(DeadlineExceeded, match="has not answered for 24 h"):
        outage.await_store("s3://bucket/runs")


def test_a_store_that_refuses_is_left_to_the_checks_of_the_start(monkeypatch, clock):
    store = Store(99, StoreError)
    use(monkeypatch, store)
    outage.await_store("s3://bucket/runs")
    assert (store.num_requests, clock.now) == (1, 0.0)


def test_a_directory_that_is_not_on_this_host_is_not_made(tmp_path):
    outage.await_store(f"file://{tmp_path}/of-another-host")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_a_directory_that_does_not_answer_is_waited_for(monkeypatch, clock, number):
    def stat(path, **_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.stat", stat)
    store = Store(2)
    use(monkeypatch, store)
    outage.await_store("file:///mnt/runs")
    assert store.num_requests > 2


def test_a_prefect_server_that_is_away_at_the_end_has_a_deadline(monkeypatch, clock):
    answers = iter([ConnectionError("no answer")] * 5 + [None])
    client = SimpleNamespace(api_healthcheck=lambda: next(answers))
    monkeypatch.setattr(outage, "get_client", lambda sync_client: nullcontext(client))
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:1/api"}):
        assert not outage.server_answers(3.0)
        assert outage.server_answers(3.0)
    with temporary_settings({PREFECT_API_URL: None}):
        assert outage.server_answers(3.0)


class Client:
    """Notes the states that the server is asked for."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.asked = error, []

    def set_flow_run_state(self, flow_run_id, state, *, force):
        if self.error is not None:
            raise self.error
        self.asked.append((str(flow_run_id), state, force))


def started_by(monkeypatch, deployment, client):
    monkeypatch.setattr(outage, "deployment", SimpleNamespace(id=deployment))
    monkeypatch.setattr(outage, "flow_run", SimpleNamespace(id=FLOW_RUN))
    monkeypatch.setattr(outage, "get_client", lambda sync_client: nullcontext(client))
    return outage.crashed_by_outage(use(monkeypatch, Store(0)), StoreUnavailable("no answer"))


FLOW_RUN = "00000000-0000-0000-0000-000000000001"


def test_the_flow_run_of_a_worker_is_scheduled_after_its_process_has_ended(monkeypatch):
    client = Client()
    crashed = started_by(monkeypatch, "deployment", client)
    with pytest.raises(Pause) as ended:
        outage.schedule_again(crashed)
    ((flow_run_id, state, is_forced),) = client.asked
    assert (flow_run_id, state.name, is_forced) == (FLOW_RUN, "AwaitingRetry", True)
    assert state.message == crashed.message
    seconds = (state.state_details.scheduled_time - datetime.now(UTC)).total_seconds()
    assert 30 < seconds <= outage.RETRY_SECONDS
    assert ended.value.state is state


@pytest.mark.parametrize(("deployment", "error"), [(None, None), ("deployment", ConnectionError("no server"))])
def test_without_a_worker_or_a_server_the_state_crashed_is_left(monkeypatch, deployment, error):
    client = Client(error)
    outage.schedule_again(started_by(monkeypatch, deployment, client))
    assert client.asked == []
