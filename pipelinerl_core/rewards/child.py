"""A scoring child process: its requests, its answers, their deadlines."""

import asyncio
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipelinerl_core.errors import FunctionRaised, RewardError
from pipelinerl_core.rewards.forked import CAUSES, TIMEOUT
from pipelinerl_core.rewards.worker import ChildSpec
from pipelinerl_core.sandbox.child_process import as_line
from pipelinerl_core.sandbox.supervised import Request, SupervisedChild
from pipelinerl_core.sandbox.user_code import Invalid
from pipelinerl_core.types import RewardComponent, Score

logger = logging.getLogger(__name__)

MAX_DEATHS = 3
"""Deaths of the child during one scoring, except because of the deadline, after which the scoring is an error."""
CONFIRM_SECONDS = 0.05
"""Pause before a second check of an exceeded deadline: if the event loop was blocked, answers may wait to be read."""
EVALUATION_GRACE_SECONDS = 2.0
"""Time for a child to report its own deadline of an evaluation."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Scoring(Request):
    line: bytes
    deaths: int = 0


class ScoringChild(SupervisedChild[_Scoring]):
    """Sends requests to a child process, which answers in order of arrival.

    The child handles one request at a time: the oldest unanswered request is the current request, since the previous
    answer. If the child dies, the current request is the cause; the others are sent to the next child.
    """

    MODULE = "pipelinerl_core.rewards.worker"
    LINE_BYTES = 2048
    ERROR = RewardError
    NOUN = "the child process"
    CLOSED = "the scorer was closed"

    def __init__(self, spec: ChildSpec, count_lost: Callable[[str], None]) -> None:
        """The first request starts the child. `count_lost` is called with the cause of each lost scoring."""
        super().__init__(f"verifier {spec.name}", asdict(spec), spec.environment)
        self._spec = spec
        self._count_lost = count_lost
        self._head_started = 0.0
        self._suspect: int | None = None  # the first check found this request over its deadline
        self._overdue: int | None = None  # the request whose deadline led to killing the child
        self._num_lost = 0

    def submit(self, text: str, task: Mapping[str, Any]) -> asyncio.Future[Score]:
        """The future reward: timeout_reward if the deadline passed; RewardError if the scoring failed otherwise."""
        line = as_line({"id": self._next_id, "text": text, "task": task})
        future: asyncio.Future[Score] = asyncio.get_running_loop().create_future()
        self._add(_Scoring(line=line, future=future))
        self._send(line)
        return future

    def _flush(self) -> None:
        if len(self._unsent) == len(self._requests):  # the child was idle until now
            self._head_started = asyncio.get_running_loop().time()
        super()._flush()

    def _on_ready(self, fields: Mapping[str, Any]) -> None:
        for request in self._requests.values():
            self._send(request.line)

    def _on_lines(self, lines: bytes) -> None:
        """Read complete lines, in the order of the requests; raises Invalid at the first invalid answer."""
        self._head_started = asyncio.get_running_loop().time()
        for answer in _parsed(lines):
            head = next(iter(self._requests), None)
            was_sent = len(self._requests) > len(self._unsent)
            if head is None or not was_sent or answer.get("id") != head:
                raise Invalid("the answer does not belong to the current request")
            result = _result(answer)
            if (cause := answer.get("lost")) is not None:
                self._note_lost(cause)
            request = self._requests.pop(head)
            if isinstance(result, Score):
                request.finish(result)
            else:
                self._fail(request, self._readable(result), FunctionRaised if answer.get("raised") else RewardError)

    def _note_lost(self, cause: str) -> None:
        """Count and log a scoring without a result, which has a reward because the text caused it."""
        self._count_lost(cause)
        self._num_lost += 1
        if self._num_lost & (self._num_lost - 1) == 0:  # the 1st, 2nd, 4th, 8th
            logger.warning(
                "%s: %d scorings without a result so far, which have a reward all the same; the newest: %s",
                self._title, self._num_lost,
                f"none within reward.timeout_seconds={self._spec.timeout_seconds}"
                if cause == TIMEOUT else "the evaluating process died",
            )  # fmt: skip

    def _seconds_to_check(self) -> float | None:
        limit = self._spec.timeout_seconds + (EVALUATION_GRACE_SECONDS if self._spec.forks else 0.0)
        head = next(iter(self._requests), None)
        now = asyncio.get_running_loop().time()
        remaining = limit if head is None else self._head_started + limit - now
        if remaining <= 0 and self._suspect == head:
            self._overdue = head
            return None
        self._suspect = head if remaining <= 0 else None
        return max(remaining, CONFIRM_SECONDS)

    async def _on_death(self, exit_code: int | None, bad_line: str) -> None:
        """Decide the current request of a dead child: timeout_reward if late, else a retry or RewardError."""
        if bad_line:
            logger.error("%s: killing the child process: %s", self._title, bad_line)
        overdue, self._overdue = self._overdue, None
        if (head := next(iter(self._requests), None)) is None:
            return
        request = self._requests[head]
        if overdue is not None:
            if overdue == head:  # else its answer arrived while the child was killed
                self._note_lost(TIMEOUT)
                self._requests.pop(head).finish(Score(self._spec.timeout_reward))
            return
        request.deaths += 1
        logger.warning("%s: child process died (exit code %s)", self._title, exit_code)
        if request.deaths >= MAX_DEATHS or request.future.done():
            del self._requests[head]
            self._fail(request, f"the child process died {request.deaths} times on this text (exit code {exit_code})")


def _parsed(lines: bytes) -> Iterator[dict[str, Any]]:
    try:
        answers = json.loads(b"[" + lines.replace(b"\n", b",") + b"]")
    except (ValueError, RecursionError):
        raise Invalid("a line that is not JSON") from None
    for answer in answers:
        if not isinstance(answer, dict):
            raise Invalid("a line that is not an answer")
        yield answer


def _result(answer: dict[str, Any]) -> Score | str:
    """The reward, or the text of an error; raises Invalid for anything else."""
    match answer:
        case {"id": int(), "reward": float() as reward, **others} if math.isfinite(reward):
            if not others or (others.keys() == {"lost"} and others["lost"] in CAUSES):
                return Score(reward)
            if others.keys() == {"components"} and _are_finite(others["components"]):
                return Score(reward, tuple(RewardComponent(*component) for component in others["components"].items()))
        case {"id": int(), "error": str() as text, **others} if len(text) <= ScoringChild.LINE_BYTES:
            if not others or others == {"raised": True}:
                return text
    raise Invalid("a line that is not an answer")


def _are_finite(components: Any) -> bool:
    return isinstance(components, dict) and all(
        isinstance(value, float) and math.isfinite(value) for value in components.values()
    )
