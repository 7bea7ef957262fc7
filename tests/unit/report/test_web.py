"""The pages of `pipelinerl serve`: the list, a run while it goes on, two runs, and what Prometheus scrapes."""

import json
import re
import shutil
import socket
import threading
from base64 import b64encode
from contextlib import contextmanager
from hashlib import sha256
from http.client import HTTPConnection
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pipelinerl_core.errors import ConfigError, MissingObject
from pipelinerl_core.report import facts, live_page, root_pages
from pipelinerl_core.report.live_page import LivePage
from pipelinerl_core.report.live_view import run_status
from pipelinerl_core.report.root_pages import RootPages
from pipelinerl_core.report.web import build_server
from pipelinerl_core.run.locate import remember_latest
from pipelinerl_core.run.records import RUN_KEY
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.telemetry.metrics import METRICS
from pipelinerl_core.telemetry.role_metrics import runs_exposition
from pipelinerl_core.types import FinishReason
from tests.fakes import MemoryStore
from tests.synthetic_run import Shape, write_run

RUN = "quickstart-1"


class Run:
    """A run of ten steps, of which the first few are committed."""

    def __init__(self, root):
        self.store = open_store(str(root / RUN))
        write_run(self.store, Shape(steps=10))
        remember_latest(self.store.url)
        self.hidden = {key: self.store.get(key) for key in self.store.list("commits")}
        self.store.delete(self.hidden)
        self.commit(4)

    def commit(self, last):
        for key, data in self.hidden.items():
            if int(key.split("/")[1].split(".")[0]) <= last:
                self.store.put(key, data)


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(live_page, "STATUS_SECONDS", 0.0)
    monkeypatch.setattr(root_pages, "LIST_SECONDS", 0.0)
    monkeypatch.setattr(root_pages, "PAGE_SHARE", 1e9)
    monkeypatch.setattr(root_pages, "RECENT_SECONDS", 1e9)  # synthetic runs are of 2025
    return Run(tmp_path)


@contextmanager
def serving(root, **how):
    server = build_server(RootPages(open_store(str(root))), "127.0.0.1", 0, **how)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def served(run, tmp_path):
    with serving(tmp_path) as url:
        yield url


@pytest.fixture
def page(served):
    """Address of the page of the run, without the slash at the end."""
    return f"{served}/runs/{RUN}"


def get(url):
    with urlopen(url, timeout=60) as answer:
        return answer.read().decode()


def test_the_page_of_a_run_is_its_report_below_a_status_line(run, served, page):
    text = get(f"{page}/")
    assert "Roles over time" in text
    assert 'id="live"' in text
    assert "stopped, step 4/10" in text
    assert 'data-page="4/2"' in text
    assert '<a href="../../">all runs</a>' in text
    status = json.loads(get(f"{page}/status.json"))
    assert (status["step"], status["page"]) == (4, "4/2")
    assert status["line"].startswith(f"{status['run_id']}: stopped, step 4/10  reward ")
    assert get(f"{served}/healthz") == "ok\n"


def test_the_rollouts_of_a_step_are_pages(run, served, page):
    newest = get(f"{page}/rollouts")
    assert "<h1>Rollouts of step 4</h1>" in newest
    assert '<a href="?step=3">step 3</a>' in newest
    assert 'href="rollouts"' in get(f"{page}/")
    first = get(f"{page}/rollouts?step=1&sort=-reward&reward=1")
    name = re.search(r'<a href="rollouts/(\d+\.\d+)">', get(f"{page}/rollouts?step=1"))[1]
    assert "Rollouts of step 1" in first
    assert f"<h1>Rollout {name}</h1>" in get(f"{page}/rollouts/{name}?colours=advantage")
    for path, status in (
        ("rollouts?step=9", 404), ("rollouts?sort=x", 400), ("rollouts/9999.1", 404), ("rollouts/0", 404),
        ("rollouts/0.0:1", 200), ("rollouts/x", 404), ("rollouts/0.0?colours=x", 404),
    ):  # fmt: skip
        assert answer_to(served, "127.0.0.1", f"/runs/{RUN}/{path}")[0] == status, path
    status, headers, _ = answer_to(served, "127.0.0.1", f"/runs/{RUN}")
    assert (status, headers["Location"]) == (301, f"{RUN}/")
    _, headers, _ = answer_to(served, "127.0.0.1", "/runs/%2F%2Fevil.example")
    assert headers["Location"] == "%2F%2Fevil.example/"


