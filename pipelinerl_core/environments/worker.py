"""The process that plays episodes of a user's environment: JSON lines in, JSON lines out, many episodes at once.

in   {...}                                         once: fields of Prepare
out  {"ready": true, "has_tasks": true, "weights": {"solved": 1.0}}        the process is sealed now; or
out  {"failed": "TypeError: ... (my_env.py:3)"}    and the process ends
in   {"play": 7, "task": {"index": 3}, "seed": 1, "once": {}}
out  {"task": 7, "value": {...}}                   a task of the environment's own, if it is not too long; no answer
out  {"ask": 7, "messages": [...], "tools": [], "after": -1}     new messages only; after: the turn before them, or -1
in   {"reply": 7, "text": "5", ...}                fields of api.Reply; or {"spent": 7}
in   {"forget": 7, "keys": ["weather"]}            before a reply: values that followed turns that are sampled again
out  {"once": 7, "key": "weather", "value": ...}   no answer
out  {"done": 7, "components": {"solved": 1.0}, "turn_rewards": []}; or {"cut": 7}; or
out  {"played": 7, "transcript": "[5]", "num_turns": 2}  JSON text, if the environment scores groups; or
out  {"error": 7, "text": "ValueError: ... (my_env.py:9)", "timeout": false}   timeout: a limit of time is exceeded
in   {"score": 8, "task": {"index": 3}, "transcripts": [...], "nums_turns": [2, 1]}      the episodes of a group
out  {"scored": 8, "results": [{"components": {...}, "turn_rewards": []}, ...]}; or {"error": 8, ...}
in   {"cancel": 7}                                 no answer

All episodes run in one event loop, on the main thread. A heartbeat of the loop charges the episodes that have the
turn with the time that they wait, and each step of a task is charged to the task's episode. A signal interrupts a
step that takes too long (Blocked). The parent kills a process that cannot be interrupted. The process ends when its
input closes, and the kernel kills the process when its parent dies.
"""

import asyncio
import json
import os
import selectors
import signal
import sys
from collections.abc import Coroutine, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from time import monotonic
from types import FrameType
from typing import Any

from pipelinerl_core.environments.api import Ask, BudgetSpent, Port, Reply, TooLong, json_text
from pipelinerl_core.environments.loading import UserEnvironment
from pipelinerl_core.environments.running_step import NO_EPISODE, RunningStep
from pipelinerl_core.sandbox import isolation
from pipelinerl_core.sandbox.child_process import as_line, begin_child, write_all
from pipelinerl_core.sandbox.user_code import Invalid, failure_line, is_own

BEAT_SECONDS = 0.1
"""Interval of the heartbeat, and of the signals to a step that takes too long."""
LATE_SECONDS = 0.3
"""Time without a heartbeat after which signals start."""
ENDING_SECONDS = 5.0
"""Time for cancelled tasks to end; then the process ends, and the parent starts another."""
EXIT_UNENDING = 70
"""Exit code of a process whose tasks ignore their cancellation."""
MAX_LINE_BYTES = 16 << 20
"""Longest line that the parent reads."""
MAX_TRANSCRIPT = 1 << 20
"""Characters of a transcript that is scored with its group: the parent and the log keep such transcripts."""
MAX_SHOWN_TASK = 1 << 20
"""Characters of a task of the environment's own that the parent is told."""
READ_BYTES = 1 << 16

_EPISODE: ContextVar["Episode | None"] = ContextVar("episode", default=None)
"""The episode of the code that runs now; tasks and callbacks inherit the value."""


class Blocked(BaseException):
    """Raised inside a step that took longer than a limit; the episode is an error already."""


class Exited(Exception):
    """A task of an episode raised SystemExit or KeyboardInterrupt, which would end the event loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """The first message of the parent."""

    path: str
    """FILE.py:CLASS or package.module:CLASS."""
    code: str | None
    """Text of FILE.py; None for a module."""
    options: Mapping[str, Any]
    weights: Mapping[str, float]
    """Replace weights of the class by name."""
    call_seconds: float
    episode_seconds: float
    network: bool
    is_sealed: bool
    memory_bytes: int
    """Limit of the address space."""


class Episode:
    """One episode that is being played, or the scoring of a group, and the time that its environment has used."""

    def __init__(self, identity: int) -> None:
        """The environment has the turn."""
        self.identity = identity
        self.ask: Ask | None = None
        self.coroutine: Coroutine[Any, Any, None] | None = None
        self.tasks: dict[asyncio.Task[Any], str] = {}  # unfinished tasks and the places where they were created
        self.main: asyncio.Task[None] | None = None
        self.reply: asyncio.Future[Reply | None] | None = None
        self.call_seconds = 0.0
        self.all_seconds = 0.0
        self.step_seconds = 0.0
        """Time since the last heartbeat that is charged already."""
        self.is_over = False

    @property
    def problem(self) -> str:
        """The first misuse of `ask`; empty: none."""
        return self.ask.problem if self.ask is not None else ""

    @property
    def has_turn(self) -> bool:
        """Whether the environment, not the model and not another episode, must act next."""
        if self.ask is not None and self.ask.in_queue:
            return False
        return self.reply is None or self.reply.done()

    def charge(self, seconds: float) -> None:
        """Add time that the environment has used."""
        self.call_seconds += seconds
        self.all_seconds += seconds

    def exceeded(self, prepare: Prepare, further: float = 0.0) -> str:
        """The limit that the used time, plus `further` seconds, exceeds; empty: none."""
        for key, used in (("call_seconds", self.call_seconds), ("episode_seconds", self.all_seconds)):
            if used + further > (limit := getattr(prepare, key)):
                return f"the environment took more than environment.{key}={limit:g}"
        return ""

    @property
    def left_tasks(self) -> list[asyncio.Task[Any]]:
        """Tasks of the environment that neither ended nor were cancelled."""
        return [task for task in self.tasks if task is not self.main and not task.done() and not task.cancelling()]


class _Steps(Coroutine[Any, Any, Any]):
    """A coroutine whose steps are measured and charged to an episode."""

    def __init__(self, worker: "Worker", episode: Episode, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._worker = worker
        self._episode = episode
        self._coroutine = coroutine

    def send(self, value: Any) -> Any:
        return self._step(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        """Run one step, which starts with an exception."""
        return self._step(self._coroutine.throw, *error)

    def close(self) -> None:
        """End the coroutine."""
        self._coroutine.close()

    def __await__(self) -> Any:
        """Never used: a task calls `send`."""
        raise NotImplementedError

    def _step(self, resume: Any, *arguments: Any) -> Any:
        self._worker.step_starts(self._episode)
        try:
            return resume(*arguments)
        except (SystemExit, KeyboardInterrupt) as error:
            raise Exited(f"{type(error).__name__}: {error}") from error
        finally:
            self._worker.step_ends(self._episode)


class Worker:
    """Plays episodes in an event loop."""

    def __init__(self, environment: UserEnvironment, prepare: Prepare, running: RunningStep, answers: int) -> None:
        """answers: descriptor for the lines to the parent."""
        self._environment = environment
        self._prepare = prepare
        self._running = running
        self._answers = answers
        self._is_masked = False  # no Blocked now: a line or the end of an episode must be complete
        self._episodes: dict[int, Episode] = {}
        self._ending: list[tuple[float, Episode]] = []  # over at this time, with tasks that have not ended
        self._since = monotonic()  # start of the current step, or of the loop's own work
        self._last_beat = self._since
        self._rest = b""
        # epoll is not allowed in a sealed process; the loop opens its pipe before the process is sealed.
        self._loop = asyncio.SelectorEventLoop(selectors.PollSelector())
        self._loop.set_task_factory(self._new_task)

    def run(self, requests: int) -> None:
        """Play until the input ends. requests: descriptor of the lines of the parent."""
        self._loop.add_reader(requests, self._read, requests)
        self._beat()
        environment = self._environment
        ready = {"ready": True, "has_tasks": environment.has_tasks, "weights": environment.weights}
        self.send({**ready, "note": environment.note} if environment.note else ready)
        self._loop.run_forever()

    def _read(self, requests: int) -> None:
        data = os.read(requests, READ_BYTES)
        if not data:
            self._loop.stop()
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._handle(json.loads(line))

    def _handle(self, request: dict[str, Any]) -> None:
        match request:
            case {"play": int() as identity}:
                self._play(identity, request)
            case {"score": int() as identity}:
                self._start(Episode(identity), self._score_group(identity, request))
            case {"reply": int() as identity, **fields}:
                self._answer(identity, Reply(**fields))
            case {"forget": int() as identity, "keys": list() as keys}:
                if (episode := self._episodes.get(identity)) is not None and episode.ask is not None:
                    episode.ask.forget(keys)
            case {"spent": int() as identity}:
                self._answer(identity, None)
            case {"cancel": int() as identity} if identity in self._episodes:
                self._end(self._episodes[identity])

    def send(self, line: Mapping[str, Any] | bytes) -> None:
        """Write a line; raises TooLong."""
        data = line if isinstance(line, bytes) else json_text(line).encode()
        if len(data) >= MAX_LINE_BYTES:
            raise TooLong(f"{len(data)} bytes at once are more than {MAX_LINE_BYTES}")
        was_masked, self._is_masked = self._is_masked, True
        write_all(self._answers, data + b"\n")
        self._is_masked = was_masked

    def _play(self, identity: int, request: Mapping[str, Any]) -> None:
        episode = Episode(identity)

        def ask(messages: str, tools: str, after: int) -> asyncio.Future[Reply | None]:
            self.send(f'{{"ask":{identity},"messages":{messages},"tools":{tools},"after":{after}}}'.encode())
            episode.reply = self._loop.create_future()
            return episode.reply

        def record(key: str, value: str) -> None:
            self.send(f'{{"once":{identity},"key":{json_text(key)},"value":{value}}}'.encode())

        port = Port(ask=ask, record=record, place=lambda: _place_of_frame(sys._getframe(), self._environment.file))
        episode.ask = Ask(port, request["once"])
        self._start(episode, self._play_and_score(episode, episode.ask, request))

    def _start(self, episode: Episode, result: Coroutine[Any, Any, Mapping[str, Any]]) -> None:
        """result: computes the last line of the episode."""
        self._episodes[episode.identity] = episode
        episode.coroutine = self._run(episode, result)
        token = _EPISODE.set(episode)
        episode.main = self._loop.create_task(episode.coroutine)
        _EPISODE.reset(token)

    async def _run(self, episode: Episode, result: Coroutine[Any, Any, Mapping[str, Any]]) -> None:
        try:
            line = await result
            if episode.problem:  # the environment has caught the AskError
                raise Invalid(episode.problem)
            self._end(episode, line)
        except BaseException as error:  # noqa: BLE001  (the boundary: whatever an environment raises is data)
            self._fail(episode, episode.problem or failure_line(error, self._environment.file))

    async def _play_and_score(self, episode: Episode, ask: Ask, request: Mapping[str, Any]) -> Mapping[str, Any]:
        environment = self._environment
        task = environment.task(request["task"])
        if environment.has_tasks and len(task) <= MAX_SHOWN_TASK:
            self.send(f'{{"task":{episode.identity},"value":{task}}}'.encode())
        is_cut = False
        try:
            transcript = await environment.play(task, ask, request["seed"])
        except* BudgetSpent:  # also of a task in a task group
            is_cut = True
        if is_cut:
            return {"cut": episode.identity}
        ask.close()
        _check_tasks(episode, "play")
        if environment.scores_groups:
            if len(transcript) > MAX_TRANSCRIPT:
                raise Invalid(f"play returned {len(transcript)} characters of JSON; at most {MAX_TRANSCRIPT}")
            return {"played": episode.identity, "transcript": transcript, "num_turns": ask.num_turns}
        components, turn_rewards = await environment.score(task, transcript, ask.num_turns)
        _check_tasks(episode, "score")
        return {"done": episode.identity, "components": components, "turn_rewards": turn_rewards}

    async def _score_group(self, identity: int, request: Mapping[str, Any]) -> Mapping[str, Any]:
        environment = self._environment
        task = environment.task(request["task"])
        transcripts = [json.loads(transcript) for transcript in request["transcripts"]]
        scored = await environment.score_group(task, transcripts, request["nums_turns"])
        _check_tasks(self._episodes[identity], "score_group")
        results = [{"components": components, "turn_rewards": turn_rewards} for components, turn_rewards in scored]
        return {"scored": identity, "results": results}

    def _answer(self, identity: int, reply: Reply | None) -> None:
        episode = self._episodes.get(identity)
        if episode is None or episode.reply is None or episode.reply.done():
            return  # the episode has ended meanwhile, or its call of `ask` was cancelled
        episode.call_seconds = 0.0
        episode.reply.set_result(reply)

    def _fail(self, episode: Episode, text: str, *, is_timeout: bool = False) -> None:
        """End an episode as an error; no effect if the episode is over."""
        encodable = text.encode(errors="replace").decode()  # without lone surrogates
        self._end(episode, {"error": episode.identity, "text": encodable, "timeout": is_timeout})

    def _end(self, episode: Episode, line: Mapping[str, Any] | None = None) -> None:
        """Send the last line of an episode, and cancel its tasks; no effect if the episode is over."""
        if episode.is_over:
            return
        was_masked, self._is_masked = self._is_masked, True
        episode.is_over = True
        del self._episodes[episode.identity]
        if line is not None:
            self.send(line)
        if episode.ask is not None:
            episode.ask.close()
        for task in list(episode.tasks):
            task.cancel()
        if episode.tasks:
            self._ending.append((monotonic(), episode))
        self._is_masked = was_masked

    def _new_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        """The task factory of the loop: registers each task with the episode whose code creates the task."""
        episode = _EPISODE.get()
        if episode is None:
            return asyncio.Task(coroutine, loop=loop, **options)
        task = asyncio.Task(_Steps(self, episode, coroutine), loop=loop, **options)
        episode.tasks[task] = _place_of_frame(sys._getframe(), self._environment.file)
        task.add_done_callback(lambda done: episode.tasks.pop(done, None))
        if episode.is_over:
            task.cancel()
        return task

    def step_starts(self, episode: Episode) -> None:
        """Called when the code of an episode starts to run."""
        self._since = monotonic()
        self._running.set(episode.identity, self._since)

    def step_ends(self, episode: Episode) -> None:
        """Called when the code of an episode returns to the event loop."""
        now = monotonic()
        if (seconds := now - self._since) > BEAT_SECONDS:  # shorter steps are charged by the heartbeat
            episode.charge(seconds)
            episode.step_seconds += seconds
        self._since = now
        self._running.set(NO_EPISODE, now)

    def _beat(self) -> None:
        """Charge the episodes that have the turn, with at most two intervals besides their own steps: if the loop was
        blocked longer, they are not the cause."""
        now = monotonic()
        elapsed, self._last_beat, self._since = now - self._last_beat, now, now
        self._running.set(NO_EPISODE, now)
        for episode in list(self._episodes.values()):
            waited, episode.step_seconds = elapsed - episode.step_seconds, 0.0
            if not episode.has_turn:
                continue
            episode.charge(min(waited, 2 * BEAT_SECONDS))
            if reason := episode.exceeded(self._prepare):
                place = _place_of_await(episode.coroutine, self._environment.file)
                self._fail(episode, f"{reason}{place}", is_timeout=True)
        self._ending = [(at, episode) for at, episode in self._ending if episode.tasks]
        if any(now - at > ENDING_SECONDS for at, _ in self._ending):
            sys.stderr.write("environment: tasks of an episode ignore their cancellation; this process ends\n")
            os._exit(EXIT_UNENDING)
        signal.signal(signal.SIGALRM, self._alarm)  # again, because libraries with time limits replace both
        signal.setitimer(signal.ITIMER_REAL, LATE_SECONDS, BEAT_SECONDS)
        self._loop.call_later(BEAT_SECONDS, self._beat)

    def _alarm(self, number: int, frame: FrameType | None) -> None:
        """The handler of SIGALRM: interrupt the code of an episode that took too long. Called until the next beat."""
        episode = _EPISODE.get()
        seconds = monotonic() - self._since
        if episode is None or self._is_masked or seconds < LATE_SECONDS:
            return
        reason = episode.exceeded(self._prepare, seconds)
        if reason or episode.is_over:
            place = _place_of_frame(frame, self._environment.file)
            self._fail(episode, f"{reason}{place}", is_timeout=True)
            raise Blocked(reason)


def _check_tasks(episode: Episode, name: str) -> None:
    if left := episode.left_tasks:
        raise Invalid(f"{name} returned before a task that it had started{episode.tasks[left[0]]}. Await each task")


def _place_of_frame(frame: FrameType | None, file: str) -> str:
    """The innermost line of the user's file in a stack, in brackets after a space; empty if there is none."""
    while frame is not None:
        if is_own(frame.f_code.co_filename, file):
            return f" ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
        frame = frame.f_back
    return ""


def _place_of_await(coroutine: Any, file: str) -> str:
    """The innermost line of the user's file at which a suspended coroutine waits, as in _place_of_frame."""
    place = ""
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None)
        if frame is not None and is_own(frame.f_code.co_filename, file):
            place = f" ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
        coroutine = getattr(coroutine, "cr_await", None)
    return place


def main() -> None:
    """Load the environment, seal the process, play episodes."""
    requests, answers, fields = begin_child()
    prepare = Prepare(**fields)
    descriptor = int(sys.argv[2])
    running = RunningStep(descriptor)
    os.close(descriptor)
    try:
        environment = UserEnvironment(prepare.path, prepare.code, prepare.options, prepare.weights)
        worker = Worker(environment, prepare, running, answers)
        if prepare.is_sealed:
            isolation.seal("environment.isolation", network=prepare.network)
    except BaseException as error:  # noqa: BLE001  (a user's module raises anything, also SystemExit)
        write_all(answers, as_line({"failed": failure_line(error)}))
        return
    worker.run(requests)
    os._exit(0)  # tasks and threads of episodes need not end


if __name__ == "__main__":
    main()
