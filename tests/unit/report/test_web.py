"""The page of a run while it goes on, and what Prometheus scrapes."""

import json
import re
import socket
import threading
from base64 import b64encode
from hashlib import sha256
from http.client import HTTPConnection
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pipelinerl.flows.cli import live_page
from pipelinerl_core.errors import ConfigError, MissingObject, StoreError
from pipelinerl_core.report import facts, web
from pipelinerl_core.report.live_view import run_status
from pipelinerl_core.report.web import LivePage, build_server
from pipelinerl_core.run.locate import remember_latest
from pipelinerl_core.run.records import RUN_KEY
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.telemetry.metrics import METRICS
from pipelinerl_core.telemetry.role_metrics import run_exposition
from tests.fakes import MemoryStore
from tests.synthetic_run import Shape, write_run


class Run:
    """A run of ten steps, of which the first few are committed."""

    def __init__(self):
        self.store = MemoryStore()
        write_run(self.store, Shape(steps=10))
        self.hidden = {key: self.store.get(key) for key in self.store.list("commits")}
        self.store.delete(self.hidden)
        self.commit(4)

    def commit(self, last):
        for key, data in self.hidden.items():
            if int(key.split("/")[1].split(".")[0]) <= last:
                self.store.put(key, data)


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(web, "STATUS_SECONDS", 0.0)
    return Run()


