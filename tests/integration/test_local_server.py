"""The local Prefect server: serves during its block, refuses web pages of other origins, ends with its parent."""

import errno
import json
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import psutil
import pytest

from pipelinerl.flows.cli import local_server as local_server_module
from pipelinerl.flows.cli.local_server import local_server
from pipelinerl_core.errors import PipelineRLError
from tests.integration.browser import browser
from tests.integration.prefect_server import csrf_headers
from tests.waiting import wait_for

pytestmark = pytest.mark.slow


def answers(url: str) -> bool:
    """Whether a server at this API URL is healthy."""
    try:
        with urlopen(f"{url}/health", timeout=30) as answer:
            return answer.status == 200
    except (URLError, OSError):
        return False


def servers_under(directory: Path) -> list[psutil.Process]:
    """Prefect server processes whose home, with the database, is below a directory."""
    processes = []
    for process in psutil.process_iter():
        try:
            is_server = "prefect" in process.cmdline() and "server" in process.cmdline()
            if is_server and str(directory) in process.environ().get("PREFECT_HOME", ""):
                processes.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return processes


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """(root, API URL) of a server that tests share."""
    root = tmp_path_factory.mktemp("root")
    with local_server(f"file://{root}") as url:
        yield root, url


def test_the_server_answers_inside_the_block_and_is_gone_after_the_block(tmp_path):
    with local_server(f"file://{tmp_path}") as url:
        assert answers(url)
        assert len(servers_under(tmp_path)) == 1
        assert (tmp_path / ".prefect" / "prefect.db").exists()
        assert stat.S_IMODE((tmp_path / ".prefect").stat().st_mode) == 0o700, "other users can read the parameters"
    assert not answers(url)
    assert servers_under(tmp_path) == []


def status_of(request: Request) -> int:
    try:
        with urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code


def allowed_origin(url: str, origin: str, method: str) -> str | None:
    """The origin whose pages may read the answer to this request, by the answer's headers; None: no other origin."""
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    try:
        with urlopen(Request(url, None, headers, method=method), timeout=60) as answer:
            answer_headers = answer.headers
    except HTTPError as error:
        answer_headers = error.headers
    return answer_headers["Access-Control-Allow-Origin"]


def test_a_web_page_of_another_origin_can_neither_read_nor_change_anything(server):
    """A page that the user visits could otherwise start a run of a deployment, and so a command."""
    _, url = server
    own, evil = url.removesuffix("/api"), "http://evil.example"
    for method, path in (
        ("OPTIONS", "/flow_runs/filter"),
        ("GET", "/csrf-token?client=evil"),
        ("GET", "/version"),
    ):
        for origin in (own, own.replace("127.0.0.1", "localhost")):
            assert allowed_origin(f"{url}{path}", origin, method) == origin, "the server's own pages"
        assert allowed_origin(f"{url}{path}", evil, method) is None
    pool = json.dumps({"name": "evil", "type": "process"}).encode()
    headers = {"Content-Type": "application/json", "Origin": evil}
    assert status_of(Request(f"{url}/work_pools/", pool, headers)) == 403
    assert status_of(Request(f"{url}/work_pools/", pool, {"Content-Type": "text/plain"})) == 403
    # Only the token is missing above, and a page of another origin cannot read the token.
    assert status_of(Request(f"{url}/work_pools/", pool, {**headers, **csrf_headers(url)})) == 201


def create_flow(url: str) -> str:
    """Create a flow; its id."""
    headers = {"Content-Type": "application/json", **csrf_headers(url)}
    with urlopen(Request(f"{url}/flows/", b'{"name": "a-flow"}', headers), timeout=60) as answer:
        return str(json.load(answer)["id"])


@pytest.mark.timeout(600)
def test_the_pages_of_the_server_work_in_a_browser(server):
    """The requests of the pages carry the CSRF token, also if the pages are opened at the other name of this host."""
    _, url = server
    with browser() as page:
        body = json.dumps({"name": "a-run-of-the-test", "flow_id": create_flow(url)}).encode()
        headers = {"Content-Type": "application/json", **csrf_headers(url)}
        urlopen(Request(f"{url}/flow_runs/", body, headers), timeout=60).close()
        for api_url in (url, url.replace("127.0.0.1", "localhost")):
            page.go(f"{api_url.removesuffix('/api')}/runs")
            page.sees("a-run-of-the-test")


def test_two_commands_on_one_root_do_not_share_a_database(server):
    root, first = server
    with local_server(f"file://{root}") as second:
        assert first != second
        assert answers(first)
        assert answers(second)
        assert len(servers_under(root)) == 1, "the other server has a temporary home"


def test_a_new_root_starts_with_the_empty_database_of_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PIPELINERL_CACHE", str(tmp_path / "cache"))
    with local_server(f"file://{tmp_path}/first") as url:
        create_flow(url)
    (cached,) = (tmp_path / "cache").iterdir()
    with closing(sqlite3.connect(cached)) as database:
        assert database.execute("SELECT count(*) FROM flow").fetchone() == (0,), "a run of another root"
        database.execute("CREATE TABLE mark (a)")
    with local_server(f"file://{tmp_path}/second") as url:
        create_flow(url)
    with closing(sqlite3.connect(tmp_path / "second" / ".prefect" / "prefect.db")) as database:
        assert database.execute("SELECT count(*) FROM mark").fetchone() == (0,)
    cached.write_bytes(cached.read_bytes()[:100_000])
    with local_server(f"file://{tmp_path}/third") as url:
        create_flow(url)
    with closing(sqlite3.connect(cached)) as database:
        assert database.execute("PRAGMA quick_check").fetchone() == ("ok",), "a damaged copy is replaced"


def test_an_empty_file_in_the_cache_is_no_database(tmp_path, monkeypatch):
    monkeypatch.setattr(local_server_module, "_cached_database", lambda: tmp_path / "cached.db")
    (tmp_path / "cached.db").touch()
    local_server_module._copy_empty_database(tmp_path / "prefect.db")
    assert [path.name for path in tmp_path.iterdir()] == ["cached.db"]


def test_a_home_that_cannot_be_written_is_replaced_by_a_temporary_directory(monkeypatch):
    def read_only(path):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(local_server_module, "private_directory", read_only)
    with local_server_module._home("s3://bucket/runs") as home:
        assert home.is_dir()


def test_the_server_ends_when_its_parent_is_killed(tmp_path):
    program = (
        "import sys, time\nfrom pipelinerl.flows.cli.local_server import local_server\n"
        f"with local_server('file://{tmp_path}') as url:\n    print(url, flush=True)\n    time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        url = parent.stdout.readline().strip()
        assert answers(url)
        parent.kill()
    wait_for(lambda: not servers_under(tmp_path), "the end of the server, whose parent was killed", 30)
    assert not answers(url)


def test_the_error_of_a_server_that_cannot_start_ends_with_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "pipelinerl.flows.cli.local_server.ending_with_parent",
        lambda command: ["/bin/sh", "-c", "echo no such port; exit 1"],
    )
    with (
        pytest.raises(PipelineRLError, match=r"ended with code 1\. Set PREFECT_API_URL(.|\n)*no such port$"),
        local_server(f"file://{tmp_path}"),
    ):
        pass
