"""Check an environment in an environment process.

stdin: {"config": ..., "code": text of its file or null} (check_process.py); a line is the note of the class.
"""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pipelinerl_core.check_process import run_check
from pipelinerl_core.config.run import RunConfig
from pipelinerl_core.environments.pool import EnvironmentPool, build_environments
from pipelinerl_core.errors import ConfigError, EnvironmentFailed
from pipelinerl_core.models.paths import resolve_model_path
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.prompts import build_source
from pipelinerl_core.prompts.check import load_tokenizer
from pipelinerl_core.prompts.turns import ChatTurns, chat_turns
from pipelinerl_core.rollouts.episode import first_tokens, task_of
from pipelinerl_core.types import Prompt, Reply


class _FirstMessages(Exception):
    """The environment has sent its first messages."""


class _TrialHost:
    """An episode that ends with the first call of `ask`."""

    once: Mapping[str, Any] = {}

    def __init__(self, chat: ChatTurns | None, max_prompt_tokens: int) -> None:
        """chat: of the model; None if the model is not on this host."""
        self._chat, self._limit = chat, max_prompt_tokens
        self.problem = ""
        """Why the first messages cannot be a prompt."""

    async def ask(self, messages: Sequence[Any], tools: Sequence[Any], after: int) -> Reply | None:
        if self._chat is not None:
            try:
                first_tokens(self._chat, messages, tools, self._limit)
            except EnvironmentFailed as error:
                self.problem = str(error)
        raise _FirstMessages

    def record(self, key: str, value: Any) -> None:
        """No trial is repeated."""

    def describe(self, task: Any) -> None:
        """No trial has a row."""

    def restart(self) -> None:
        """No trial is repeated."""


async def check(config: RunConfig, code: str | None) -> str:
    """Load the class, and play the first training task and the last held-out task up to their first messages.

    If the model is on this host, the first messages and tools are rendered with its tokenizer and chat template.
    Returns what the class says about this host, or nothing. Raises ConfigError if any of this fails.
    """
    subject = config.environment.subject
    environments = build_environments(config, code)
    source = build_source(config)
    directory = resolve_model_path(config.model.path)
    try:
        chat = None if directory is None else chat_turns(config, load_tokenizer(directory))
        loaded = await environments.check()
        _check_tasks(config, subject, has_tasks=loaded.has_tasks)
        for name, prompts in (
            ("training", [source.prompt(0)]),
            ("held-out", source.held_out(config.eval.num_prompts)),
        ):
            if not prompts:
                continue
            host = _TrialHost(chat, config.rollouts.max_prompt_tokens)
            if error := await _trial(environments, config, prompts[-1], host):
                raise ConfigError(f"{subject}: a {name} task failed before its first message: {error}{_hint(error)}")
            if host.problem:
                raise ConfigError(f"{subject}: the first messages of a {name} task: {host.problem}")
        return loaded.note
    except EnvironmentFailed as error:
        raise ConfigError(f"{subject}: {_reason(str(error))}") from None
    finally:
        await environments.close()


def _check_tasks(config: RunConfig, subject: str, *, has_tasks: bool) -> None:
    is_own = config.prompts.from_environment
    if has_tasks and not is_own:
        raise ConfigError(
            f"{subject}: the class has tasks of its own, but prompts.kind={config.prompts.kind}. Set "
            "prompts.kind=environment, or remove the methods task and held_out"
        )
    if is_own and not has_tasks:
        raise ConfigError(
            f"{subject}: prompts.kind=environment, but the class has no methods task and held_out. Write both, or "
            "set another prompts.kind, whose rows are the tasks"
        )


async def _trial(environments: EnvironmentPool, config: RunConfig, prompt: Prompt, host: _TrialHost) -> str:
    """The error of an episode before its first message; empty: none."""
    try:
        await environments.play(task_of(config, prompt), 0, host)
    except _FirstMessages:
        return ""
    except EnvironmentFailed as error:
        return _reason(str(error))
    return "the episode ended without a turn of the model"


def _hint(error: str) -> str:
    """The change that allows a call which the isolation has refused; empty for other errors."""
    if "can't start new thread" in error:
        return ". The environment may start no threads (asyncio.to_thread), unless environment.network=true"
    if "Operation not permitted" in error:
        return ". If the environment needs the network, set environment.network=true"
    if "Permission denied" in error:
        return ". Read files in __init__, or set environment.isolation=none"
    return ""


def _reason(message: str) -> str:
    """The message without the name of the environment, `environment FILE.py:CLASS: `."""
    return message.split(": ", 1)[1] if message.startswith("environment ") else message


def _check(given: Any) -> list[str]:
    note = asyncio.run(check(build_config(given["config"]), given["code"]))
    return [note] if note else []


if __name__ == "__main__":
    sys.exit(run_check(_check))
