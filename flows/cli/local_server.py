"""A local Prefect server for a command without PREFECT_API_URL: a child process with its database under the root.

Measured on two cores: ready after 2.7 s; 8.3 s at the first start with a version of Prefect, which creates an empty
database. Later starts with a new root copy that database from the cache. 0.013 cores when idle.
"""

import fcntl
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from http import HTTPStatus
from importlib.metadata import version
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from pipelinerl_core.errors import DeadlineExceeded, PipelineRLError
from pipelinerl_core.models.recipes import cache_directory
from pipelinerl_core.run.context import private_directory
from pipelinerl_core.run.locate import local_directory
from pipelinerl_core.supervision.role_commands import ending_with_parent
from pipelinerl_core.supervision.temporary_directories import temporary_directory

START_SECONDS = 120.0
"""Deadline of the start, which takes seconds, more on a busy machine."""
STOP_SECONDS = 3.0
_HEALTH_SECONDS = 2.0
_POLL_SECONDS = 0.1
_HOME = ".prefect"
_DATABASE = "prefect.db"
_TAIL_BYTES = 2_000

# A single command needs no schedules, workers or automations: the services that poll for them are off.
_SETTINGS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true",  # and no origin but its own: docs/security.md
    "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
    "PREFECT_SERVER_UI_ENABLED": "true",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_LATE_RUNS_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_PAUSE_EXPIRATIONS_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_FOREMAN_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_CLEANUP_RECONCILER_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_REPOSSESSOR_LOOP_SECONDS": "300",
    "PREFECT_SERVER_SERVICES_CANCELLATION_CLEANUP_LOOP_SECONDS": "300",
}


@contextmanager
def local_server(root: str) -> Iterator[str]:
    """Run a server during the block; yields its API URL. The server ends with the calling thread, even after SIGKILL.

    Raises PipelineRLError with the end of the server's log if the server does not start, DeadlineExceeded if the
    start takes too long.
    """
    with _home(root) as home:
        port = _free_port()
        log_path = home / "server.log"
        database = home / _DATABASE
        if not database.exists():
            _copy_empty_database(database)
        is_new = not database.exists()
        with log_path.open("wb") as log:
            command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
            process = subprocess.Popen(
                ending_with_parent(command),
                env=_environment(home, port),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        try:
            url = f"http://127.0.0.1:{port}/api"
            _await_health(process, url, log_path)
            if is_new:
                _keep_empty_database(database)
            yield url
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            process.kill()
            process.wait()


@contextmanager
def _home(root: str) -> Iterator[Path]:
    """<root>/.prefect, locked for this process; if another process holds the lock, another user has made the
    directory, or it cannot be written, a temporary directory.

    Two servers on one SQLite database would block each other.
    """
    directory = local_directory(root) or Path.home() / ".pipelinerl"
    home = directory / _HOME
    with ExitStack() as stack:
        try:
            lock = stack.enter_context((private_directory(home) / "lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # also of a file system that is read-only or has no locks
            home = stack.enter_context(temporary_directory())
        yield home


def _cached_database() -> Path:
    return cache_directory() / f"prefect-{version('prefect')}.db"


def _copy_empty_database(database: Path) -> None:
    """Start from the empty database of this version of Prefect, if the cache has it and it is intact."""
    new = database.with_suffix(".new")
    for name in ("-wal", "-shm", "-journal"):  # of a database that was removed: they do not belong to the copy
        database.with_name(f"{database.name}{name}").unlink(missing_ok=True)
    with suppress(OSError, RuntimeError, sqlite3.Error):
        cached = _cached_database()
        if cached.stat().st_uid in (0, os.getuid()):
            shutil.copyfile(cached, new)
            with closing(sqlite3.connect(new)) as copy:
                is_intact = copy.execute("PRAGMA quick_check").fetchone() == ("ok",)
                copy.execute("SELECT * FROM alembic_version")  # an empty file is a database without tables
            if is_intact:
                new.replace(database)
    new.unlink(missing_ok=True)


def _keep_empty_database(database: Path) -> None:
    """Copy the database of a server that has just started into the cache; replaces a damaged copy."""
    new = database.with_suffix(".new")
    with suppress(OSError, RuntimeError, sqlite3.Error):
        cached = _cached_database()
        cached.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(database)) as source, closing(sqlite3.connect(new)) as target:
            source.backup(target)
        with tempfile.NamedTemporaryFile(dir=cached.parent, delete=False) as own:
            try:
                own.write(new.read_bytes())
                own.flush()
                os.fsync(own.fileno())
                os.replace(own.name, cached)
            except OSError:
                os.unlink(own.name)
    new.unlink(missing_ok=True)


def _environment(home: Path, port: int) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    origins = [f"http://{host}:{port}" for host in ("127.0.0.1", "localhost")]
    database = f"sqlite+aiosqlite:///{home / _DATABASE}"
    return {
        **inherited,
        **_SETTINGS,
        "PREFECT_HOME": str(home),
        "PREFECT_SERVER_UI_API_URL": f"{origins[0]}/api",  # the default of the page is port 4200
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": ",".join(origins),
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": database,
    }


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _await_health(process: "subprocess.Popen[bytes]", url: str, log_path: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not _is_healthy(url):
        if process.poll() is not None:
            end = log_path.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip()
            raise PipelineRLError(
                f"the local Prefect server ended with code {process.returncode}. Set PREFECT_API_URL to use "
                f"another server. End of {log_path}:\n{end}"
            )
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"the local Prefect server did not answer {url}/health within {START_SECONDS:.0f} s. See {log_path}, "
                "or set PREFECT_API_URL to use another server"
            )
        time.sleep(_POLL_SECONDS)


def _is_healthy(url: str) -> bool:
    try:
        with urlopen(f"{url}/health", timeout=_HEALTH_SECONDS) as answer:
            return bool(answer.status == HTTPStatus.OK)
    except (URLError, OSError):
        return False
