"""A scoring child process: its request queue, its deadlines, its restarts."""

import asyncio
import itertools
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipelinerl_core.errors import FunctionRaised, RewardError
from pipelinerl_core.restart_budget import RestartBudget
from pipelinerl_core.rewards.forked import CAUSES, TIMEOUT
from pipelinerl_core.sandbox.child_process import child_environment, printable, without_secrets
from pipelinerl_core.types import RewardComponent, Score

logger = logging.getLogger(__name__)

START_SECONDS = 60.0
"""Deadline of a child's start; importing reasoning-gym takes seconds on a busy host."""
CLOSE_SECONDS = 1.0
"""Between closing a child's input and SIGKILL."""
MAX_RETRIES = 2
"""Further attempts of a request after the child died, except because of the deadline."""
MAX_RESTARTS = 2
"""Restarts after failed starts, in a row; then all requests in the queue fail."""
BACKOFF_SECONDS = 0.2
"""Pause after a failed start."""
CONFIRM_SECONDS = 0.05
"""Pause before a second check of an exceeded deadline: if the event loop was blocked, answers may wait to be read."""
EVALUATION_GRACE_SECONDS = 2.0
"""Time for a child to answer after the child's own deadline of an evaluation."""
READY = b'{"ready":true}\n'
READ_BYTES = 1 << 16
REPLY_BYTES = 2048
"""Maximum length of a child's line."""


class BadReply(Exception):
    """A line of the child is not a valid answer to its current request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """Verifier and limits of a child."""

    name: str
    """Name of the verifier, for messages."""
    function: str
    """module:function of the verifier."""
    timeout_seconds: float
    """Limit of one scoring, from the time when the child starts the scoring."""
    memory_bytes: int
    """Limit of the child's address space."""
    prepare: Any = None
    """JSON argument of a verifier that is a class, or of the function `prepare` in the verifier's module; None: do
    not call `prepare`."""
    is_users: bool = False
    """The verifier is a user's function, which gets the prompt's text and the completion's tokens too."""
    is_sealed: bool = True
    """Drop access to files, network and processes before the first scoring, as far as the kernel allows."""
    network: bool = False
    """A sealed process may open connections."""
    environment: tuple[str, ...] = ()
    """Further variables of the actor's environment that the child gets."""
    forks: bool = False
    """The verifier may return Evaluations, which run in forks of the child."""

    @property
    def answer_seconds(self) -> float:
        """Deadline of an answer; includes time for a child that evaluates to report its own deadline."""
        return self.timeout_seconds + (EVALUATION_GRACE_SECONDS if self.forks else 0.0)


@dataclass(slots=True, kw_only=True, eq=False)
class _Request:
    line: bytes
    future: asyncio.Future[Score]
    failures: int = 0


