"""Starts agent programs, and ends them with everything that they have started. Standard library only.

    python -I -S launcher.py SOCKET        or, with modules to import first:   python launcher.py SOCKET MODULE...

    environment process --request, four descriptors--> launcher --fork--> guard --fork--> program --> its children

A request is one message with the descriptors of the guard's socket, stdin, stdout and stderr. The guard reads
{"command": [...], "environment": {...}, "is_separate": true} from its socket, because programs may be forks of the
launcher, whose memory must have no key of an episode. is_separate: the program gets a Landlock domain of its own and
loses the capabilities that lead to the memory of other processes. The guard adopts every orphan below it
(PR_SET_CHILD_SUBREAPER), so no process can leave its tree. If the program ends, or the environment process closes the
socket or dies, the guard kills the tree, and then sends the exit status of the program (negative: a signal) as JSON.
The launcher ends when SOCKET closes.

After the modules are imported, the launcher sends {"ready": true, "facts": [...]}, with PIPELINERL_FACTS of each
module that has such a dictionary.

The interpreter of a user's program runs this file with preloaded modules: Python 3.9 is enough.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any

_SANDBOX = os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, os.pardir, "sandbox")
_LANDLOCK, _PRIVILEGES = (runpy.run_path(os.path.join(_SANDBOX, name)) for name in ("landlock.py", "privileges.py"))
_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
_MAX_REQUEST = 1 << 20
_NUM_DESCRIPTORS = 4
_REAP_MILLISECONDS = 1000
_KILL_PAUSE_SECONDS = 0.003
_KILL_SECONDS = 10.0
_EXIT_NOT_STARTED = 127


def main(descriptor: int, modules: list[str]) -> None:
    """Import the modules, report the result, and start programs until the socket closes."""
    del sys.path[0]  # the directory of this file
    _PRIVILEGES["forbid_dumps"]()
    requests = socket.socket(fileno=descriptor)
    try:
        facts = [getattr(importlib.import_module(module), "PIPELINERL_FACTS", {}) for module in modules]
    except BaseException as error:  # noqa: BLE001  (a module raises anything)
        reason = str(error) if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"
        requests.send(json.dumps({"failed": reason}).encode())
        return
    requests.send(json.dumps({"ready": True, "facts": facts}).encode())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends Ctrl-C to all processes
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # guards need no wait
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 1, _NUM_DESCRIPTORS)
        if not message:
            return
        if os.fork() == 0:
            requests.close()
            _guard(descriptors, is_forked=bool(modules))
            os._exit(0)
        for received_descriptor in descriptors:
            os.close(received_descriptor)


def _guard(descriptors: list[int], *, is_forked: bool) -> None:
    """Start the program, wait for its end or for the end of the socket, and kill the tree."""
    control = socket.socket(fileno=descriptors[0])
    request = json.loads(control.recv(_MAX_REQUEST))
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    program = os.fork()
    if program == 0:
        _become(request, descriptors, is_forked)
    for descriptor in descriptors[1:]:
        os.close(descriptor)
    null = os.open(os.devnull, os.O_RDWR)  # guards do not write to the output of the launcher
    for stream in range(3):
        os.dup2(null, stream)
    status = _watch(program, control)
    status = _kill_tree(program, status)
    with contextlib.suppress(OSError):  # the environment process has ended
        control.send(json.dumps({"status": -signal.SIGKILL if status is None else status}).encode())


def _become(request: dict[str, Any], descriptors: list[int], is_forked: bool) -> None:
    """Replace this process by the program; with preloaded modules, run the Python file of the command instead."""
    try:
        os.setsid()  # signals of the program to its own group do not reach the guard
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        for number, descriptor in enumerate(descriptors[1:]):
            os.dup2(descriptor, number)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        if request["is_separate"]:
            _separate()
        command, environment = request["command"], request["environment"]
        if not is_forked:
            os.execvpe(command[0], command, environment)
        os.environ.clear()
        os.environ.update(environment)
        atexit._clear()  # of the preloaded modules
        _run_python(command[1:])
    except SystemExit as error:
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
        _leave(error.code if isinstance(error.code, int) else int(error.code is not None))
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        _leave(_EXIT_NOT_STARTED)
    except BaseException:  # noqa: BLE001  (the end of a program of the user)
        traceback.print_exc()
        _leave(1)
    _leave(0)


def _separate() -> None:
    if _LANDLOCK["version"]() > 0:
        _LANDLOCK["separate"]()
    _PRIVILEGES["drop_capabilities"](_PRIVILEGES["OVER_PROCESSES"])


def _run_python(arguments: list[str]) -> None:
    sys.argv = arguments
    sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
    runpy.run_path(arguments[0], run_name="__main__")


def _leave(code: int) -> None:
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the end of an interpreter does
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code & 0xFF or int(code != 0))  # the kernel keeps the low byte, which is 0 for 256


def _watch(program: int, control: socket.socket) -> int | None:
    """The exit status of the program; None if the socket closed first."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    ended = os.pidfd_open(program)
    poll.register(ended, select.POLLIN)
    while True:
        ready = dict(poll.poll(_REAP_MILLISECONDS))
        if ended in ready:
            return _code(os.waitpid(program, 0)[1])
        if control.fileno() in ready:
            return None
        _reap(except_for=program)


def _reap(except_for: int) -> None:
    """Wait for adopted children that have ended."""
    for pid in _descendants(os.getpid()):
        if pid != except_for:
            with contextlib.suppress(ChildProcessError):  # the child of another process
                os.waitpid(pid, os.WNOHANG)


def _kill_tree(program: int, status: int | None) -> int | None:
    """Kill all descendants, and wait for them; returns the status of the program."""
    deadline = time.monotonic() + _KILL_SECONDS
    while time.monotonic() < deadline:
        for pid in _descendants(os.getpid()):
            with contextlib.suppress(OSError):  # ended meanwhile, or another user's program
                os.kill(pid, signal.SIGKILL)
        try:
            while True:
                pid, code = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid == program:
                    status = _code(code)
        except ChildProcessError:
            break
        time.sleep(_KILL_PAUSE_SECONDS)
    return status


def _descendants(root: int) -> list[int]:
    """Process ids of all processes below `root`."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as stat:
                    parent = int(stat.read().rpartition(b")")[2].split()[1])
            except (OSError, IndexError):
                continue  # ended meanwhile
            children.setdefault(parent, []).append(int(name))
    descendants: list[int] = []
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        descendants += below
        waiting += below
    return descendants


def _code(status: int) -> int:
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
    os._exit(0)  # preloaded modules may have threads
