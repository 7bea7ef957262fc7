"""What every role does as a process."""

import errno
import subprocess
import sys
import textwrap

import pytest

from pipelinerl_core.errors import ConfigError, Fenced, ParityError, StoreError, StoreUnavailable, TrainingDiverged
from pipelinerl_core.roles.runtime.process import RUN, exit_codes, run_main


def run(code: str) -> str:
    printed = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True, timeout=60
    )
    return printed.stdout.strip()


def test_startup_objects_are_left_out_of_later_collections():
    code = """
        import gc
        from pipelinerl_core.roles.runtime.process import freeze_startup_objects
        kept = [[] for _ in range(10_000)]
        freeze_startup_objects()
        print(gc.get_freeze_count() > 10_000, len(gc.get_objects()) < 1_000)
    """
    assert run(code) == "True True"


def test_the_limit_of_descriptors_is_raised_to_the_maximum_of_the_system():
    code = """
        import resource
        from pipelinerl_core.roles.runtime.process import raise_descriptor_limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
        raise_descriptor_limit()
        print(resource.getrlimit(resource.RLIMIT_NOFILE))
    """
    assert run(code) == "(200, 200)"


def test_a_thread_with_descriptors_of_its_own_opens_files_when_the_others_have_none_left():
    code = """
        import os, resource
        from concurrent.futures import ThreadPoolExecutor
        from pathlib import Path
        from pipelinerl_core.roles.runtime.process import own_descriptors
        with ThreadPoolExecutor(1, initializer=own_descriptors) as keeper:
            keeper.submit(int).result()
            resource.setrlimit(resource.RLIMIT_NOFILE, (50, 50))
            taken = [os.dup(0) for _ in range(50 - len(os.listdir("/proc/self/fd")) + 1)]
            try:
                os.dup(0)
            except OSError as error:
                print(error.errno, len(keeper.submit(Path("/proc/self/comm").read_text).result()) > 0)
    """
    assert run(code) == f"{errno.EMFILE} True"


FULL = """
import os, resource, sys
from concurrent.futures import ThreadPoolExecutor
from pipelinerl_core.roles.runtime.process import own_descriptors
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
heartbeat = ThreadPoolExecutor(1, initializer=own_descriptors if sys.argv[1] == "own" else None)
heartbeat.submit(int).result()
taken = []
try:
    while True:
        taken.append(open("/dev/null"))
except OSError:
    pass
def beat():
    with open("/dev/null", "wb") as file:
        return file.write(b"x")
try:
    print(heartbeat.submit(beat).result())
except OSError as error:
    print(error.errno)
"""


@pytest.mark.parametrize(("table", "printed"), [("own", "1"), ("common", str(errno.EMFILE))])
def test_a_thread_with_its_own_descriptors_writes_while_connections_have_used_up_all_others(table, printed):
    ended = subprocess.run(
        [sys.executable, "-c", FULL, table], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout.strip() == printed


@pytest.mark.parametrize(
    ("error", "code", "printed"),
    [
        (None, 0, ""),
        (ConfigError("model.path: no such directory"), 2, "model.path: no such directory\n"),
        (ParityError("parity gate: mean 0.3"), 2, "parity gate: mean 0.3\n"),
        (Fenced("epoch 4 was taken over"), 3, "Fenced: epoch 4 was taken over\n"),
        (StoreError("disk"), 1, "StoreError: disk\n"),
        (StoreUnavailable("503"), 4, "StoreUnavailable: 503\n"),
        (TrainingDiverged("step 3: nan"), 5, "TrainingDiverged: step 3: nan\n"),
        (ExceptionGroup("", [StoreUnavailable("503"), Fenced("gone")]), 3, "StoreUnavailable: 503\nFenced: gone\n"),
        (StoreError("\x1b[2J of a\npeer"), 1, "StoreError: \\x1b[2J of a\\npeer\n"),
        (ExceptionGroup("", [StoreError("disk"), ExceptionGroup("", [Fenced("gone")])]), 3,
         "StoreError: disk\nFenced: gone\n"),
    ],
)  # fmt: skip
def test_expected_errors_of_a_role_are_lines_and_exit_codes(error, code, printed, capsys):
    @exit_codes
    def main():
        if error is not None:
            raise error
        return 0

    assert main() == code
    assert capsys.readouterr().err == printed


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (0, 0), (1, 1)])
def test_the_body_of_a_process_is_given_its_arguments_and_its_result_is_the_exit_code(returned, code, monkeypatch):
    given = []
    monkeypatch.setattr(sys, "argv", ["role", "--run", "/runs/one", "--steps", "3", "a=1", "b=2"])
    arguments = {**RUN, "--steps": {"type": int}, "overrides": {"nargs": "*"}}

    def body(parsed):
        given.append(vars(parsed))
        return returned

    assert run_main("", arguments, body, logs=False) == code
    assert given == [{"run": "/runs/one", "steps": 3, "overrides": ["a=1", "b=2"]}]


def test_an_unexpected_error_beside_an_expected_error_keeps_its_traceback(capsys):
    @exit_codes
    def main():
        raise ExceptionGroup("", [StoreError("disk"), ZeroDivisionError()])

    with pytest.raises(ExceptionGroup) as caught:
        main()
    assert caught.group_contains(ZeroDivisionError)
    assert not caught.group_contains(StoreError)
    assert capsys.readouterr().err == "StoreError: disk\n"


def test_all_threads_of_a_process_and_its_children_keep_to_its_cores():
    code = """
        import os, subprocess, sys, threading
        from pipelinerl_core.roles.runtime.process import keep_to_cores
        done = threading.Event()
        old = threading.Thread(target=done.wait, daemon=True)
        old.start()
        before = os.sched_getaffinity(0)
        keep_to_cores(None)
        assert os.sched_getaffinity(0) == before
        core = max(before)
        keep_to_cores([core])
        child = [sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"]
        printed = subprocess.run(child, capture_output=True, text=True, check=True).stdout.strip()
        print([os.sched_getaffinity(0), os.sched_getaffinity(old.native_id)] == [{core}] * 2, printed == str({core}))
    """
    assert run(code) == "True True"