def test_a_search_that_another_site_asks_for_is_refused(page):
    url = urlsplit(page)
    for query, site, kind, status in (
        ("step=all&where=true", "cross-site", "image", 403),
        ("step=all&text=x", "same-site", "iframe", 403),
        ("step=all&where=true", "cross-site", "document", 200),  # a link
        ("step=1", "cross-site", "image", 200),
    ):
        connection = HTTPConnection(url.netloc, timeout=60)
        headers = {"Sec-Fetch-Site": site, "Sec-Fetch-Dest": kind}
        connection.request("GET", f"{url.path}/rollouts?{query}", headers=headers)
        assert connection.getresponse().status == status
        connection.close()
    assert "Rollouts of all steps" in get(f"{page}/rollouts?step=all&where=true")


def test_the_diagnosis_of_the_live_page_leads_to_its_rollouts(run, page):
    write_run(run.store, Shape(steps=10, finish_reason=FinishReason.LENGTH))
    name = re.search(r'<a href="rollouts/(\d+\.\d+)">', get(f"{page}/"))[1]
    assert f"<h1>Rollout {name}</h1>" in get(f"{page}/rollouts/{name}")


def answer_to(served, host, path="/", **headers):
    """Status, headers and text of the answer to a request with this Host header and further ones."""
    connection = HTTPConnection(served.removeprefix("http://"), timeout=60)
    connection.request("GET", path, headers={"Host": host, **headers})
    answer = connection.getresponse()
    answered = (answer.status, answer.headers, answer.read().decode())
    connection.close()
    return answered


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/runs.json",
        f"/runs/{RUN}/",
        f"/runs/{RUN}/status.json",
        f"/runs/{RUN}/rollouts",
        f"/runs/{RUN}/rollouts/0.0",
        "/metrics",
        "/targets.json",
        "/healthz",
    ],
)
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


def test_names_that_were_allowed_are_answered():
    server = build_server(None, "127.0.0.1", 0, ["status", "Gpu1.Example"])
    assert [server.answers_to(host) for host in ("status:9464", "gpu1.example", "gpu1", "other")] == [
        True,
        True,
        False,
        False,
    ]
    server.server_close()


@pytest.mark.parametrize("path", ["/", f"/runs/{RUN}/", f"/compare?run={RUN}&run={RUN}", "/nothing"])
def test_a_page_may_run_its_own_script_and_nothing_else(run, served, path):
    _, headers, text = answer_to(served, "localhost", path)
    assert headers["X-Content-Type-Options"] == "nosniff"
    policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert "unsafe" not in headers["Content-Security-Policy"]
    if path == "/nothing":
        return
    for element, source in (("script", "script-src"), ("style", "style-src")):
        texts = re.findall(rf"<{element}>(.*?)</{element}>", text, re.DOTALL)
        hashes = {f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in texts}
        assert hashes <= set(policy[source].split())
        assert hashes or (element, path.partition("?")[0]) == ("script", "/compare")
    assert not re.search(r'<[^>]* (style|on[a-z]+)="', text), "attributes that the policy would block"


def test_markup_in_the_id_of_a_run_is_text_on_its_page(run):
    hostile = "x<img src=x onerror=alert(1)>&amp;"
    record = json.loads(run.store.get(RUN_KEY))
    run.store.put(RUN_KEY, json.dumps({**record, "run_id": hostile}).encode())
    page = LivePage(run.store, None).page()
    assert "<img" not in page
    assert "x&lt;img src=x onerror=alert(1)&gt;&amp;amp;: stopped, step 4/10" in page


