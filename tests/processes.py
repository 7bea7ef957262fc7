"""Processes that tests watch, and programs that tests need."""

import fcntl
import shutil
import subprocess
import tempfile
from pathlib import Path

import psutil


def is_running(process: psutil.Process | int) -> bool:
    """Whether a process (given by its id, or looked up before) has not ended; a zombie has ended."""
    try:
        handle = psutil.Process(process) if isinstance(process, int) else process
        return bool(handle.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def debian_program(name: str, *options: str, package: str | None = None) -> str:
    """Path of a program; if the program is missing, its Debian package is installed, with `options` of apt-get."""
    if shutil.which(name) is None:
        install_debian(package or name, *options)
    program = shutil.which(name)
    assert program is not None
    return program


def install_debian(package: str, *options: str) -> None:
    """Install a Debian package, with `options` of apt-get; one process at a time, as apt-get requires."""
    with Path(tempfile.gettempdir(), "pipelinerl-tests-apt").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in (["update", "-q"], ["install", "-qy", *options, package]):
            subprocess.run(["apt-get", *command], check=True, timeout=400, stdout=subprocess.DEVNULL)
