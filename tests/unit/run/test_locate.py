"""What a start of a run leaves on its host when it ends."""

import os
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from pipelinerl_core.run import locate
from pipelinerl_core.run.records import HUB_KEY
from pipelinerl_core.storage.object_store import open_store
from tests.builders import hub_record, put_epoch
from tests.fakes import MemoryStore
from tests.synthetic_run import Shape, put_record, write_run


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


@pytest.fixture
def killed(tmp_path, monkeypatch):
    """(root, store) of a run whose processes were killed, with weights in shared memory."""
    monkeypatch.setattr(locate, "SHARED_MEMORY", tmp_path / "shm")
    store = open_store(f"{tmp_path}/runs/r-1")
    write_run(store, Shape(steps=1))
    (locate.shared_memory_of("r-1") / "00000001.4").mkdir(parents=True)
    (locate.shared_memory_of("of-another-root") / "00000001.4").mkdir(parents=True)
    return f"{tmp_path}/runs", store


def test_shared_memory_of_a_killed_run_is_found_and_that_of_other_roots_stays(killed):
    assert locate.abandoned_shared_memory(killed[0]) == [locate.shared_memory_of("r-1")]


def test_shared_memory_of_a_run_whose_hub_or_trainer_lives_is_not_abandoned(killed):
    root, store = killed
    put_epoch(store, 90, "trainer", started_at=time.time(), host=socket.gethostname(), pid=os.getpid())
    assert locate.abandoned_shared_memory(root) == []
    put_epoch(store, 91, "trainer", started_at=time.time(), host=socket.gethostname(), pid=dead_pid())
    assert len(locate.abandoned_shared_memory(root)) == 1
    own = psutil.Process()
    hub = hub_record(host=socket.gethostname(), pid=own.pid, process_started_at=own.create_time(), beat=0.0)
    put_record(store, HUB_KEY, hub)
    assert locate.abandoned_shared_memory(root) == []


def test_shared_memory_in_which_a_live_engine_stages_weights_is_not_abandoned(killed):
    staged = locate.shared_memory_of("r-1") / "staged"
    (staged / f"actor-0.{dead_pid()}").mkdir(parents=True)
    assert len(locate.abandoned_shared_memory(killed[0])) == 1
    (staged / f"actor-0.{os.getpid()}").mkdir()
    assert locate.abandoned_shared_memory(killed[0]) == []


def test_latest_is_the_newest_run_of_the_user_and_without_one_that_of_all(tmp_path, monkeypatch):
    root = str(tmp_path)
    for name, owner in (("a", "alice@gpu1"), ("b", "bob"), ("c", "carol@laptop")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
        locate.remember_latest(f"file://{tmp_path}/{name}", owner)
    newest = {}
    for user in ("alice", "bob", "dora"):
        monkeypatch.setattr("getpass.getuser", lambda user=user: user)
        newest[user] = locate.locate_run("latest", root)[-1]
    assert newest == {"alice": "a", "bob": "b", "dora": "c"}
    monkeypatch.setattr("getpass.getuser", lambda: "alice")
    assert locate.locate_run("latest", root, of_all=True)[-1] == "c"
    (tmp_path / "a" / "run.json").unlink()
    assert locate.locate_run("latest", root)[-1] == "c", "alice's run was removed"