def test_a_new_commit_makes_a_new_page_and_reads_no_batch_twice(run, page, monkeypatch):
    monkeypatch.setattr(live_page, "PAGE_SHARE", 1e9)
    get(f"{page}/")
    read = []
    real = facts.TrainedRows.batches
    monkeypatch.setattr(
        facts.TrainedRows, "batches", lambda own, commit: read.append(commit.step) or real(own, commit)
    )
    run.commit(7)
    assert json.loads(get(f"{page}/status.json"))["page"] == "7/2"
    assert 'data-page="7/2"' in get(f"{page}/")
    assert read == [5, 6, 7, 1, 7]  # the figures of the new steps, then the samples of the first and the last step


def test_a_live_run_is_drawn_again_only_now_and_then(run, monkeypatch):
    monkeypatch.setattr(live_page, "PAGE_SHARE", 1e-6)
    real = live_page.status_of
    monkeypatch.setattr(live_page, "status_of", lambda *known, **more: {**real(*known, **more), "state": "running"})
    page = LivePage(run.store, None)
    page.page()
    run.commit(7)
    assert (page.status()["step"], page.status()["page"]) == (7, "4/2")
    assert 'data-page="4/2"' in page.page()


def test_missing_and_unreadable_objects_are_told_apart(run, served, page):
    for path in (
        "/../run.json",
        "/runs/nothing/",
        "/runs/..%2Fquickstart-1/",
        "/runs/file:%2F%2F%2Ftmp/",
        "/runs/%2e%2e/",
    ):
        assert answer_to(served, "localhost", path)[0] == 404, path
    commit = run.store.list("commits")[-1]
    data = run.store.get(commit)
    run.store.put(commit, b"{")
    assert answer_to(served, "localhost", f"/runs/{RUN}/status.json")[0] == 503
    (listed,) = json.loads(get(f"{served}/runs.json"))["runs"]
    assert listed["state"] == "unreadable"
    assert b'state="unreadable"} 1.0' in get(f"{served}/metrics").encode()
    run.store.put(commit, data)
    assert json.loads(get(f"{page}/status.json"))["step"] == 4
    with pytest.raises(MissingObject):
        LivePage(MemoryStore(), None)


def test_a_port_that_is_taken_is_a_configuration_error(run, served):
    port = int(served.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port} cannot be bound"):
        build_server(None, "127.0.0.1", port)


def test_prometheus_can_read_every_metric_and_every_name_is_declared(run, served):
    families = {family.name: family for family in text_string_to_metric_families(get(f"{served}/metrics"))}
    samples = {sample.name: sample for family in families.values() for sample in family.samples}
    assert set(samples) <= {name for metric in METRICS.values() for name in metric.series}
    assert samples["pipelinerl_step"].value == 4
    assert samples["pipelinerl_step"].labels == {"run": RUN}, "its directory"
    tokens = {s.labels["class"]: s.value for s in families["pipelinerl_tokens"].samples}
    assert tokens["generated"] == sum(number for name, number in tokens.items() if name != "generated")
    states = {s.labels["state"]: s.value for s in families["pipelinerl_state"].samples}
    assert states == {"running": 0.0, "stopped": 1.0, "finished": 0.0, "unreadable": 0.0}
    assert "pipelinerl_actor_slots" not in families, "of a stopped run"


def test_of_an_actor_that_was_restarted_the_newest_epoch_is_shown(store):
    actor_state = {"running": 1, "waiting": 0, "concurrency": 8, "engine_version": 3}
    write_run(store, Shape(steps=2))
    status = {
        **run_status(store),
        "state": "running",
        "actors": {"actor-0/9": actor_state, "actor-0/10": {**actor_state, "running": 5}, "actor-0/2": actor_state},
    }
    assert runs_exposition([status]).count(b"pipelinerl_actor_running{") == 1
    assert b"} 5.0" in runs_exposition([status])
    assert b'actor="actor-0"' in runs_exposition([status]), "labels are bounded: no epochs in them"


