"""The local Prefect server: up once, off with its block, dead with its parent."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import psutil
import pytest

from pipelinerl.flows.cli.local_server import local_server
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
    found = []
    for process in psutil.process_iter():
        try:
            is_server = "prefect" in process.cmdline() and "server" in process.cmdline()
            if is_server and str(directory) in process.environ().get("PREFECT_HOME", ""):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def test_it_answers_inside_the_block_and_is_gone_after_it(tmp_path):
    with local_server(f"file://{tmp_path}") as url:
        assert answers(url)
        assert len(servers_under(tmp_path)) == 1
        assert (tmp_path / ".prefect" / "prefect.db").exists()
    assert not answers(url)
    assert servers_under(tmp_path) == []


def test_two_commands_on_one_root_do_not_share_a_database(tmp_path):
    with local_server(f"file://{tmp_path}") as first, local_server(f"file://{tmp_path}") as second:
        assert first != second
        assert answers(first)
        assert answers(second)
        assert len(servers_under(tmp_path)) == 1


def test_it_dies_with_a_parent_that_is_killed(tmp_path):
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
