"""Scorings that evaluate text, each in a process that exists for it alone.

worker --fork--> limits, second filter, rehearsal, --request--> evaluation --one line--> worker --kill

The process is forked before its text is there, because a fork and what Python touches first take milliseconds.
Whatever the evaluation does to its process ends with the process. Its line is read up to a bound and believed only as
one number of the range that the verifier gives, or as the words of an error.
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
from pipelinerl_core.rewards.isolation import limit_evaluation

REPLY_BYTES = 512
_REQUEST, _REPLY = 3, 4
"""Descriptors of a fork; all others are closed or /dev/null."""
_MAX_DESCRIPTORS = 1 << 16


class Lost(Exception):
    """There is no result, because of what was evaluated; the message is the cause."""


TIMEOUT, DIED = "timeout", "died"
CAUSES = (TIMEOUT, DIED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one evaluation, and the descriptor that takes what it prints."""

    seconds: float
    """Deadline."""
    memory_bytes: int
    """Address space of the fork."""
    null: int
    """/dev/null, open for reading and writing: a sealed process cannot open it."""


@dataclass(frozen=True, slots=True)
class _Fork:
    process: int
    requests: int
    replies: int


class Evaluator:
    """Evaluates in forks of this process, one after the other."""

    def __init__(
        self, evaluate: Callable[[bytes], dict[str, Any]], rehearse: Callable[[], object], limits: Limits
    ) -> None:
        """`evaluate` turns a request into {"reward": number} or {"error": words}.

        It runs in the fork, after `rehearse`, which does what every evaluation begins with, on a text of our own.
        """
        self._evaluate = evaluate
        self._rehearse = rehearse
        self._limits = limits
        self._next: _Fork | None = None
        self._killed: int | None = None

    def start_next(self) -> None:
        """Wait for the end of the fork before, and fork for the next request. Call it after the answer is sent."""
        if self._killed is not None:
            os.waitpid(self._killed, 0)
            self._killed = None
        if self._next is None:
            self._next = self._forked()

    def evaluated(self, request: bytes) -> dict[str, Any]:
        """The result of a request, a line. Raises Lost when none comes in time. Its process is killed afterwards."""
        self.start_next()
        fork, self._next = self._next, None
        assert fork is not None
        deadline = time.monotonic() + self._limits.seconds
        try:
            write_all(fork.requests, request)
            return _believed(_line(fork.replies, deadline))
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
                _keep_only(request_reader, reply_writer, self._limits.null)
                limit_evaluation(math.ceil(self._limits.seconds) + 1, self._limits.memory_bytes)
                self._rehearse()
                with open(_REQUEST, "rb") as stream:
                    request = stream.readline()
                os.write(_REPLY, json.dumps(self._evaluate(request)).encode() + b"\n")
            finally:
                os._exit(0)  # nothing of the worker's own end: no traceback, no buffers
        os.close(request_reader)
        os.close(reply_writer)
        return _Fork(process, requests, replies)


def _keep_only(request_reader: int, reply_writer: int, null: int) -> None:
    reader, writer = (fcntl.fcntl(one, fcntl.F_DUPFD, _REPLY + 1) for one in (request_reader, reply_writer))
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.dup2(reader, _REQUEST)
    os.dup2(writer, _REPLY)
    os.closerange(_REPLY + 1, _MAX_DESCRIPTORS)


def _line(reading: int, deadline: float) -> bytes:
    """What comes until a line or the pipe ends; at most a few bytes more than REPLY_BYTES."""
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


def _believed(line: bytes) -> dict[str, Any]:
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError):
        raise Lost(DIED) from None
    match reply:
        case {"reward": float() | int() as reward} if not isinstance(reward, bool):
            return {"reward": reward}
        case {"error": str() as words}:
            return {"error": "".join(letter for letter in words if letter.isprintable())}
    raise Lost(DIED)


def write_all(descriptor: int, data: bytes) -> None:
    """Write however often it takes."""
    while data:
        data = data[os.write(descriptor, data) :]
