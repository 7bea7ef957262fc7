"""An agent program per episode: its start, its output, its end, its reward."""

import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pipelinerl_core.environments.agents.endpoint import Endpoint
from pipelinerl_core.environments.api import Ask, BudgetSpent
from pipelinerl_core.sandbox import landlock, privileges
from pipelinerl_core.sandbox.user_code import Invalid

OUTPUT_BYTES = 64 << 10
"""End of the output that is kept; the rest is read and dropped."""
ERROR_LETTERS = 300
"""End of stderr in an error."""
FEW_TASKS = 80
"""Below this number of tasks, a fifth is held out; else a tenth."""
END_SECONDS = 4.0
"""Time for the guard to kill the tree of a program whose episode was ended."""
_LAUNCHER = str(Path(__file__).with_name("launcher.py"))
_NOT_PASSED_ON = ("PYTHONPATH", "PYTHONHASHSEED")
"""Variables of the environment process for itself; the program has an interpreter and packages of its own."""


class Launcher:
    """The process that starts programs, and ends with this process."""

    def __init__(
        self, command: Sequence[str], preload: Sequence[str], variables: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Start the launcher, and wait until it has imported `preload`. Raises Invalid if it has not.

        variables: further variables of the launcher, which programs do not get; only with preload modules of this
        project.
        """
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        interpreter = [command[0]] if preload else [sys.executable, "-I", "-S"]
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [*interpreter, _LAUNCHER, str(theirs.fileno()), *preload],
                    env=program_environment(variables), pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL,
                )  # fmt: skip
            except OSError as error:
                raise Invalid(f"{interpreter[0]}: {error.strerror}") from None
        self._socket = own
        answer = json.loads(own.recv(1 << 16) or '{"failed": "the interpreter of the command ended"}')
        if "failed" in answer:
            prefix = "" if variables else f"environment.preload={', '.join(preload)}: "
            raise Invalid(f"{prefix}{answer['failed']}")
        self.facts = {key: value for facts in answer.get("facts", ()) for key, value in facts.items()}
        """The entries of PIPELINERL_FACTS of the preloaded modules."""

    @property
    def has_ended(self) -> bool:
        """The process has ended, for example for lack of memory."""
        return self._process.poll() is not None

    def start(self, descriptors: Sequence[int]) -> None:
        """Send a request, as described in launcher.py. Raises OSError."""
        socket.send_fds(self._socket, [b"s"], list(descriptors))


def program_environment(further: Mapping[str, str]) -> dict[str, str]:
    """The variables of a program: those of this process, and `further`. Requests to loopback use no proxy."""
    own = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON}
    given = own.get("no_proxy") or own.get("NO_PROXY")
    direct = f"{given},127.0.0.1,localhost" if given else "127.0.0.1,localhost"
    return {**own, "NO_PROXY": direct, "no_proxy": direct, **further}


class Output:
    """Reads a pipe to its end and keeps the last bytes."""

    def __init__(self) -> None:
        """`write_end` is for the program; the caller closes it."""
        self._loop = asyncio.get_running_loop()
        self._read_end, self.write_end = os.pipe()
        self._kept = bytearray()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        """Done when all writers have closed the pipe."""
        os.set_blocking(self._read_end, False)
        self._loop.add_reader(self._read_end, self._read)

    @property
    def text(self) -> str:
        """The end of the output."""
        return self._kept.decode(errors="replace")

    def _read(self) -> None:
        data = os.read(self._read_end, OUTPUT_BYTES)
        if not data:
            self.close()
            return
        self._kept += data
        del self._kept[:-OUTPUT_BYTES]

    def close(self) -> None:
        """Stop reading."""
        if not self.ended.done():
            self.ended.set_result(None)
            self._loop.remove_reader(self._read_end)
            os.close(self._read_end)


class Program:
    """One running program."""

    def __init__(
        self, launcher: Launcher, command: Sequence[str], environment: Mapping[str, str], given: bytes,
        *, is_separate: bool,
    ) -> None:  # fmt: skip
        """Start the program; given: its stdin; is_separate: see launcher.py. Raises Invalid."""
        self.stdout, self.stderr = Output(), Output()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        request = {"command": list(command), "environment": dict(environment), "is_separate": is_separate}
        with tempfile.TemporaryFile() as stdin, theirs:
            stdin.write(given)
            stdin.seek(0)
            try:
                self._control.send(json.dumps(request).encode())
                launcher.start((theirs.fileno(), stdin.fileno(), self.stdout.write_end, self.stderr.write_end))
            except OSError as error:
                raise Invalid(f"the program could not be started: {error}") from None
            finally:
                os.close(self.stdout.write_end)
                os.close(self.stderr.write_end)

    async def wait(self) -> int:
        """The exit status when the program and everything that it has started have ended; negative: a signal."""
        answer = await asyncio.get_running_loop().sock_recv(self._control, 1 << 10)
        await asyncio.wait({self.stdout.ended, self.stderr.ended})
        return int(json.loads(answer)["status"]) if answer else -9

    async def end(self) -> None:
        """Kill the program with everything that it has started, if it runs; returns when all have ended."""
        with contextlib.suppress(OSError, TimeoutError):
            self._control.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(END_SECONDS):
                while await asyncio.get_running_loop().sock_recv(self._control, 1 << 10):
                    pass
        self._control.close()
        self.stdout.close()
        self.stderr.close()


class _AgentProgram:
    weights = {"reward": 1.0}  # noqa: RUF012  (the form of environments)

    def __init__(
        self,
        command: list[str],
        preload: list[str],
        isolation: str,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """See environment.command, environment.preload, environment.isolation, Launcher."""
        privileges.forbid_dumps()  # this process has the keys of all its episodes
        self._is_separate = isolation == "auto"
        if self._is_separate and landlock.version() == 0:
            self.note = (
                "this kernel has no Landlock (Linux 5.13 and newer, enabled): agent programs can read the memory and "
                "the environment variables of other processes of the actor's user, also tokens and keys"
            )
        self._command = command
        self._start_launcher = partial(Launcher, command, preload, variables)
        self._launcher = self._start_launcher()

    async def play(self, task: dict[str, Any], ask: Ask, seed: int) -> dict[str, Any]:
        """Run the program; returns its output, its last answer and the reward that it has sent."""
        if self._launcher.has_ended:
            self._launcher = self._start_launcher()
        with tempfile.TemporaryDirectory(prefix="pipelinerl-agent-", ignore_cleanup_errors=True) as directory:
            async with Endpoint(ask) as endpoint:
                environment = program_environment(
                    {
                        "OPENAI_BASE_URL": endpoint.url,
                        "OPENAI_API_KEY": endpoint.key,
                        "PIPELINERL_SEED": str(seed),
                        "TMPDIR": directory,
                    }
                )
                given = json.dumps(task).encode()
                command = _filled(self._command, task)
                program = Program(self._launcher, command, environment, given, is_separate=self._is_separate)
                try:
                    status = await _ended(program, endpoint)
                    await endpoint.finish_turn()
                finally:
                    await program.end()
                if status != 0:
                    if endpoint.is_spent:
                        raise BudgetSpent
                    raise Invalid(f"the program {_end(status)}: {_last_words(program.stderr.text)}")
                if ask.num_turns == 0:
                    raise Invalid("the program ended without a request to the model")
                return {"answer": endpoint.answer, "stdout": program.stdout.text, "posted": endpoint.posted}


class Posted(_AgentProgram):
    """The environment of environment.kind=command: a program per episode, which sends its reward to /reward."""

    def score(self, task: dict[str, Any], transcript: dict[str, Any]) -> dict[str, float]:
        """The posted reward and components."""
        if transcript["posted"] is None:
            raise Invalid("the program ended without a POST to /reward. Send one, or set environment.reward=answer")
        posted: dict[str, float] = transcript["posted"]
        return posted


class Verifiers(Posted):
    """The environment of environment.kind=verifiers: verifiers_episode.py plays a task of the library per episode."""

    def __init__(self, command: list[str], preload: list[str], isolation: str) -> None:
        """Load the taskset in the launcher; the program of an episode is a fork. Raises Invalid."""
        directory = str(Path(command[1]).parent)
        try:
            variables = {"PYTHONPATH": directory, "PIPELINERL_TASKSET": json.dumps(command[2:])}
            super().__init__(command, preload, isolation, variables)
        except Invalid as error:
            if not Path(command[0]).exists() or "No module named" in str(error):
                install = "make install ENVIRONMENTS=verifiers, or set environment.python"
                raise Invalid(f"{error}. The interpreter {command[0]} needs verifiers 0.4: {install}") from None
            raise
        self.split(self._launcher.facts["tasks"])

    def split(self, total: int) -> None:
        """Hold out every tenth of `total` tasks, of few tasks every fifth."""
        self._total = total
        self._every = 5 if total < FEW_TASKS else 10

    def task(self, index: int) -> dict[str, int]:
        """The position of a training task: all positions that are no multiple of `_every`, in order, repeated."""
        turn = index % (self._total - len(range(0, self._total, self._every)))
        return {"index": turn + turn // (self._every - 1) + 1}

    def held_out(self, count: int) -> list[dict[str, int]]:
        """The positions that are multiples of `_every`; at most `count`."""
        return [{"index": position} for position in range(0, self._total, self._every)][:count]


class Judged(_AgentProgram):
    """The same, scored by the verifier or reward function of the run, in its scoring processes.

    `score_group` makes the process hand the transcript to the actor.
    """

    def score_group(self, task: dict[str, Any], transcripts: list[Any]) -> list[dict[str, float]]:
        """Never called: the actor scores the transcripts."""
        raise NotImplementedError


async def _ended(program: Program, endpoint: Endpoint) -> int:
    """The exit status; raises the error of the episode, if that comes first."""
    waiting = asyncio.create_task(program.wait())
    try:
        either: set[asyncio.Future[Any]] = {waiting, endpoint.failed}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if endpoint.failed.done():
            endpoint.failed.result()
        return await waiting
    finally:
        waiting.cancel()
        await asyncio.wait({waiting})


def _filled(command: Sequence[str], task: Mapping[str, Any]) -> list[str]:
    """The command with "{column}" replaced by the columns of the task, in arguments that name a column: a text as it
    is, another value as JSON."""
    if not task:
        return list(command)
    columns = re.compile("|".join(re.escape(f"{{{name}}}") for name in task))
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in task.items()}
    return [columns.sub(lambda match: texts[match[0][1:-1]], argument) for argument in command]


def _end(status: int) -> str:
    return f"was killed by signal {-status}" if status < 0 else f"ended with exit code {status}"


def _last_words(stderr: str) -> str:
    words = " ".join(stderr.split())
    return words[-ERROR_LETTERS:] or "no message on stderr"
