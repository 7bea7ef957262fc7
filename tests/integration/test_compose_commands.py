"""The commands of infra/compose.yaml, as processes of this machine: do they come up, and do their health checks pass?

No Docker: PostgreSQL and Redis are Debian's, rclone stands in for the S3 store, names of services become 127.0.0.1.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from tests.integration.prefect_server import kill_tree, postgres, postgres_programs
from tests.ports import free_port
from tests.processes import debian_program
from tests.s3_server import ACCESS_KEY, SECRET_KEY, find_rclone
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra"
BIN = Path(sys.executable).parent
SERVICES = yaml.safe_load((INFRA / "compose.yaml").read_text())["services"]
PORTS = {"postgres": 5432, "redis": 6379, "s3": 7070, "prefect-server": 4200, "mlflow": 5000, "serve": 9464}
SECRETS = {"POSTGRES_PASSWORD": "p" * 24, "S3_ACCESS_KEY": ACCESS_KEY, "S3_SECRET_KEY": SECRET_KEY}
STORES = ("redis", "s3")
"""Which Debian and rclone stand in for."""
START_SECONDS = 120


class Stack:
    """Processes by service, each with a free port in place of its own."""

    def __init__(self, home: Path, packages: Path) -> None:
        self.home = home
        self.ports = {name: free_port() for name in [*PORTS, "control"]}
        self.packages = packages
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def here(self, text: str) -> str:
        """A value of compose.yaml as it is on this machine."""
        text = re.sub(r"\$\{(\w+)(?::[-?][^}]*)?\}", lambda match: SECRETS.get(match[1], ""), text)
        for name, port in PORTS.items():
            text = re.sub(rf"\b{name}:{port}\b", f"127.0.0.1:{self.ports[name]}", text)
        return text

    def command(self, name: str) -> list[str]:
        own = {"0.0.0.0": "127.0.0.1", str(PORTS.get(name)): str(self.ports.get(name))}
        first, *rest = [own.get(word, self.here(word)) for word in SERVICES[name]["command"]]
        return [str(BIN / first) if (BIN / first).exists() else first, *rest]

    def environment(self, name: str) -> dict[str, str]:
        kept = {
            key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "AWS_", "MLFLOW_"))
        }
        merged = {key: self.here(str(value)) for key, value in SERVICES[name].get("environment", {}).items()}
        return {
            **kept,
            **merged,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}:{self.packages}",
            "PREFECT_HOME": str(self.home / "prefect"),
            "PREFECT_WORKER_WEBSERVER_PORT": str(self.ports["control"]),
        }

    def start(self, name: str, command: list[str] | None = None) -> None:
        environment = None if command else self.environment(name)
        command = command or self.command(name)
        with (self.home / f"{name}.log").open("wb") as log:
            cwd = self.home if name in STORES else ROOT
            self.processes[name] = subprocess.Popen(command, env=environment, cwd=cwd, stdout=log, stderr=log)

    def wait(self, name: str) -> None:
        """Until the health check of compose.yaml passes."""
        how, program, url = SERVICES[name]["healthcheck"]["test"]
        assert (how, program) == ("CMD", "healthcheck")
        here = re.sub(r":\d+/", f":{self.ports[name]}/", url)
        await_success([sys.executable, str(INFRA / "docker" / "healthcheck"), here], self.processes[name])

    def stop(self) -> None:
        for process in reversed(self.processes.values()):
            kill_tree(process.pid)
            process.wait(timeout=10)


def prepare_databases(port: str) -> None:
    """What the image does on an empty volume: the user and the databases of compose.yaml."""
    asked = SERVICES["postgres"]["environment"]
    psql = [str(postgres_programs() / "psql"), "-q", "-h", "127.0.0.1", "-p", port]
    role = f"CREATE ROLE {asked['POSTGRES_USER']} SUPERUSER LOGIN PASSWORD '{SECRETS['POSTGRES_PASSWORD']}'"
    database = f"CREATE DATABASE {asked['POSTGRES_DB']}"
    mine = ["-U", asked["POSTGRES_USER"], "-d", asked["POSTGRES_DB"]]
    for arguments in (
        ["-U", "postgres", "-c", role, "-c", database],
        [*mine, "-f", str(INFRA / "postgres" / "mlflow.sql")],
    ):
        subprocess.run([*psql, *arguments], check=True, timeout=30)
    _, *ready = SERVICES["postgres"]["healthcheck"]["test"]
    await_success([*ready, f"--port={port}"])


def start_redis_and_s3(stack: Stack) -> None:
    """Debian's Redis, installed if it is missing; rclone in place of versitygw."""
    debian_program("redis-server", "--no-install-recommends")
    port = str(stack.ports["redis"])
    stack.start("redis", [*SERVICES["redis"]["command"], "--port", port])
    address, keys = f"127.0.0.1:{stack.ports['s3']}", f"{ACCESS_KEY},{SECRET_KEY}"
    (stack.home / "s3").mkdir()
    served = [find_rclone(), "serve", "s3", str(stack.home / "s3"), "--addr", address, "--auth-key", keys]
    stack.start("s3", [*served, "--config", "/dev/null"])
    _, *ready = SERVICES["redis"]["healthcheck"]["test"]
    await_success([ready[0], "-p", port, *ready[1:]])


def await_success(command: list[str], process: subprocess.Popen[bytes] | None = None) -> None:
    def has_succeeded() -> bool:
        return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0

    wait_for(has_succeeded, " ".join(command), START_SECONDS, pause=0.3, process=process)


@pytest.fixture
def stack(tmp_path: Path, server_packages: Path) -> Iterator[Stack]:
    """The stores run; the packages of the control image are beside the environment."""
    stack = Stack(tmp_path, server_packages)
    with postgres() as url:
        port = stack.ports["postgres"] = urlsplit(url).port
        prepare_databases(str(port))
        try:
            start_redis_and_s3(stack)
            yield stack
        finally:
            stack.stop()


@pytest.mark.campaign
def test_every_service_of_ours_comes_up_and_passes_its_health_check(stack):
    stack.start("prefect-server")
    stack.start("mlflow")
    stack.wait("prefect-server")
    stack.start("prefect-services")
    setup = subprocess.run(
        stack.command("setup"),
        env=stack.environment("setup"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert setup.returncode == 0, setup.stderr
    assert "work pool control: created" in setup.stdout
    assert sorted(path.name for path in (stack.home / "s3").iterdir()) == ["mlflow", "pipelinerl"]
    stack.start("control")
    stack.start("serve")
    for name in ("mlflow", "control", "serve"):
        stack.wait(name)
    assert [name for name, process in stack.processes.items() if process.poll() is not None] == []
