"""An environment process: its start, its episodes, its deadlines, its restarts."""

import asyncio
import itertools
import json
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipelinerl_core.environments.api import MAX_KEY_LETTERS
from pipelinerl_core.environments.loading import weighted_components
from pipelinerl_core.environments.running_step import RunningStep, new_descriptor
from pipelinerl_core.environments.worker import MAX_LINE_BYTES, Prepare
from pipelinerl_core.errors import EnvironmentFailed, EnvironmentTimeout
from pipelinerl_core.interfaces import EpisodeHost
from pipelinerl_core.restart_budget import RestartBudget
from pipelinerl_core.sandbox.child_process import child_environment, printable, without_secrets
from pipelinerl_core.sandbox.user_code import Invalid, checked_components, finite_number
from pipelinerl_core.types import Played, Reply, RewardComponent, Score, Transcript

logger = logging.getLogger(__name__)

START_SECONDS = 60.0
"""Deadline of a process's start; importing libraries takes seconds on a busy host."""
CLOSE_SECONDS = 1.0
"""Between closing a process's input and SIGKILL."""
GRACE_SECONDS = 2.0
"""Time for a process to interrupt a step after environment.call_seconds; then the process is killed."""
WATCH_SECONDS = 0.5
"""Interval of the checks for a blocked process."""
KINDS = ("ask", "once", "done", "played", "scored", "cut", "error")
"""Fields that name the episode of a line."""
MAX_DEATHS = 3
"""Deaths of the process during one episode, after which the episode is an error."""
MAX_RESTARTS = 2
"""Restarts after failed starts, in a row; then all waiting episodes fail."""
BACKOFF_SECONDS = 0.2
"""Pause after a failed start."""


class BadAnswer(Exception):
    """A line of the process is not valid at this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSpec:
    """Environment and limits of a process."""

    name: str
    """For messages: FILE.py:CLASS without directory."""
    prepare: Prepare
    variables: tuple[str, ...] = ()
    """Further variables of the actor's environment that the process gets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a process reports about the loaded class."""

    has_tasks: bool
    """The class has task and held_out; else it gets the rows of prompts."""
    weights: Mapping[str, float]
    """Component -> weight in the reward."""
    note: str = ""
    """What the class says about this host: the attribute `note` of the instance."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Episode:
    """One episode, or the scoring of a group of episodes."""

    task: Mapping[str, Any]
    seed: int = 0
    host: EpisodeHost | None = None
    """None while a group is scored."""
    transcripts: Sequence[Transcript] = ()
    """Of the group that is scored."""
    future: asyncio.Future[Any]
    """Played, Transcript, or a list of Played."""
    asking: asyncio.Task[None] | None = None
    """The model's turn; None while the environment has the turn."""
    is_playing: bool = False
    """The process plays the episode."""
    deaths: int = 0

    async def end_asking(self) -> None:
        """Cancel the model's turn; returns when the host has ended the turn."""
        if (asking := self.asking) is not None:
            self.asking = None
            asking.cancel()
            await asyncio.wait({asking})


