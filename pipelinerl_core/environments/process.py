"""An environment process: its episodes, their deadlines, and the episodes of a process that died."""

import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipelinerl_core.environments.api import MAX_KEY_LETTERS
from pipelinerl_core.environments.loading import weighted_components
from pipelinerl_core.environments.running_step import RunningStep, new_descriptor
from pipelinerl_core.environments.worker import MAX_LINE_BYTES, Prepare
from pipelinerl_core.errors import EnvironmentFailed, EnvironmentNotStarted, EnvironmentTimeout
from pipelinerl_core.interfaces import EpisodeHost
from pipelinerl_core.sandbox.child_process import as_line
from pipelinerl_core.sandbox.supervised import START_SECONDS, Request, SupervisedChild
from pipelinerl_core.sandbox.user_code import Invalid, checked_components, finite_number
from pipelinerl_core.types import Played, Reply, RewardComponent, Score, Transcript

logger = logging.getLogger(__name__)

GRACE_SECONDS = 2.0
"""Time for a process to interrupt a step after environment.call_seconds; then the process is killed."""
WATCH_SECONDS = 0.5
"""Interval of the checks for a blocked process."""
KINDS = ("task", "ask", "once", "done", "played", "scored", "cut", "error")
"""Fields that name the episode of a line."""
MAX_DEATHS = 3
"""Deaths of the process during one episode, after which the episode is an error."""


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
class _Episode(Request):
    """One episode, or the scoring of a group of episodes, or a check whether the environment can be loaded."""

    task: Mapping[str, Any]
    is_check: bool = False
    seed: int = 0
    host: EpisodeHost | None = None
    """Of an episode."""
    transcripts: Sequence[Transcript] = ()
    """Of the group that is scored."""
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


