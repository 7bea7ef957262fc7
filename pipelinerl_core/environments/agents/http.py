"""HTTP/1.1 for the endpoint of an episode: requests with bodies of bounded size, answers as JSON or as events."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

MAX_BODY = 8 << 20
"""Bytes of a request's body."""
_MAX_CHUNK_LINE = 1024


class BadRequest(Exception):
    """A request is refused; the message is for the program."""

    def __init__(self, reason: str, status: int = 400, code: str | None = None) -> None:
        """status: not 408, 409, 429 or above 499, because clients repeat such requests."""
        super().__init__(reason)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class Request:
    """A request; the names of headers are in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


async def read_request(reader: asyncio.StreamReader) -> Request | None:
    """The next request of a connection; None at the end of the connection. Raises BadRequest, IncompleteReadError."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return None
    except asyncio.LimitOverrunError:
        raise BadRequest("the headers are too long", 431) from None
    first, *lines = head.decode("latin-1").split("\r\n")
    try:
        method, path, _ = first.split(" ")
        pairs = (line.split(":", 1) for line in lines if line)
        headers = {name.strip().lower(): value.strip() for name, value in pairs}
        body = await _read_body(reader, headers)
    except ValueError:
        raise BadRequest("this is no HTTP request") from None
    return Request(method, path, headers, body)


async def _read_body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
    if headers.get("transfer-encoding", "identity") == "identity":
        return await reader.readexactly(_checked(int(headers.get("content-length", "0"))))
    body = bytearray()
    while size := int((await reader.readuntil(b"\r\n"))[:_MAX_CHUNK_LINE].partition(b";")[0], 16):
        _checked(len(body) + size)
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readuntil(b"\r\n")
    return bytes(body)


def _checked(size: int) -> int:
    if not 0 <= size <= MAX_BODY:
        raise BadRequest(f"the body has {size} bytes; at most {MAX_BODY}", 413)
    return size


def answer(status: int, value: Any) -> bytes:
    """A response with a JSON value."""
    return _response(status, "application/json", json.dumps(value).encode())


def event_stream(chunks: Sequence[Any]) -> bytes:
    """A response with server-sent events, one per JSON value, and the end mark of chat completions."""
    events = [json.dumps(chunk) for chunk in chunks] + ["[DONE]"]
    return _response(200, "text/event-stream", "".join(f"data: {event}\n\n" for event in events).encode())


def _response(status: int, kind: str, body: bytes) -> bytes:
    first = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"
    return f"{first}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
