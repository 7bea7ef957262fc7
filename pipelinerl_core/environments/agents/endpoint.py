"""The model of one episode as a chat completions endpoint on loopback, for a program that speaks HTTP.

    program --whole history--> Endpoint --messages--> ask --tokens--> engine

The history that the program sends is compared with the turns that the endpoint has answered: `ask` gets each known
turn as the exact message of its reply, so sampled tokens are never rendered again. A history that was compacted or
edited, or that of a sub-agent, begins a branch of the episode (rollouts/episode.py).

A program that sends a request again gets the turn of the first request. What counts as the same request: the same
Idempotency-Key header; or the header x-stainless-retry-count (the official clients) above 0 and the body of the last
request. Equal bodies alone are no retry.
"""

import asyncio
import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from pipelinerl_core.environments.agents.http import (
    READ_BYTES,
    Answer,
    BadRequest,
    Connection,
    Head,
    Room,
    answer,
    event_stream,
)
from pipelinerl_core.environments.api import Ask, AskError, BudgetSpent, Reply, extended, history_digest, json_text
from pipelinerl_core.sandbox.user_code import Invalid, checked_components

MODEL = "policy"
"""The name in /v1/models; requests may name any model."""
MAX_CONNECTIONS = 64
"""Open connections of an endpoint."""