class EnvironmentProcess(SupervisedChild[_Episode]):
    """Plays episodes in a process.

    If the process dies, its episodes are played again from the start: their hosts answer the turns that they know.
    """

    MODULE = "pipelinerl_core.environments.worker"
    LINE_BYTES = MAX_LINE_BYTES
    ERROR = EnvironmentFailed
    NOT_STARTED = EnvironmentNotStarted
    NOUN = "the process"
    LATE = f"the environment was not loaded within {START_SECONDS:g} s"
    CLOSED = "the environment was closed"

    def __init__(self, name: str, prepare: Prepare, variables: Sequence[str]) -> None:
        """The first episode starts the process.

        name: for messages, FILE.py:CLASS without directory. variables: further variables of the actor's environment
        that the process gets.
        """
        super().__init__(f"environment {name}", asdict(prepare), variables)
        self._call_seconds = prepare.call_seconds
        self._running: RunningStep
        self._loaded = Loaded(has_tasks=False, weights={})
        self._is_overdue = False  # the process was killed because one step exceeded its limit

    async def play(self, task: Mapping[str, Any], seed: int, host: EpisodeHost) -> Played | Transcript:
        """Play one episode. Raises EnvironmentFailed, or the exception of `host.ask`."""
        result: Played | Transcript = await self._run(task=task, seed=seed, host=host)
        return result

    async def score_group(self, task: Mapping[str, Any], transcripts: Sequence[Transcript]) -> list[Played]:
        """Score the episodes of a group. Raises EnvironmentFailed."""
        result: list[Played] = await self._run(task=task, transcripts=transcripts)
        return result

    async def check(self) -> Loaded:
        """Start the process if there is none. Raises EnvironmentFailed if the environment cannot be loaded."""
        result: Loaded = await self._run(task={}, is_check=True)
        return result

    async def _run(self, **fields: Any) -> Any:
        """Add an _Episode with these fields, and wait for its result."""
        identity = self._next_id
        episode = _Episode(future=asyncio.get_running_loop().create_future(), **fields)
        self._add(episode)
        try:
            self._begin(identity, episode)
            return await episode.future
        finally:
            self._requests.pop(identity, None)
            if episode.is_playing:
                self._send(as_line({"cancel": identity}))
            await episode.end_asking()

    def _new_descriptors(self) -> tuple[int, ...]:
        descriptor = new_descriptor()
        self._running = RunningStep(descriptor)
        return (descriptor,)

    def _on_ready(self, fields: Mapping[str, Any]) -> None:
        match fields:
            case {"has_tasks": bool() as has_tasks, "weights": dict() as weights, **others}:
                note = self._readable(str(others.get("note", "")))
            case _:
                raise Invalid("a ready line with wrong fields")
        if note and note != self._loaded.note:
            logger.info("%s: %s", self._title, note)
        self._loaded = Loaded(has_tasks=has_tasks, weights=checked_components(weights, "weights"), note=note)
        for identity, episode in self._requests.items():
            self._begin(identity, episode)

    def _seconds_to_check(self) -> float | None:
        _, since = self._running.get()
        self._is_overdue = time.monotonic() - since > self._call_seconds + GRACE_SECONDS
        return None if self._is_overdue else WATCH_SECONDS

    async def _on_death(self, exit_code: int | None, bad_line: str) -> None:
        """Blame the episode whose code ran; all other episodes are played again."""
        cause, _ = self._running.get()
        is_overdue, self._is_overdue = self._is_overdue, False
        playing = {identity: episode for identity, episode in self._requests.items() if episode.is_playing}
        if 0 <= cause < self._next_id:
            blamed = [playing[cause]] if cause in playing else []  # else the error of the episode was the cause
        else:
            blamed = [episode for episode in playing.values() if episode.asking is None]
            cause = -1
        limit = f"environment.call_seconds={self._call_seconds:g}"
        reason = f"ended (exit code {exit_code})"
        if is_overdue:
            reason = f"was killed, because a step took more than {limit}"
        elif bad_line:
            reason = f"was killed, because its answer is not valid ({bad_line[:200]})"
        for episode in blamed:
            episode.deaths += 1
            if is_overdue and cause >= 0:
                reason_of_one = f"the environment took more than {limit} and could not be interrupted"
                self._fail_episode(episode, reason_of_one, is_timeout=True)
            elif episode.deaths >= MAX_DEATHS:
                self._fail(episode, f"{MAX_DEATHS} times during this episode, the process {reason}")
        num_again = sum(not episode.future.done() for episode in playing.values())
        logger.warning("%s: the process %s; %d episodes start again", self._title, reason, num_again)
        for episode in playing.values():
            episode.is_playing = False
            await episode.end_asking()
            if episode.host is not None and not episode.future.done():
                episode.host.restart()

    def _fail_episode(self, episode: _Episode, reason: str, *, is_timeout: bool) -> None:
        # The scoring of a group is no single episode's fault.
        self._fail(episode, reason, EnvironmentTimeout if is_timeout and episode.host is not None else None)

    def _begin(self, identity: int, episode: _Episode) -> None:
        """If the process is ready, send an episode, or answer a check."""
        if self._input is None:
            return
        if episode.is_check:
            episode.finish(self._loaded)
            return
        episode.is_playing = True
        if episode.host is not None:
            line = {"play": identity, "seed": episode.seed, "once": episode.host.once}
        else:
            line = {
                "score": identity,
                "transcripts": [transcript.text for transcript in episode.transcripts],
                "nums_turns": [transcript.num_turns for transcript in episode.transcripts],
            }
        self._send(as_line({**line, "task": episode.task}))

    def _on_lines(self, lines: bytes) -> None:
        """Handle lines of the process; raises Invalid, or what a host raises for a value, if a line is not valid."""
        for line in lines.split(b"\n"):
            self._handle(_parsed_or_none(line))

    def _handle(self, answer: Any) -> None:
        identity = (
            next((answer[kind] for kind in KINDS if kind in answer), None) if isinstance(answer, dict) else None
        )
        if type(identity) is not int or not 0 <= identity < self._next_id:
            raise Invalid("a line that names no episode")
        episode = self._requests.get(identity)
        if episode is None or episode.future.done() or not episode.is_playing:
            return  # the episode was cancelled meanwhile
        if episode.host is None:
            self._handle_scoring(episode, answer)
        else:
            self._handle_playing(identity, episode, episode.host, answer)

    def _handle_playing(self, identity: int, episode: _Episode, host: EpisodeHost, answer: Mapping[str, Any]) -> None:
        match answer:
            case {"ask": _, "messages": list() as messages, "tools": list() as tools, "after": int() as after} if (
                _are_messages(messages)
            ):
                if episode.asking is not None or not all(isinstance(tool, dict) for tool in tools):
                    raise Invalid("an ask that is not possible now")
                asking = self._ask(identity, episode, host, messages, tools, after)
                episode.asking = asyncio.create_task(asking, name=f"{self._title}: ask")
            case {"task": _, "value": task}:
                host.describe(task)
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
                self._fail_episode(episode, self._readable(text), is_timeout=is_timeout)
            case _:
                raise Invalid("a line with wrong fields")

    def _played(self, result: Any) -> Played:
        match result:
            case {"components": dict() as components, "turn_rewards": list() as turn_rewards}:
                reward, values = weighted_components(components, self._loaded.weights)
                parts = tuple(finite_number(value, "score", " for a turn") for value in turn_rewards)
                return Played(score=_score(reward, values), turn_rewards=parts)
            case _:
                raise Invalid("a result with wrong fields")

    def _finish(self, episode: _Episode, result: Played | Transcript | list[Played]) -> None:
        episode.is_playing = False
        episode.future.set_result(result)

    async def _ask(
        self, identity: int, episode: _Episode, host: EpisodeHost, messages: list[dict[str, Any]],
        tools: list[dict[str, Any]], after: int,
    ) -> None:  # fmt: skip
        recorded = set(host.once)
        try:
            reply = await host.ask(messages, tools, after)
        except asyncio.CancelledError:
            if episode.asking is not None:  # the host has cancelled the turn, not end_asking
                episode.future.cancel()
            raise
        except Exception as error:  # noqa: BLE001  (play raises the exception)
            if not episode.future.done():
                episode.future.set_exception(error)
            return
        episode.asking = None
        if forgotten := recorded - host.once.keys():
            self._send(as_line({"forget": identity, "keys": sorted(forgotten)}))
        self._send(as_line({"spent": identity} if reply is None else {"reply": identity, **_fields(reply)}))


def _parsed_or_none(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _are_messages(messages: list[Any]) -> bool:
    return bool(messages) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages
    )


def _score(reward: float, components: Mapping[str, float]) -> Score:
    return Score(reward, tuple(RewardComponent(name, value) for name, value in components.items()))


def _fields(reply: Reply) -> dict[str, Any]:
    """The fields of api.Reply, which has the calls as dictionaries."""
    return {**asdict(reply), "tool_calls": [call._asdict() for call in reply.tool_calls]}
