"""What a resume asks of an MLflow server, and what a server that stalls costs.

The server is a stub: it records every request, and answers none while it stalls.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from pipelinerl.tasks.run_watch import RunWatch
from pipelinerl_core.comparison.mlflow_run import open_comparison
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.run.context import RunContext, open_run
from pipelinerl_core.run.history import read_commit
from pipelinerl_core.run.mlflow_run import label_tags, open_tracker
from pipelinerl_core.run.records import commit_key
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.supervision import checks
from pipelinerl_core.telemetry import mlflow as tracking
from pipelinerl_core.telemetry.mlflow import LOGGED_TAG, LOST_TAG, RUN_TAG
from tests.synthetic_run import Shape, write_run
from tests.waiting import wait_for

NUM_KEYS = 80
"""Metrics that the run has in MLflow; each has a history."""


class StubMlflow(ThreadingHTTPServer):
    """The part of MLflow's REST API that a run uses."""

    daemon_threads = True

    def __init__(self, artifacts: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.artifacts = artifacts
        self.uri = f"http://127.0.0.1:{self.server_port}"
        self.answers = threading.Event()
        self.answers.set()
        self.asked: list[str] = []
        self.runs = {"old": {RUN_TAG: "r-1"}}
        self.names: dict[str, str] = {}
        self.steps: dict[str, list[int]] = {"old": []}

    def answer(self, path: str, given: dict) -> dict:
        name = path.removeprefix("/api/2.0/mlflow/")
        if name == "experiments/get-by-name":
            return {"experiment": {"experiment_id": "7", "name": "e", "lifecycle_stage": "active"}}
        if name == "runs/create":
            self.runs["new"], self.steps["new"] = {}, []
            return {"run": self.run("new")}
        if name == "runs/search":
            wanted = given["filter"].split("'")[1]
            return {"runs": [self.run(run_id) for run_id, tags in self.runs.items() if tags.get(RUN_TAG) == wanted]}
        if name == "runs/log-batch":
            self.runs[given["run_id"]].update({tag["key"]: tag["value"] for tag in given.get("tags", ())})
            self.steps[given["run_id"]] += [
                metric["step"] for metric in given.get("metrics", ()) if metric["key"] == "reward/mean"
            ]
        if name == "runs/update":
            self.names[given["run_id"]] = given.get("run_name", "")
            return {"run_info": self.run(given["run_id"])["info"]}
        return {"run": self.run(given["run_id"])} if name == "runs/get" else {}

    def run(self, run_id: str) -> dict:
        info = {"run_id": run_id, "experiment_id": "7", "start_time": 1, "artifact_uri": self.artifacts.as_uri()}
        tags = [{"key": key, "value": value} for key, value in self.runs[run_id].items()]
        metrics = [{"key": f"m{n}", "value": 1.0, "timestamp": 1, "step": 5} for n in range(NUM_KEYS)]
        return {"info": info, "data": {"tags": tags, "metrics": metrics}}


class Handler(BaseHTTPRequestHandler):
    server: StubMlflow

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        self.handle_request(parts.path, dict(pair.split("=", 1) for pair in parts.query.split("&") if pair))

    def do_POST(self) -> None:
        self.handle_request(self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def handle_request(self, path: str, given: dict) -> None:
        self.server.asked.append(path)
        self.server.answers.wait(60)
        body = json.dumps(self.server.answer(path, given)).encode()
        with suppress(OSError):  # the client has given up
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server(monkeypatch, tmp_path) -> Iterator[StubMlflow]:
    monkeypatch.setattr(tracking, "_FLUSH_SECONDS", 0.05)
    monkeypatch.setattr(tracking, "_STOP_SECONDS", 0.2)
    monkeypatch.setattr(tracking, "_CLOSE_SECONDS", 20.0)
    stub = StubMlflow(tmp_path / "artifacts")
    thread = threading.Thread(target=stub.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield stub
    stub.answers.set()
    stub.shutdown()
    stub.server_close()
    thread.join(60)


@pytest.fixture
def run(tmp_path) -> RunContext:
    write_run(open_store(str(tmp_path / "r-1")), Shape(steps=5))
    return open_run(f"file://{tmp_path}/r-1")


def resume(run: RunContext, server: StubMlflow, monkeypatch) -> RunWatch:
    """The part of a resume that uses MLflow."""
    config = load_config("quickstart", [f"tracking.mlflow_uri={server.uri}"])
    record = run.record.model_copy(update={"mlflow_run_id": "old"})
    tracker, _ = open_tracker(config, run.store.url, record, "flow-run", {})
    monkeypatch.setattr(tracker, "_datasets", ())
    return RunWatch(run, tracker)


def test_a_resume_starts_while_mlflow_answers_nothing_and_asks_for_no_history(run, server, monkeypatch, caplog):
    server.answers.clear()
    watch = resume(run, server, monkeypatch)  # returns: the stub answers only after the end of the run
    assert watch.committed_step == 5
    with suppress(KeyboardInterrupt), watch:
        wait_for(lambda: server.asked, "a request")
        raise KeyboardInterrupt
    assert "`pipelinerl resume` of the run writes them" in caplog.text
    assert not [path for path in server.asked if "history" in path]
    assert set(server.steps) == {"old"}


def test_a_resume_logs_the_steps_that_mlflow_lacks_with_few_requests(run, server, monkeypatch):
    digest = read_commit(run.store, commit_key(3, 2)).weights_digest
    server.runs["old"][LOGGED_TAG] = json.dumps({"step": 3, "weights_digest": digest})
    with resume(run, server, monkeypatch):
        pass
    assert sorted(server.steps["old"]) == [4, 5]
    assert json.loads(server.runs["old"][LOGGED_TAG])["step"] == 5
    assert not [path for path in server.asked if "history" in path]
    assert len(server.asked) < 20, server.asked  # NUM_KEYS histories would be NUM_KEYS requests


def test_a_run_restored_from_an_older_copy_goes_to_a_new_mlflow_run_and_the_old_mlflow_run_is_marked(
    run, server, monkeypatch, caplog
):
    server.runs["old"][LOGGED_TAG] = json.dumps({"step": 8, "weights_digest": "8" * 64})
    with resume(run, server, monkeypatch) as watch:
        pass
    assert sorted(server.steps["new"]) == [1, 2, 3, 4, 5]
    assert server.steps["old"] == []
    assert server.runs["old"][LOST_TAG] == "5"
    assert server.names["old"] == "r-1 (lost timeline, replaced at step 5)"
    assert "was restored from an older copy" in caplog.text
    assert watch._tracker.run_id == "new"
    with resume(run, server, monkeypatch):  # run.json still names the old MLflow run
        pass
    assert list(server.steps) == ["old", "new"]
    assert sorted(server.steps["new"]) == [1, 2, 3, 4, 5]


def test_a_first_start_waits_for_mlflow_and_refuses_a_server_that_does_not_answer(server, monkeypatch, tmp_path):
    assert tracking._CONNECT_SECONDS < 10
    monkeypatch.setattr(tracking, "_CONNECT_SECONDS", 0.2)
    server.answers.clear()
    config = load_config("quickstart", [f"tracking.mlflow_uri={server.uri}"])
    with pytest.raises(ConfigError, match="MLflow cannot be reached or used"):
        open_tracker(config, f"file://{tmp_path}/r-2", None, "flow-run", {})


def test_a_comparison_with_a_table_goes_on_while_mlflow_does_not_answer(server, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(tracking, "_CONNECT_SECONDS", 0.2)
    monkeypatch.setattr(tracking, "_CLOSE_SECONDS", 0.2)
    server.answers.clear()
    config = load_config("quickstart", [f"tracking.mlflow_uri={server.uri}"])
    arguments = (config, f"file://{tmp_path}", "comparisons/c-1", {}, "flow-run")
    with pytest.raises(ConfigError, match="MLflow cannot be reached or used"):
        open_comparison(*arguments, is_required=True)
    tracker, parent = open_comparison(*arguments, is_required=False)
    tracker.close()
    assert parent is None


def test_only_the_checks_of_a_first_start_ask_for_mlflow(monkeypatch, tmp_path):
    asked = []
    names = ("root", "hub_address", "packages", "prompts", "reward", "objective", "model", "space", "local_files")
    for name in names:
        monkeypatch.setattr(checks, f"check_{name}", lambda *_, **__: [])
    monkeypatch.setattr(checks, "check_mlflow", asked.append)
    config = load_config("quickstart", ["tracking.mlflow_uri=http://127.0.0.1:1"])
    checks.check_all(config, str(tmp_path), run=object())
    assert asked == []
    checks.check_all(config, str(tmp_path))
    assert asked == ["http://127.0.0.1:1"]


def test_labels_of_a_user_are_tags_owner_and_description_in_mlflow():
    labels = ["tracking.tags=exp42,team:alice,model:mine,a@b!/", "tracking.notes=why: x = 3"]
    tags = label_tags(load_config("quickstart", labels), "alice@a")
    assert tags == {
        "tag.exp42": "true", "tag.team": "alice", "tag.model": "mine", "tag.a_b__": "true", "mlflow.user": "alice@a",
        "mlflow.note.content": "why: x = 3",
    }  # fmt: skip
    assert label_tags(load_config("quickstart"), "") == {}