@dataclass(slots=True)
class _Turn:
    """One turn of the model: the request that asked for it, and the answer."""

    digest: bytes
    """Digest of the request's body."""
    key: str
    """The request's idempotency key; empty without."""
    asking: asyncio.Task[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class _Given:
    """A turn as the program got it, and as `ask` expects it."""

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
        self._given: dict[bytes, list[_Given]] = {}
        """Digest of a history -> the turns that the endpoint has answered to it."""
        self._num_answers = 0
        self._connections: set[asyncio.Task[None]] = set()
        self._room = Room()
        self._server: asyncio.Server | None = None
        self._is_closed = False

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0, limit=READ_BYTES)
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

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        connection = Connection(reader, writer, self._room)
        try:
            if len(self._connections) > MAX_CONNECTIONS:
                raise BadRequest(f"over {MAX_CONNECTIONS} connections are open", 503)
            while not self._is_closed and (head := await connection.head()) is not None:
                self._check_key(head)
                await connection.send(await self._answered(head, await connection.body(head)))
        except BadRequest as error:
            with suppress(ConnectionError, asyncio.CancelledError):
                await connection.refuse(_refusal(error))
        except (ConnectionError, asyncio.CancelledError):
            pass  # the program or `__aexit__` has closed the connection; a turn that it asked for goes on
        finally:
            connection.forget()
            writer.close()
            self._connections.discard(task)

    def _check_key(self, head: Head) -> None:
        given = head.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self.key.encode()):
            raise BadRequest("this API key belongs to no running episode", 401, "invalid_api_key")

    async def _answered(self, head: Head, body: bytearray) -> Answer:
        try:
            path = head.path.partition("?")[0].removeprefix("/v1")
            match head.method, path:
                case "POST", "/chat/completions":
                    return await self._completed(head, body)
                case "POST", "/reward":
                    return self._rewarded(head, body)
                case "GET", "/models":
                    return answer(200, {"object": "list", "data": [_model()]})
                case "GET", _ if path.startswith("/models/"):
                    return answer(200, _model())
                case "POST", "/responses":
                    raise BadRequest(
                        "this endpoint has chat completions, not the Responses API. With openai-agents, call "
                        'agents.set_default_openai_api("chat_completions")', 404, "not_found",
                    )  # fmt: skip
                case _:
                    raise BadRequest(f"{head.method} {head.path}: no such route", 404, "not_found")
        except BadRequest as error:
            return _refusal(error)

    def _rewarded(self, head: Head, body: bytearray) -> Answer:
        given = _parsed(body)
        values = given.get("components", {})
        if not isinstance(values, dict) or "reward" not in given or set(given) - {"reward", "components"}:
            raise BadRequest('a reward is {"reward": number}, with further {"components": {name: number}} or without')
        numbers = {**values, "reward": given["reward"]}
        if wrong := [name for name, value in numbers.items() if type(value) not in (int, float)]:
            raise BadRequest(f"{wrong[0]} is no number")
        try:
            posted = checked_components(numbers, "the request")
        except Invalid as error:
            raise BadRequest(str(error).replace(" returned ", " has ", 1)) from None
        is_repeated = posted == self.posted and (_is_retry(head) or "idempotency-key" in head.headers)
        if self.posted is not None and not is_repeated:
            raise BadRequest("the episode has its reward already: the first one counts", 409)
        self.posted = posted
        return answer(200, {"object": "reward"})

    async def _completed(self, head: Head, body: bytearray) -> Answer:
        given = _parsed(body)
        _refuse_unsupported(given)
        options = given.get("stream_options") or {}
        if not isinstance(options, dict):
            raise BadRequest("stream_options is no object")
        key, digest = head.headers.get("idempotency-key", ""), hashlib.sha256(body).digest()
        turn = self._same_turn(head, key, digest)
        if turn is None:
            history, tools = self._history(given.get("messages")), given.get("tools") or []
            if given.get("tool_choice") == "none":
                tools = []
            if not _are_objects(tools):
                raise BadRequest("tools is no list of objects")
            _check_json(tools)
            earlier = self._turns[-1].asking if self._turns else None
            # A task of its own: the turn goes on if the program drops the connection.
            asking = asyncio.create_task(self._asked(history, tools, earlier))
            turn = _Turn(digest, key, asking)
            self._turns.append(turn)
        try:
            completion = await asyncio.shield(turn.asking)
        except BudgetSpent:
            reason = (
                "the episode has used up its tokens, turns or branches (rollouts.max_tokens, environment.max_turns, "
                "environment.max_branches)"
            )
            raise BadRequest(reason, 400, "context_length_exceeded") from None
        except AskError as error:
            raise BadRequest(str(error)) from None
        if not given.get("stream"):
            return answer(200, completion)
        return event_stream(_chunks(completion, has_usage=bool(options.get("include_usage"))))

    def _same_turn(self, head: Head, key: str, digest: bytes) -> _Turn | None:
        """The turn of an earlier request that this request repeats; None: this is a new request."""
        if key:
            return next((turn for turn in self._turns if turn.key == key), None)
        if not _is_retry(head):
            return None
        candidates = [*self._turns[-1:], *(turn for turn in self._turns if not turn.asking.done())]
        return next((turn for turn in candidates if turn.digest == digest), None)

    def _history(self, messages: Any) -> list[Mapping[str, Any]]:
        """The messages for `ask`: plain texts, and turns that the endpoint has answered after these very messages as
        `ask` has given them."""
        if not isinstance(messages, list) or not messages:
            raise BadRequest("messages is no list of messages")
        history: list[Mapping[str, Any]] = [_plain(message) for message in messages]
        _check_json(history)
        digest = history_digest([])
        for position, message in enumerate(history):
            if message["role"] == "assistant":
                turns = self._given.get(digest, ())
                given = next((given for given in turns if _is_turn(message, given.wire)), None)
                history[position] = given.message if given else _with_parsed_arguments(message)
            digest = extended(digest, json_text(history[position]))
        return history

    async def _asked(
        self,
        history: list[Mapping[str, Any]],
        tools: list[Mapping[str, Any]],
        earlier: asyncio.Task[Mapping[str, Any]] | None,
    ) -> Mapping[str, Any]:
        """The next turn as a completion, after the `earlier` turn; an error of `ask` is an error of the episode."""
        if earlier is not None:
            await asyncio.wait({earlier})
        try:
            if self.failed.done():
                raise AskError("an earlier request of the program has failed")
            reply = await self._ask(history, tools)
        except BudgetSpent:
            self.is_spent = True
            raise
        except AskError as error:
            if not self.failed.done():
                self.failed.set_exception(error)
            raise
        number, self._num_answers = self._num_answers, self._num_answers + 1
        wire = _wire(reply, number)
        self._given.setdefault(history_digest(map(json_text, history)), []).append(_Given(wire, reply.message))
        self.answer = reply.content
        return _completion(reply, wire, number)


