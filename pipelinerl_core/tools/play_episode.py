"""Plays one episode of an environment without a model: a script, or a person, says the model's turns."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipelinerl_core.config import RunConfig
from pipelinerl_core.environments.pool import build_environments
from pipelinerl_core.errors import ConfigError, EnvironmentFailed
from pipelinerl_core.prompts import build_source
from pipelinerl_core.prompts.reply import read_reply
from pipelinerl_core.rewards.pool import build_scorer
from pipelinerl_core.rollouts.episode import task_of
from pipelinerl_core.run.user_code import local_code
from pipelinerl_core.types import FinishReason, Message, Played, Reply, Transcript

_FORM = 'a JSON string, or {"content": "...", "tool_calls": [{"name": "...", "arguments": {...}}]}'


def read_turns(file: str) -> list[str]:
    """The turns of a script, each as the model would write it. Raises ConfigError."""
    try:
        lines = Path(file).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    return [_turn(line, f"{file}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]


def _turn(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise ConfigError(f"{where}: is not JSON. Write {_FORM}") from None
    if isinstance(value, str):
        return value
    calls = value.get("tool_calls", []) if isinstance(value, dict) else None
    if not isinstance(calls, list) or set(value) - {"content", "tool_calls"}:
        raise ConfigError(f"{where}: write {_FORM}")
    text = str(value.get("content") or "") + "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)
    reply = read_reply(text, FinishReason.STOP, 0)
    if len(reply.tool_calls) != len(calls):
        raise ConfigError(f"{where}: a tool call cannot be read. Write {_FORM}")
    return text


class ScriptedHost:
    """The actor's side of an episode (`interfaces.EpisodeHost`); `say` returns the next turn, or None for none."""

    def __init__(self, say: Callable[[], str | None], show: Callable[[str], None], config: RunConfig) -> None:
        """show: called with each line about the episode. config: its limits of turns and branches count."""
        self.once: dict[str, Any] = {}
        self.turns: list[dict[str, Any]] = []
        """Messages before each turn, `after`, and the turn's text."""
        self._say, self._show = say, show
        self._environment, self._max_tokens = config.environment, config.rollouts.max_tokens
        self._num_branches = self._asked = 0

    async def ask(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], after: int) -> Reply | None:
        turn, self._asked = self._asked, self._asked + 1
        if turn < len(self.turns):
            return self._reply(self.turns[turn]["text"])
        if turn and after != turn - 1:
            self._num_branches += 1
            self._show("-- a branch: " + ("a history of its own" if after < 0 else f"continues turn {after}"))
        if tools:
            self._show(f"tools: {', '.join(str(tool.get('function', tool).get('name')) for tool in tools)}")
        for message in messages:
            self._show(f"{message['role']}: {message.get('content') or ''}")
            for call in message.get("tool_calls") or ():
                self._show(f"  calls {json.dumps(call, ensure_ascii=False)}")
        limits = self._environment
        is_over = turn >= limits.max_turns or self._num_branches > limits.max_branches
        text = None if is_over else self._say()
        if text is None:
            self._show("-- no turn or branch is left")
            return None
        reply = self._reply(text)
        self._show(f"turn {turn}: {reply.content}")
        for call in reply.tool_calls:
            self._show(f"  calls {call.name}({json.dumps(dict(call.arguments), ensure_ascii=False)})")
        self.turns.append({"messages": list(messages), "after": after, "text": text})
        return reply

    def _reply(self, text: str) -> Reply:
        return replace(read_reply(text, FinishReason.STOP, len(text)), tokens_left=self._max_tokens)

    def describe(self, task: Any) -> None:
        self._show(f"task: {json.dumps(task, ensure_ascii=False)}")

    def record(self, key: str, value: Any) -> None:
        self.once[key] = value

    def restart(self) -> None:
        """The process of the environment has died: the episode begins again with the turns that were said."""
        self._asked = 0


async def play(
    config: RunConfig, index: int, say: Callable[[], str | None], show: Callable[[str], None]
) -> dict[str, Any]:
    """Play the training task at a position; returns its turns and scores.

    Raises ConfigError without an environment, EnvironmentFailed with one line if the environment fails.
    """
    if not config.environment.path:
        raise ConfigError("play is for environments: set environment.path or environment.kind")
    code = local_code(config)
    prompt = build_source(config).prompt(index)
    scorer = build_scorer(config, code=code) if config.environment.is_judged else None
    environments = build_environments(config, code, scorer)
    host = ScriptedHost(say, show, config)
    try:
        if not config.prompts.from_environment:
            host.describe(prompt.task)
        try:
            result = await environments.play(task_of(config, prompt), 0, host)
        except EnvironmentFailed as error:
            hint = (
                ""
                if config.prompts.from_environment
                else ". If it has tasks of its own, set prompts.kind=environment"
            )
            raise EnvironmentFailed(f"{error}{hint}") from None
        if isinstance(result, Transcript):  # scored as a group of one episode
            (result,) = await environments.score_group(task_of(config, prompt), [result])
    finally:
        await environments.close()
    return _scores(result, host)


def _scores(played: Played, host: ScriptedHost) -> dict[str, Any]:
    return {
        "turns": host.turns,
        "reward": float(played.score),
        "components": {component.name: component.value for component in played.score.components},
        "turn_rewards": list(played.turn_rewards),
        "cut": played.is_cut,
    }
