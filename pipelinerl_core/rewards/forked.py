"""Scorings that evaluate text, each in a forked process of its own.

worker --fork--> limits, second filter, warm-up, --request--> evaluation --one line--> worker --kill

The process is forked before the request arrives, because the fork and the warm-up take milliseconds. All side effects
of an evaluation end with its process. The worker reads the reply up to a size limit and accepts only a number in the
verifier's range, or the text of an error.
"""

import fcntl
import json
import math
import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipelinerl_core.parent_death import die_with_parent
from pipelinerl_core.sandbox.child_process import printable, write_all
from pipelinerl_core.sandbox.isolation import limit_evaluation

REPLY_BYTES = 512
_REQUEST, _REPLY = 3, 4
"""Descriptors in a fork; all other descriptors are closed or /dev/null."""
_MAX_DESCRIPTORS = 1 << 16


class Lost(Exception):
    """The evaluated text prevented a result; the message is the cause (see CAUSES)."""


TIMEOUT, DIED = "timeout", "died"
CAUSES = (TIMEOUT, DIED)


@dataclass(frozen=True, slots=True)
class _Fork:
    process: int
    requests: int
    replies: int


class Evaluator:
    """Evaluates in forks of this process, one after the other."""

    def __init__(
        self,
        evaluate: Callable[[bytes], dict[str, Any]],
        warm_up: Callable[[], object],
        *,
        seconds: float,
        memory_bytes: int,
    ) -> None:
        """Call before the process is sealed.

        Args:
            evaluate: request -> {"reward": number} or {"error": text}, called in the fork.
            warm_up: called in the fork before the request arrives; does the first part of an evaluation on a fixed
                text.
            seconds: deadline of an evaluation.
            memory_bytes: limit of the address space of the fork.
        """
        self._evaluate = evaluate
        self._warm_up = warm_up
        self._seconds = seconds
        self._memory_bytes = memory_bytes
        self._null = os.open(os.devnull, os.O_RDWR)  # now, because a sealed process cannot open files
        self._next: _Fork | None = None
        self._killed: int | None = None

    def start_next(self) -> None:
        """Wait for the end of the previous fork, and fork for the next request. Call after sending the answer."""
        if self._killed is not None:
            os.waitpid(self._killed, 0)
            self._killed = None
        if self._next is None:
            self._next = self._forked()

    def evaluated(self, request: bytes) -> dict[str, Any]:
        """The result of a request (one line). Raises Lost if no valid result arrives in time. Kills the fork."""
        self.start_next()
        fork, self._next = self._next, None
        assert fork is not None
        deadline = time.monotonic() + self._seconds
        try:
            write_all(fork.requests, request)
            return _validated(_line(fork.replies, deadline))
        except BrokenPipeError:
            raise Lost(DIED) from None
        finally:
            os.kill(fork.process, signal.SIGKILL)
            self._killed = fork.process
            os.close(fork.requests)
            os.close(fork.replies)

    def _forked(self) -> _Fork:
        worker = os.getpid()
        (request_reader, requests), (replies, reply_writer) = os.pipe(), os.pipe()
        process = os.fork()
        if process == 0:
            try:
                die_with_parent(worker)
                _keep_only(request_reader, reply_writer, self._null)
                limit_evaluation(math.ceil(self._seconds) + 1, self._memory_bytes)
                self._warm_up()
                with open(_REQUEST, "rb") as stream:
                    request = stream.readline()
                os.write(_REPLY, json.dumps(self._evaluate(request)).encode() + b"\n")
            finally:
                os._exit(0)  # skips the worker's exit handlers: no traceback, no flushed buffers
        os.close(request_reader)
        os.close(reply_writer)
        return _Fork(process, requests, replies)


def _keep_only(request_reader: int, reply_writer: int, null: int) -> None:
    reader, writer = (
        fcntl.fcntl(descriptor, fcntl.F_DUPFD, _REPLY + 1) for descriptor in (request_reader, reply_writer)
    )
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.dup2(reader, _REQUEST)
    os.dup2(writer, _REPLY)
    os.closerange(_REPLY + 1, _MAX_DESCRIPTORS)


def _line(reading: int, deadline: float) -> bytes:
    """Read until the end of a line or of the pipe; at most 2 * REPLY_BYTES. Raises Lost."""
    poll = select.poll()
    poll.register(reading, select.POLLIN)
    received = b""
    while not received.endswith(b"\n") and len(received) <= REPLY_BYTES:
        remaining = deadline - time.monotonic()
        if remaining <= 0 or not poll.poll(1000 * remaining):
            raise Lost(TIMEOUT)
        data = os.read(reading, REPLY_BYTES)
        if not data:
            raise Lost(DIED)
        received += data
    return received


def _validated(line: bytes) -> dict[str, Any]:
    """Parse a reply; raises Lost for anything but a reward or an error."""
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError):
        raise Lost(DIED) from None
    match reply:
        case {"reward": float() | int() as reward, **others} if not isinstance(reward, bool) and not others:
            return {"reward": reward}
        case {"error": str() as text, **others} if not others or others == {"raised": True}:
            return {"error": printable(text)}
    raise Lost(DIED)
