"""The local Prefect server: up once, off with its block, dead with its parent."""

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import psutil
import pytest

from pipelinerl.flows.cli.local_server import local_server
from tests.integration.browser import browser
from tests.integration.prefect_server import csrf_headers
from tests.waiting import wait_for

pytestmark = pytest.mark.slow


def answers(url: str) -> bool:
    try:
        with urlopen(f"{url}/health", timeout=30) as answer:
            return answer.status == 200
    except (URLError, OSError):
        return False


def servers_under(directory: Path) -> list[psutil.Process]:
    """Prefect server processes whose database is below a directory."""
    processes = []
    for process in psutil.process_iter():
        try:
            is_server = "prefect" in process.cmdline() and "server" in process.cmdline()
            if is_server and str(directory) in process.environ().get("PREFECT_HOME", ""):
                processes.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return processes


def test_the_server_answers_inside_the_block_and_is_gone_after_the_block(tmp_path):
    with local_server(f"file://{tmp_path}") as url:
        assert answers(url)
        assert len(servers_under(tmp_path)) == 1
        assert (tmp_path / ".prefect" / "prefect.db").exists()
        assert stat.S_IMODE((tmp_path / ".prefect").stat().st_mode) == 0o700, "parameters and logs are this user's"
    assert not answers(url)
    assert servers_under(tmp_path) == []


def test_a_web_page_of_another_origin_can_neither_read_nor_change_anything(tmp_path):
    """A page that the user visits could otherwise start a run of a deployment, and so a command."""

    def status_of(request: Request) -> int:
        try:
            with urlopen(request, timeout=60) as answer:
                return int(answer.status)
        except HTTPError as error:
            return error.code

    def allowed_origin(origin: str, method: str, path: str) -> str | None:
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        request = Request(f"{url}{path}", None, headers, method=method)
        try:
            with urlopen(request, timeout=60) as answer:
                answer_headers = answer.headers
        except HTTPError as error:
            answer_headers = error.headers
        return answer_headers["Access-Control-Allow-Origin"]

    with local_server(f"file://{tmp_path}") as url:
        own, evil = url.removesuffix("/api"), "http://evil.example"
        for method, path in (
            ("OPTIONS", "/flow_runs/filter"),
            ("GET", "/csrf-token?client=evil"),
            ("GET", "/version"),
        ):
            assert allowed_origin(own, method, path) == own, "the server's own pages"
            assert allowed_origin(own.replace("127.0.0.1", "localhost"), method, path) is not None
            assert allowed_origin(evil, method, path) is None
        pool = json.dumps({"name": "evil", "type": "process"}).encode()
        headers = {"Content-Type": "application/json", "Origin": evil}
        assert status_of(Request(f"{url}/work_pools/", pool, headers)) == 403
        assert status_of(Request(f"{url}/work_pools/", pool, {"Content-Type": "text/plain"})) == 403
        assert status_of(Request(f"{url}/work_pools/", pool, {**headers, **csrf_headers(url)})) == 201


@pytest.mark.timeout(600)
def test_the_pages_of_the_server_work_in_a_browser(tmp_path):
    """Their requests carry the tokens; also at the other name of this host, where they are of another origin."""
    with local_server(f"file://{tmp_path}") as url, browser() as page:
        body = json.dumps({"name": "a-run-of-the-test", "flow_id": flow_of(url)}).encode()
        headers = {"Content-Type": "application/json", **csrf_headers(url)}
        urlopen(Request(f"{url}/flow_runs/", body, headers), timeout=60).close()
        for place in (url, url.replace("127.0.0.1", "localhost")):
            page.go(f"{place.removesuffix('/api')}/runs")
            page.sees("a-run-of-the-test")


def flow_of(url: str) -> str:
    headers = {"Content-Type": "application/json", **csrf_headers(url)}
    with urlopen(Request(f"{url}/flows/", b'{"name": "a-flow"}', headers), timeout=60) as answer:
        return str(json.load(answer)["id"])


def test_two_commands_on_one_root_do_not_share_a_database(tmp_path):
    with local_server(f"file://{tmp_path}") as first, local_server(f"file://{tmp_path}") as second:
        assert first != second
        assert answers(first)
        assert answers(second)
        assert len(servers_under(tmp_path)) == 1


def test_the_server_ends_when_its_parent_is_killed(tmp_path):
    program = (
        "import sys, time\nfrom pipelinerl.flows.cli.local_server import local_server\n"
        f"with local_server('file://{tmp_path}') as url:\n    print(url, flush=True)\n    time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        url = parent.stdout.readline().strip()
        assert answers(url)
        os.kill(parent.pid, signal.SIGKILL)
    wait_for(lambda: not servers_under(tmp_path), "the end of the server, whose parent was killed", 30)
    assert not answers(url)


def test_a_server_that_cannot_start_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr("pipelinerl.flows.cli.local_server.sys.executable", "/bin/false")
    monkeypatch.setattr(
        "pipelinerl.flows.cli.local_server.ending_with_parent",
        lambda command: ["/bin/sh", "-c", "echo no such port; exit 1"],
    )
    with (
        pytest.raises(Exception, match=r"ended with code 1. Set PREFECT_API_URL(.|\n)*no such port"),
        local_server(f"file://{tmp_path}"),
    ):
        pass
