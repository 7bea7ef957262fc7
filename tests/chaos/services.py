"""Servers around a run that can vanish and come back: Prefect, MLflow, S3."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from tests.ports import free_port

START_SECONDS = 300.0
"""A server alone takes seconds; one that comes back shares two cores with two engines and two ranks at full work."""


class Service:
    """A server process on a port of its own, the same each time it is started."""

    def __init__(
        self, name: str, arguments: list[str], home: Path, port: int, environment: Mapping[str, str]
    ) -> None:
        self.name, self.home = name, home
        self.url = f"http://127.0.0.1:{port}"
        self._arguments = [sys.executable, "-m", *arguments, "--host", "127.0.0.1", "--port", str(port)]
        self._environment = {**os.environ, **environment}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """In the background; `wait` until it answers."""
        with (self.home / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._arguments, env=self._environment, stdout=log, stderr=log, start_new_session=True, cwd=self.home
            )

    def wait(self) -> None:
        """Until it answers."""
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            assert self._process is not None
            assert self._process.poll() is None, (self.home / f"{self.name}.log").read_text()[-2000:]
            assert time.monotonic() < deadline, f"{self.name} did not answer within {START_SECONDS:g} s"
            time.sleep(0.2)

    def kill(self) -> None:
        """kill -9 of it and of its workers."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(60)
            self._process = None

    def _answers(self) -> bool:
        path = "/api/health" if self.name == "prefect" else "/health"
        try:
            with urlopen(self.url + path, timeout=2) as answer:
                return answer.status == 200
        except (URLError, OSError):
            return False


def prefect_server(home: Path) -> Service:
    """A Prefect server on SQLite."""
    environment = {
        "PREFECT_HOME": str(home / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
        "PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED": "false",
    }
    return Service("prefect", ["prefect", "server", "start"], home, free_port(), environment)


def mlflow_server(home: Path) -> Service:
    """An MLflow server on SQLite."""
    arguments = ["mlflow", "server", "--workers", "1", "--backend-store-uri", f"sqlite:///{home}/mlflow.db"]
    arguments += ["--default-artifact-root", str(home / "mlartifacts")]
    # Without them it is one process: its job runner starts seven more, and each loads all of MLflow. That was most of
    # a start, which took longer than two minutes beside a run with vLLM.
    environment = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    return Service("mlflow", arguments, home, free_port(), environment)
