"""What a start of a run leaves on its host when it ends."""

import os
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from pipelinerl_core.run import locate
from pipelinerl_core.testing.fakes import MemoryStore
from tests.builders import put_epoch


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(locate, "SHARED_MEMORY", tmp_path)
    run = SimpleNamespace(run_id="run", store=MemoryStore())
    (locate.shared_memory_of("run") / "00000001.4").mkdir(parents=True)
    return run


def start(run, epoch, role="trainer", **values):
    put_epoch(run.store, epoch, role, **{"started_at": time.time(), "host": socket.gethostname(), **values})


def dead_pid():
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", ""])
    process.wait(60)
    return process.pid


def is_left(run):
    locate.remove_shared_memory(run)
    return locate.shared_memory_of("run").exists()


def test_weights_in_shared_memory_stay_while_the_trainer_of_another_start_is_on_this_host(run):
    start(run, 2, pid=dead_pid())
    start(run, 4, pid=os.getpid())
    start(run, 5, "hub", pid=dead_pid())
    assert is_left(run)


@pytest.mark.parametrize("newest", ["none", "dead", "elsewhere", "pid of another process"])
def test_weights_in_shared_memory_go_with_the_last_start_on_this_host(run, newest):
    if newest != "none":
        start(run, 2, pid=os.getpid())
    if newest == "dead":
        start(run, 4, pid=dead_pid())
    if newest == "elsewhere":
        start(run, 4, pid=os.getpid(), host="another-host")
    if newest == "pid of another process":
        start(run, 4, pid=os.getpid(), started_at=1.0)
    assert not is_left(run)


def test_weights_in_shared_memory_go_though_the_trainer_of_this_start_has_its_grace_still(run):
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE) as trainer:
        start(run, 2, pid=trainer.pid)
        assert not is_left(run)
