"""A sandbox that runs programs of a model: Python without network, processes and files, with limits.

    with bubblewrap      new namespaces, a file system of Python's own files; inside, the restrictions below
    without bubblewrap   Landlock, seccomp, limits, no capabilities

Seccomp is required in both cases: a program can neither start processes or threads nor open sockets or files for
writing. See program_server.py for the process inside, docs/security.md for what each layer is for.
"""

import asyncio
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pipelinerl_core.sandbox import isolation, landlock, seccomp
from pipelinerl_core.sandbox.child_process import SINGLE_THREADED
from pipelinerl_core.sandbox.program_server import LENGTH, Limits

Choice = Literal["auto", "bubblewrap", "landlock"]
START_SECONDS = 30.0
"""Deadline of the start of a sandbox."""
GRACE_SECONDS = 30.0
"""Time for the sandbox to report the end of a program after the program's deadline."""
PROGRAM_PATH = "/bin:/usr/bin:/usr/local/bin"
"""Directories in which bwrap is looked for: an environment process has no PATH."""
MAX_REQUEST_BYTES = 8 << 20
_PACKAGE = Path(__file__).resolve().parents[1]
_PROGRAM = (
    "import sys; sys.path.insert(0, {root!r}); from pipelinerl_core.sandbox.program_server import main; "
    "sys.path[:1] = []; sys.path += {site!r}; main({files!r}, {readable!r}, {limits!r})"
)


class NoSandbox(Exception):
    """This host cannot run programs in isolation; the message says what to install."""


class SandboxEnded(Exception):
    """The process of the sandbox has ended or does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """The end of one execution. All texts were written by the program."""

    exit_code: int
    """Negative: the number of the signal that ended the program."""
    is_killed: bool
    """The program has used up its seconds, or the memory of the host."""
    output: str
    """The standard output, or with calls a line of JSON for each result."""
    errors: str
    """The standard error; with calls also the standard output."""
    cpu_seconds: float


class ProgramSandbox:
    """Runs one program at a time. `run` is bound to one event loop; construct before a process isolates itself."""

    def __init__(self, limits: Limits, choice: Choice = "auto") -> None:
        """Start the sandbox. choice: auto: bubblewrap if it works, else Landlock. Raises NoSandbox."""
        self._limits = limits
        self._lock = asyncio.Lock()
        self._unsent = b""
        self._num_unread = 0
        self._rest = b""
        self._files = [os.memfd_create(name) for name in ("input", "output", "errors", "log")]
        self.isolation = ""
        """What isolates the programs, as text."""
        self.reason = ""
        """Why bubblewrap does not isolate the programs; empty if it does, or was not asked for."""
        if not seccomp.is_available():
            raise NoSandbox("programs of a model need seccomp on x86_64 or aarch64, which this host lacks")
        if choice != "landlock":
            self.reason = self._start_in_bubblewrap()
        if choice == "bubblewrap" and self.reason:
            raise NoSandbox(f"{self.reason}. Install bubblewrap and allow user namespaces, or set sandbox=auto")
        if not self.isolation:
            self._start_in_landlock()

    async def run(
        self, program: str, *, stdin: str = "", function: str = "", calls: Sequence[Sequence[Any]] | None = None,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Execution:  # fmt: skip
        """Run a program with an input; or with `calls`, define its functions and call `function` with each list of
        arguments. Waits, inside of `waiting`, while another program runs. Raises SandboxEnded."""
        request: dict[str, Any] = {"program": program, "stdin": stdin}
        if calls is not None:
            request = {"program": program, "function": function, "calls": list(map(_as_text, calls))}
        data = json.dumps(request).encode()
        if len(data) > MAX_REQUEST_BYTES:
            raise ValueError(f"a program and its input have {len(data)} bytes; at most {MAX_REQUEST_BYTES}")
        with waiting():
            await self._lock.acquire()
        try:
            await self._finish_cancelled()
            self._unsent, self._num_unread = LENGTH.pack(len(data)) + data, 1
            await self._send()
            return self._execution(await self._status())
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the sandbox; returns when its process has ended."""
        os.close(self._requests)
        try:
            self._process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._statuses)

    async def _finish_cancelled(self) -> None:
        """Send and receive the bytes that a cancelled call has left."""
        await self._send()
        while self._num_unread:
            await self._status()

    async def _send(self) -> None:
        loop = asyncio.get_running_loop()
        while self._unsent:
            try:
                self._unsent = self._unsent[os.write(self._requests, self._unsent) :]
            except BlockingIOError:
                await self._wait_for(self._requests, loop.add_writer, loop.remove_writer)
            except BrokenPipeError:
                raise SandboxEnded("the sandbox has ended") from None

    async def _status(self) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        while b"\n" not in self._rest:
            await self._wait_for(self._statuses, loop.add_reader, loop.remove_reader)
            if not (data := os.read(self._statuses, 4096)):
                raise SandboxEnded("the sandbox has ended")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        self._num_unread -= 1
        status: dict[str, Any] = json.loads(line)
        return status

    async def _wait_for(self, pipe: int, add: Callable[..., None], remove: Callable[[int], bool]) -> None:
        """Wait until a pipe can be read or written. add, remove: of the event loop, for one of them."""
        ready = asyncio.Event()
        add(pipe, ready.set)
        try:
            async with asyncio.timeout(self._limits.wall_seconds + GRACE_SECONDS):
                await ready.wait()
        except TimeoutError:
            raise SandboxEnded("the sandbox does not answer") from None
        finally:
            remove(pipe)

    def _execution(self, status: dict[str, Any]) -> Execution:
        limit = self._limits.output_bytes
        output, errors = (os.pread(file, limit, 0).decode(errors="replace") for file in self._files[1:3])
        return Execution(
            exit_code=status["exit_code"],
            is_killed=status["exit_code"] == -signal.SIGKILL,
            output=output,
            errors=errors,
            cpu_seconds=status["cpu_seconds"],
        )

    def _start_in_bubblewrap(self) -> str:
        """Start with bubblewrap; returns why this is not possible, or nothing."""
        if (bwrap := shutil.which("bwrap", path=PROGRAM_PATH)) is None:
            return "bubblewrap (bwrap) is not installed"
        ready, error = self._started([bwrap, *_namespaces()])
        if ready is None:
            return f"bubblewrap does not work here ({error})"
        if ready["is_root"]:
            self.close()
            return "bubblewrap does not work here (programs would run as root)"
        self.isolation = "bubblewrap" + (" and Landlock" if landlock.version() else "")
        return ""

    def _start_in_landlock(self) -> None:
        missing = f"{self.reason}, and this" if self.reason else "this"
        if not landlock.version():
            raise NoSandbox(
                f"programs of a model need isolation, but {missing} kernel has no Landlock (Linux 5.13, enabled). "
                "Install bubblewrap and allow user namespaces"
            )
        ready, error = self._started([])
        if ready is None:
            raise NoSandbox(f"the sandbox did not start ({error})")
        self.isolation = f"Landlock{' as root without capabilities' if ready['is_root'] else ''}"

    def _started(self, prefix: list[str]) -> tuple[dict[str, Any] | None, str]:
        """Start the server behind a command; its first line, or None and an error."""
        inside, self._requests = os.pipe()
        self._statuses, outside = os.pipe()
        readable = [path for path in isolation.installed_paths() if os.path.exists(path)]
        site = [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
        program = _PROGRAM.format(
            root=str(_PACKAGE.parent),
            site=site,
            files=self._files[:3],
            readable=readable,
            limits=asdict(self._limits),
        )
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-I", "-S", "-W", "ignore", "-c", program],
            stdin=inside,
            stdout=outside,
            stderr=self._files[3],
            env={"PATH": os.defpath, "LANG": "C.UTF-8", **SINGLE_THREADED},
            pass_fds=self._files[:3],
            start_new_session=True,  # the terminal sends Ctrl-C to all processes of its session
        )
        os.close(inside)
        os.close(outside)
        os.set_blocking(self._requests, False)
        if line := _first_line(self._statuses):
            ready: dict[str, Any] = json.loads(line)
            return ready, ""
        self._process.kill()
        self.close()
        lines = os.pread(self._files[3], 1 << 16, 0).decode(errors="replace").strip().splitlines()
        return None, lines[-1][:200] if lines else f"exit code {self._process.returncode}"


