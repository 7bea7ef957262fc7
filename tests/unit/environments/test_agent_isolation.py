"""What an agent program can do to other processes of its user; real launchers, as this user and as nobody."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pipelinerl_core.environments.agents import program
from pipelinerl_core.environments.agents.program import Posted
from pipelinerl_core.sandbox import landlock, privileges
from tests.unit.environments.episode_case import ScriptedHost
from tests.unit.environments.test_agents import played

needs_landlock = pytest.mark.skipif(landlock.version() == 0, reason="this kernel has no Landlock")
LAUNCHER = Path(program.__file__).with_name("launcher.py")
NOBODY = 65534
KEY = "sk-of-another-episode"
# Prints which attempts work on which process; argument 1: name -> process id.
ATTACK = """
import ctypes, json, os, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)
if len(sys.argv) == 1:  # the program that is attacked
    print(os.getpid(), flush=True)
    time.sleep(300)

def check(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")

ATTEMPTS = {
    "variables": lambda pid: open(f"/proc/{pid}/environ", "rb").read(),
    "memory": lambda pid: open(f"/proc/{pid}/mem", "rb"),
    "map": lambda pid: open(f"/proc/{pid}/maps", "rb").read(1),
    "descriptors": lambda pid: os.readlink(f"/proc/{pid}/fd/0"),
    "descriptor": lambda pid: check(libc.syscall(438, os.pidfd_open(pid), 0, 0)),
    "trace": lambda pid: check(libc.ptrace(0x4206, pid, 0, 0)),
    "signal": lambda pid: os.kill(pid, 0),
}

def works(attempt, pid):
    try:
        attempt(pid)
    except OSError:
        return False
    return True

others = {**json.loads(sys.argv[1]), "guard": os.getppid()}
found = {who: [name for name, attempt in ATTEMPTS.items() if works(attempt, pid)] for who, pid in others.items()}
status = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True).stdout
fields = dict(line.split(":", 1) for line in status.splitlines())
print(json.dumps([found, int(fields["CapEff"], 16), int(fields["CapBnd"], 16), int(fields["NoNewPrivs"])]))
"""
# Prints how often a text is in the memory of this process, which gets the text with each letter replaced by the next
# one, and searches a copy of its memory that is changed in the same way: it never has the text itself.
SEARCH = """
import ctypes, sys
found, following = 0, bytes((number + 1) % 256 for number in range(256))
for line in open("/proc/self/maps"):
    span, rights, _, _, _, *name = line.split()
    if rights.startswith("rw"):
        start, end = (int(part, 16) for part in span.split("-"))
        found += ctypes.string_at(start, end - start).translate(following).count(sys.argv[1].encode())
print(found)
"""


@pytest.fixture(params=["own", "nobody"])
def user(request):
    """Arguments of Popen, and an interpreter that the user may run."""
    if request.param == "own":
        return {}, sys.executable
    python = shutil.which("python3", path="/usr/bin")
    if os.geteuid() != 0 or python is None:
        pytest.skip("needs root and /usr/bin/python3")
    options = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    if subprocess.run(
        [python, "-I", "-S", "-c", f"open({str(LAUNCHER)!r})"], **options, cwd="/", check=False
    ).returncode:
        pytest.skip("nobody cannot read the checkout")
    return options, python


class Launched:
    """A launcher that is driven with raw sockets."""

    def __init__(self, options, python, modules):
        self.python = python
        self.own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        flags = [] if modules else ["-I", "-S"]
        with theirs:
            self.process = subprocess.Popen(
                [python, *flags, LAUNCHER, str(theirs.fileno()), *modules],
                pass_fds=(theirs.fileno(),), cwd="/", **options,
            )  # fmt: skip
        assert json.loads(self.own.recv(1 << 16))["ready"]

    def start(self, command, environment, is_separate):
        """Start a program; returns its control socket and its output."""
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        reading, writing = os.pipe()
        null = os.open(os.devnull, os.O_RDONLY)
        request = {"command": command, "environment": environment, "is_separate": is_separate}
        control.send(json.dumps(request).encode())
        socket.send_fds(self.own, [b"s"], [theirs.fileno(), null, writing, 2])
        theirs.close()
        os.close(writing)
        os.close(null)
        return control, open(reading)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.own.close()
        self.process.wait(timeout=30)


@pytest.fixture
def script():
    """Write a script that any user may read."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)

        def write(code):
            path = Path(directory) / "program.py"
            path.write_text(code)
            path.chmod(0o644)
            return str(path)

        yield write


def attacked(user, script, *, is_forked, is_separate):
    """What works on the other processes, and the capabilities of a program that the attacker starts."""
    options, python = user
    path = script(ATTACK)
    role = subprocess.Popen(["sleep", "300"], env={"PIPELINERL_TOKEN": "secret", "PATH": os.defpath}, **options)
    try:
        with Launched(options, python, ["json"] if is_forked else []) as launched:
            variables = {"PATH": os.defpath, "OPENAI_API_KEY": KEY}
            victim, output = launched.start([python, path], variables, is_separate)
            others = {"role": role.pid, "launcher": launched.process.pid, "program": int(output.readline())}
            attacker, report = launched.start([python, path, json.dumps(others)], variables, is_separate)
            with attacker, victim, output, report:
                return json.loads(report.read())
    finally:
        role.kill()
        role.wait()


@needs_landlock
@pytest.mark.parametrize("is_forked", [False, True])
def test_a_program_reaches_no_process_outside_of_its_domain(user, script, is_forked):
    findings, effective, bounding, no_new_privileges = attacked(user, script, is_forked=is_forked, is_separate=True)
    harmless = [] if landlock.version() >= 6 else ["signal"]
    assert findings == dict.fromkeys(("role", "launcher", "program", "guard"), harmless)
    assert not any(effective >> number & 1 for number in privileges.OVER_PROCESSES)
    if user[0] == {} and os.geteuid() == 0:
        assert effective & 0b11  # CAP_CHOWN, CAP_DAC_OVERRIDE: programs of root may still write files
        assert not any(bounding >> number & 1 for number in privileges.OVER_PROCESSES)
    assert no_new_privileges == 1


def test_without_isolation_a_program_reads_other_programs_and_roles(user, script):
    """The attempts of the test above work; launcher and guard refuse those of a user other than root."""
    findings, *_ = attacked(user, script, is_forked=False, is_separate=False)
    for who in ("role", "program"):
        assert {"variables", "memory", "descriptors", "descriptor", "trace", "signal"} <= set(findings[who])
    if user[0]:
        assert findings["launcher"] == findings["guard"] == ["signal"]


def test_a_fork_of_the_launcher_has_no_key_of_an_earlier_episode_in_its_memory(script):
    path = script(SEARCH)
    with Launched({}, sys.executable, ["json"]) as launched:
        held = [launched.start([sys.executable, "/dev/null"], {"KEY": KEY}, False) for _ in range(3)]
        control, output = launched.start(
            [sys.executable, path, "".join(chr(ord(letter) + 1) for letter in KEY)], {}, False
        )
        with control, output:
            assert output.read() == "0\n"
        for process, text in held:
            process.close()
            text.close()


@needs_landlock
@pytest.mark.parametrize("version", [1, 2, 5, 7])
def test_the_domains_of_older_kernels_leave_files_alone(tmp_path, version):
    if version > landlock.version():
        pytest.skip("this kernel is older")
    code = f"""
import os
from pipelinerl_core.sandbox import landlock, privileges
landlock.version = lambda: {version}
landlock.separate()
privileges.drop_capabilities(privileges.OVER_PROCESSES)
os.makedirs("a/b")
open("a/file", "w").write("text")
if {version} > 1:
    os.rename("a/file", "a/b/file")
    os.rename("a/b/file", "file")
try:
    open(f"/proc/{{os.getppid()}}/environ").read()
except PermissionError:
    print("refused")
"""
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == "refused\n", done.stderr


@needs_landlock
@pytest.mark.parametrize(("isolation", "is_readable"), [("auto", False), ("none", True)])
def test_the_key_chooses_the_isolation(tmp_path, isolation, is_readable):
    code = """
try:
    open("/proc/%d/environ" % task["actor"]).read()
    show(True)
except PermissionError:
    show(False)
chat([user("a")])
reward(1)
"""
    overrides = ("environment.reward=posted", f"environment.isolation={isolation}")
    episode = played(
        tmp_path, code, "one", overrides=overrides, task={"actor": os.getpid()}.items(), host=ScriptedHost("a")
    )
    assert episode.shown == [is_readable]
    assert episode.result.score == 1


def test_a_host_without_landlock_is_named(monkeypatch):
    monkeypatch.setattr(landlock, "version", lambda: 0)
    monkeypatch.setattr(privileges, "forbid_dumps", lambda: None)  # this process is no environment process
    environments = [Posted([sys.executable, "agent.py"], [], isolation) for isolation in ("auto", "none")]
    for environment in environments:
        environment._launcher._socket.close()
        environment._launcher._process.wait(timeout=30)
    assert environments[0].note.startswith("this kernel has no Landlock (Linux 5.13")
    assert not hasattr(environments[1], "note")
