"""Permissions of an environment process."""

import os
import socket
from pathlib import Path
from threading import Thread

import pytest

from pipelinerl_core.sandbox import isolation
from tests.unit.environments.episode_case import ScriptedHost, played

pytestmark = pytest.mark.skipif(
    bool(isolation.missing()), reason=f"this host has no {' and no '.join(isolation.missing())}"
)

CODE = """
import asyncio, os, signal, socket, subprocess, threading, time

async def dial(task):
    reader, writer = await asyncio.open_connection("127.0.0.1", task["port"])
    writer.close()

ATTEMPTS = {
    "read": lambda task: open("/etc/passwd").read(),
    "read_own": lambda task: open(task["file"]).read(),
    "environment": lambda task: open(f"/proc/{task['parent']}/environ").read(),
    "write": lambda task: open(task["file"], "w"),
    "socket": lambda task: socket.create_connection(("127.0.0.1", task["port"])),
    "dial": dial,
    "unix": lambda task: socket.socket(socket.AF_UNIX),
    "thread": lambda task: asyncio.to_thread(time.sleep, 0),
    "fork": lambda task: os.fork() or os._exit(0),
    "run": lambda task: subprocess.run(["/bin/true"]),
    "kill": lambda task: os.kill(task["parent"], 0),
    "token": lambda task: os.environ["PIPELINERL_TOKEN"],
}

class Env:
    weights = {"read": 0.0}

    async def play(self, task, ask, seed):
        results = {}
        for name, attempt in ATTEMPTS.items():
            try:
                result = attempt(task)
                if asyncio.iscoroutine(result):
                    await result
                results[name] = 1
            except (OSError, RuntimeError, KeyError):
                results[name] = 0
        return results

    async def score(self, task, transcript): return transcript
"""


@pytest.fixture
def server():
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept():
            while True:
                connection, _ = listening.accept()
                is_last = connection.recv(4) == b"stop"
                connection.close()
                if is_last:
                    return

        thread = Thread(target=accept)
        thread.start()
        yield listening.getsockname()[1]
        with socket.create_connection(listening.getsockname()) as last:
            last.sendall(b"stop")
        thread.join()


@pytest.mark.parametrize(("network", "allowed"), [("false", set()), ("true", {"socket", "dial", "thread"})])
def test_files_network_and_processes_are_out_of_reach(server, network, allowed, monkeypatch):
    monkeypatch.setenv("PIPELINERL_TOKEN", "hidden")
    task = {"port": server, "file": str(Path(__file__)), "parent": os.getpid()}
    (result,) = played(CODE, ScriptedHost(), task=task, overrides=[f"environment.network={network}"])
    assert {component.name for component in result.score.components if component.value} == allowed


def test_a_class_may_read_files_and_start_programs_without_isolation():
    code = CODE.replace("os._exit(0)", "None")
    task = {"port": 1, "file": str(Path(__file__)), "parent": os.getpid()}
    code = code.replace('"fork"', '"read_again"').replace("os.fork() or None", "open(task['file']).read()")
    code = code.replace('open(task["file"], "w")', "None")
    (result,) = played(code, ScriptedHost(), task=task, overrides=["environment.isolation=none"])
    assert {"read", "read_own", "run", "thread"} < {
        component.name for component in result.score.components if component.value
    }


def test_a_file_that_starts_a_thread_is_refused_with_the_name_of_the_key():
    code = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n" + CODE
    (error,) = played(code, ScriptedHost(), task={})
    assert "has started threads" in error
    assert "set environment.isolation=none" in error
