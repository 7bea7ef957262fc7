"""The process inside the sandbox that runs programs of a model, each in a fork (programs.py starts this process).

descriptor 0    requests: 4 bytes of length, then JSON {"program": str, "stdin": str} or
                {"program": str, "function": str, "calls": [[...], ...]}
descriptor 1    statuses: one JSON line after the end of each fork
3, 4, 5         files in memory: input, output and errors of the current program

The server reads no request and no output, because each later fork gets a copy of the server's memory: the fork reads
its own request, and the parent outside of the sandbox reads the output. Expected outputs never enter the sandbox.
"""

import ast
import fcntl
import gc
import json
import os
import select
import signal
import site
import struct
import sys
import traceback
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NoReturn

from pipelinerl_core.parent_death import die_with_parent
from pipelinerl_core.sandbox import isolation, landlock, privileges, seccomp
from pipelinerl_core.sandbox.child_process import write_all

NOBODY = 65534
LENGTH = struct.Struct("<I")
REQUESTS, STATUSES, INPUT, OUTPUT, ERRORS = 0, 1, 3, 4, 5
COMMON_MODULES = (
    *("abc", "bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools"),
    *("heapq", "itertools", "json", "math", "operator", "random", "re", "statistics", "string", "typing"),
)
"""Modules that programs often import; loaded once, before the forks."""
_EXIT_BROKEN = 70
_HIGH = 128
"""Copies of the given descriptors get at least this number, so that they do not overwrite each other."""
_MAX_DESCRIPTORS = 1 << 16
_RESULTS = 3
"""Descriptor of the results of calls in a fork; also a program's standard output is then in the errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one execution."""

    cpu_seconds: int
    wall_seconds: float
    memory_bytes: int
    """Address space, with the interpreter."""
    output_bytes: int
    """Size of the output, and of the errors."""


def main(files: list[int], readable: list[str], limits: dict[str, Any]) -> None:
    """Restrict this process, then run programs until the requests end.

    files: descriptors of the files in memory for input, output and errors. readable: directories and files that
    programs may read. limits: fields of Limits.
    """
    copies = [fcntl.fcntl(file, fcntl.F_DUPFD, _HIGH) for file in files]
    for copy, number in zip(copies, (INPUT, OUTPUT, ERRORS), strict=True):
        os.dup2(copy, number)
    os.closerange(ERRORS + 1, _MAX_DESCRIPTORS)
    for name in COMMON_MODULES:
        import_module(name)
    site.setquit()  # exit() and quit(), which -S leaves out
    privileges.forbid_dumps()
    is_root = not _leave_root()
    privileges.drop_capabilities()
    # After the change of the user, which resets the signal. A bubblewrap that root has started may not signal nobody:
    # the server then ends with its requests, at most wall_seconds later.
    die_with_parent()
    if landlock.version() > 0:
        landlock.restrict(readable)
    seccomp.install(forks=True)
    gc.collect()
    gc.freeze()
    _tell({"ready": True, "is_root": is_root})
    serve(Limits(**limits))


def _leave_root() -> bool:
    """Become nobody if this process is root and nobody can read the standard library; False: still root."""
    if os.geteuid() != 0:
        return True
    try:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.seteuid(NOBODY)
        is_readable = os.access(os.__file__, os.R_OK, effective_ids=True)
        os.seteuid(0)
        if is_readable:
            os.setresuid(NOBODY, NOBODY, NOBODY)
    except OSError:  # no capability to change the user
        return False
    return is_readable


def serve(limits: Limits) -> None:
    """Run one program after the other."""
    readable = select.poll()
    readable.register(REQUESTS, select.POLLIN)
    while any(events & select.POLLIN for _, events in readable.poll()):
        for descriptor in (INPUT, OUTPUT, ERRORS):
            os.ftruncate(descriptor, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, 0)  # the previous program may have set O_APPEND
        program = os.fork()
        if program == 0:
            try:
                _run(limits)
            finally:
                os._exit(_EXIT_BROKEN)
        _tell(_ended(program, limits.wall_seconds))


def _ended(program: int, seconds: float) -> dict[str, Any]:
    """Wait for a fork, at most `seconds`; then kill the fork."""
    signal.signal(signal.SIGALRM, lambda number, frame: os.kill(program, signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    _, status, usage = os.wait4(program, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    cpu_seconds = usage.ru_utime + usage.ru_stime
    return {"exit_code": os.waitstatus_to_exitcode(status), "cpu_seconds": cpu_seconds}


def _tell(line: dict[str, Any]) -> None:
    os.write(STATUSES, json.dumps(line).encode() + b"\n")


def _run(limits: Limits) -> NoReturn:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    die_with_parent()
    (size,) = LENGTH.unpack(_read(LENGTH.size))
    request = json.loads(_read(size))
    has_calls = "calls" in request
    write_all(INPUT, request.get("stdin", "").encode(errors="surrogatepass"))
    os.lseek(INPUT, 0, os.SEEK_SET)
    os.dup2(INPUT, 0)
    os.dup2(ERRORS if has_calls else OUTPUT, 1)
    os.dup2(ERRORS, 2)
    if has_calls:
        os.dup2(OUTPUT, _RESULTS)
    os.closerange(_RESULTS + has_calls, ERRORS + 1)
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        mode = "w" if descriptor else "r"
        setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", errors="replace", closefd=False))
    isolation.limit_evaluation(limits.cpu_seconds, limits.memory_bytes, limits.output_bytes, has_filter=True)
    code = 0
    try:
        _execute(request)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:  # noqa: BLE001  (the boundary: whatever a program raises)
        traceback.print_exception(error.with_traceback(_of_program(error)))
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF or int(code != 0))  # the kernel keeps the low byte, which is 0 for 256


def _read(size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.read(REQUESTS, size - len(data))
        if not part:
            os._exit(_EXIT_BROKEN)
        data += part
    return data


def _parsed(arguments: str) -> list[Any]:
    try:
        parsed: list[Any] = json.loads(arguments)
    except ValueError:
        parsed = ast.literal_eval(arguments)
    return parsed


def _execute(request: dict[str, Any]) -> None:
    has_calls = "calls" in request
    scope: dict[str, Any] = {"__name__": "answer" if has_calls else "__main__"}
    exec(compile(request["program"], "answer.py", "exec"), scope)  # the sandbox is for this line
    if not has_calls:
        return
    name = request["function"]
    function = scope[name] if name in scope else getattr(scope["Solution"](), name)
    for arguments in request["calls"]:
        result = json.dumps(function(*_parsed(arguments)), allow_nan=False)
        os.write(_RESULTS, result.encode() + b"\n")


def _of_program(error: BaseException) -> Any:
    """The traceback without the frames of this module."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace
