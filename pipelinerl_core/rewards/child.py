"""One child process that scores, kept alive: its queue, its deadline, its restarts."""

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

from pipelinerl_core.errors import RewardError
from pipelinerl_core.restart_budget import RestartBudget
from pipelinerl_core.rewards.forked import CAUSES, TIMEOUT

logger = logging.getLogger(__name__)

START_SECONDS = 60.0
"""Limit of starting a child: reasoning-gym takes seconds to import on a busy host."""
CLOSE_SECONDS = 1.0
"""Grace between closing a child's input and killing it."""
MAX_RETRIES = 2
"""Further attempts at a scoring after the child died of something else than the deadline."""
MAX_RESTARTS = 2
"""After failed starts, in a row; then everything in the queue fails."""
BACKOFF_SECONDS = 0.2
"""Pause after a failed start."""
CONFIRM_SECONDS = 0.05
"""Pause between seeing a deadline pass and believing it: after the loop itself stood still, answers come first."""
EVALUATION_GRACE_SECONDS = 2.0
"""How much later than its own deadline of an evaluation a child has to answer."""
READY = b'{"ready":true}\n'
READ_BYTES = 1 << 16
REPLY_BYTES = 2048
"""Longest line of a child: the words of an error are cut there."""

PASSED_ON = ("HOME", "TMPDIR", "PYTHONHASHSEED")
"""Of the actor's environment: where libraries keep caches while they are loaded, and the seed of Python's hashes. A
verifier works on what a model wrote and gets no tokens and no credentials."""
SINGLE_THREADED = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class BadReply(Exception):
    """A child said something that is no answer to the request that it works on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """What a child runs and what it may use."""

    name: str
    """Name of the verifier, for messages."""
    function: str
    """module:function of the verifier."""
    timeout_seconds: float
    """Limit of one scoring, from when the child starts it."""
    memory_bytes: int
    """Limit of the child's address space."""
    prepare: Any = None
    """JSON, for the function `prepare` of the verifier's module; None: it has none."""
    is_sealed: bool = True
    """Give up files, network and the rest before the first scoring, as far as the host can."""
    forks: bool = False
    """The verifier may evaluate, in forks of the child."""

    @property
    def answer_seconds(self) -> float:
        """Limit of an answer: a child with a deadline of its own for evaluations is given time to report it."""
        return self.timeout_seconds + (EVALUATION_GRACE_SECONDS if self.forks else 0.0)


@dataclass(slots=True, kw_only=True, eq=False)
class _Request:
    line: bytes
    future: asyncio.Future[float]
    failures: int = 0


class ScoringChild:
    """Answers requests in order of arrival. Lives on one event loop.

    The child handles one request at a time, so the oldest unanswered one is the one it works on, since the moment of
    the answer before it. When the child dies that one is to blame; the others are sent again to the next child.
    The loop's thread must outlive it: the kernel ends a child with the thread that started it.
    """

    def __init__(self, spec: ChildSpec, count_lost: Callable[[str], None]) -> None:
        """Nothing is started before the first request. `count_lost` hears the cause of each lost scoring."""
        self._spec = spec
        self._count_lost = count_lost
        self._ids = itertools.count()
        self._pending: dict[int, _Request] = {}  # in the order in which the child works on them
        self._outbox: list[bytes] = []
        self._input: asyncio.StreamWriter | None = None  # of a child that is ready
        self._process: asyncio.subprocess.Process | None = None
        self._wanted = asyncio.Event()
        self._head_started = 0.0
        self._watch_timer: asyncio.TimerHandle | None = None
        self._suspect: int | None = None  # seen over its deadline once
        self._overdue: int | None = None  # the request whose deadline ended the child
        self._restarts = RestartBudget(MAX_RESTARTS, f"at most {MAX_RESTARTS} in a row", clock=time.monotonic)
        self._num_lost = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def num_pending(self) -> int:
        """Requests without an answer."""
        return len(self._pending)

    def submit(self, text: str, task: Mapping[str, Any]) -> asyncio.Future[float]:
        """The future reward, 0 when there was none within the deadline; RewardError when there is none otherwise."""
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
        """End the child; requests without an answer fail. Returns when the process is gone."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})  # bounded: it ends within CLOSE_SECONDS
        self._fail_all("the scorer was closed")

    # ---- life of the child ---------------------------------------------------------------------------------------

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
                self._blame(process.returncode)
            else:
                await self._start_failed(process.returncode)

    async def _start(self) -> asyncio.subprocess.Process:
        spec = self._spec
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-W", "ignore", "-m", "pipelinerl_core.rewards.worker"),
            *("--verifier", spec.function, "--prepare", json.dumps(spec.prepare)),
            *("--timeout-seconds", str(spec.timeout_seconds), "--memory-bytes", str(spec.memory_bytes)),
            *("--parent", str(os.getpid()), *(["--seal"] * spec.is_sealed), *(["--forks"] * spec.forks)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=_environment(),
        )

    async def _serve(self, process: asyncio.subprocess.Process) -> bool:
        """Send what is pending and take in answers until the child's output ends; False if it never got ready."""
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_SECONDS):
                ready = await process.stdout.readline()
        except TimeoutError:
            logger.error("verifier %s: the child was not ready within %s s", self._spec.name, START_SECONDS)
            return False
        except ValueError:  # a line without end
            return False
        if ready != READY:
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
            logger.error("verifier %s: the child process is ended: %s", self._spec.name, error)
            process.kill()
        return True

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """Whatever state the child is in: gone afterwards."""
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
        """Take in whole lines, in the order of the requests; raises BadReply at the first that is no answer."""
        self._head_started = asyncio.get_running_loop().time()
        for answer in _parsed(lines):
            head = next(iter(self._pending), None)
            was_sent = len(self._pending) > len(self._outbox)
            if head is None or not was_sent or answer.get("id") != head:
                raise BadReply("an answer to what was not asked")
            result = _result(answer)
            if (cause := answer.get("lost")) is not None:
                self._note_lost(cause)
            future = self._pending.pop(head).future
            if future.done():
                continue  # nobody waits for it any more
            if isinstance(result, float):
                future.set_result(result)
            else:
                future.set_exception(RewardError(f"verifier {self._spec.name}: {result}"))

    def _note_lost(self, cause: str) -> None:
        """A scoring without a result is a wrong answer: the text is to blame, not the task."""
        self._count_lost(cause)
        self._num_lost += 1
        if self._num_lost & (self._num_lost - 1) == 0:  # the 1st, 2nd, 4th, 8th
            logger.warning(
                "verifier %s: %d scorings without a result so far, which count as wrong answers; the newest: %s",
                self._spec.name, self._num_lost, f"none within reward.timeout_seconds={self._spec.timeout_seconds}"
                if cause == TIMEOUT else "the process that evaluated it died",
            )  # fmt: skip

    def _watch(self) -> None:
        """Kill the child when the request it works on is over its deadline; otherwise look again when it could be."""
        if self._input is None or self._process is None:
            return  # the next child starts a watch of its own
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

    def _blame(self, exit_code: int | None) -> None:
        """After the death of a child: deal with the request it was working on."""
        overdue, self._overdue = self._overdue, None
        if not self._pending:
            return
        head = next(iter(self._pending))
        request = self._pending[head]
        if overdue is not None:
            if overdue == head:  # else its answer was on the way when the child was killed
                self._note_lost(TIMEOUT)
                del self._pending[head]
                if not request.future.done():
                    request.future.set_result(0.0)
            return
        request.failures += 1
        logger.warning("verifier %s: child process died (exit code %s)", self._spec.name, exit_code)
        if request.failures > MAX_RETRIES or request.future.done():
            self._fail(head, f"the child process died {request.failures} times over it (exit code {exit_code})")

    async def _start_failed(self, exit_code: int | None) -> None:
        logger.error("verifier %s: child process did not start (exit code %s)", self._spec.name, exit_code)
        if not self._restarts.take():
            self._fail_all(f"the child process did not start (exit code {exit_code}), {self._restarts.spent_text}")
            self._restarts.reset()
        await asyncio.sleep(BACKOFF_SECONDS)

    def _fail(self, identity: int, reason: str) -> None:
        future = self._pending.pop(identity).future
        if not future.done():
            future.set_exception(RewardError(f"verifier {self._spec.name}: {reason}"))

    def _supervision_ended(self, task: asyncio.Task[None]) -> None:
        """Nobody waits forever, whatever went wrong (no more processes, an answer that is none)."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("verifier %s: %s", self._spec.name, error, exc_info=error)
            self._fail_all(f"{type(error).__name__}: {error}")

    def _fail_all(self, reason: str) -> None:
        for identity in list(self._pending):
            self._fail(identity, reason)


def _environment() -> dict[str, str]:
    """What Python needs to find and load the modules that the actor finds."""
    modules = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    passed_on = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    return {"PYTHONPATH": modules, **passed_on, **SINGLE_THREADED}


def _parsed(lines: bytes) -> Iterator[dict[str, Any]]:
    try:
        answers = json.loads(b"[" + lines.replace(b"\n", b",") + b"]")
    except (ValueError, RecursionError):
        raise BadReply("a line that is no JSON") from None
    for answer in answers:
        if not isinstance(answer, dict):
            raise BadReply("a line that is no answer")
        yield answer


def _result(answer: dict[str, Any]) -> float | str:
    """The reward, or the words of an error; raises BadReply for anything else."""
    match answer:
        case {"id": int(), "reward": float() as reward, **others} if math.isfinite(reward):
            if not others or (others.keys() == {"lost"} and others["lost"] in CAUSES):
                return reward
        case {"id": int(), "error": str() as words, **others} if not others and len(words) <= REPLY_BYTES:
            return "".join(letter for letter in words if letter.isprintable())
    raise BadReply("a line that is no answer")