class EnvironmentProcess:
    """Plays episodes in a process, which is started again after a death. Bound to one event loop.

    If the process dies, its episodes are played again from the start: their hosts answer the turns that they know.
    The loop's thread must run longer than the process, because the kernel kills the process when that thread ends.
    """

    def __init__(self, spec: EnvironmentSpec) -> None:
        """The first episode starts the process."""
        self._spec = spec
        self._next_id = itertools.count()
        self._num_ids = 0
        self._episodes: dict[int, _Episode] = {}
        self._checks: list[asyncio.Future[Loaded]] = []
        self._input: asyncio.StreamWriter | None = None  # of a process that is ready
        self._process: asyncio.subprocess.Process | None = None
        self._running: RunningStep | None = None
        self._loaded = Loaded(has_tasks=False, weights={})
        self._wanted = asyncio.Event()
        self._watch_timer: asyncio.TimerHandle | None = None
        self._is_overdue = False  # the process was killed because one step exceeded its limit
        self._bad_answer = ""  # the process was killed because of this line
        self._start_error = ""
        self._restarts = RestartBudget(MAX_RESTARTS, f"at most {MAX_RESTARTS} in a row", clock=time.monotonic)
        self._task: asyncio.Task[None] | None = None

    @property
    def num_episodes(self) -> int:
        """Episodes that are played or wait for the process."""
        return len(self._episodes)

    async def play(self, task: Mapping[str, Any], seed: int, host: EpisodeHost) -> Played | Transcript:
        """Play one episode. Raises EnvironmentFailed, or the exception of `host.ask`."""
        future = asyncio.get_running_loop().create_future()
        result: Played | Transcript = await self._run(_Episode(task=task, seed=seed, host=host, future=future))
        return result

    async def score_group(self, task: Mapping[str, Any], transcripts: Sequence[Transcript]) -> list[Played]:
        """Score the episodes of a group. Raises EnvironmentFailed."""
        future = asyncio.get_running_loop().create_future()
        result: list[Played] = await self._run(_Episode(task=task, transcripts=transcripts, future=future))
        return result

    async def _run(self, episode: _Episode) -> Any:
        identity = next(self._next_id)
        self._num_ids = identity + 1
        self._episodes[identity] = episode
        self._start_playing(identity, episode)
        self._keep_running()
        try:
            return await episode.future
        finally:
            self._episodes.pop(identity, None)
            if episode.is_playing:
                self._send({"cancel": identity})
            await episode.end_asking()

    async def check(self) -> Loaded:
        """Start the process if there is none. Raises EnvironmentFailed if the environment cannot be loaded."""
        if self._input is not None:
            return self._loaded
        loaded: asyncio.Future[Loaded] = asyncio.get_running_loop().create_future()
        self._checks.append(loaded)
        self._keep_running()
        return await loaded

    async def close(self) -> None:
        """End the process; unfinished episodes fail. Returns when the process has ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})  # bounded: the task ends within CLOSE_SECONDS
        self._fail_all("the environment was closed")

    # ---- start and end of the process ----------------------------------------------------------------------------

    def _keep_running(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._supervise(), name=f"environment {self._spec.name}")
            self._task.add_done_callback(self._supervision_ended)
        self._wanted.set()

    async def _supervise(self) -> None:
        while True:
            self._wanted.clear()
            if not self._episodes and not self._checks:
                await self._wanted.wait()
            process = await self._start()
            self._process = process
            try:
                started = await self._is_ready(process)
                if started:
                    await self._serve(process)
            finally:
                await self._end(process)
            if started:
                self._restarts.reset()
                await self._handle_death(process.returncode)
            else:
                await self._start_failed(process.returncode)

    async def _start(self) -> asyncio.subprocess.Process:
        descriptor = new_descriptor()
        try:
            self._running = RunningStep(descriptor)
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-u", "-P", "-W", "ignore", "-m", "pipelinerl_core.environments.worker"),
                *(str(os.getpid()), str(descriptor)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=child_environment(self._spec.variables),
                pass_fds=(descriptor,),
                limit=MAX_LINE_BYTES,
            )
        finally:
            os.close(descriptor)

    async def _is_ready(self, process: asyncio.subprocess.Process) -> bool:
        """Send the environment, and wait until the process has loaded it."""
        assert process.stdin is not None
        assert process.stdout is not None
        self._start_error = ""
        process.stdin.write(json.dumps({"prepare": asdict(self._spec.prepare)}).encode() + b"\n")
        try:
            async with asyncio.timeout(START_SECONDS):
                line = await process.stdout.readline()
        except TimeoutError:
            self._start_error = f"the environment was not loaded within {START_SECONDS:g} s"
            process.kill()
            return False
        except ValueError:  # the line exceeds the reader's limit
            process.kill()
            return False
        match _parsed_or_none(line):
            case {"failed": str() as text}:
                self._start_error = self._readable(text)
            case {"ready": True, "has_tasks": bool() as has_tasks, "weights": dict() as weights, **others}:
                note = self._readable(str(others.get("note", "")))
                if note and note != self._loaded.note:
                    logger.info("environment %s: %s", self._spec.name, note)
                checked = checked_components(weights, "weights")
                self._loaded = Loaded(has_tasks=has_tasks, weights=checked, note=note)
                return True
        return False

    async def _serve(self, process: asyncio.subprocess.Process) -> None:
        """Play episodes until the process's output ends."""
        assert process.stdout is not None
        self._input = process.stdin
        for check in self._checks:
            if not check.done():
                check.set_result(self._loaded)
        self._checks = []
        for identity, episode in self._episodes.items():
            self._start_playing(identity, episode)
        self._watch()
        try:
            while line := await process.stdout.readline():
                self._handle(line)
        except (BadAnswer, Invalid, ValueError, RecursionError) as error:
            # ValueError: the line exceeds the reader's limit. RecursionError: a value that the log cannot write.
            self._bad_answer = printable(str(error))[:200]
            process.kill()

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """End the process from any state; returns when the process has ended."""
        self._input = None
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

    def _watch(self) -> None:
        """Kill the process if one step exceeds its limit, else schedule the next check."""
        if self._process is None or self._running is None:
            return
        _, since = self._running.get()
        if time.monotonic() - since > self._spec.prepare.call_seconds + GRACE_SECONDS:
            self._is_overdue = True
            self._process.kill()
            return
        self._watch_timer = asyncio.get_running_loop().call_later(WATCH_SECONDS, self._watch)

    async def _handle_death(self, exit_code: int | None) -> None:
        """Blame the episode whose code ran; all other episodes are played again."""
        assert self._running is not None
        cause, _ = self._running.get()
        self._running.close()
        is_overdue, self._is_overdue = self._is_overdue, False
        bad_answer, self._bad_answer = self._bad_answer, ""
        playing = {identity: one for identity, one in self._episodes.items() if one.is_playing}
        if 0 <= cause < self._num_ids:
            blamed = [playing[cause]] if cause in playing else []  # else the error of the episode was the cause
        else:
            blamed = [one for one in playing.values() if one.asking is None]
            cause = -1
        limit = f"environment.call_seconds={self._spec.prepare.call_seconds:g}"
        reason = f"ended (exit code {exit_code})"
        if is_overdue:
            reason = f"was killed, because a step took more than {limit}"
        elif bad_answer:
            reason = f"was killed, because its answer is not valid ({bad_answer})"
        for episode in blamed:
            episode.deaths += 1
            if is_overdue and cause >= 0:
                reason_of_one = f"the environment took more than {limit} and could not be interrupted"
                self._fail(episode, reason_of_one, is_timeout=True)
            elif episode.deaths >= MAX_DEATHS:
                self._fail(episode, f"{MAX_DEATHS} times during this episode, the process {reason}")
        num_again = sum(not one.future.done() for one in playing.values())
        logger.warning("environment %s: the process %s; %d episodes start again", self._spec.name, reason, num_again)
        for episode in playing.values():
            episode.is_playing = False
            await episode.end_asking()
            if episode.host is not None and not episode.future.done():
                episode.host.restart()

    async def _start_failed(self, exit_code: int | None) -> None:
        assert self._running is not None
        self._running.close()
        reason = self._start_error or f"the process did not start (exit code {exit_code})"
        logger.error("environment %s: %s", self._spec.name, reason)
        if self._start_error:  # the next process would fail in the same way
            self._fail_all(reason)
        elif not self._restarts.take():
            self._fail_all(f"{reason}, {self._restarts.spent_text}")
            self._restarts.reset()
        await asyncio.sleep(BACKOFF_SECONDS)

    def _supervision_ended(self, task: asyncio.Task[None]) -> None:
        """If the supervising task failed (for example no process could start), fail all episodes."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("environment %s: %s", self._spec.name, error, exc_info=error)
            self._fail_all(f"{type(error).__name__}: {error}")

    def _fail_all(self, reason: str) -> None:
        for episode in self._episodes.values():
            self._fail(episode, reason)
        for check in self._checks:
            if not check.done():
                check.set_exception(EnvironmentFailed(f"environment {self._spec.name}: {reason}"))
        self._checks = []

    def _fail(self, episode: _Episode, reason: str, *, is_timeout: bool = False) -> None:
        if not episode.future.done():
            # The scoring of a group is no single episode's fault.
            kind = EnvironmentTimeout if is_timeout and episode.host is not None else EnvironmentFailed
            episode.future.set_exception(kind(f"environment {self._spec.name}: {reason}"))

    # ---- lines ---------------------------------------------------------------------------------------------------

    def _send(self, line: Mapping[str, Any]) -> None:
        if self._input is not None:
            self._input.write(json.dumps(line).encode() + b"\n")

    def _start_playing(self, identity: int, episode: _Episode) -> None:
        if self._input is not None and not episode.is_playing:
            episode.is_playing = True
            if episode.host is not None:
                line = {"play": identity, "seed": episode.seed, "once": episode.host.once}
            else:
                line = {
                    "score": identity,
                    "transcripts": [one.text for one in episode.transcripts],
                    "nums_turns": [one.num_turns for one in episode.transcripts],
                }
            self._send({**line, "task": episode.task})

    def _handle(self, line: bytes) -> None:
        """Handle a line of the process; raises BadAnswer or Invalid if the line is not valid."""
        answer = _parsed_or_none(line)
        identity = (
            next((answer[kind] for kind in KINDS if kind in answer), None) if isinstance(answer, dict) else None
        )
        if type(identity) is not int or not 0 <= identity < self._num_ids:
            raise BadAnswer("a line that names no episode")
        episode = self._episodes.get(identity)
        if episode is None or episode.future.done() or not episode.is_playing:
            return  # the episode was cancelled meanwhile
        if episode.host is None:
            self._handle_scoring(episode, answer)
        else:
            self._handle_playing(identity, episode, episode.host, answer)

    def _handle_playing(self, identity: int, episode: _Episode, host: EpisodeHost, answer: Mapping[str, Any]) -> None:
        match answer:
            case {"ask": _, "messages": list() as messages, "tools": list() as tools} if _are_messages(messages):
                if episode.asking is not None or not all(isinstance(tool, dict) for tool in tools):
                    raise BadAnswer("an ask that is not possible now")
                asking = self._ask(identity, episode, host, messages, tools)
                episode.asking = asyncio.create_task(asking, name=f"environment {self._spec.name}: ask")
            case {"once": _, "key": str() as key, "value": value} if len(key) <= MAX_KEY_LETTERS:
                host.record(key, value)
            case {"done": _}:
                self._finish(episode, self._played(answer))
            case {"played": _, "transcript": str() as text, "num_turns": int() as num_turns}:
                self._finish(episode, Transcript(text, num_turns))
            case {"cut": _}:
                zeros = dict.fromkeys(self._loaded.weights, 0.0)
                self._finish(episode, Played(score=_score(0.0, zeros), is_cut=True))
            case _:
                self._handle_error(episode, answer)

    def _handle_scoring(self, episode: _Episode, answer: Mapping[str, Any]) -> None:
        match answer:
            case {"scored": _, "results": list() as results} if len(results) == len(episode.transcripts):
                self._finish(episode, [self._played(result) for result in results])
            case _:
                self._handle_error(episode, answer)

    def _handle_error(self, episode: _Episode, answer: Mapping[str, Any]) -> None:
        match answer:
            case {"error": _, "text": str() as text, "timeout": bool() as is_timeout}:
                episode.is_playing = False
                self._fail(episode, self._readable(text), is_timeout=is_timeout)
            case _:
                raise BadAnswer("a line with wrong fields")

    def _played(self, result: Any) -> Played:
        match result:
            case {"components": dict() as components, "turn_rewards": list() as turn_rewards}:
                reward, values = weighted_components(components, self._loaded.weights)
                parts = tuple(finite_number(value, "score", " for a turn") for value in turn_rewards)
                return Played(score=_score(reward, values), turn_rewards=parts)
            case _:
                raise BadAnswer("a result with wrong fields")

    def _finish(self, episode: _Episode, result: Played | Transcript | list[Played]) -> None:
        episode.is_playing = False
        episode.future.set_result(result)

    async def _ask(
        self, identity: int, episode: _Episode, host: EpisodeHost, messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
    ) -> None:  # fmt: skip
        try:
            reply = await host.ask(messages, tools)
        except asyncio.CancelledError:
            if episode.asking is not None:  # the host has cancelled the turn, not end_asking
                episode.future.cancel()
            raise
        except Exception as error:  # noqa: BLE001  (play raises the exception)
            if not episode.future.done():
                episode.future.set_exception(error)
            return
        episode.asking = None
        self._send({"spent": identity} if reply is None else {"reply": identity, **_fields(reply)})

    def _readable(self, text: str) -> str:
        return without_secrets(printable(text), self._spec.variables)[:600]


def _parsed_or_none(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _are_messages(messages: list[Any]) -> bool:
    return bool(messages) and all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in messages)


def _score(reward: float, components: Mapping[str, float]) -> Score:
    return Score(reward, tuple(RewardComponent(name, value) for name, value in components.items()))


def _fields(reply: Reply) -> dict[str, Any]:
    """The fields of api.Reply."""
    return {
        "text": reply.text,
        "content": reply.content,
        "reasoning": reply.reasoning,
        "tool_calls": [{"name": call.name, "arguments": dict(call.arguments)} for call in reply.tool_calls],
        "finish_reason": str(reply.finish_reason),
        "num_tokens": reply.num_tokens,
        "num_tokens_before": reply.num_tokens_before,
        "tokens_left": reply.tokens_left,
    }
