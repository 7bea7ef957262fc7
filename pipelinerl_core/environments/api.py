"""The objects that an environment's code uses: `ask`, its replies, and the exceptions that it raises.

async def play(self, task, ask, seed):
    messages = [{"role": "user", "content": "Guess a number"}]
    reply = await ask(messages)
    messages += [reply.message, {"role": "user", "content": "higher"}]
    weather = await ask.once("weather", fetch)
"""

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate
from typing import Any

MAX_KEY_LETTERS = 200
"""Longest key of a recorded value."""
_NO_MESSAGES = bytes(32)
"""Stands for the digest of an empty history; as long as any other digest."""


class BudgetSpent(Exception):
    """The episode has used up its tokens or environment.max_turns. Uncaught, the episode has reward 0."""


class TooLong(Exception):
    """A line to the parent exceeds the limit."""


class AskError(Exception):
    """`ask` was called in a way that has no reply; the episode is an error, also if the exception is caught."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One turn of the model."""

    text: str
    """The whole turn, without the token that ends the turn."""
    content: str
    """The text without reasoning and tool calls."""
    reasoning: str = ""
    """The text of the reasoning block; empty without such a block."""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """[{"name": str, "arguments": dict}, ...]. A call that is not valid JSON stays in the text."""
    finish_reason: str = "stop"
    """stop, or length if a limit of tokens cut the turn off."""
    num_tokens: int = 0
    """Tokens of the turn."""
    num_tokens_before: int = 0
    """Tokens of the conversation before the turn."""
    tokens_left: int = 0
    """Tokens that the episode may still have."""

    @property
    def message(self) -> dict[str, Any]:
        """The turn as a message, to append to the history."""
        calls = [{"type": "function", "function": call} for call in self.tool_calls]
        return {"role": "assistant", "content": self.text, **({"tool_calls": calls} if calls else {})}


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """The connection of an Ask to its episode."""

    ask: Callable[[str, str, int], asyncio.Future[Reply | None]]
    """Send new messages and tools, both JSON, and the index of the turn that they follow, or -1. The future is None
    if the budget is used up. Raises TooLong."""
    record: Callable[[str, str], None]
    """Send a key and the value of this key, as JSON. Raises TooLong."""
    place: Callable[[], str]
    """File and line of the environment's code that runs now, in brackets after a space; empty if unknown."""


