"""Programs that attack their sandbox and their tests, in bubblewrap and with Landlock alone."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from pipelinerl_core.environments.builtin.code import Code
from pipelinerl_core.sandbox import isolation
from pipelinerl_core.sandbox.program_server import Limits
from pipelinerl_core.sandbox.programs import NoSandbox, ProgramSandbox, SandboxEnded, host_isolation
from tests.integration.pipeline import ROOT
from tests.processes import debian_program
from tests.unit.environments.episode_case import ScriptedHost, played, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(isolation.missing()), reason=f"this host has no {' and no '.join(isolation.missing())}"),
]

LIMITS = Limits(cpu_seconds=1, wall_seconds=60, memory_bytes=512 << 20, output_bytes=10_000)
SECRET = "the expected output of a test"

# What must fail with an OSError; `secret` is a file of the host, `parent` the process that starts the sandbox.
REFUSED = {
    "read a file of the host": "open(secret).read()",
    "read the users": "open('/etc/passwd').read()",
    "read the checkout": "open(checkout + '/pyproject.toml').read()",
    "read the project": "open(checkout + '/pipelinerl_core/sandbox/programs.py').read()",
    "list the root": "os.listdir('/')",
    "read the environment of the parent": "open(f'/proc/{parent}/environ', 'rb').read()",
    "read the memory of the parent": "open(f'/proc/{parent}/mem', 'rb')",
    "read the memory of the server": "open(f'/proc/{os.getppid()}/mem', 'rb')",
    "list the descriptors of the parent": "os.listdir(f'/proc/{parent}/fd')",
    "read its environment": "open('/proc/self/environ', 'rb').read()",
    "read memory by a system call": "check(libc.syscall(310, os.getppid(), None, 0, None, 0, 0))",
    "trace the server": "check(libc.ptrace(16, os.getppid(), 0, 0))",
    "write a file": "open('/tmp/marker', 'w')",
    "write a module": "open(os.__file__, 'a')",
    "fork": "os.fork()",
    "start a program": "subprocess.run(['/bin/true'])",
    "replace itself": "os.execv(sys.executable, ['python', '-c', '1'])",
    "kill the server": "os.kill(os.getppid(), 9)",
    "stop the server": "os.kill(os.getppid(), 19)",
    "kill all": "os.kill(-1, 9)",
    "connect": "socket.create_connection(('127.0.0.1', 1))",
    "send a datagram": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "open a socket of the host": "socket.socket(socket.AF_UNIX)",
    "raise its limits": "check(libc.setrlimit(6, (ctypes.c_long * 2)(1000, 1000)))",
    "share memory": "multiprocessing.shared_memory.SharedMemory(create=True, size=100)",
    "use the descriptor of the statuses": "os.write(6, b'{}')",
    "read the descriptor of the requests": "os.read(5, 1)",
    "mount": "check(libc.mount(b'none', b'/tmp', b'tmpfs', 0, None))",
    "make a namespace": "check(libc.unshare(0x10000000))",
}
ATTEMPT = """
import ctypes, multiprocessing, os, socket, subprocess, sys
import multiprocessing.shared_memory
libc = ctypes.CDLL(None, use_errno=True)
secret, checkout, parent = {values}
def check(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
try:
    {attempt}
    print("worked")
except OSError:
    print("refused")
"""
# Programs that must end by a limit, and what their ends look like: exit code, part of the errors.
LIMITED = {
    "loops": ("while True: pass", -9, ""),
    "sleeps": ("import time\ntime.sleep(1e6)", -9, ""),
    "ignores signals": (
        "import signal\n[signal.signal(n, signal.SIG_IGN) for n in (14, 24, 25)]\nwhile 1: pass",
        -9,
        "",
    ),
    "allocates": ("x = bytearray(1 << 40)", 1, "MemoryError"),
    "maps memory": ("import mmap\nx = [mmap.mmap(-1, 100 << 20) for _ in range(100)]", 1, "Cannot allocate memory"),
    "prints": ("while True: print('x' * 1000)", 1, "File too large"),
    "forks for ever": ("import os\nwhile True: os.fork()", 1, "Operation not permitted"),
    "starts threads": ("import threading\nthreading.Thread(target=print).start()", 1, "can't start new thread"),
    "recurses": ("import sys\nsys.setrecursionlimit(10**9)\nf = lambda: f()\nf()", None, ""),
    "opens descriptors": ("import os\nx = [os.dup(0) for _ in range(1000)]", 1, "Too many open files"),
}


@pytest.fixture(scope="module", params=["bubblewrap", "landlock"])
def choice(request):
    if request.param == "bubblewrap":
        debian_program("bwrap", package="bubblewrap")
    return request.param


def executed(choice, *programs, limits=LIMITS, **request):
    """The executions of programs in one sandbox, one after the other; no process of the sandbox is left."""
    before = set(psutil.Process().children(recursive=True))

    async def main():
        sandbox = ProgramSandbox(limits, choice)
        try:
            async with asyncio.timeout(200):
                return [await sandbox.run(program, **request) for program in programs]
        finally:
            sandbox.close()

    results = asyncio.run(main())
    assert set(psutil.Process().children(recursive=True)) == before
    return results


def test_input_imports_and_exits_work_in_the_sandbox(choice):
    read_twice = "print(repr(input()), repr(__import__('sys').stdin.read()), repr(__import__('sys').stdin.read()))"
    uses, reads, imports, exits, quits = executed(
        choice,
        "import collections, decimal, re\nprint(re.sub('a', 'b', input()), sum(range(10)))",
        read_twice,
        "import sqlite3, unicodedata, numpy\nprint(numpy.arange(3).sum())",
        "print('done')\nraise SystemExit(0)",
        "print('done')\nexit()",
        stdin="abc\nrest",
    )
    assert uses.output == "bbc 45\n"
    assert reads.output == "'abc' 'rest' ''\n"
    assert (imports.exit_code, imports.output) == (0, "3\n"), imports.errors
    assert (exits.exit_code, exits.output) == (quits.exit_code, quits.output) == (0, "done\n")


def test_calls_return_json_and_prints_do_not_disturb(choice):
    program = "def f(x, y=2):\n    print('noise')\n    return [x, (y, None)]"
    (done,) = executed(choice, program, function="f", calls=[[1], ["é", {"a": 1.5}]])
    assert [json.loads(line) for line in done.output.splitlines()] == [[1, [2, None]], ["é", [{"a": 1.5}, None]]]
    program = "class Solution:\n    def f(self, *values): return repr(values)"
    (done,) = executed(choice, program, function="f", calls=[[(1, [2])], [{1: None}, {True}], ["1", float("inf")]])
    results = [json.loads(line) for line in done.output.splitlines()]
    assert results == ["((1, [2]),)", "({1: None}, {True})", "('1', inf)"]
    (broken,) = executed(choice, "def f(x): return {1, 2}", function="f", calls=[[1]])
    assert (broken.exit_code, broken.output) == (1, "")
    assert "not JSON serializable" in broken.errors


def test_attempts_to_leave_the_sandbox_are_refused(choice, tmp_path):
    secret = tmp_path / "tests.json"
    secret.write_text(SECRET)
    os.chmod(tmp_path, 0o755)
    values = repr((str(secret), str(ROOT), os.getpid()))
    programs = [ATTEMPT.format(values=values, attempt=attempt) for attempt in REFUSED.values()]
    results = dict(zip(REFUSED, executed(choice, *programs), strict=True))
    assert {name: done.output for name, done in results.items()} == dict.fromkeys(REFUSED, "refused\n")
    assert not Path("/tmp/marker").exists()


def test_limits_end_a_program_and_the_next_program_runs(choice):
    programs = [program for program, _, _ in LIMITED.values()]
    *results, last = executed(choice, *programs, "print('alive')", limits=replace(LIMITS, wall_seconds=5))
    for name, (_, exit_code, error), done in zip(LIMITED, LIMITED.values(), results, strict=True):
        assert (exit_code is None and done.exit_code != 0) or done.exit_code == exit_code, (name, done)
        assert error in done.errors, (name, done)
        assert len(done.output) <= LIMITS.output_bytes
    assert (last.exit_code, last.output) == (0, "alive\n")


def test_a_program_finds_nothing_of_earlier_programs(choice):
    """A program that prints a mark, and one that looks for the mark in all memory that it can read."""
    mark = "MARK" + "OF-AN-EARLIER-PROGRAM"
    leaves = f"import sys\nprint({mark!r}, input())\nsys.stdout.flush()\nprint({mark!r}, file=sys.stderr)"
    searches = (
        "import gc, os\nfirst, second = 'KRAM', 'REILRAE-NA-FO'\n"  # backwards: this text is in memory, too
        "texts = [str(one) for one in gc.get_objects() if isinstance(one, (bytes, str, list, tuple, dict))]\n"
        "found = any(first[::-1] + second[::-1] in text for text in texts)\n"
        "print(found, os.fstat(1).st_size, os.environ.get('HOME'))"
    )

    async def main():
        sandbox = ProgramSandbox(LIMITS, choice)
        try:
            first = await sandbox.run(leaves, stdin=mark)
            return first, await sandbox.run(searches)
        finally:
            sandbox.close()

    first, second = asyncio.run(main())
    assert first.output == f"{mark} {mark}\n"
    assert second.output == "False 0 None\n", second.errors


def test_a_program_is_not_root_in_bubblewrap_and_has_no_capabilities(choice):
    read = (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\n"
        "bounding = [libc.prctl(23, number, 0, 0, 0) for number in (0, 7, 12, 21)]\n"
        "print(bounding, libc.prctl(39, 0, 0, 0, 0), os.getuid())"
    )
    (done,) = executed(choice, read)
    # prctl is refused; the user is nobody, or a user of the host that is not root, in bubblewrap.
    assert done.output.startswith("[-1, -1, -1, -1] -1 ")
    if choice == "bubblewrap":
        assert int(done.output.split()[-1]) != 0


def test_a_cancelled_execution_does_not_answer_the_next_execution(choice):
    async def main():
        sandbox = ProgramSandbox(LIMITS, choice)
        try:
            large = "#" * 1_000_000
            first = asyncio.create_task(sandbox.run(f"{large}\nimport time\ntime.sleep(0.3)\nprint('first')"))
            await asyncio.sleep(0.1)
            first.cancel()
            return (await sandbox.run("print('second')")).output
        finally:
            sandbox.close()

    assert asyncio.run(main()) == "second\n"


def test_an_ended_sandbox_is_an_error_and_a_missing_sandbox_is_named(choice, monkeypatch):
    async def main():
        sandbox = ProgramSandbox(LIMITS, choice)
        main_process = psutil.Process(sandbox._process.pid)
        for member in (*main_process.children(recursive=True), main_process):
            member.kill()
        try:
            with pytest.raises(SandboxEnded):
                await sandbox.run("print(1)")
        finally:
            sandbox.close()

    asyncio.run(main())
    monkeypatch.setattr(shutil, "which", lambda name, path: None)
    if choice == "bubblewrap":
        with pytest.raises(NoSandbox, match=r"bubblewrap \(bwrap\) is not installed"):
            ProgramSandbox(LIMITS, "bubblewrap")
        return
    sandbox = ProgramSandbox(LIMITS, "auto")
    assert sandbox.isolation.startswith("Landlock")
    assert "not installed" in sandbox.reason
    sandbox.close()
    assert host_isolation().endswith(", because bubblewrap (bwrap) is not installed")


def test_the_sandbox_ends_with_its_parent(choice):
    code = (
        "from tests.integration.test_programs_sandbox import LIMITS, ProgramSandbox\nimport os\n"
        f"import psutil\nsandbox = ProgramSandbox(LIMITS, {choice!r})\n"
        "print(*(one.pid for one in psutil.Process().children(recursive=True)), flush=True)\nos.kill(os.getpid(), 9)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    processes = [psutil.Process(pid) for pid in map(int, done.stdout.split()) if psutil.pid_exists(pid)]
    assert done.stdout.split()
    _, left = psutil.wait_procs(processes, timeout=30)
    assert not left


# ---- answers of a model, with the environment around them ---------------------------------------------------------

ADD = {"prompt": "Add.", "tests": json.dumps([{"stdin": "1 2", "stdout": "3"}, {"stdin": "5 5", "stdout": "10"}])}
SQUARE = {"prompt": "Square.", "tests": ["assert square(3) == 9", "assert square(-2) == 4", "assert square(0) == 0"]}
HALF = {"prompt": "Half.", "tests": ["assert half(3) == 1.5", "assert half(2) == 1.0"]}
RIGHT_ADD = "print(sum(map(int, input().split())))"
# Reply -> (task, solved, passed)
REPLIES = {
    f"Sure:\n```python\n{RIGHT_ADD}\n```": (ADD, 1.0, 1.0),
    "print(3)": (ADD, 0.0, 0.5),
    "print('passed')\nprint('OK')\nraise SystemExit(0)": (ADD, 0.0, 0.0),
    "import os\nos._exit(0)": (ADD, 0.0, 0.0),
    "for n in range(100): print(n)": (ADD, 0.0, 0.0),
    "while True: pass": (ADD, 0.0, 0.0),
    f"{RIGHT_ADD}\n1 / 0": (ADD, 0.0, 0.0),
    f"```\n{RIGHT_ADD}\n```\nor\n```\nprint(0)\n```": (ADD, 0.0, 0.0),
    "": (ADD, 0.0, 0.0),
    "def square(x): return x * x": (SQUARE, 1.0, 1.0),
    "def square(x): return x + 6": (SQUARE, 0.0, 2 / 3),
    "class Any:\n    def __eq__(self, other): return True\ndef square(x): return Any()": (SQUARE, 0.0, 0.0),
    "class Any(int):\n    def __eq__(self, other): return True\ndef square(x): return Any(1)": (SQUARE, 0.0, 0.0),
    "import json\njson.dumps = lambda *a, **k: 'true'\ndef square(x): return 1": (SQUARE, 0.0, 0.0),
    "import os\nos.write(3, b'9\\n4\\n0\\n')\ndef square(x): return x * x": (SQUARE, 0.0, 0.0),
    "import os, sys\nos.write(3, b'1\\n1\\n1\\n')\nos._exit(0)": (SQUARE, 0.0, 0.0),
    "def square(x): raise SystemExit(0)": (SQUARE, 0.0, 0.0),
    "square = 9": (SQUARE, 0.0, 0.0),
    "def square(x): return [[]] * 10**6": (SQUARE, 0.0, 0.0),
    "x = []\nfor _ in range(5000): x = [x]\ndef square(y): return x": (SQUARE, 0.0, 0.0),
    "def square(x): return float('nan')": (SQUARE, 0.0, 0.0),
    f"{RIGHT_ADD}\nraise SystemExit(256)": (ADD, 0.0, 0.0),
    "def half(x): return x / 2": (HALF, 1.0, 1.0),
    "def half(x): return 10**400": (HALF, 0.0, 0.0),
    "def half(x): return 10**5000": (HALF, 0.0, 0.0),
    "import os\nos.write(3, b'1' + b'0' * 400 + b'\\n')\ndef half(x): return x / 2": (HALF, 0.0, 0.0),
}
OVERRIDES = ["prompts.kind=file", "prompts.path=rows.jsonl"]


def components(result):
    return {component.name: component.value for component in result.score.components}


def test_known_ways_to_cheat_earn_nothing(choice):
    results = played(
        None,
        *(ScriptedHost(reply) for reply in REPLIES),
        tasks=[task for task, _, _ in REPLIES.values()],
        overrides=[*OVERRIDES, f"environment.options.sandbox={choice}"],
        path="builtin:code",
    )
    for reply, (_, solved, passed), result in zip(REPLIES, REPLIES.values(), results, strict=True):
        values = components(result)
        assert (values["solved"], values["passed"]) == (solved, pytest.approx(passed)), (reply, values)


def test_a_failed_test_is_told_without_the_expected_output():
    host = ScriptedHost("print(7)", f"```\n{RIGHT_ADD}\n```")
    (result,) = played(
        None, host, task=ADD, overrides=[*OVERRIDES, "environment.options.turns=3"], path="builtin:code"
    )
    assert components(result) == {"solved": 1.0, "passed": 1.0, "ran": 1.0, "turns": 2.0}
    ((message,), _) = host.asked[1]
    assert message["content"] == "A test failed.\nInput:\n1 2\nOutput:\n7\nWrite the whole program again."
    assert list(host.once) == ["program 1", "program 2"]  # what a crash does not run again


def test_after_the_end_of_the_sandbox_the_episode_is_played_in_a_new_process():
    """The host kills the server of the sandbox, as it does if its memory is used up."""
    hosts = [ScriptedHost(f"```\n{RIGHT_ADD}\n```") for _ in range(2)]
    others = set(psutil.Process().children())  # of earlier tests of this process

    async def work(pool):
        first = await pool.play(ADD, 1, hosts[0])
        (process,) = set(psutil.Process().children()) - others
        for child in process.children(recursive=True):
            child.kill()
        return first, await pool.play(ADD, 2, hosts[1])

    first, second = run(None, work, *OVERRIDES, path="builtin:code")
    assert [components(result)["solved"] for result in (first, second)] == [1.0, 1.0]
    assert (hosts[0].restarts, hosts[1].restarts) == (0, 1)


def test_the_process_names_the_isolation_of_the_programs(monkeypatch, caplog):
    """The fallback is never silent: the check before the start prints the note, and the actor logs it."""
    caplog.set_level("INFO")

    async def work(pool):
        return await pool.check()

    loaded = run(None, work, *OVERRIDES, "environment.options.sandbox=landlock", path="builtin:code")
    assert loaded.note.startswith("programs run with Landlock")
    assert loaded.note in caplog.text
    monkeypatch.setattr(shutil, "which", lambda name, path: None)
    environment = Code()
    environment._sandbox.close()
    assert re.match(r"programs run with Landlock.*, because bubblewrap \(bwrap\) is not installed", environment.note)


def test_rows_without_tests_name_the_option():
    (error,) = played(
        None, ScriptedHost("x"), task={"prompt": "a", "answer": "b"}, overrides=OVERRIDES, path="builtin:code"
    )
    assert "the row has no column 'tests'. Set environment.options.tests_column (columns: answer, prompt)" in error


# ---- docs/code.md -------------------------------------------------------------------------------------------------


def test_the_example_of_the_page_makes_rows_and_its_reply_solves_the_first(tmp_path):
    text = (ROOT / "docs" / "code.md").read_text()
    (program,) = re.findall(r"```python\n(# make_rows\.py\n.*?)```", text, re.DOTALL)
    (reply,) = re.findall(r"````\n(.*?)````", text, re.DOTALL)
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=60)
    rows = [json.loads(line) for line in (tmp_path / "programs.jsonl").read_text().splitlines()]
    assert len(rows) == 40
    results = played(
        None, ScriptedHost(reply), ScriptedHost(reply), tasks=[rows[0], rows[-1]], overrides=OVERRIDES,
        path="builtin:code",
    )  # fmt: skip
    assert [components(result)["solved"] for result in results] == [1.0, 0.0]


@pytest.mark.campaign
def test_the_command_of_the_page_trains_a_small_model(tmp_path):
    """`train --tiny` with the rows of the page; the check before the start names the isolation."""
    text = (ROOT / "docs" / "code.md").read_text()
    (program,) = re.findall(r"```python\n(# make_rows\.py\n.*?)```", text, re.DOTALL)
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=60)
    (command,) = re.findall(r"^pipelinerl (train .*programs\.jsonl.*)$", text, re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-m", "pipelinerl.flows.cli", *command.split(), "--tiny", "--root", str(tmp_path / "runs")],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=280,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "programs run with " in done.stdout + done.stderr
    (report,) = (tmp_path / "runs").glob("*/report.json")
    assert set(json.loads(report.read_text())["eval_components"]) == {"solved", "passed", "ran", "turns"}