def _is_retry(head: Head) -> bool:
    return head.headers.get("x-stainless-retry-count", "0") != "0"


def _parsed(body: bytearray) -> dict[str, Any]:
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        raise BadRequest("the body is no JSON") from None
    except MemoryError:
        raise BadRequest("the body needs more memory than this process has", 413) from None
    if not isinstance(given, dict):
        raise BadRequest("the body is no JSON object")
    return given


def _refuse_unsupported(request: Mapping[str, Any]) -> None:
    """Refuse what would change the answer and is not done; other options, such as temperature, are the run's."""
    if request.get("n", 1) not in (1, None):
        raise BadRequest("n must be 1: the run samples the episodes of a group")
    if request.get("tool_choice") not in (None, "auto", "none"):
        raise BadRequest("tool_choice must be auto or none: the policy is sampled freely, and its calls are trained")
    form = request.get("response_format")
    if form is not None and (not isinstance(form, dict) or form.get("type") != "text"):
        raise BadRequest(
            "response_format must be text: the policy is sampled freely. Ask for JSON in a message, and reward it"
        )
    if request.get("logprobs") or request.get("top_logprobs"):
        raise BadRequest("logprobs must be false: the rows of the run have the log-probabilities")


def _are_objects(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, dict) for value in values)


def _check_json(*values: Any) -> None:
    """Refuse what Python reads and JSON does not have."""
    try:
        for value in values:
            json_text(value)
    except (ValueError, RecursionError):
        raise BadRequest("messages or tools have nan, infinity, half a surrogate pair or too many levels") from None


def _plain(message: Any) -> dict[str, Any]:
    """A message with a text as content, and without empty fields."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadRequest("a message is no object with a role")
    plain = {name: value for name, value in message.items() if value is not None}
    if isinstance(parts := plain.get("content"), list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
            raise BadRequest("a content has parts that are no text")
        plain["content"] = "".join(part["text"] for part in parts)
    if not isinstance(plain.get("content", ""), str):
        raise BadRequest("a content is no text")
    if not _are_objects(plain.get("tool_calls", [])):
        raise BadRequest("tool_calls is no list of objects")
    if plain["role"] == "developer":
        plain["role"] = "system"
    return plain


def _with_parsed_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A turn of the program's own, with the arguments of its calls as chat templates expect them: objects."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function")
        arguments = function.get("arguments") if isinstance(function, dict) else None
        with suppress(ValueError, RecursionError):
            if isinstance(arguments, str):
                parsed = json.loads(arguments)
                json_text(parsed)  # raises ValueError for nan, which Python reads and JSON does not have
                call = {**call, "function": {**function, "arguments": parsed}}
        calls.append(call)
    return {**message, "content": message.get("content", ""), "tool_calls": calls}


def _is_turn(message: Mapping[str, Any], wire: Mapping[str, Any]) -> bool:
    """Whether a message of the history is a turn that the program got; spaces around the content do not count."""

    def content(turn: Mapping[str, Any]) -> str:
        return str(turn.get("content") or "").strip()

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


def _refusal(error: BadRequest) -> Answer:
    body = {"message": str(error), "type": "invalid_request_error", "code": error.code, "param": None}
    # The official clients repeat a request after 503, and without this header after 409.
    headers = {503: [("Retry-After", "1")], 409: [("X-Should-Retry", "false")]}
    return answer(error.status, {"error": body}, headers.get(error.status, ()))
