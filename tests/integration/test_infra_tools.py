"""Prometheus' and Alertmanager's tools read our files, and test our alerts; Prometheus finds the roles of a run."""

import json
import subprocess
import threading
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.report import root_pages
from pipelinerl_core.report.root_pages import RootPages
from pipelinerl_core.report.web import build_server
from pipelinerl_core.roles.runtime.monitor import monitored
from pipelinerl_core.run.context import RunContext
from pipelinerl_core.run.locate import remember_latest
from pipelinerl_core.run.records import RunRecord
from pipelinerl_core.storage.object_store import open_store
from tests.ports import free_port
from tests.processes import debian_program
from tests.synthetic_run import Shape, write_run
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PROMETHEUS = Path(__file__).parents[2] / "infra" / "prometheus"


@pytest.fixture(scope="module")
def promtool():
    return debian_program("promtool", package="prometheus")


def test_amtool_accepts_the_file():
    amtool = debian_program("amtool", "--no-install-recommends", package="prometheus-alertmanager")
    command = [amtool, "check-config", "alertmanager.yml"]
    done = subprocess.run(command, cwd=PROMETHEUS, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "config", "--syntax-only", "prometheus.yml"],
        ["check", "rules", "alerts.yml"],
        ["test", "rules", "alerts_test.yml"],
    ],
)
def test_promtool_accepts_the_files(promtool, arguments):
    done = subprocess.run(
        [promtool, *arguments], cwd=PROMETHEUS, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def ask(port, path):
    try:
        with urlopen(f"http://127.0.0.1:{port}/api/v1/{path}", timeout=5) as answer:
            return json.loads(answer.read())["data"]
    except (URLError, OSError):  # it is starting
        return {}


def test_prometheus_finds_the_roles_through_the_server_of_the_runs_and_scrapes_them(promtool, tmp_path, monkeypatch):
    store = open_store(str(tmp_path / "runs" / "quickstart-1"))
    write_run(store, Shape(steps=3))
    remember_latest(store.url)
    run = RunContext(
        store=store,
        record=RunRecord.model_validate_json(store.get("run.json")),
        config=load_config("quickstart"),
        token="t",
    )
    monkeypatch.setattr(root_pages, "RECENT_SECONDS", 1e9)  # the commits of the synthetic run are of 2025
    server = build_server(RootPages(open_store(str(tmp_path / "runs"))), "127.0.0.1", 0, token="of-prometheus")
    (tmp_path / "token").write_text("of-prometheus\n")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    text = (PROMETHEUS / "prometheus.yml").read_text()
    for shipped, here in (
        ("/run/secrets/serve-token", str(tmp_path / "token")),
        ("serve:9464", f"127.0.0.1:{server.server_address[1]}"),
        ("15s", "1s"),
        ("- alerts.yml", f"- {PROMETHEUS / 'alerts.yml'}"),
    ):
        assert shipped in text
        text = text.replace(shipped, here)
    (tmp_path / "prometheus.yml").write_text(text)
    port = free_port()
    command = [
        "prometheus", f"--config.file={tmp_path / 'prometheus.yml'}", f"--web.listen-address=127.0.0.1:{port}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
    ]  # fmt: skip
    with monitored(run, "trainer", "trainer") as (_, monitor):
        monitor.heartbeat("computing step 3")
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            all_series = wait_for(
                lambda: ask(port, "query?query=pipelinerl_role_healthy").get("result"), "a scrape of the role"
            )
        finally:
            process.kill()
            process.wait(timeout=10)
            server.shutdown()
            server.server_close()
    (series,) = all_series
    assert series["value"][1] == "1"
    labels = series["metric"]
    assert (labels["run"], labels["role"], labels["name"]) == (run.run_id, "trainer", "trainer")
    assert labels["job"] == "pipelinerl-roles"