def test_latest_is_followed_from_one_run_to_the_next(tmp_path):
    pages = RootPages(open_store(str(tmp_path)))
    with pytest.raises(ConfigError, match="no run was started"):
        pages.run("latest")
    seen = []
    for name in ("one", "one", "two"):
        write_run(open_store(str(tmp_path / name)), Shape(steps=2))
        remember_latest(str(tmp_path / name))
        seen.append(pages.run("latest"))
    assert seen[0] is seen[1]
    assert seen[2] is not seen[1]


def test_a_run_without_commits_or_hub_has_metrics_too(store):
    write_run(store, Shape(steps=2))
    store.delete(store.list("commits"))
    assert b'pipelinerl_step{run="' in runs_exposition([run_status(store)])


def team(root):
    """Three runs of two owners; of the third, run.json is damaged."""
    for name, owner, tags, steps in (("a-1", "alice", ("exp:1",), 6), ("b-2", "bob", (), 9), ("c-3", "bob", (), 3)):
        store = open_store(str(root / name))
        write_run(store, Shape(steps=steps))
        record = json.loads(store.get(RUN_KEY))
        record["config"]["tracking"] = {**record["config"].get("tracking", {}), "tags": tags, "notes": "<b>half</b>"}
        store.put(RUN_KEY, json.dumps({**record, "run_id": name, "owner": owner}).encode())
    store.put(RUN_KEY, b"{")


def test_the_list_has_every_run_with_filters_and_order(run, tmp_path):
    team(tmp_path / "runs")
    with serving(tmp_path / "runs") as served:
        text = get(f"{served}/")
        assert {"a-1", "b-2", "c-3"} == set(re.findall(r'name="run" value="([^"]*)"', text))
        assert 'href="runs/c-3/"' not in text, "an unreadable run has no page"
        assert "&lt;b&gt;half&lt;/b&gt;" in text
        assert "<b>half" not in text

        def shown(query):
            return [run["run_id"] for run in json.loads(get(f"{served}/runs.json?{query}"))["runs"]]

        assert shown("owner=bob") == ["b-2"]
        assert shown("tag=exp") == ["a-1"]
        assert shown("state=unreadable") == ["c-3"]
        assert shown("sort=step")[:2] == ["b-2", "a-1"]
        assert shown("sort=owner")[:2] == ["a-1", "b-2"]
        for query in ("sort=color", "state=lost"):
            assert answer_to(served, "localhost", f"/runs.json?{query}")[0] == 400
        first = json.loads(get(f"{served}/runs.json?owner=alice"))["runs"][0]
        assert first["tokens"] > 0
        assert first["seconds"] == pytest.approx(6.5)


def test_two_runs_side_by_side_show_figures_and_the_settings_that_differ(run, tmp_path):
    team(tmp_path / "runs")
    with serving(tmp_path / "runs") as served:
        text = get(f"{served}/compare?run=a-1&run=b-2")
        assert re.search(r"<td>steps</td><td>6</td><td>9</td>", text)
        assert "<td>tracking.tags</td>" in text
        assert "<td>tracking.notes</td>" not in text, "equal in both"
        assert text.count("<svg") == 2
        for query, status in (("run=a-1", 400), ("run=a-1&run=b-2&run=c-3", 400), ("run=a-1&run=nothing", 404)):
            assert answer_to(served, "localhost", f"/compare?{query}")[0] == status, query


def test_prometheus_sees_every_run_of_the_root(run, tmp_path, monkeypatch):
    team(tmp_path / "runs")
    named = open_store(str(tmp_path / "runs" / "b-2"))
    record = json.loads(named.get(RUN_KEY))
    record["config"]["tracking"]["name"] = 'half "rate"'
    named.put(RUN_KEY, json.dumps({**record, "preset": "quickstart"}).encode())
    with serving(tmp_path / "runs") as served:
        families = {f.name: f for f in text_string_to_metric_families(get(f"{served}/metrics"))}
        assert {s.labels["run"] for s in families["pipelinerl_step"].samples} == {"a-1", "b-2"}
        infos = [(s.value, s.labels) for s in families["pipelinerl_run_info"].samples]
        assert sorted(infos, key=lambda info: info[1]["run"]) == [
            (1.0, {"run": "a-1", "name": "", "owner": "alice", "preset": ""}),
            (1.0, {"run": "b-2", "name": 'half "rate"', "owner": "bob", "preset": "quickstart"}),
        ]
        monkeypatch.setattr(root_pages, "RECENT_SECONDS", 1.0)
        families = {f.name: f for f in text_string_to_metric_families(get(f"{served}/metrics"))}
        assert "pipelinerl_step" not in families, "these runs ended long ago"
        assert {s.labels["run"] for s in families["pipelinerl_state"].samples} == {"c-3"}


