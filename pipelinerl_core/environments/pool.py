"""The environments of a run: a pool of environment processes."""

import asyncio
import contextlib
import json
import logging
import resource
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pipelinerl_core.config.environments import CommandEnvironment, VerifiersEnvironment
from pipelinerl_core.config.run import RunConfig
from pipelinerl_core.config.verifier import verifier_name
from pipelinerl_core.environments.process import EnvironmentProcess, Loaded
from pipelinerl_core.environments.worker import Prepare
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.interfaces import EpisodeHost, Scorer
from pipelinerl_core.sandbox import isolation
from pipelinerl_core.sandbox.child_process import check_variables
from pipelinerl_core.types import Played, Prompt, RewardComponent, Score, Transcript

logger = logging.getLogger(__name__)

PROGRAM_VARIABLES = ("PATH", "LANG", "LC_ALL", "USER", "LOGNAME", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR")
"""Variables of the actor's environment that agent programs get, if they are set."""
VERIFIERS_PROGRAM = Path(__file__).parent / "programs" / "verifiers_episode.py"
MEMORY_BYTES = 16 << 30
"""Limit of a process's address space; the environment may import any library."""
BUILTIN: Mapping[str, str] = MappingProxyType(
    {
        "guess": "pipelinerl_core.environments.builtin.guess:Guess",
        "calculator": "pipelinerl_core.environments.builtin.calculator:Calculator",
        "code": "pipelinerl_core.environments.builtin.code:Code",
        "math": "pipelinerl_core.environments.builtin.math:Math",
    }
)
"""Name of environment.path=builtin:NAME -> module:CLASS."""


def build_environments(config: RunConfig, code: str | None, scorer: Scorer | None = None) -> "EnvironmentPool":
    """The environments of a run; starts no process.

    code: text of the file that environment.path names; None for a module. scorer: scores the episodes of an agent
    program; the pool closes the scorer. Raises ConfigError if the name of a built-in environment is unknown, or a
    variable of environment.variables is not set.
    """
    section = config.environment
    check_variables("environment.variables", section.variables)
    if isinstance(section, CommandEnvironment | VerifiersEnvironment):
        judge = _Judge(config, section, scorer) if scorer and isinstance(section, CommandEnvironment) else None
        return EnvironmentPool(_program_processes(config, section), judge, limit=section.programs)
    name = Path(section.path).name
    prepare = Prepare(
        path=_location(section.path, has_rows=not config.prompts.from_environment),
        code=code,
        options=section.options,
        weights=config.reward.weights,
        call_seconds=section.call_seconds,
        episode_seconds=section.episode_seconds,
        network=section.network,
        is_sealed=section.isolation == "auto",
        memory_bytes=MEMORY_BYTES,
    )
    if prepare.is_sealed and (lacks := " and ".join(isolation.missing())):
        logger.warning("environment %s: processes are only partly isolated: this host has no %s", name, lacks)
    return EnvironmentPool([EnvironmentProcess(name, prepare, section.variables) for _ in range(section.workers)])


def _program_processes(
    config: RunConfig, section: CommandEnvironment | VerifiersEnvironment
) -> list[EnvironmentProcess]:
    """Agent programs use files and start programs, with any amount of address space: the launcher isolates them."""
    if isinstance(section, VerifiersEnvironment):
        name, shown = "Verifiers", f"verifiers {section.id}"
        options = json.dumps(section.options)
        command: tuple[str, ...] = (section.python, str(VERIFIERS_PROGRAM), section.id, options, section.harness)
        preload: tuple[str, ...] = (VERIFIERS_PROGRAM.stem,)
    else:
        name = "Judged" if section.is_judged else "Posted"
        command, preload, shown = section.command, section.preload, f"command {Path(section.command[0]).name}"
    prepare = Prepare(
        path=f"pipelinerl_core.environments.agents.program:{name}",
        code=None,
        options={"command": command, "preload": preload, "isolation": section.isolation},
        weights={} if section.is_judged else config.reward.weights,
        call_seconds=section.call_seconds,
        episode_seconds=section.episode_seconds,
        network=True,
        is_sealed=False,
        memory_bytes=resource.RLIM_INFINITY,
    )
    variables = (*section.variables, *PROGRAM_VARIABLES)
    return [EnvironmentProcess(shown, prepare, variables) for _ in range(section.workers)]


class _Judge:
    """Scores what agent programs have produced with the verifier or reward function of the run."""

    def __init__(self, config: RunConfig, section: CommandEnvironment, scorer: Scorer) -> None:
        self._field = section.reward
        self._env = verifier_name(config)
        self._scorer = scorer

    async def played(self, task: Mapping[str, Any], transcript: Transcript) -> Played:
        """The scored episode. Raises RewardError."""
        text = json.loads(transcript.text)[self._field].strip()
        asked, messages = str(task.get("prompt", "")), task.get("prompt_messages")
        prompt = Prompt(
            prompt_id="", source="", env=self._env, text=asked, task=dict(task),
            messages=tuple(messages) if isinstance(messages, list) else (),
        )  # fmt: skip
        score = await self._scorer.score(prompt, text)
        components = score.components or (RewardComponent("reward", score),)
        return Played(score=Score(score, components))

    async def close(self) -> None:
        await self._scorer.close()


def _location(path: str, *, has_rows: bool) -> str:
    kind, _, name = path.partition(":")
    if kind != "builtin":
        return path
    if name not in BUILTIN:
        raise ConfigError(
            f"environment.path={path}: no such environment. Built-in environments: {', '.join(BUILTIN) or 'none'}"
        )
    if name == "code" and not has_rows:
        return "pipelinerl_core.environments.builtin.code_exercises:CodeExercises"
    return BUILTIN[name]


class EnvironmentPool:
    """Plays episodes in processes; each episode goes to the process with the fewest episodes.

    Processes start with the first episodes. All methods run on one event loop, whose thread must outlive the pool.
    """

    def __init__(
        self, processes: Sequence[EnvironmentProcess], judge: _Judge | None = None, *, limit: int | None = None
    ) -> None:
        """Start no process yet.

        judge: scores episodes. limit: episodes at once; the time until an episode starts counts for no deadline.
        """
        self._processes = processes
        self._judge = judge
        self._places: asyncio.Semaphore | contextlib.nullcontext[None] = (
            asyncio.Semaphore(limit) if limit else contextlib.nullcontext()
        )

    async def play(self, task: Mapping[str, Any], seed: int, host: EpisodeHost) -> Played | Transcript:
        """Play and score one episode, as described in interfaces.py.

        task: {"index": i} or {"held_out": i, "of": count} if the class has tasks of its own, else the row of a
        prompt; JSON values. Raises EnvironmentFailed (one line), or the exception of `host.ask`. If the process dies
        during a turn of the model, `host.ask` is cancelled before `host.restart` is called.
        """
        async with self._places:
            result = await self._process().play(task, seed, host)
        if self._judge is not None and isinstance(result, Transcript):
            return await self._judge.played(task, result)
        return result

    async def score_group(self, task: Mapping[str, Any], transcripts: Sequence[Transcript]) -> list[Played]:
        """Score the episodes of a group, as described in interfaces.py. Raises EnvironmentFailed (one line)."""
        return await self._process().score_group(task, transcripts)

    def _process(self) -> EnvironmentProcess:
        return min(self._processes, key=lambda candidate: candidate.num_requests)

    async def check(self) -> Loaded:
        """Load the environment in a process. Raises EnvironmentFailed with the reason if it cannot be used."""
        return await self._processes[0].check()

    async def close(self) -> None:
        """End the processes; unfinished episodes fail with EnvironmentFailed."""
        await asyncio.gather(*(process.close() for process in self._processes))
        if self._judge is not None:
            await self._judge.close()
