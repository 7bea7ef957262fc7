"""Supervision of a role, on stand-in children that take milliseconds."""

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipelinerl_core.errors import ConfigError, Fenced, StoreUnavailable, TrainingDiverged
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.supervision import process_groups, run_roles, supervise
from pipelinerl_core.supervision.role_commands import role_command, role_environment
from pipelinerl_core.supervision.role_logs import RoleLog
from pipelinerl_core.supervision.supervise import RoleFailed, RoleReport, describe_exit, memory_kills, supervise_role
from tests.processes import is_running
from tests.waiting import wait_for


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    monkeypatch.setattr(supervise, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(supervise, "FIRST_BACKOFF_SECONDS", 0.01)


def run(tmp_path: Path, program: str, *, max_restarts: int = 2, **options) -> RoleReport:
    options.setdefault("stop", threading.Event())
    return supervise_role(
        [sys.executable, "-I", "-S", "-c", program, str(tmp_path)],
        env=dict(os.environ),
        log=RoleLog(tmp_path / "logs" / "role.log", 1 << 20),
        max_restarts=max_restarts,
        name="role",
        **options,
    )


# Appends one character per start to <tmp>/starts and leaves the number of starts in `n`.
COUNT = """
import os, sys, time, signal, subprocess
with open(sys.argv[1] + "/starts", "a+") as file:
    file.write("x"); file.flush(); file.seek(0); n = len(file.read())
"""


def test_a_role_that_ends_with_0_is_not_restarted(tmp_path):
    report = run(tmp_path, COUNT)
    assert (report.exit_code, report.restarts, report.stopped) == (0, 0, False)
    assert (tmp_path / "starts").read_text() == "x"


def test_a_role_that_ends_with_0_before_its_work_is_done_is_started_again(tmp_path):
    report = run(tmp_path, COUNT, is_done=lambda: (tmp_path / "starts").read_text() == "xx")
    assert (report.exit_code, report.restarts) == (0, 1)


def test_a_role_that_fails_twice_and_then_succeeds_has_two_restarts(tmp_path):
    report = run(tmp_path, COUNT + "sys.exit(0 if n == 3 else 1)")
    assert (report.exit_code, report.restarts) == (0, 2)
    assert (tmp_path / "starts").read_text() == "xxx"


def test_the_budget_of_restarts_is_exact_and_the_error_quotes_the_last_log_lines(tmp_path):
    with pytest.raises(
        RoleFailed, match=r"exited with code 7, after 2 restarts \(placement.max_restarts=2\)"
    ) as caught:
        run(tmp_path, COUNT + "print('start', n, 'found no weights'); sys.exit(7)")
    assert (tmp_path / "starts").read_text() == "xxx"
    assert "  | start 3 found no weights" in str(caught.value)
    assert "start 1" not in str(caught.value), "the log of an earlier start is not the reason"


def test_failures_before_a_long_life_are_not_counted(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    program = COUNT + "time.sleep(0.3 * (n == 3))\nsys.exit(7 * (n < 6))"
    with pytest.raises(RoleFailed, match="after 2 restarts"):
        run(tmp_path / "a", COUNT + "sys.exit(7 * (n < 6))")
    report = run(tmp_path / "b", program, stable_seconds=0.25, max_restarts=3)
    assert report.restarts == 5


@pytest.mark.parametrize(("collective_seconds", "max_tokens"), [(600.0, 80), (3600.0, 80), (600.0, 32768)])
def test_a_life_that_was_a_wait_in_vain_is_counted(tmp_path, collective_seconds, max_tokens, monkeypatch):
    """Groups never come, or ranks: the trainer gives up after its deadline, and has done so in every life."""
    given = {}
    monkeypatch.setattr(run_roles, "supervise_role", lambda command, **options: given.update(options))
    overrides = [f"trainer.collective_seconds={collective_seconds}", f"rollouts.max_tokens={max_tokens}"]
    config = load_config("quickstart", overrides)
    run = SimpleNamespace(store=SimpleNamespace(url=f"file://{tmp_path}"), run_id="one", config=config, token="token")
    run_roles.supervise(run, "trainer", "trainer", {}, threading.Event())
    start_seconds = 300.0
    assert given["stable_seconds"] > start_seconds + max(config.group_seconds, collective_seconds)


def test_a_killed_role_is_restarted_and_named_by_its_signal(tmp_path):
    with pytest.raises(RoleFailed, match="killed by SIGKILL"):
        run(tmp_path, COUNT + "os.kill(os.getpid(), signal.SIGKILL)", max_restarts=1)
    assert (tmp_path / "starts").read_text() == "xx"


def test_exit_code_2_surfaces_its_own_line_and_is_not_restarted(tmp_path):
    program = (
        COUNT
        + "print('INFO: hello', flush=True)\n"
        + "print('model.path=/nope: no such directory', file=sys.stderr); sys.exit(2)"
    )
    with pytest.raises(ConfigError) as caught:
        run(tmp_path, program)
    assert str(caught.value) == "model.path=/nope: no such directory"
    assert (tmp_path / "starts").read_text() == "x"


def test_an_actor_whose_place_is_taken_ends_without_an_error(tmp_path):
    report = run(tmp_path, COUNT + "sys.exit(3)", is_replaced=lambda: True)
    assert (report.exit_code, report.restarts) == (3, 0)


def test_an_actor_whose_place_was_taken_is_started_again_once_that_place_is_free(tmp_path):
    report = run(tmp_path, COUNT + "sys.exit(3 if n == 1 else 0)", is_replaced=lambda: False)
    assert (report.exit_code, report.restarts) == (0, 1)
    assert (tmp_path / "starts").read_text() == "xx"


def test_an_actor_that_is_fenced_again_and_again_is_given_up(tmp_path):
    with pytest.raises(RoleFailed, match="the process that replaced the role has ended, after 2 restarts"):
        run(tmp_path, COUNT + "sys.exit(3)", is_replaced=lambda: False)


def test_an_expelled_actor_is_not_restarted_and_does_not_end_the_run(tmp_path, caplog):
    program = COUNT + "print('Expelled: actor a: its engine', file=sys.stderr); sys.exit(6)"
    report = run(tmp_path, program, is_replaced=lambda: False)
    assert (report.exit_code, report.restarts, report.stopped) == (6, 0, False)
    assert (tmp_path / "starts").read_text() == "x"
    assert "ended for good: Expelled: actor a: its engine" in caplog.text


def test_a_fenced_role_is_not_restarted(tmp_path):
    with pytest.raises(Fenced, match=r"another process has taken over.*epoch 4 was taken over"):
        run(tmp_path, COUNT + "print('epoch 4 was taken over'); sys.exit(3)")
    assert (tmp_path / "starts").read_text() == "x"


def stop_when_started(tmp_path: Path, program: str, **options) -> tuple[RoleReport, float]:
    """Set the stop event once the child has written <tmp>/pid; the report and seconds from stop to return."""
    stop = threading.Event()
    reports: list[RoleReport] = []
    thread = threading.Thread(target=lambda: reports.append(run(tmp_path, program, stop=stop, **options)))
    thread.start()
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the process id")
    begun = time.monotonic()
    stop.set()
    thread.join(60)
    return reports[0], time.monotonic() - begun


WRITE_PID = COUNT + "open(sys.argv[1] + '/pid', 'w').write(str(os.getpid()))\n"


def test_stop_sends_sigterm_and_the_role_ends_on_its_own_terms(tmp_path):
    program = (
        COUNT
        + "signal.signal(signal.SIGTERM, lambda *_: (open(sys.argv[1] + '/sealed', 'w').write('1'), sys.exit(0)))\n"
        + "open(sys.argv[1] + '/pid', 'w').write(str(os.getpid()))\ntime.sleep(60)"
    )
    report, seconds = stop_when_started(tmp_path, program, stop_seconds=60.0)
    assert (report.stopped, report.exit_code, report.restarts) == (True, 0, 0)
    assert (tmp_path / "sealed").exists()
    assert seconds < 30


def test_a_role_that_ignores_sigterm_is_killed_after_the_grace(tmp_path):
    program = (
        COUNT + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WRITE_PID.removeprefix(COUNT) + "time.sleep(60)"
    )
    report, seconds = stop_when_started(tmp_path, program, stop_seconds=0.3)
    assert (report.stopped, report.exit_code) == (True, -9)
    assert 0.3 <= seconds < 30
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_a_child_of_a_role_ends_with_the_role(tmp_path):
    grandchild = "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    program = COUNT + grandchild + "open(sys.argv[1] + '/pid', 'w').write(str(child.pid))\ntime.sleep(60)"
    stop_when_started(tmp_path, program)
    wait_for(lambda: not is_running(int((tmp_path / "pid").read_text())), "the end of the role's own child")


def test_a_role_that_does_not_become_ready_is_restarted_and_named(tmp_path):
    with pytest.raises(RoleFailed, match=r"not ready within 0 s, after 1 restarts"):
        run(tmp_path, COUNT + "time.sleep(60)", max_restarts=1, ready_check=lambda: False, ready_seconds=0.2)


def test_readiness_is_asked_until_the_first_yes_and_then_no_more(tmp_path):
    answers = iter([False, True])
    report = run(tmp_path, COUNT + "time.sleep(0.3)", ready_check=lambda: next(answers), ready_seconds=0.2)
    assert report.exit_code == 0


def test_a_stop_during_the_backoff_ends_the_supervision(tmp_path, monkeypatch):
    monkeypatch.setattr(supervise, "FIRST_BACKOFF_SECONDS", 30.0)
    monkeypatch.setattr(supervise, "LAST_BACKOFF_SECONDS", 30.0)
    lives = []
    start = supervise._RoleProcess.__init__
    monkeypatch.setattr(
        supervise._RoleProcess, "__init__", lambda self, *args: (lives.append(self), start(self, *args))[1]
    )
    report, seconds = stop_when_started(tmp_path, WRITE_PID + "sys.exit(1)")
    assert report.stopped
    assert seconds < 15
    assert len(lives) == 1
    assert (tmp_path / "starts").read_text() == "x", "a stopped role must not be started again"


def test_every_life_has_a_temporary_directory_of_its_own_which_is_removed_at_its_end(tmp_path):
    program = (
        COUNT
        + "directory = os.environ['TMPDIR']; open(directory + '/left', 'w').write('x')\n"
        + "open(sys.argv[1] + '/directories', 'a').write(directory + '\\n')\n"
        + "os.kill(os.getpid(), signal.SIGKILL) if n == 1 else None"
    )
    assert run(tmp_path, program).restarts == 1
    directories = (tmp_path / "directories").read_text().split()
    assert len(set(directories)) == 2
    assert not any(Path(directory).exists() for directory in directories)


LEAVES_MEMORY = """
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=1000)
tracker = resource_tracker._resource_tracker
child = subprocess.Popen(["sleep", "60"], pass_fds=[tracker.getfd()])
with open(sys.argv[1] + "/left", "w") as file:
    file.write(f"{memory.name} {tracker._pid} {child.pid}")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_shared_memory_of_a_killed_role_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(process_groups, "TRACKER_SECONDS", 20.0)
    with pytest.raises(RoleFailed, match="killed by SIGKILL"):
        run(tmp_path, COUNT + LEAVES_MEMORY, max_restarts=0)
    name, *pids = (tmp_path / "left").read_text().split()
    assert not (Path("/dev/shm") / name).exists()
    assert not any(is_running(int(pid)) for pid in pids)


def test_a_role_that_the_store_has_ended_to_its_last_restart_is_an_outage_and_no_failure(tmp_path):
    with pytest.raises(StoreUnavailable, match="the store did not answer, after 1 restarts"):
        run(tmp_path, COUNT + "sys.exit(4)", max_restarts=1)
    with pytest.raises(RoleFailed, match="exited with code 1, after 3 restarts"):
        run(tmp_path, COUNT + "sys.exit(1)", max_restarts=3)


@pytest.mark.parametrize(
    ("raised", "starts"),
    [
        ("raise ValueError('no head')", "xx"),
        ("{}[n // 9]", "xx"),
        ("raise ValueError(n)", "xxx"),  # another message: another cause
        ("raise ConnectionError('no server')", "xxx"),
        ("import subprocess; raise subprocess.SubprocessError('busy')", "xxx"),  # no exception of the language
        ("raise MemoryError", "xxx"),
        ("print('ValueError: in a line of its own', file=sys.stderr); sys.exit(1)", "xxx"),
    ],
)
def test_two_ends_at_the_same_place_are_a_wrong_configuration(tmp_path, raised, starts):
    expected = ConfigError if starts == "xx" else RoleFailed
    with pytest.raises(expected) as caught:
        run(tmp_path, COUNT + raised)
    assert (tmp_path / "starts").read_text() == starts
    if expected is ConfigError:
        start = "role: ended twice at the same place with "
        assert re.fullmatch(rf"{start}\w+: .*\. Its log is {tmp_path}/logs/role\.log", str(caught.value))


def test_a_trainer_that_diverged_is_not_restarted(tmp_path):
    program = COUNT + "print('TrainingDiverged: step 3: nan', file=sys.stderr); sys.exit(5)"
    with pytest.raises(TrainingDiverged, match=r"^step 3: nan$"):
        run(tmp_path, program, max_restarts=3)
    assert (tmp_path / "starts").read_text() == "x"


def test_exit_codes_in_words():
    assert describe_exit(1) == "exited with code 1"
    assert describe_exit(-9) == "killed by SIGKILL"
    assert "when memory is full, and has done" in describe_exit(-9, memory_kills=1)
    assert describe_exit(-15, memory_kills=1) == "killed by SIGTERM"


def test_kills_for_lack_of_memory_are_those_that_the_kernel_counts(tmp_path):
    (tmp_path / "vmstat").write_text("pgfault 12\noom_kill 3\nunevictable_pgs_culled 0\n")
    assert memory_kills(tmp_path / "vmstat") == 3
    assert memory_kills(tmp_path / "none") == 0


def test_every_child_waits_passively_and_has_its_thread_limits():
    environment = role_environment(3, "secret")
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environment["GOMP_SPINCOUNT"] == "0"
    assert {environment[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")} == {"3"}
    assert environment["PIPELINERL_TOKEN"] == "secret"
    assert next(iter(environment)) == "PYTHONUNBUFFERED", "a variable that no library sets again"


def test_a_role_keeps_freed_memory_instead_of_fetching_new_pages(monkeypatch):
    program = (
        "import resource\ncount = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "step = lambda: [bytearray(4 << 20) for _ in range(50)]\n"
        "step()\nbefore = count()\nfor _ in range(5): step()\nprint(count() - before)"
    )
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    command = [sys.executable, "-c", program]
    output = subprocess.run(command, env=role_environment(1, ""), check=True, capture_output=True, timeout=60).stdout
    assert int(output) < 2_000, "page faults; 256,000 pages are allocated"
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=2")
    assert role_environment(1, "")["GLIBC_TUNABLES"].endswith(":glibc.malloc.arena_max=2"), "the user's choice"
    monkeypatch.setenv("GLIBC_TUNABLES", "")
    assert role_environment(1, "")["GLIBC_TUNABLES"] == "", "the defaults of glibc"


def test_the_command_line_of_a_role_has_the_pid_of_its_parent_and_never_the_token():
    command = role_command("actor", {"run": "file:///runs/a", "name": "actor-0"})
    expected = ["-m", "pipelinerl_core.roles.actor.main", "--run", "file:///runs/a", "--name", "actor-0"]
    assert command[1:] == [*expected, "--parent-pid", str(os.getpid())]
