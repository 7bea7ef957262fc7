"""The model of one episode as a chat completions endpoint on loopback, for a program that speaks HTTP.

    program --whole history--> Endpoint --messages--> ask --tokens--> engine

The history that the program sends is compared with the turns that the endpoint has answered: `ask` gets each known
turn as the exact message of its reply, so sampled tokens are never rendered again.

A program that sends a request again gets the turn of the first request. What counts as the same request: the same
Idempotency-Key header; or the header x-stainless-retry-count (the official clients) above 0 and the body of the last
request. Equal bodies alone are no retry.
"""

import asyncio
import hmac
import json
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from pipelinerl_core.environments.agents.http import BadRequest, Request, answer, event_stream, read_request
from pipelinerl_core.environments.api import Ask, AskError, BudgetSpent, Reply, json_text

MODEL = "policy"
"""The name in /v1/models; requests may name any model."""


@dataclass(slots=True)
class _Turn:
    """One turn of the model: the request that asked for it, and the answer."""

    body: bytes
    key: str
    """The request's idempotency key; empty without."""
    asking: asyncio.Task[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class _Given:
    """A turn as the program got it, and as `ask` expects it."""

    position: int
    """Of the turn in the history."""
    wire: Mapping[str, Any]
    message: Mapping[str, Any]


class Endpoint:
    """Serves one episode; `async with` starts and ends the server."""

    def __init__(self, ask: Ask) -> None:
        """All requests go to `ask`."""
        self.key = f"sk-{secrets.token_hex(24)}"
        """The API key of the episode, refused after the end of the block."""
        self.is_spent = False
        """The program was told that no token or turn is left."""
        self.posted: dict[str, Any] | None = None
        """The reward that the program has sent to /reward."""
        self.answer = ""
        """Content of the last turn."""
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Raises the first error of `ask` that ends the episode."""
        self._ask = ask
        self._turns: list[_Turn] = []
        self._given: list[_Given] = []
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._is_closed = False

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_error: object) -> None:
        assert self._server is not None
        self._server.close()
        self._is_closed = True
        for _ in range(3):  # connections that are accepted now end at once
            await asyncio.sleep(0)
        pending = [*self._connections, *(turn.asking for turn in self._turns)]
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        if not self.failed.cancel():
            self.failed.exception()  # the caller may have raised another error

    @property
    def url(self) -> str:
        """The base URL for clients."""
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"

    async def finish_turn(self) -> None:
        """Wait for a turn that the program has left unread: a started turn belongs to the episode."""
        if self._turns:
            await asyncio.wait({self._turns[-1].asking})

    # ---- requests ------------------------------------------------------------------------------------------------

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while not self._is_closed and (request := await read_request(reader)) is not None:
                writer.write(await self._answered(request))
                await writer.drain()
        except BadRequest as error:
            writer.write(_refusal(error))
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the program has closed the connection; a turn that it asked for goes on
        finally:
            writer.close()
            self._connections.discard(task)

    async def _answered(self, request: Request) -> bytes:
        try:
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), self.key.encode()):
                raise BadRequest("this API key belongs to no running episode", 401, "invalid_api_key")
            path = request.path.partition("?")[0].removeprefix("/v1")
            match request.method, path:
                case "POST", "/chat/completions":
                    return await self._completed(request)
                case "POST", "/reward":
                    return self._rewarded(request)
                case "GET", "/models":
                    return answer(200, {"object": "list", "data": [_model()]})
                case "GET", _ if path.startswith("/models/"):
                    return answer(200, _model())
                case _:
                    raise BadRequest(f"{request.method} {request.path}: no such route", 404, "not_found")
        except BadRequest as error:
            return _refusal(error)

    def _rewarded(self, request: Request) -> bytes:
        body = _parsed(request)
        values = body.get("components", {})
        if not isinstance(values, dict) or "reward" not in body or set(body) - {"reward", "components"}:
            raise BadRequest('a reward is {"reward": number}, with further {"components": {name: number}} or without')
        numbers = {**values, "reward": body["reward"]}
        if wrong := [name for name, value in numbers.items() if not _is_number(value)]:
            raise BadRequest(f"{wrong[0]} is no finite number")
        self.posted = numbers
        return answer(200, {"object": "reward"})

    async def _completed(self, request: Request) -> bytes:
        body = _parsed(request)
        if body.get("n", 1) not in (1, None):
            raise BadRequest("n must be 1: the run samples the episodes of a group")
        turn = self._same_turn(request)
        if turn is None:
            history, tools = self._history(body.get("messages")), body.get("tools") or []
            if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
                raise BadRequest("tools is no list of objects")
            is_early = bool(self._turns) and not self._turns[-1].asking.done()
            # A task of its own: the turn goes on if the program drops the connection.
            asking = asyncio.create_task(self._asked(history, tools, is_early=is_early))
            turn = _Turn(request.body, request.headers.get("idempotency-key", ""), asking)
            self._turns.append(turn)
        try:
            completion = await asyncio.shield(turn.asking)
        except BudgetSpent:
            reason = "the episode has used up its tokens or turns (rollouts.max_tokens, environment.max_turns)"
            raise BadRequest(reason, 400, "context_length_exceeded") from None
        except AskError as error:
            raise BadRequest(str(error)) from None
        if not body.get("stream"):
            return answer(200, completion)
        options = body.get("stream_options") or {}
        return event_stream(_chunks(completion, has_usage=bool(options.get("include_usage"))))

    def _same_turn(self, request: Request) -> _Turn | None:
        """The turn of an earlier request that this request repeats; None: this is a new request."""
        if key := request.headers.get("idempotency-key", ""):
            return next((turn for turn in self._turns if turn.key == key), None)
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        last = self._turns[-1:] if is_retry else []
        return next((turn for turn in last if turn.body == request.body), None)

    # ---- turns ---------------------------------------------------------------------------------------------------

    def _history(self, messages: Any) -> list[Mapping[str, Any]]:
        """The messages for `ask`: plain texts, and known turns as `ask` has given them."""
        if not isinstance(messages, list) or not messages:
            raise BadRequest("messages is no list of messages")
        history: list[Mapping[str, Any]] = [_plain(message) for message in messages]
        for given in self._given:
            if given.position < len(history) and _is_turn(history[given.position], given.wire):
                history[given.position] = given.message
        return history

    async def _asked(
        self, history: list[Mapping[str, Any]], tools: list[Mapping[str, Any]], *, is_early: bool
    ) -> Mapping[str, Any]:
        """The next turn as a completion; an error of `ask` is an error of the episode."""
        try:
            if is_early:
                raise AskError("the program sent a request before the previous request had its answer")
            reply = await self._ask(history, tools)
        except BudgetSpent:
            self.is_spent = True
            raise
        except AskError as error:
            if not self.failed.done():
                self.failed.set_exception(error)
            raise
        number = len(self._given)
        wire = _wire(reply, number)
        self._given.append(_Given(len(history), wire, reply.message))
        self.answer = reply.content
        return _completion(reply, wire, number)


def _parsed(request: Request) -> dict[str, Any]:
    try:
        body = json.loads(request.body)
    except (ValueError, RecursionError):
        raise BadRequest("the body is no JSON") from None
    if not isinstance(body, dict):
        raise BadRequest("the body is no JSON object")
    return body


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _plain(message: Any) -> dict[str, Any]:
    """A message with a text as content, and without empty fields."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadRequest("a message is no object with a role")
    plain = {name: value for name, value in message.items() if value is not None}
    if isinstance(parts := plain.get("content"), list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
            raise BadRequest("a content has parts that are no text")
        plain["content"] = "".join(part["text"] for part in parts)
    if plain["role"] == "developer":
        plain["role"] = "system"
    return plain


def _is_turn(message: Mapping[str, Any], wire: Mapping[str, Any]) -> bool:
    """Whether a message of the history is a turn that the program got; spaces around the content do not count."""

    def content(one: Mapping[str, Any]) -> str:
        return str(one.get("content") or "").strip()

    return (
        message["role"] == "assistant"
        and content(message) == content(wire)
        and _calls(message) == _calls(wire)
    )  # fmt: skip


def _calls(message: Mapping[str, Any]) -> list[Any]:
    """The tool calls of a message, comparable: id, name and parsed arguments."""
    try:
        return [
            (call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in message.get("tool_calls") or []
        ]
    except (KeyError, TypeError, ValueError, RecursionError):
        return [None]  # equals no calls of a turn


def _wire(reply: Reply, number: int) -> dict[str, Any]:
    """The turn as the message of a completion. The ids are the same when the episode is played again."""
    calls = [
        {
            "id": f"call{number:03}{index:02}",  # nine letters and digits: some chat templates require this form
            "type": "function",
            "function": {"name": call["name"], "arguments": json_text(call["arguments"])},
        }
        for index, call in enumerate(reply.tool_calls)
    ]
    content = None if calls and not reply.content else reply.content
    reasoning = {"reasoning_content": reply.reasoning} if reply.reasoning else {}
    return {"role": "assistant", "content": content, **reasoning, **({"tool_calls": calls} if calls else {})}


def _completion(reply: Reply, wire: Mapping[str, Any], number: int) -> dict[str, Any]:
    reason = "tool_calls" if reply.tool_calls and reply.finish_reason == "stop" else reply.finish_reason
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": 0,
        "model": MODEL,
        "choices": [{"index": 0, "message": wire, "finish_reason": reason, "logprobs": None}],
        "usage": {
            "prompt_tokens": reply.num_tokens_before,
            "completion_tokens": reply.num_tokens,
            "total_tokens": reply.num_tokens_before + reply.num_tokens,
        },
    }


def _chunks(completion: Mapping[str, Any], *, has_usage: bool) -> list[dict[str, Any]]:
    """The completion as the chunks of a stream: the turn in one piece, then its end."""
    (choice,) = completion["choices"]
    head = {key: completion[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(delta["tool_calls"])]
    pieces = [(delta, None), ({}, choice["finish_reason"])]
    chunks = [
        {**head, "choices": [{"index": 0, "delta": piece, "finish_reason": reason}]} for piece, reason in pieces
    ]
    return [*chunks, *([{**head, "choices": [], "usage": completion["usage"]}] if has_usage else [])]


def _model() -> dict[str, Any]:
    return {"id": MODEL, "object": "model", "created": 0, "owned_by": "pipelinerl"}


def _refusal(error: BadRequest) -> bytes:
    body = {"message": str(error), "type": "invalid_request_error", "code": error.code, "param": None}
    return answer(error.status, {"error": body})
