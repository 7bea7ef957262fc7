"""A verifier that does what the text says, behind the worker's isolation alone: no gate in front of it.

Each text tries something and sets `reward` to 1.0 when that worked, to 0.5 when it was refused.
"""

import asyncio
import os
import platform
import time
from pathlib import Path

import psutil
import pytest

from pipelinerl_core.errors import RewardError
from pipelinerl_core.rewards.pool import ProcessScorer
from pipelinerl_core.rewards.worker import ChildSpec
from pipelinerl_core.sandbox import isolation
from pipelinerl_core.types import Prompt

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(isolation.missing()), reason=f"this host has no {' and no '.join(isolation.missing())}"),
]

VERIFIER = """
import ctypes, fcntl, multiprocessing, os, resource, signal, socket, subprocess, sys, threading, time

from pipelinerl_core.rewards.verifiers import Evaluation

def run(text, task):
    scope = {**globals(), "task": task}
    exec(text, scope)
    return scope["reward"]

def apart(text, task):
    return Evaluation(score=lambda: run(text, task))

def here(text, task):
    return run(text, task)
"""

TRY = """
try:
    {attempt}
    reward = 1.0
except (OSError, ValueError):
    reward = 0.5
"""

SYSTEM_CALL = """
libc = ctypes.CDLL(None, use_errno=True)
result = libc.syscall({number}, {arguments})
reward = 1.0 if result >= 0 else 0.5 if ctypes.get_errno() in (1, 38) else 0.75
"""

