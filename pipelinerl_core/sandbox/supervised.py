"""A child process that exchanges lines of JSON with its parent: its start, its deadlines, its end, its restarts.

in   {...}                 once, after the start: what the child prepares
out  {"ready": true, ...}  once; or {"failed": "reason"}, and the child ends
in   requests              only after the ready line
out  answers

child_process.py has the child's part. A subclass decides what the lines mean, and what happens to the requests of a
child that died.
"""

import asyncio
import json
import logging
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from pipelinerl_core.restart_budget import RestartBudget
from pipelinerl_core.sandbox.child_process import as_line, child_environment, printable, without_secrets
from pipelinerl_core.sandbox.user_code import Invalid

START_SECONDS = 60.0
"""Deadline of a child's start; importing libraries takes seconds on a busy host."""
CLOSE_SECONDS = 1.0
"""Between closing a child's input and SIGKILL."""
MAX_RESTARTS = 2
"""Restarts after failed starts, in a row; then all requests fail."""
BACKOFF_SECONDS = 0.2
"""Pause after a failed start; five times as long after each further one in a row."""
READ_BYTES = 1 << 16


class _Late(Invalid):
    """The child was not ready in time."""


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A request whose future is done when the child has answered, the request has failed, or the caller cancelled."""

    future: asyncio.Future[Any]

    def finish(self, result: Any) -> None:
        """Set the result; no effect if the future is done."""
        if not self.future.done():
            self.future.set_result(result)


R = TypeVar("R", bound=Request)


class SupervisedChild(ABC, Generic[R]):
    """Starts a child when there are requests, and another child after a death. Bound to one event loop.

    The loop's thread must run longer than the child, because the kernel kills the child when that thread ends.
    """

    MODULE: ClassVar[str]
    """What the child runs."""
    LINE_BYTES: ClassVar[int]
    """Maximum length of a child's line."""
    ERROR: ClassVar[type[Exception]]
    """Class of the errors of requests."""
    NOUN: ClassVar[str]
    """The child, in messages."""
    LATE: ClassVar[str] = ""
    """Why all requests fail if the first child is not ready in time; empty: another child is started."""
    NOT_STARTED: ClassVar[type[Exception] | None] = None
    """Replaces ERROR if no child has started, for reasons that no child has named."""
    CLOSED: ClassVar[str]
    """Why all requests fail since `close`."""

    def __init__(self, title: str, prepare: Mapping[str, Any], variables: Sequence[str]) -> None:
        """The first request starts the child. title: start of messages; prepare: the first line for the child.

        variables: further variables of this process's environment that the child gets.
        """
        self._title = title
        self._prepare = prepare
        self._variables = variables
        self._logger = logging.getLogger(type(self).__module__)
        self._next_id = 0
        self._requests: dict[int, R] = {}  # in the order of arrival
        self._input: asyncio.StreamWriter | None = None  # of a child that is ready
        self._unsent: list[bytes] = []
        self._wanted = asyncio.Event()
        self._watch_timer: asyncio.TimerHandle | None = None
        self._restarts = RestartBudget(MAX_RESTARTS, f"at most {MAX_RESTARTS} in a row", clock=time.monotonic)
        self._was_ready = False  # an earlier child
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    async def close(self) -> None:
        """End the child; unanswered and later requests fail. Returns when the child has ended."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})  # bounded: the task ends within CLOSE_SECONDS
        self._fail_all(self.CLOSED)

    def _add(self, request: R) -> None:
        """Store a request under the id `_next_id`, and start a child if there is none. Subclasses remove requests.

        Raises ERROR after `close`."""
        if self._is_closed:
            raise self.ERROR(f"{self._title}: {self.CLOSED}")
        self._requests[self._next_id] = request
        self._next_id += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._supervise(), name=self._title)
        self._wanted.set()

    def _send(self, line: bytes) -> None:
        """Send a line to a child that is ready; without such a child, drop the line."""
        if self._input is not None:
            if not self._unsent:
                asyncio.get_running_loop().call_soon(self._flush)  # one write for all lines of this turn of the loop
            self._unsent.append(line)

    def _flush(self) -> None:
        if self._input is not None and self._unsent:
            self._input.write(b"".join(self._unsent))
        self._unsent = []

    def _fail(self, request: R, reason: str, error: type[Exception] | None = None) -> None:
        """error: replaces ERROR."""
        if not request.future.done():
            request.future.set_exception((error or self.ERROR)(f"{self._title}: {reason}"))

    def _readable(self, text: str) -> str:
        """A text of the child, for messages."""
        return without_secrets(printable(text)[:2000], self._variables)[:600]

    def _new_descriptors(self) -> tuple[int, ...]:
        """Descriptors for the next child, which gets their numbers as arguments; they are closed here afterwards."""
        return ()

    @abstractmethod
    def _on_ready(self, fields: Mapping[str, Any]) -> None:
        """Send all requests. fields: of the ready line. Raises Invalid if the child cannot be used."""

    @abstractmethod
    def _on_lines(self, lines: bytes) -> None:
        """Handle complete lines. Raises Invalid, ValueError or RecursionError to kill the child."""

    @abstractmethod
    def _seconds_to_check(self) -> float | None:
        """Check the deadlines: seconds until the next check; None: a deadline is exceeded, kill the child."""

    @abstractmethod
    async def _on_death(self, exit_code: int | None, bad_line: str) -> None:
        """Decide the requests of a child that was ready. bad_line: what was wrong with a line; empty: nothing."""

    async def _supervise(self) -> None:
        try:
            while True:
                self._wanted.clear()
                if not self._requests:
                    await self._wanted.wait()
                await self._run_child()
        except Exception as error:
            self._logger.error("%s: %s", self._title, error, exc_info=error)
            self._fail_all(f"{type(error).__name__}: {error}")

    def _fail_all(self, reason: str, error: type[Exception] | None = None) -> None:
        for request in self._requests.values():
            self._fail(request, reason, error)
        self._requests.clear()

    async def _run_child(self) -> None:
        """Start a child; returns after the child's end, when the requests are decided."""
        try:
            process = await self._start()
        except OSError as error:  # the host has no memory, processes or space left
            await self._start_failed(f"{self.NOUN} did not start ({error})")
            return
        is_ready, reason, is_final = False, "", False
        try:
            fields = await self._ready_fields(process)
            self._input = process.stdin
            self._on_ready(fields)
            self._flush()  # before the first check of the deadlines
            is_ready = self._was_ready = True
            self._watch(process)
            await self._read(process)
        except (Invalid, ValueError, RecursionError) as error:
            reason = self._readable(str(error))
            is_final = not isinstance(error, _Late)
            if is_ready:
                process.kill()
        finally:
            await self._end(process)
        if is_ready:
            self._restarts.reset()
            await self._on_death(process.returncode, reason)
        else:
            text = reason or f"{self.NOUN} did not start (exit code {process.returncode})"
            await self._start_failed(text, is_final=is_final and bool(reason))

    async def _start(self) -> asyncio.subprocess.Process:
        descriptors = self._new_descriptors()
        try:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-u", "-P", "-W", "ignore", "-m", self.MODULE),
                *map(str, (os.getpid(), *descriptors)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=child_environment(self._variables),
                pass_fds=descriptors,
            )
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    async def _ready_fields(self, process: asyncio.subprocess.Process) -> Mapping[Any, Any]:
        """Wait for the ready line. Raises Invalid, with a text if the next child would fail in the same way, or
        _Late."""
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(as_line(self._prepare))
        try:
            async with asyncio.timeout(START_SECONDS):
                first = json.loads(await process.stdout.readline())
        except TimeoutError:
            raise _Late(self.LATE or f"the child was not ready within {START_SECONDS:g} s") from None
        except (ValueError, RecursionError):  # the child has ended, or its line is too long or not JSON
            raise Invalid from None
        match first:
            case {"ready": True, **fields}:
                return fields
            case {"failed": str() as text}:
                raise Invalid(text)
        raise Invalid

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Handle lines until the child's output ends."""
        assert process.stdout is not None
        begun = bytearray()
        while data := await process.stdout.read(READ_BYTES):
            lines, newline, rest = data.rpartition(b"\n")
            if newline:
                self._on_lines(bytes(begun) + lines)
                begun.clear()
            begun += rest
            if len(begun) > self.LINE_BYTES:
                raise Invalid(f"a line of more than {self.LINE_BYTES} bytes")

    def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Kill the child if a deadline is exceeded; else schedule the next check."""
        if (seconds := self._seconds_to_check()) is None:
            self._input = None
            process.kill()
        else:
            self._watch_timer = asyncio.get_running_loop().call_later(seconds, self._watch, process)

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """End the child from any state; returns when the child has ended."""
        self._input = None
        self._unsent = []
        if self._watch_timer is not None:
            self._watch_timer.cancel()
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        # asyncio closes the output only at its end, and a process that the child has left may hold it open.
        transport: asyncio.SubprocessTransport = process._transport  # type: ignore[attr-defined]
        transport.close()

    async def _start_failed(self, text: str, *, is_final: bool = False) -> None:
        """Fail all requests if too many starts have failed. is_final: the next child would fail in the same way."""
        self._logger.error("%s: %s", self._title, text)
        if is_final:
            self._fail_all(text)
        elif text == self.LATE and not self._was_ready:  # a slow start takes a minute, and would take it again
            self._fail_all(text, self.NOT_STARTED)
        elif not self._restarts.take():
            self._fail_all(f"{text}, {self._restarts.spent_text}", self.NOT_STARTED)
            self._restarts.reset()
        await asyncio.sleep(BACKOFF_SECONDS * 5**self._restarts.count)
