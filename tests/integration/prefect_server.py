"""A Prefect server for tests, on PostgreSQL, with a worker per pool; all of it gone at the end."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import psutil

from tests.integration.pipeline import ROOT
from tests.ports import free_port
from tests.processes import install_debian
from tests.waiting import wait_for

MAX_RESUMES = 2
"""Of flow runs that never come to run."""
POOLS = ("control", "actors", "trainers")
PREFECT = str(Path(sys.executable).parent / "prefect")
_DEBIAN_POSTGRES = Path("/usr/lib/postgresql")
await_ = partial(wait_for, pause=0.5)
"""A server that many tests share is asked twice a second only."""


def postgres_programs() -> Path:
    """Directory of Debian's PostgreSQL, which is installed if it is missing."""
    if not list(_DEBIAN_POSTGRES.glob("*/bin/initdb")):
        install_debian("postgresql")
    return max(_DEBIAN_POSTGRES.glob("*/bin/initdb")).parent


@contextmanager
def postgres() -> Iterator[str]:
    """URL (asyncpg) of an empty database of its own cluster, on loopback, without a password."""
    programs, port = postgres_programs(), free_port()
    # Not below pytest's directory, which another session of pytest closes to other users.
    directory = Path(tempfile.mkdtemp(prefix="pipelinerl-postgres-"))
    data = directory / "data"
    data.mkdir()
    # The server refuses to run as root.
    user = ["runuser", "-u", "postgres", "--"] if os.getuid() == 0 else []
    if user:
        shutil.chown(data, "postgres")
        directory.chmod(0o711)
    initdb = [str(programs / "initdb"), "-D", str(data), "-U", "postgres", "-A", "trust", "--no-sync"]
    subprocess.run([*user, *initdb], check=True, timeout=120, stdout=subprocess.DEVNULL, cwd="/")
    options = ["-p", str(port), "-c", "listen_addresses=127.0.0.1", "-c", f"unix_socket_directories={data}"]
    with (directory / "postgres.log").open("ab") as log:
        server = subprocess.Popen(
            [*user, str(programs / "postgres"), "-D", str(data), *options], stdout=log, stderr=log, cwd="/"
        )
    try:
        ready = [str(programs / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(port)]
        await_(lambda: subprocess.run(ready, check=False).returncode == 0, "PostgreSQL", 60)
        yield f"postgresql+asyncpg://postgres@127.0.0.1:{port}/postgres"
    finally:
        kill_tree(server.pid)
        server.wait(timeout=60)
        shutil.rmtree(directory)


def kill_tree(pid: int) -> None:
    """A process and all that it started."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for member in [*process.children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                member.kill()


def csrf_headers(url: str) -> dict[str, str]:
    """Headers without which the server at this URL refuses every request that changes something."""
    with urlopen(f"{url}/csrf-token?client=tests", timeout=60) as answer:
        return {"Prefect-Csrf-Client": "tests", "Prefect-Csrf-Token": json.load(answer)["token"]}


class Prefect:
    """A server and a worker per pool, in a home of their own."""

    def __init__(self, home: Path, database: str = "") -> None:
        """`database`: URL; empty: SQLite in the home."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}/api"
        self.home = home
        self.environment = {
            **os.environ,
            "PREFECT_HOME": str(home),
            "PREFECT_API_URL": self.url,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": self.url.removesuffix(
                "/api"
            ),  # as docs/tutorials/prefect.md sets them
            "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true",
            "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            **({"PREFECT_API_DATABASE_CONNECTION_URL": database} if database else {}),
        }
        self.processes = [self.spawn("server", "start", "--host", "127.0.0.1", "--port", str(port))]

    def spawn(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a prefect command; `stop` ends it."""
        with (self.home / "log").open("ab") as log:
            return subprocess.Popen(
                [PREFECT, *arguments], env=self.environment, cwd=ROOT, stdout=log, stderr=log, start_new_session=True
            )

    def command(self, *arguments: str) -> None:
        """Run a prefect command to its end; CalledProcessError if it fails."""
        subprocess.run([PREFECT, *arguments], env=self.environment, cwd=ROOT, check=True, timeout=120)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """POST with a body, GET without."""
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"{self.url}{path}", data, {"Content-Type": "application/json"})
        if data is not None:
            for header, value in csrf_headers(self.url).items():
                request.add_header(header, value)
        with urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def delete(self, path: str) -> None:
        """DELETE."""
        urlopen(Request(f"{self.url}{path}", headers=csrf_headers(self.url), method="DELETE"), timeout=60).close()

    def start(self, *arguments: str) -> None:
        """Wait for the server, deploy twice with these arguments, start the workers."""
        await_(self.is_healthy, f"the Prefect server, {self.home / 'log'}", 120)
        first, again = (self.deploy("--max-resumes", str(MAX_RESUMES), *arguments) for _ in range(2))
        assert set(first["pools"].values()) == set(first["automations"].values()) == {"created"}
        changes = [*again["pools"].values(), *again["deployments"].values(), *again["automations"].values()]
        assert (set(changes), again["kept"]) == ({"unchanged"}, {})
        assert set(again["pools"]) == set(POOLS)
        self.processes += [self.spawn("worker", "start", "--pool", pool) for pool in POOLS]

    def deploy(self, *arguments: str) -> dict[str, Any]:
        """`pipelinerl deploy --json`."""
        command = [sys.executable, "-m", "pipelinerl.flows.cli", "deploy", "--json", *arguments]
        done = subprocess.run(
            command, env=self.environment, cwd=ROOT, check=True, timeout=120, stdout=subprocess.PIPE, text=True
        )
        deployment: dict[str, Any] = json.loads(done.stdout)
        return deployment

    def is_healthy(self) -> bool:
        """Whether the server answers."""
        try:
            with urlopen(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (URLError, OSError):
            return False

    def log_tail(self) -> str:
        """The end of what server and workers wrote."""
        return (self.home / "log").read_text()[-4000:]

    def runs(self) -> list[dict[str, Any]]:
        """All flow runs, the oldest first."""
        flow_runs: list[dict[str, Any]] = self.ask("/flow_runs/filter", {"sort": "START_TIME_ASC"})
        return flow_runs

    def run(self, run_id: str) -> dict[str, Any]:
        """One flow run."""
        flow_run: dict[str, Any] = self.ask(f"/flow_runs/{run_id}")
        return flow_run

    def set_state(self, run_id: str, **state: Any) -> None:
        """What the buttons of the UI do."""
        self.ask(f"/flow_runs/{run_id}/set_state", {"state": state, "force": state["type"] == "SCHEDULED"})

    def flow_processes(self, run_id: str = "") -> list[psutil.Process]:
        """Processes that execute a flow run: this one, or any."""
        processes = []
        for worker in self.processes[1:]:
            for process in psutil.Process(worker.pid).children(recursive=True):
                with suppress(psutil.Error):  # one that has just ended
                    is_flow = "prefect.engine" in " ".join(process.cmdline())
                    if is_flow and run_id in ("", process.environ().get("PREFECT__FLOW_RUN_ID")):
                        processes.append(process)
        return processes

    def stop(self) -> None:
        """End everything at once."""
        for process in self.processes:
            kill_tree(process.pid)
        for process in self.processes:
            process.wait(timeout=60)