# Python statements; an OSError is what is expected.
FILES = {
    "read the environment of the actor": "open(f'/proc/{task[\"actor\"]}/environ', 'rb').read()",
    "read its own environment": "open('/proc/self/environ', 'rb').read()",
    "read memory of the actor": "open(f'/proc/{task[\"actor\"]}/mem', 'rb')",
    "read the users": "open('/etc/passwd').read()",
    "read the checkout": "open(task['checkout'] + '/pyproject.toml').read()",
    "read a file of the run": "open(task['victim']).read()",
    "list the root": "os.listdir('/')",
    "list the home": "os.listdir(os.path.expanduser('~root'))",
    "write a file": "open(task['marker'], 'w').write('x')",
    "write a file that is there": "open(task['victim'], 'a').write('x')",
    "write into the packages": "open(os.path.join(os.path.dirname(os.__file__), 'marker.py'), 'w')",
    "empty a file of the packages": "os.open(os.__file__, os.O_RDONLY | os.O_TRUNC)",
    "make a nameless file": "os.open('/tmp', os.O_TMPFILE | os.O_RDWR)",
    "make a directory": "os.mkdir(task['marker'])",
    "make a link": "os.symlink('/etc/passwd', task['marker'])",
    "make a pipe": "os.mkfifo(task['marker'])",
    "remove a file": "os.unlink(task['victim'])",
    "rename a file": "os.rename(task['victim'], task['marker'])",
    "shorten a file": "os.truncate(task['victim'], 0)",
    "shut a file": "os.chmod(task['victim'], 0)",
    "give a file away": "os.chown(task['victim'], 1, 1)",
    "date a file": "os.utime(task['victim'], (0, 0))",
    "mark a file": "os.setxattr(task['victim'], 'user.a', b'b')",
    "make a file of memory": "os.memfd_create('a')",
    "leave the directory": "os.chdir('/')",
}
NETWORK = {
    f"open a socket of {family}": f"socket.socket(socket.{family}, socket.{kind})"
    for family, kind in (
        ("AF_INET", "SOCK_STREAM"),
        ("AF_INET", "SOCK_DGRAM"),
        ("AF_INET6", "SOCK_STREAM"),
        ("AF_UNIX", "SOCK_STREAM"),
        ("AF_NETLINK", "SOCK_RAW"),
    )
} | {"open a pair of sockets": "socket.socketpair()"}
PROCESSES = {
    "run a program": "os.execv('/bin/true', ['true'])",
    "run a program apart": "subprocess.run(['/bin/true'])",
    "spawn a program": "os.posix_spawn('/bin/true', ['true'], {})",
    "fork": "os.fork() or os._exit(0)",
    "kill the actor": "os.kill(task['actor'], 0)",
    "kill the parent": "os.kill(os.getppid(), signal.SIGKILL)",
    "kill everybody": "os.kill(-1, signal.SIGKILL)",
    "kill by pidfd": "os.pidfd_open(task['actor'])",
    "limit the actor": "resource.prlimit(task['actor'], resource.RLIMIT_NOFILE)",
    "move the actor": "os.sched_setaffinity(task['actor'], {0})",
    "slow the actor": "os.setpriority(os.PRIO_PROCESS, task['actor'], 19)",
    "send signals by a pipe": "fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, task['actor'])",
    "choose the signal of a pipe": "fcntl.fcntl(os.pipe()[0], 10, 9)",
    "type on the terminal": "fcntl.ioctl(0, 0x5412, b'x')",
    "leave the session": "os.setsid()",
    "take more memory": "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
}
# Number on x86_64, on aarch64, arguments.
SYSTEM_CALLS = {
    "trace the actor": (101, 117, "16, task['actor'], 0, 0"),
    "read memory of the actor by a call": (310, 270, "task['actor'], 0, 0, 0, 0, 0"),
    "write memory of the actor": (311, 271, "task['actor'], 0, 0, 0, 0, 0"),
    "outlive the worker": (157, 167, "1, 0, 0, 0, 0"),
    "be traced by others": (157, 167, "4, 1, 0, 0, 0"),
    "use a new filter": (317, 277, "0, 0, 0"),
    "ask through io_uring": (425, 425, "1, 0"),
    "leave the namespaces": (272, 97, "0x10000000"),
    "enter namespaces": (308, 268, "0, 0"),
    "mount": (165, 40, "0, 0, 0, 0, 0"),
    "load a program into the kernel": (321, 280, "0, 0, 0"),
    "watch the machine": (298, 241, "0, 0, 0, 0, 0"),
    "read keys": (250, 219, "0, -3, 0"),
    "ask for a key": (249, 218, "0, 0, 0, 0"),
    "handle page faults": (323, 282, "0"),
    "take capabilities": (126, 91, "0, 0"),
    "be somebody else": (105, 146, "1"),
    "see another root": (161, 51, "b'/'"),
    "open by handle": (304, 265, "0, 0, 0"),
    "open the newest way": (437, 437, "-100, b'/etc/passwd', 0, 24"),
    "start a thread the newest way": (435, 435, "0, 88"),
    "share memory": (29, 194, "0, 4096, 0o1600"),
    "compare processes": (312, 272, "task['actor'], task['actor'], 0, 0, 0"),
    "advise on memory of others": (440, 440, "0, 0, 0, 0, 0"),
    "load a module": (313, 273, "0, 0, 0"),
    "set the clock": (227, 112, "0, 0"),
    "print into the kernel's log": (103, 116, "2, 0, 0"),
}


def system_call(place):
    x86_64, aarch64, arguments = SYSTEM_CALLS[place]
    number = {"x86_64": x86_64, "aarch64": aarch64}[platform.machine()]
    return SYSTEM_CALL.format(number=number, arguments=arguments)


ATTEMPTS = {name: TRY.format(attempt=attempt) for name, attempt in (FILES | NETWORK | PROCESSES).items()} | {
    name: system_call(name) for name in SYSTEM_CALLS
}

# What takes the process along, or its time: the text and what is counted.
ENDS = {
    "spin": ("while True: pass", "timeout"),
    "sleep": ("time.sleep(1000)", "timeout"),
    "compute": ("9**9**9**9", None),
    "close the pipe and stay": ("os.closerange(3, 64)\nwhile True: pass", "died"),
    "leave": ("os._exit(0)", "died"),
    "crash": ("ctypes.string_at(0)", "died"),
    "abort": ("os.abort()", "died"),
    "reply too much": ("os.write(4, b'x' * 60000)\ntime.sleep(1000)", "died"),
    "reply half a line": ("os.write(4, b'{\"reward\":')\ntime.sleep(1000)", "timeout"),
    "reply beyond the range": ("os.write(4, b'{\"reward\": 1.5}\\n')\ntime.sleep(1000)", "died"),
    "reply what is no number": ("os.write(4, b'{\"reward\": NaN}\\n')\ntime.sleep(1000)", "died"),
    "reply a truth": ("os.write(4, b'{\"reward\": true}\\n')\ntime.sleep(1000)", "died"),
    "reply brackets": ("os.write(4, b'[' * 500 + b'\\n')\ntime.sleep(1000)", "died"),
    "reply for all others": (
        "for one in range(3, 64):\n"
        "    for number in range(9):\n"
        "        try:\n"
        "            os.write(one, b'{\"id\": %d, \"reward\": 1.0}\\n' % number)\n"
        "        except OSError:\n"
        "            pass\n"
        "os._exit(0)",
        None,
    ),
}  # fmt: skip