class Ask:
    """The model, as one episode calls it. Bound to the loop of the process."""

    def __init__(self, port: Port, once: Mapping[str, Any]) -> None:
        """once: values that an earlier start of this episode has recorded."""
        self._port = port
        self._recorded = dict(once)
        # (digest of a history that ends with a turn of the model, its tools or "" for any) -> the newest such turn
        self._turns: dict[tuple[bytes, str], int] = {}
        self._tools: list[str] = []  # of each turn, as its context shows them
        self._is_waiting = False
        self._is_spent = False
        self._is_closed = False
        self.in_queue = False
        """The environment waits for other episodes; the time is not charged to this episode."""
        self.num_turns = 0
        """Turns of the model so far."""
        self.problem = ""
        """The first misuse, with file and line; empty: none."""

    async def __call__(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> Reply:
        """The model's next turn.

        messages: the whole history. A history that continues the previous call's has its messages, reply.message,
        then new messages. Any other history begins a branch of the episode: it continues the history of an earlier
        call, or is a history of its own: a compacted history, the history of a sub-agent, a history with other tools.
        tools: function tools as JSON schemas. A call without tools keeps the tools of its history. Raises BudgetSpent
        and AskError.
        """
        if self._is_closed:
            raise AskError("ask was called after the end of its episode")
        if self._is_waiting:
            raise self._misused("ask was called while an earlier call waits for its reply. Await each call")
        if self.problem:
            raise AskError("ask was called after an error of ask")
        messages, tools = list(messages), list(tools)
        history = [self._text(message, f"messages[{index}]") for index, message in enumerate(messages)]
        tools_text = self._tools_text(tools)
        num_known, after = self._known_messages(history, tools_text if tools else "")
        new = _json_list(messages[num_known:])
        if self._is_spent:
            raise BudgetSpent
        self._is_waiting = True
        try:
            reply = await self._port.ask(new, tools_text, after)
        except TooLong as error:
            raise self._misused(str(error)) from None
        except asyncio.CancelledError:
            if not self._is_closed:
                self._misused("a call of ask was cancelled. Await each call, without a time limit")
            raise
        finally:
            self._is_waiting = False
        if reply is None:
            self._is_spent = True
            raise BudgetSpent
        self._tools.append(tools_text if after < 0 else self._tools[after])
        digest = history_digest([*history, json_text(reply.message)])
        self._turns |= dict.fromkeys([(digest, self._tools[-1]), (digest, "")], self.num_turns)
        self.num_turns += 1
        return reply

    async def once(self, key: str, fetch: Callable[[], Awaitable[Any]]) -> Any:
        """The value of `fetch`, an async function without parameters, which is called once per key and episode.

        If the process ends and the episode is played again, the recorded value is returned, unless it followed a turn
        that is sampled again. The value is JSON.
        """
        if self._is_closed:
            raise AskError("ask.once was called after the end of its episode")
        if not isinstance(key, str) or len(key) > MAX_KEY_LETTERS:
            raise self._misused(f"the key of ask.once is not a string of at most {MAX_KEY_LETTERS} characters")
        if key not in self._recorded:
            value = await fetch()
            if key not in self._recorded:  # else another call with this key was faster
                text = self._text(value, f"the value of ask.once({key[:40]!r})", is_message=False)
                try:
                    self._port.record(key, text)
                except TooLong as error:
                    raise self._misused(str(error)) from None
                self._recorded[key] = json.loads(text)
        return self._recorded[key]

    def forget(self, keys: Iterable[str]) -> None:
        """Drop recorded values: they followed turns that are sampled again."""
        for key in keys:
            self._recorded.pop(key, None)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The time inside counts neither for environment.call_seconds nor for environment.episode_seconds: a wait for
        other episodes, which have deadlines of their own."""
        self.in_queue = True
        try:
            yield
        finally:
            self.in_queue = False

    def close(self) -> None:
        """Refuse all further calls."""
        self._is_closed = True

    def _known_messages(self, history: list[str], tools: str) -> tuple[int, int]:
        """The length of the longest known history that the given one continues, and its last turn, or -1.

        tools: of the history, which stand before its first turn; "": any.
        """
        num_known, after = 0, -1
        for num, digest in enumerate(accumulate(history, extended, initial=_NO_MESSAGES)):
            if (digest, tools) in self._turns:
                num_known, after = num, self._turns[digest, tools]
        if num_known == len(history):
            raise self._misused("ask was called without a new message")
        return num_known, after

    def _tools_text(self, tools: Sequence[Mapping[str, Any]]) -> str:
        for tool in tools:
            self._text(tool, "tools")
        return _json_list(tools)

    def _text(self, value: Any, name: str, *, is_message: bool = True) -> str:
        if is_message and not isinstance(value, Mapping):
            raise self._misused(f"{name} is not a mapping, but has the type {type(value).__name__}")
        if is_message and name != "tools" and not isinstance(value.get("role"), str):
            raise self._misused(f"{name} has no role")
        try:
            return json_text(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise self._misused(f"{name} is not JSON: {error}") from None

    def _misused(self, reason: str) -> AskError:
        self.problem = self.problem or f"AskError: {reason}{self._port.place()}"
        return AskError(reason)


def extended(digest: bytes, message: str) -> bytes:
    """The digest of a history that has one more message, as JSON."""
    return hashlib.sha256(digest + message.encode()).digest()


def history_digest(history: Iterable[str]) -> bytes:
    """The digest of a history of messages, each as JSON."""
    return reduce(extended, history, _NO_MESSAGES)


def json_text(value: Any, *, is_sorted: bool = True) -> str:
    """The value as JSON that encodes as UTF-8; raises TypeError, ValueError or RecursionError.

    is_sorted: keys in alphabetical order, so that equal values have equal texts.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=is_sorted, separators=(",", ":"))
    text.encode()  # a lone surrogate is a UnicodeEncodeError, which is a ValueError
    return text


def _json_list(values: Sequence[Any]) -> str:
    """Messages or tools with their keys in the given order, in which a chat template writes them."""
    return json_text(list(values), is_sorted=False)