class ScoringChild:
    """Sends requests to a child process, which answers in order of arrival. Bound to one event loop.

    The child handles one request at a time: the oldest unanswered request is the current request, since the previous
    answer. If the child dies, the current request is the cause; the others are sent to the next child.
    The loop's thread must run longer than the child, because the kernel kills the child when that thread ends.
    """

    def __init__(self, spec: ChildSpec, count_lost: Callable[[str], None]) -> None:
        """The first request starts the child. `count_lost` is called with the cause of each lost scoring."""
        self._spec = spec
        self._count_lost = count_lost
        self._ids = itertools.count()
        self._pending: dict[int, _Request] = {}  # in the child's order
        self._outbox: list[bytes] = []
        self._input: asyncio.StreamWriter | None = None  # of a child that is ready
        self._process: asyncio.subprocess.Process | None = None
        self._wanted = asyncio.Event()
        self._head_started = 0.0
        self._watch_timer: asyncio.TimerHandle | None = None
        self._suspect: int | None = None  # the first check found this request over its deadline
        self._overdue: int | None = None  # the request whose deadline led to killing the child
        self._start_error = ""
        self._restarts = RestartBudget(MAX_RESTARTS, f"at most {MAX_RESTARTS} in a row", clock=time.monotonic)
        self._num_lost = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def num_pending(self) -> int:
        """Requests without an answer."""
        return len(self._pending)

    def submit(self, text: str, task: Mapping[str, Any]) -> asyncio.Future[Score]:
        """The future reward: 0 if the deadline passed; RewardError if the scoring failed otherwise."""
        loop = asyncio.get_running_loop()
        identity = next(self._ids)
        line = json.dumps({"id": identity, "text": text, "task": task}).encode() + b"\n"
        request = _Request(line=line, future=loop.create_future())
        if not self._pending:
            self._head_started = loop.time()
        self._pending[identity] = request
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._keep_alive(), name=f"reward child {self._spec.name}")
            self._task.add_done_callback(self._supervision_ended)
        self._wanted.set()
        if self._input is not None:
            if not self._outbox:
                loop.call_soon(self._flush)  # one write for all requests of this turn of the loop
            self._outbox.append(line)
        return request.future

    async def close(self) -> None:
        """End the child; unanswered requests fail. Returns when the process has ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})  # bounded: the task ends within CLOSE_SECONDS
        self._fail_all("the scorer was closed")

    # ---- start and end of the child ------------------------------------------------------------------------------

    async def _keep_alive(self) -> None:
        while True:
            self._wanted.clear()
            if not self._pending:
                await self._wanted.wait()
            process = await self._start()
            self._process = process
            try:
                started = await self._serve(process)
            finally:
                await self._end(process)
            if started:
                self._restarts.reset()
                self._handle_death(process.returncode)
            else:
                await self._start_failed(process.returncode)

    async def _start(self) -> asyncio.subprocess.Process:
        spec = self._spec
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-W", "ignore", "-m", "pipelinerl_core.rewards.worker"),
            *("--verifier", spec.function),
            *("--timeout-seconds", str(spec.timeout_seconds), "--memory-bytes", str(spec.memory_bytes)),
            *("--parent", str(os.getpid()), *(["--seal"] * spec.is_sealed), *(["--forks"] * spec.forks)),
            *(["--network"] * spec.network),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=child_environment(spec.environment),
        )

    async def _serve(self, process: asyncio.subprocess.Process) -> bool:
        """Send requests and read answers until the child's output ends; False if the child was never ready."""
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdin.write(json.dumps(self._spec.prepare).encode() + b"\n")
        try:
            async with asyncio.timeout(START_SECONDS):
                ready = await process.stdout.readline()
        except TimeoutError:
            logger.error("verifier %s: the child was not ready within %s s", self._spec.name, START_SECONDS)
            return False
        except ValueError:  # the line exceeds the reader's limit
            return False
        if ready != READY:
            self._start_error = without_secrets(_start_error(ready), self._spec.environment)
            return False
        self._input = process.stdin
        self._outbox = [request.line for request in self._pending.values()]
        self._flush()
        self._watch()
        rest = b""
        try:
            while data := await process.stdout.read(READ_BYTES):
                lines, newline, rest = (rest + data).rpartition(b"\n")
                if newline:
                    self._answers(lines)
                if len(rest) > REPLY_BYTES:
                    raise BadReply(f"a line of more than {REPLY_BYTES} bytes")
        except BadReply as error:
            logger.error("verifier %s: killing the child process: %s", self._spec.name, error)
            process.kill()
        return True

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """End the child from any state; returns when the process has ended."""
        self._input = None
        self._outbox = []
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
        self._process = None

    # ---- requests and answers ------------------------------------------------------------------------------------

    def _flush(self) -> None:
        if self._input is not None and self._outbox:
            if len(self._outbox) == len(self._pending):  # the child was idle until now
                self._head_started = asyncio.get_running_loop().time()
            self._input.write(b"".join(self._outbox))
        self._outbox = []

    def _answers(self, lines: bytes) -> None:
        """Read complete lines, in the order of the requests; raises BadReply at the first invalid answer."""
        self._head_started = asyncio.get_running_loop().time()
        for answer in _parsed(lines):
            head = next(iter(self._pending), None)
            was_sent = len(self._pending) > len(self._outbox)
            if head is None or not was_sent or answer.get("id") != head:
                raise BadReply("the answer does not belong to the current request")
            result = _result(answer)
            if (cause := answer.get("lost")) is not None:
                self._note_lost(cause)
            future = self._pending.pop(head).future
            if future.done():
                continue  # the caller has cancelled the request
            if isinstance(result, Score):
                future.set_result(result)
            else:
                failure = FunctionRaised if answer.get("raised") else RewardError
                reason = without_secrets(result, self._spec.environment)
                future.set_exception(failure(f"verifier {self._spec.name}: {reason}"))

    def _note_lost(self, cause: str) -> None:
        """Count and log a scoring without a result, which counts as a wrong answer because the text caused it."""
        self._count_lost(cause)
        self._num_lost += 1
        if self._num_lost & (self._num_lost - 1) == 0:  # the 1st, 2nd, 4th, 8th
            logger.warning(
                "verifier %s: %d scorings without a result so far, which count as wrong answers; the newest: %s",
                self._spec.name, self._num_lost, f"none within reward.timeout_seconds={self._spec.timeout_seconds}"
                if cause == TIMEOUT else "the evaluating process died",
            )  # fmt: skip

    def _watch(self) -> None:
        """Kill the child if the current request exceeds its deadline; else schedule the next check."""
        if self._input is None or self._process is None:
            return  # the next child starts its own checks
        loop = asyncio.get_running_loop()
        limit = self._spec.answer_seconds
        head = next(iter(self._pending), None)
        remaining = limit if head is None else self._head_started + limit - loop.time()
        if remaining > 0 or self._suspect != head:
            self._suspect = head if remaining <= 0 else None
            self._watch_timer = loop.call_later(max(remaining, CONFIRM_SECONDS), self._watch)
            return
        self._overdue = head
        self._input = None
        self._process.kill()

    def _handle_death(self, exit_code: int | None) -> None:
        """Decide the current request of a dead child: 0 after its deadline; else a retry or RewardError."""
        overdue, self._overdue = self._overdue, None
        if not self._pending:
            return
        head = next(iter(self._pending))
        request = self._pending[head]
        if overdue is not None:
            if overdue == head:  # else its answer arrived while the child was killed
                self._note_lost(TIMEOUT)
                del self._pending[head]
                if not request.future.done():
                    request.future.set_result(Score(0.0))
            return
        request.failures += 1
        logger.warning("verifier %s: child process died (exit code %s)", self._spec.name, exit_code)
        if request.failures > MAX_RETRIES or request.future.done():
            self._fail(head, f"the child process died {request.failures} times on this text (exit code {exit_code})")

    async def _start_failed(self, exit_code: int | None) -> None:
        reason = self._start_error or f"the child process did not start (exit code {exit_code})"
        logger.error("verifier %s: %s", self._spec.name, reason)
        if self._start_error:  # the next child would fail in the same way
            self._fail_all(reason)
        elif not self._restarts.take():
            self._fail_all(f"{reason}, {self._restarts.spent_text}")
            self._restarts.reset()
        await asyncio.sleep(BACKOFF_SECONDS)

    def _fail(self, identity: int, reason: str) -> None:
        future = self._pending.pop(identity).future
        if not future.done():
            future.set_exception(RewardError(f"verifier {self._spec.name}: {reason}"))

    def _supervision_ended(self, task: asyncio.Task[None]) -> None:
        """If the supervising task failed (for example no process could start), fail all requests."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("verifier %s: %s", self._spec.name, error, exc_info=error)
            self._fail_all(f"{type(error).__name__}: {error}")

    def _fail_all(self, reason: str) -> None:
        for identity in list(self._pending):
            self._fail(identity, reason)


def _parsed(lines: bytes) -> Iterator[dict[str, Any]]:
    try:
        answers = json.loads(b"[" + lines.replace(b"\n", b",") + b"]")
    except (ValueError, RecursionError):
        raise BadReply("a line that is not JSON") from None
    for answer in answers:
        if not isinstance(answer, dict):
            raise BadReply("a line that is not an answer")
        yield answer


def _start_error(line: bytes) -> str:
    """The reason that a child gives for not starting; empty if there is none."""
    try:
        match json.loads(line):
            case {"failed": str() as text, **others} if not others:
                return printable(text)
    except (ValueError, RecursionError):
        pass
    return ""


def _result(answer: dict[str, Any]) -> Score | str:
    """The reward, or the text of an error; raises BadReply for anything else."""
    match answer:
        case {"id": int(), "reward": float() as reward, **others} if math.isfinite(reward):
            if not others or (others.keys() == {"lost"} and others["lost"] in CAUSES):
                return Score(reward)
            if others.keys() == {"components"} and _are_finite(others["components"]):
                return Score(reward, tuple(RewardComponent(*one) for one in others["components"].items()))
        case {"id": int(), "error": str() as text, **others} if len(text) <= REPLY_BYTES:
            if not others or others == {"raised": True}:
                return printable(text)
    raise BadReply("a line that is not an answer")


def _are_finite(components: Any) -> bool:
    return isinstance(components, dict) and all(
        isinstance(value, float) and math.isfinite(value) for value in components.values()
    )