@pytest.fixture
def served(run):
    page = LivePage(run.store, None)
    server = build_server(lambda: page, "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def get(url):
    with urlopen(url, timeout=60) as answer:
        return answer.read().decode()


def test_the_page_is_the_report_below_a_status_line_of_the_run(run, served):
    page = get(f"{served}/")
    assert "Roles over time" in page
    assert 'id="live"' in page
    assert "stopped, step 4/10" in page
    assert 'data-page="4/2"' in page
    status = json.loads(get(f"{served}/status.json"))
    assert (status["step"], status["page"]) == (4, "4/2")
    assert status["line"].startswith(f"{status['run_id']}: stopped, step 4/10  reward ")
    assert get(f"{served}/healthz") == "ok\n"


def answer_to(served, host, path="/"):
    """Status, headers and text of the answer to a request with this Host header."""
    connection = HTTPConnection(served.removeprefix("http://"), timeout=60)
    connection.request("GET", path, headers={"Host": host})
    answer = connection.getresponse()
    answered = (answer.status, answer.headers, answer.read().decode())
    connection.close()
    return answered


@pytest.mark.parametrize("path", ["/", "/status.json", "/metrics", "/targets.json", "/healthz"])
def test_a_page_of_the_web_whose_name_leads_here_reads_nothing(run, served, path):
    for host in (
        "evil.example",
        "evil.example:80",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "a@b:c",
        "[",
        "",
    ):
        status, _, text = answer_to(served, host, path)
        assert (status, "--allowed-host NAME" in text) == (421, True), host
    own = socket.gethostname()
    for host in ("localhost", "LOCALHOST.:8080", "127.0.0.1:1", "[::1]:9464", "10.1.2.3", "[fe80::1%25eth0]", own):
        assert answer_to(served, host, path)[0] == 200, host


def test_names_that_were_allowed_are_answered(run):
    server = build_server(lambda: None, "127.0.0.1", 0, ["status", "Gpu1.Example"])
    assert [server.answers_to(host) for host in ("status:9464", "gpu1.example", "gpu1", "other")] == [
        True,
        True,
        False,
        False,
    ]
    server.server_close()


def test_the_page_may_run_its_own_script_and_nothing_else(run, served):
    for path in ("/", "/nothing"):
        headers = answer_to(served, "localhost", path)[1]
        assert headers["X-Content-Type-Options"] == "nosniff"
        policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert "unsafe" not in headers["Content-Security-Policy"]
    page = get(f"{served}/")
    for element, source in (("script", "script-src"), ("style", "style-src")):
        texts = re.findall(rf"<{element}>(.*?)</{element}>", page, re.DOTALL)
        hashes = {f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in texts}
        assert hashes == set(policy[source].split())
    assert not re.search(r'<[^>]* (style|on[a-z]+)="', page), "attributes that the policy would block"


def test_markup_in_the_id_of_a_run_is_text_on_its_page(run):
    hostile = "x<img src=x onerror=alert(1)>&amp;"
    record = json.loads(run.store.get(RUN_KEY))
    run.store.put(RUN_KEY, json.dumps({**record, "run_id": hostile}).encode())
    page = LivePage(run.store, None).page()
    assert "<img" not in page
    assert "x&lt;img src=x onerror=alert(1)&gt;&amp;amp;: stopped, step 4/10" in page


def test_a_new_commit_makes_a_new_page_and_reads_no_batch_twice(run, served, monkeypatch):
    get(f"{served}/")
    read = []
    real = facts.read_batch
    monkeypatch.setattr(facts, "read_batch", lambda store, commit: read.append(commit.step) or real(store, commit))
    run.commit(7)
    assert json.loads(get(f"{served}/status.json"))["page"] == "7/2"
    assert 'data-page="7/2"' in get(f"{served}/")
    assert read == [5, 6, 7]


def test_a_live_run_is_drawn_again_only_now_and_then(run, monkeypatch):
    monkeypatch.setattr(web, "PAGE_SHARE", 1e-6)
    real = web.status_of
    monkeypatch.setattr(web, "status_of", lambda *known, **more: {**real(*known, **more), "state": "running"})
    page = LivePage(run.store, None)
    page.page()
    run.commit(7)
    assert (page.status()["step"], page.status()["page"]) == (7, "4/2")
    assert 'data-page="4/2"' in page.page()


def test_missing_and_unreadable_objects_are_told_apart(run, served, monkeypatch):
    with pytest.raises(HTTPError, match="404"):
        get(f"{served}/../run.json")

    def away(prefix):
        raise StoreError("the store is away")

    with monkeypatch.context() as patch:
        patch.setattr(run.store, "list", away)
        with pytest.raises(HTTPError, match="503"):
            get(f"{served}/status.json")
    assert json.loads(get(f"{served}/status.json"))["step"] == 4
    with pytest.raises(MissingObject):
        LivePage(MemoryStore(), None)


def test_a_port_that_is_taken_is_a_configuration_error(run, served):
    port = int(served.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port} cannot be bound"):
        build_server(lambda: LivePage(run.store, None), "127.0.0.1", port)


def test_prometheus_can_read_every_metric_and_every_name_is_declared(run, served):
    families = {family.name: family for family in text_string_to_metric_families(get(f"{served}/metrics"))}
    samples = {sample.name: sample for family in families.values() for sample in family.samples}
    assert set(samples) <= {name for metric in METRICS.values() for name in metric.series}
    assert samples["pipelinerl_step"].value == 4
    assert samples["pipelinerl_step"].labels == {"run": run_status(run.store)["run_id"]}
    tokens = {s.labels["class"]: s.value for s in families["pipelinerl_tokens"].samples}
    assert tokens["generated"] == sum(number for name, number in tokens.items() if name != "generated")
    states = {s.labels["state"]: s.value for s in families["pipelinerl_state"].samples}
    assert states == {"running": 0.0, "stopped": 1.0, "finished": 0.0}
    actors = {s.labels["actor"] for s in families["pipelinerl_actor_slots"].samples}
    assert actors == {"actor-0", "actor-1"}, "labels are bounded: no epochs in them"


def test_of_an_actor_that_was_restarted_the_newest_epoch_is_shown(store):
    actor_state = {"running": 1, "waiting": 0, "concurrency": 8, "engine_version": 3}
    write_run(store, Shape(steps=2))
    status = {
        **run_status(store),
        "actors": {"actor-0/9": actor_state, "actor-0/10": {**actor_state, "running": 5}, "actor-0/2": actor_state},
    }
    assert run_exposition(status).count(b"pipelinerl_actor_running{") == 1
    assert b"} 5.0" in run_exposition(status)


def test_latest_is_followed_from_one_run_to_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(live_page, "LATEST_SECONDS", 0.0)
    current = live_page.CurrentPage("latest", str(tmp_path))
    with pytest.raises(ConfigError, match="no run was started"):
        current()
    pages = []
    for name in ("one", "one", "two"):
        write_run(open_store(str(tmp_path / name)), Shape(steps=2))
        remember_latest(str(tmp_path / name))
        pages.append(current())
    assert pages[0] is pages[1]
    assert pages[2] is not pages[1]


def test_a_run_without_commits_or_hub_has_metrics_too(store):
    write_run(store, Shape(steps=2))
    store.delete(store.list("commits"))
    assert b'pipelinerl_step{run="' in run_exposition(run_status(store))