PATCHES = [
    "import pipelinerl_core.rewards.worker as worker\nworker._scored = lambda *a: {'reward': 1.0}\nreward = 0.5",
    "sys.modules['__main__']._scored = lambda *a: {'reward': 1.0}\nreward = 0.5",
    "sys.modules['__main__']._reply = lambda *a: {'id': 0, 'reward': 1.0}\nreward = 0.5",
    "import hostile\nhostile.run = lambda *a: 1.0\nhostile.here = hostile.apart = lambda *a: 1.0\nreward = 0.5",
    "import builtins\nbuiltins.exec = lambda *a: None\nbuiltins.float = lambda *a: 1.0\nreward = 0.5",
    "import json\njson.dumps = lambda *a: '{}'\njson.loads = lambda *a: {}\nreward = 0.5",
    "sys.path.insert(0, '/tmp')\nsys.modules.clear()\nreward = 0.5",
    "os.environ['LD_PRELOAD'] = '/tmp/marker'\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nreward = 0.5",
    "sys.setrecursionlimit(10**9)\nreward = 0.5",
    "resource.setrlimit(resource.RLIMIT_CPU, (1, 1))\nreward = 0.5",
]


@pytest.fixture
def task(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("secret")
    return {
        "actor": os.getpid(),
        "checkout": str(Path(__file__).parents[2]),
        "victim": str(victim),
        "marker": str(tmp_path / "marker"),
    }


@pytest.fixture
def make_scorer(tmp_path, monkeypatch):
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "hostile.py").write_text(VERIFIER)
    monkeypatch.syspath_prepend(str(modules))
    monkeypatch.setenv("PIPELINERL_TOKEN", "hidden")

    def make(function, timeout=20.0, count_lost=lambda cause: None):
        spec = ChildSpec(
            name="hostile",
            function=f"hostile:{function}",
            timeout_seconds=timeout,
            memory_bytes=2 << 30,
            forks=function == "apart",
        )
        return ProcessScorer(spec, 1, count_lost)

    return make


def scored(scorer, task, texts):
    """Rewards or errors of texts, one after the other; nothing of the scorer is left afterwards."""
    prompt = Prompt(prompt_id="0" * 16, source="test", env="hostile", text="", task=task)

    async def main():
        results = []
        async with asyncio.timeout(200):
            for text in texts:
                try:
                    results.append(await scorer.score(prompt, text))
                except RewardError as error:
                    results.append(str(error))
            await scorer.close()
        return results

    before = {child.pid for child in psutil.Process().children(recursive=True)}
    results = asyncio.run(main())
    deadline = time.monotonic() + 20
    while {child.pid for child in psutil.Process().children(recursive=True)} - before:
        assert time.monotonic() < deadline, "a scoring left a process behind"
        time.sleep(0.05)
    return results


@pytest.mark.parametrize("function", ["apart", "here"])
def test_nothing_outside_can_be_read_written_reached_or_started(make_scorer, task, function, tmp_path):
    scorer = make_scorer(function)
    results = scored(scorer, task, ATTEMPTS.values())
    assert dict(zip(ATTEMPTS, results, strict=True)) == dict.fromkeys(ATTEMPTS, 0.5)
    assert Path(task["victim"]).read_text() == "secret"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["modules", "victim"]


