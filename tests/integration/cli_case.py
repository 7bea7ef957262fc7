"""Commands of the CLI as processes, and what is seen of their runs."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

REPOSITORY = Path(__file__).parents[2]
START_SECONDS = 900.0
# What the supervision allows itself at a stop adds up to 22 s, with servers that do not answer; it takes 2 of them.
STOP_SECONDS = 45.0
STARTED: "list[subprocess.Popen[str]]" = []


@pytest.fixture(autouse=True)
def nothing_is_left() -> "Iterator[None]":
    """A test that fails in the middle must not leave its commands to the next one."""
    yield
    while STARTED:
        process = STARTED.pop()
        process.kill()
        process.wait(10)


def start(root: Path, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "pipelinerl.flows.cli", *arguments, "--root", str(root), "--json"]
    with (root / "stderr.txt").open("a") as log, (root / "stdout.txt").open("w") as results:
        STARTED.append(subprocess.Popen(command, stdout=results, stderr=log, text=True, cwd=REPOSITORY))
    return STARTED[-1]


def run_directories(root: Path) -> list[Path]:
    return [path.parent for path in root.glob("*/run.json")]


def committed(root: Path) -> int:
    # [0-9]*: a file that is being written has a name that starts with a point until it is whole.
    keys = [path for run in run_directories(root) for path in (run / "commits").glob("[0-9]*.json")]
    return max((int(path.name.split(".")[0]) for path in keys), default=-1)


def left_over(root: Path, pids: list[int]) -> list[str]:
    """Processes of a run that still live: those that were children of its command, and any that name its root."""
    command_lines = []
    for process in psutil.process_iter():
        try:
            is_ours = process.pid in pids or str(root) in " ".join(process.cmdline())
            if is_ours and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                command_lines.append(" ".join(process.cmdline()))
        except psutil.NoSuchProcess:
            continue
    return command_lines


def children(process: "subprocess.Popen[str]") -> list[int]:
    return [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