def test_a_run_that_is_odd_or_damaged_hides_no_other(run, tmp_path):
    root = tmp_path / "runs"
    team(root)
    shutil.copytree(root / "a-1", root / "a copy")  # the same id twice, in a directory that is no id
    other = open_store(str(root / "b-2"))
    record = json.loads(other.get(RUN_KEY))
    record["config"]["trainer"]["key_of_another_release"] = 1
    other.put(RUN_KEY, json.dumps(record).encode())
    for name, damage in (("d-4", {"trainer": None}), ("e-5", {"trainer": {"steps": "x"}}), ("f-6", {"tracking": 3})):
        open_store(str(root / name)).put(RUN_KEY, json.dumps({**record, "run_id": name, "config": damage}).encode())
    with serving(root) as served:
        runs = {run["url"].rpartition("/")[2]: run for run in json.loads(get(f"{served}/runs.json"))["runs"]}
        assert {name for name, run in runs.items() if run["state"] == "unreadable"} >= {"c-3", "d-4", "e-5"}
        assert set(runs) == {"a-1", "a copy", "b-2", "c-3", "d-4", "e-5", "f-6"}
        assert get(f"{served}/targets.json") == "[]"
        families = {f.name: f for f in text_string_to_metric_families(get(f"{served}/metrics"))}
        steps = {s.labels["run"]: s.value for s in families["pipelinerl_step"].samples}
        assert (steps["a-1"], steps["a copy"], steps["b-2"]) == (6, 6, 9)
        for name in ("a%20copy", "b-2"):
            assert "Roles over time" in get(f"{served}/runs/{name}/")
        (root / "latest.json").write_text("[]")
        assert answer_to(served, "localhost", "/runs/latest/")[0] == 404
        shutil.rmtree(root / "a-1")
        assert answer_to(served, "localhost", "/runs/a-1/")[0] == 404
        assert "pipelinerl_step" in get(f"{served}/metrics")


def test_with_a_token_nothing_is_shown_without_it(run, tmp_path):
    with serving(tmp_path, token="s3cret/+1") as served:
        for path in ("/", "/runs.json", f"/runs/{RUN}/", "/metrics", "/targets.json", "/?token=other", "/nothing"):
            assert answer_to(served, "localhost", path)[0] == 401, path
        assert answer_to(served, "localhost", "/", Cookie="pipelinerl-token=other")[0] == 401
        assert answer_to(served, "localhost", "/healthz")[0] == 200
        bearer = {"Authorization": "Bearer s3cret/+1"}
        assert answer_to(served, "localhost", "/metrics", **bearer)[0] == 200
        status, headers, _ = answer_to(served, "localhost", f"/runs/{RUN}/?a=1&token=s3cret/%2B1")
        assert (status, headers["Location"]) == (303, ".?a=1"), "relative to the page"
        cookie = headers["Set-Cookie"].partition(";")
        assert "HttpOnly" in cookie[2]
        assert answer_to(served, "localhost", "/", Cookie=cookie[0])[0] == 200
        foreign = 'a={"x":1}; nameless; k=a b'
        assert answer_to(served, "localhost", "/", Cookie=f"{foreign}; {cookie[0]}")[0] == 200
        _, headers, _ = answer_to(served, "localhost", "//evil.example/x?token=s3cret/%2B1")
        assert headers["Location"] == "x"
        assert answer_to(served, "localhost", "/healthz?token=other")[1]["Set-Cookie"] is None
    with serving(tmp_path) as served:  # without a token
        assert answer_to(served, "localhost", "/?token=other")[1]["Set-Cookie"] is None