@pytest.mark.parametrize("function", ["apart", "here"])
def test_the_environment_holds_nothing_to_hide_and_modules_can_be_imported(make_scorer, task, function):
    passed_on = {"PYTHONPATH", "HOME", "TMPDIR", "PYTHONHASHSEED", "LC_CTYPE", "JE_ARROW_MALLOC_CONF"}
    known = passed_on | {f"{library}_NUM_THREADS" for library in ("OMP", "OPENBLAS", "MKL")}
    texts = [
        f"reward = float(len(os.environ.keys() - {known}))",
        "import wave, decimal, sqlite3, numpy.polynomial, sympy.plotting\nreward = 0.5",
        "reward = 1.0 if 'numpy' in sys.modules else 0.0",
    ]
    assert scored(make_scorer(function), task, texts) == [0.0, 0.5, 0.0 if function == "apart" else 1.0]


def test_no_thread_and_no_process_is_started_by_an_evaluation(make_scorer, task):
    thread = """
try:
    threading.Thread(target=time.sleep, args=(1000,)).start()
    reward = 1.0
except RuntimeError:
    reward = 0.5
"""
    bomb = """
reward = 0.5
for _ in range(1000):
    try:
        os.fork()
        reward = 1.0
    except OSError:
        pass
"""
    assert scored(make_scorer("apart"), task, [thread, bomb, "reward = 1.0"]) == [0.5, 0.5, 1.0]


def test_an_evaluation_without_a_result_is_a_wrong_answer_and_counted(make_scorer, task):
    lost = []
    scorer = make_scorer("apart", timeout=2.0, count_lost=lost.append)
    texts = [text for text, _ in ENDS.values()]
    results = scored(
        scorer, task, [completion for text in texts for completion in (text, "reward = 1.0", "reward = 0.25")]
    )
    assert results[1::3] == [1.0] * len(texts)
    assert results[2::3] == [0.25] * len(texts)
    assert dict(zip(ENDS, results[::3], strict=True)) == dict.fromkeys(ENDS, 0.0)
    assert len(lost) == len(ENDS)
    counted = dict(zip(ENDS, lost, strict=True))
    assert {name: cause for name, cause in counted.items() if ENDS[name][1]} == {
        name: cause for name, (_, cause) in ENDS.items() if cause
    }


def test_changes_of_an_evaluation_do_not_reach_later_evaluations(make_scorer, task):
    scorer = make_scorer("apart")
    results = scored(
        scorer, task, [completion for patch in PATCHES for completion in (patch, "reward = 1.0", "reward = 0.25")]
    )
    assert results[1::3] == [1.0] * len(PATCHES)
    assert results[2::3] == [0.25] * len(PATCHES)


def test_memory_and_nesting_are_limited(make_scorer, task):
    hoard, keep, nest, ok = scored(
        make_scorer("apart"),
        task,
        ["bytearray(3 << 30)", "x = [bytes(1 << 20) for _ in range(5000)]", "eval('(' * 10_000)", "reward = 1.0"],
    )
    assert "MemoryError" in hoard
    assert "MemoryError" in keep
    assert "hostile: " in nest
    assert ok == 1.0


def test_output_of_an_evaluation_is_discarded(make_scorer, task, capfd):
    flood = "for _ in range(1000):\n    print('x' * 100_000)\n    os.write(2, b'y' * 100_000)\nreward = 0.5"
    assert scored(make_scorer("apart"), task, [flood, "reward = 1.0"]) == [0.5, 1.0]
    assert "xxx" not in "".join(capfd.readouterr())
    assert "yyy" not in "".join(capfd.readouterr())


def test_the_words_of_an_error_are_one_printable_line(make_scorer, task):
    text = r"raise ValueError('\x1b[31mred\x00 ' + 'long' * 1000 + '\n{}')"
    (error,) = scored(make_scorer("apart"), task, [text])
    assert error.isprintable()
    assert len(error) < 400


def test_a_reward_of_another_range_or_forged_for_itself_is_no_more_than_the_highest(make_scorer, task):
    texts = [
        "reward = 1e30",
        "reward = -1.0",
        "os.write(4, b'{\"reward\": 1.0}\\n')\ntime.sleep(1000)",
        "reward = 0.25",
    ]
    assert scored(make_scorer("apart"), task, texts) == [0.0, 0.0, 1.0, 0.25]
