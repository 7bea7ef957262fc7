"""Processes that tests watch, and programs that tests need."""

import shutil
import subprocess

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
        for command in (["update", "-q"], ["install", "-qy", *options, package or name]):
            subprocess.run(["apt-get", *command], check=True, timeout=400, stdout=subprocess.DEVNULL)
    program = shutil.which(name)
    assert program is not None
    return program
