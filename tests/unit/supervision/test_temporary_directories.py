"""Temporary directories of role processes: their own, short, and gone with them."""

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.run.context import OUTER_TEMPORARY_VARIABLE, log_directory
from pipelinerl_core.supervision import temporary_directories
from pipelinerl_core.supervision.temporary_directories import compiler_cache, own_temporary, temporary_directory

ROOT = Path(__file__).parents[3]
# What vLLM calls its sockets.
SOCKET = "1a423857-47e1-469b-8d08-a6800a88a956"


@pytest.fixture
def outer(monkeypatch):
    """A temporary directory of this host that nobody else uses, with a path nearly as short as /tmp's."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as directory:
        monkeypatch.setenv(OUTER_TEMPORARY_VARIABLE, directory)
        yield Path(directory)


LEAVES_THINGS = """
import os, signal, sys, tempfile
tempfile.mkdtemp(); tempfile.mkstemp()
open(sys.argv[1], "w").write(tempfile.gettempdir())
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_files_that_a_killed_process_leaves_are_removed_with_its_directory(outer, tmp_path):
    with own_temporary(os.environ) as environment:
        command = [sys.executable, "-c", LEAVES_THINGS, str(tmp_path / "where")]
        ended = subprocess.run(command, env=environment, check=False)
        inside = Path((tmp_path / "where").read_text())
        assert ended.returncode == -signal.SIGKILL
        assert inside == Path(environment["TMPDIR"])
        assert len(list(inside.iterdir())) == 3, "two of its own, and the way to the compiler's cache"
    assert list(outer.iterdir()) == [compiler_cache()]


STRAGGLER = """
import os, sys, time
directory = os.open(sys.argv[1], os.O_RDONLY)
print(flush=True)
for n in range(300):
    os.mkdir(str(n), dir_fd=directory)
    time.sleep(0.001)
"""


def test_the_directory_is_removed_although_a_process_still_writes_there(outer, monkeypatch):
    monkeypatch.setattr(temporary_directories, "_REMOVE_SECONDS", 30.0)
    with temporary_directory() as directory:
        command = [sys.executable, "-I", "-S", "-c", STRAGGLER, str(directory)]
        straggler = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert straggler.stdout is not None
        with straggler.stdout:
            straggler.stdout.readline()
    assert list(outer.iterdir()) == []
    straggler.wait(60)
    assert list(outer.iterdir()) == []


OWNER = """
import time, pipelinerl_core.supervision.temporary_directories
with pipelinerl_core.supervision.temporary_directories.temporary_directory() as directory:
    print(directory, flush=True)
    time.sleep(60)
"""


def test_the_directory_of_a_killed_supervisor_is_removed_at_the_next_start_and_a_live_directory_stays(outer):
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert owner.stdout is not None
    with owner.stdout:
        abandoned = Path(owner.stdout.readline().strip())
    with temporary_directory() as other:
        assert {abandoned, other} == set(outer.iterdir()), "its owner lives"
        owner.kill()
        owner.wait(10)
        with temporary_directory() as newest:
            assert {other, newest} == set(outer.iterdir())
    assert list(outer.iterdir()) == []


def test_a_socket_fits_however_long_the_path_of_the_hosts_directory_is(tmp_path, monkeypatch):
    long = tmp_path / ("d" * 80)
    long.mkdir()
    monkeypatch.setenv(OUTER_TEMPORARY_VARIABLE, str(long))
    with own_temporary({}) as environment, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{environment['TMPDIR']}/{SOCKET}")
        assert environment[OUTER_TEMPORARY_VARIABLE] == str(long)
    assert not Path(environment["TMPDIR"]).exists()


def test_a_directory_that_is_removed_as_abandoned_during_its_creation_is_made_again(outer, monkeypatch):
    lock, taken = temporary_directories.fcntl.flock, []

    def late(descriptor: int, how: int) -> None:
        if not taken:
            taken.extend(outer.iterdir())
            taken[0].rmdir()
        lock(descriptor, how)

    monkeypatch.setattr(temporary_directories.fcntl, "flock", late)
    with temporary_directory() as directory:
        assert [directory] == list(outer.iterdir()) != taken


def test_logs_stay_where_others_find_them(outer, monkeypatch):
    with own_temporary({"PATH": "/bin"}) as environment:
        assert environment["PATH"] == "/bin"
        assert environment[OUTER_TEMPORARY_VARIABLE] == str(outer)
        monkeypatch.setattr(tempfile, "tempdir", environment["TMPDIR"])  # as in the role
        assert log_directory("s3://bucket/run", "run").parents[2] == outer


def test_compiled_code_is_there_for_the_next_process(outer, monkeypatch):
    seen = []
    for _ in range(2):
        with own_temporary(os.environ) as environment:
            monkeypatch.setattr(tempfile, "tempdir", environment["TMPDIR"])  # as in the role
            cache = Path(default_cache_dir())
            seen.append(sorted(path.name for path in cache.iterdir()))
            (cache / "header.gch").touch()
    assert seen == [[], ["header.gch"]]
    assert [path.name for path in outer.iterdir()] == [cache.name], "the processes' own directories are gone"


MANY = """
import pipelinerl_core.supervision.temporary_directories
for _ in range(40):
    with pipelinerl_core.supervision.temporary_directories.temporary_directory() as directory:
        (directory / "x").touch()
"""


def test_starts_at_the_same_moment_do_not_take_each_others_directories(outer):
    several = [subprocess.Popen([sys.executable, "-c", MANY], cwd=ROOT) for _ in range(3)]
    assert [process.wait(120) for process in several] == [0, 0, 0]
    assert list(outer.iterdir()) == []


def test_a_process_runs_where_no_temporary_directory_can_be_made(monkeypatch, caplog):
    monkeypatch.setenv(OUTER_TEMPORARY_VARIABLE, "/tmp/there-is-no-such-directory")
    with own_temporary({"PATH": "/bin"}) as environment:
        assert environment == {"PATH": "/bin"}
    assert "no temporary directory below /tmp/there-is-no-such-directory" in caplog.text


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user, whose files only root can make")


@as_root
@pytest.mark.parametrize("is_link", [False, True])
def test_a_compiler_cache_of_another_user_is_not_used(outer, is_link):
    """It holds code that the role would run."""
    planted = outer / "planted"
    planted.mkdir()
    os.chown(planted, 65534, 65534)
    if is_link:
        compiler_cache().symlink_to(planted)
    else:
        planted.rename(compiler_cache())
    with own_temporary(os.environ) as environment:
        assert list(Path(environment["TMPDIR"]).iterdir()) == [], "the process makes a cache of its own"


def test_a_pipe_with_the_name_of_an_abandoned_directory_stops_nobody(outer):
    os.mkfifo(outer / f"{temporary_directories._prefix()}pipe")
    with temporary_directory() as directory:
        assert directory.is_dir()


@as_root
@pytest.mark.parametrize("is_link", [False, True])
def test_a_log_directory_of_another_user_is_refused(outer, is_link):
    own = log_directory("s3://bucket/run", "run").parents[1]
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    if is_link:
        own.rename(outer / "planted")
        own.symlink_to(outer / "planted")
    else:
        os.chown(own, 65534, 65534)
    with pytest.raises(ConfigError, match=rf"^{own}: no place for logs .*Set TMPDIR"):
        log_directory("s3://bucket/run", "run")
