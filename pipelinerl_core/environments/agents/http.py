"""HTTP/1.1 for the endpoint of an episode: h11 parses the requests, the answers are JSON or events.

The head of a request arrives before its body, so that the endpoint can refuse a request before it reads the body. All
memory is bounded: of a head, of a body, and of the bodies of all connections together.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import h11

MAX_BODY = 8 << 20
"""Bytes of a request's body."""
MAX_BODIES = 16 << 20
"""Bytes of the bodies of all connections of an endpoint together."""
HEAD_SECONDS = 10.0
"""Deadline of the first head of a connection, whose client has shown no key."""
READ_BYTES = 1 << 14
_MAX_HEAD = 1 << 16
_LINGER_SECONDS = 2.0
_SHOWN_LETTERS = 200


class BadRequest(Exception):
    """A request is refused; the message is for the program."""

    def __init__(self, reason: str, status: int = 400, code: str | None = None) -> None:
        """status: clients repeat requests that are refused with 408, 429 or a number above 499."""
        super().__init__(reason)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class Head:
    """A request without its body; the names of headers are in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    """A response."""

    status: int
    kind: str
    body: bytes
    headers: Sequence[tuple[str, str]] = ()


@dataclass(slots=True)
class Room:
    """Bytes that further bodies may have."""

    left: int = MAX_BODIES


class Connection:
    """The server's side of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, room: Room) -> None:
        """room: shared by the connections of an endpoint."""
        self._reader = reader
        self._writer = writer
        self._room = room
        self._held = 0
        self._http = h11.Connection(h11.SERVER, _MAX_HEAD)
        self._method = ""
        self._has_shown_key = False

    async def head(self) -> Head | None:
        """The head of the next request; None at the end of the connection. Raises BadRequest."""
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
        if self._http.our_state is not h11.IDLE:
            return None
        self._method = ""
        try:
            async with asyncio.timeout(None if self._has_shown_key else HEAD_SECONDS):
                event = await self._event()
        except TimeoutError:
            raise BadRequest(f"the headers of the request took more than {HEAD_SECONDS:g} s", 408) from None
        if not isinstance(event, h11.Request):
            return None
        self._method = event.method.decode()
        headers = {name.decode(): value.decode("latin-1") for name, value in event.headers}
        if "content-length" in headers and "transfer-encoding" in headers:
            raise BadRequest("the request has both Content-Length and Transfer-Encoding")
        return Head(self._method, event.target.decode("latin-1"), headers)

    async def body(self, head: Head) -> bytearray:
        """The body of the request; the client has shown its key. Raises BadRequest."""
        self._has_shown_key = True
        _check_size(int(head.headers.get("content-length", "0")))
        body = bytearray()
        while isinstance(event := await self._event(), h11.Data):
            _check_size(len(body) + len(event.data))
            if len(event.data) > self._room.left:
                raise BadRequest(f"the unanswered requests of this episode have over {MAX_BODIES} bytes", 503)
            self._room.left -= len(event.data)
            self._held += len(event.data)
            body += event.data
        return body

    async def send(self, answer: Answer) -> None:
        """Send the response to a request whose body has been read."""
        headers = [("Content-Type", answer.kind), ("Content-Length", str(len(answer.body))), *answer.headers]
        reason = HTTPStatus(answer.status).phrase
        events: list[h11.Event] = [h11.Response(status_code=answer.status, headers=headers, reason=reason)]
        if self._method != "HEAD":
            events.append(h11.Data(data=answer.body))
        for event in [*events, h11.EndOfMessage()]:
            self._writer.write(self._http.send(event) or b"")
        self.forget()
        await self._writer.drain()

    async def refuse(self, answer: Answer) -> None:
        """Send the last response of the connection, also while the client still sends its request.

        Reads and drops the rest of the request: the kernel would otherwise drop the response.
        """
        await self.send(Answer(answer.status, answer.kind, answer.body, [*answer.headers, ("Connection", "close")]))
        self._writer.write_eof()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_SECONDS):
                while await self._reader.read(READ_BYTES):
                    pass

    def forget(self) -> None:
        """Free the room of the body."""
        self._room.left += self._held
        self._held = 0

    async def _event(self) -> h11.Event | type[h11.PAUSED]:
        while True:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError as error:
                status = 431 if error.error_status_hint == 431 else 400
                raise BadRequest(f"this is no HTTP request: {str(error)[:_SHOWN_LETTERS]}", status) from None
            if not isinstance(event, type) or event is h11.PAUSED:
                return event
            if self._http.they_are_waiting_for_100_continue:
                self._writer.write(self._http.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
            self._http.receive_data(await self._reader.read(READ_BYTES))


def _check_size(size: int) -> None:
    if size > MAX_BODY:
        raise BadRequest(f"the body has {size} bytes; at most {MAX_BODY}", 413)


def answer(status: int, value: Any, headers: Sequence[tuple[str, str]] = ()) -> Answer:
    """A response with a JSON value."""
    return Answer(status, "application/json", json.dumps(value).encode(), headers)


def event_stream(chunks: Sequence[Any]) -> Answer:
    """A response with server-sent events, one per JSON value, and the end mark of chat completions."""
    events = [json.dumps(chunk) for chunk in chunks] + ["[DONE]"]
    return Answer(200, "text/event-stream", "".join(f"data: {event}\n\n" for event in events).encode())