def _first_line(descriptor: int) -> bytes:
    """The first line of a pipe; empty without a line in time."""
    deadline = time.monotonic() + START_SECONDS
    readable = select.poll()
    readable.register(descriptor, select.POLLIN)
    line = b""
    while not line.endswith(b"\n"):
        if not readable.poll(1000 * max(0.0, deadline - time.monotonic())):
            return b""
        if not (data := os.read(descriptor, 4096)):
            return b""
        line += data
    return line


def _namespaces() -> list[str]:
    """Arguments of bubblewrap: new namespaces, and a file system that has Python and its libraries only."""
    arguments = [
        *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
        *("--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"),
    ]
    # Root needs no namespace of users, in which the kernel would still see root: the server becomes nobody.
    arguments += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if os.geteuid() == 0 else ["--unshare-user"]
    own = {os.path.abspath(path) for path in (sys.prefix, sys.base_prefix, *isolation.installed_paths())}
    covered: list[str] = []
    for path in sorted({"/usr", "/lib", "/lib64", str(_PACKAGE), *own}):
        if not os.path.exists(path) or any(path.startswith(f"{parent}/") for parent in covered):
            continue
        covered.append(path)
        if os.path.islink(path) and path.startswith("/lib"):
            arguments += ["--symlink", os.readlink(path), path]
            continue
        parents = [str(parent) for parent in reversed(Path(path).parents)][1:]
        for parent in parents if os.geteuid() == 0 else ():  # else with the mode outside, for example of /root
            arguments += ["--perms", "0755", "--dir", parent]
        arguments += ["--ro-bind", os.path.realpath(path), path]
    return [*arguments, "--"]


def host_isolation() -> str:
    """What isolates the programs of environment.kind=code on this host, as text; starts a sandbox."""
    limits = Limits(cpu_seconds=1, wall_seconds=5, memory_bytes=512 << 20, output_bytes=1 << 16)
    try:
        sandbox = ProgramSandbox(limits)
    except NoSandbox as error:
        return f"none, environment.kind=code is refused: {error}"
    sandbox.close()
    return sandbox.isolation + (f", because {sandbox.reason}" if sandbox.reason else "")


def _as_text(arguments: Sequence[Any]) -> str:
    """JSON; for values that JSON changes (tuples, sets, keys that are no texts), a literal of Python."""
    try:
        text = json.dumps(list(arguments))
    except TypeError:
        return repr(list(arguments))
    return text if repr(json.loads(text)) == repr(list(arguments)) else repr(list(arguments))
