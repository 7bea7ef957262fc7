"""A client's exchange with the hub, by carrier: Arrow Flight, or a Unix socket on the hub's own host."""

import json
import logging
import socket
import threading
from collections import deque
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.flight as fl

from pipelinerl_core.errors import ConfigError, HubUnavailable
from pipelinerl_core.stream.frames import (
    ABSTRACT,
    Frame,
    FrameReader,
    FrameWriter,
    abstract_address,
    is_own_user,
    read_rows,
)
from pipelinerl_core.stream.schema import ROLLOUT_SCHEMA, check_schema

CERTIFIED_NAME = "pipelinerl-hub"
"""The name in every hub's certificate, whatever its address: a client trusts one certificate, not a name."""
CONNECT_SECONDS = 10.0
"""For the hub's first word."""
WIRE_ERRORS = (pa.ArrowException, fl.FlightError, OSError)
"""Everything that a broken connection raises."""
REFUSED_TOKEN = "wrong or missing token"
"""What a hub says to a client of its host that has another one."""

_CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # a socket of its own, and no back-off inherited from other clients
    ("grpc.min_reconnect_backoff_ms", 5000),  # bounds one attempt to connect
)
_MAX_MESSAGE_BYTES = 64 << 20  # of an answer: a reservation of a hundred thousand groups
_MAX_ROW_BYTES = 1 << 30

_log = logging.getLogger(__name__)


class Exchange(Protocol):
    """One exchange. One thread reads; any may hand over, one other goes on with what has not left."""

    def hand_over(self, metadata: bytes, rows: pa.RecordBatch | None) -> bool:
        """Whether the message has left at once; else `go_on` is to be called. Never waits."""
        ...

    def go_on(self) -> None:
        """Returns when all that was handed over has left."""
        ...

    def begin_reading(self) -> None:
        """Returns with the hub's first word. Raises SchemaMismatch when its rows cannot be read."""
        ...

    def read(self) -> tuple[bytes, pa.RecordBatch | None]:
        """The next answer. Raises StopIteration when the hub has ended the exchange."""
        ...

    def done_writing(self) -> None:
        """Nothing more is sent: the hub ends the exchange."""
        ...

    def cancel(self) -> None:
        """End it at once, whoever reads or writes; any thread, any number of times."""
        ...

    def close(self) -> None:
        """Give back what it holds; nobody reads or writes any more."""
        ...


def open_exchange(url: str, token: str, command: bytes, certificate: str) -> Exchange:
    """HubUnavailable without a hub, ConfigError with a wrong token; with Flight both may come with the first word."""
    if url.startswith(ABSTRACT):
        return LocalExchange(url, token, command)
    return FlightExchange(url, token, command, certificate)


class FlightExchange:
    """Over Arrow Flight. Its writes wait for the socket, so they are left to the thread that goes on."""

    def __init__(self, url: str, token: str, command: bytes, certificate: str) -> None:
        options = fl.FlightCallOptions(headers=[(b"authorization", f"Bearer {token}".encode())])
        trust = {"tls_root_certs": certificate, "override_hostname": CERTIFIED_NAME} if certificate else {}
        self._waiting: deque[tuple[bytes, pa.RecordBatch | None]] = deque()
        self._client: Any
        self._writer: Any
        self._reader: Any
        try:
            self._client = fl.FlightClient(url, generic_options=list(_CHANNEL_OPTIONS), **trust)
            self._writer, self._reader = self._client.do_exchange(fl.FlightDescriptor.for_command(command), options)
            self._writer.begin(ROLLOUT_SCHEMA)
        except fl.FlightUnauthenticatedError:
            raise ConfigError(token_text(url)) from None
        except WIRE_ERRORS as error:
            raise HubUnavailable(absent_text(url, reason_of(error))) from None

    def hand_over(self, metadata: bytes, rows: pa.RecordBatch | None) -> bool:
        self._waiting.append((metadata, rows))
        return False

    def go_on(self) -> None:
        while self._waiting:
            metadata, rows = self._waiting.popleft()
            if rows is None:
                self._writer.write_metadata(metadata)
            else:
                self._writer.write_with_metadata(rows, metadata)

    def begin_reading(self) -> None:
        check_schema(self._reader.schema)

    def read(self) -> tuple[bytes, pa.RecordBatch | None]:
        chunk = self._reader.read_chunk()
        return chunk.app_metadata.to_pybytes(), chunk.data

    def done_writing(self) -> None:
        self._writer.done_writing()

    def cancel(self) -> None:
        try:
            self._reader.cancel()
        except WIRE_ERRORS as error:
            _log.debug("cancel: %s", error)

    def close(self) -> None:
        self._writer.close()  # while a thread still reads, it would wait for the hub
        self._client.close()


class LocalExchange:
    """Over a Unix socket. What the socket takes leaves on the thread that hands it over."""

    def __init__(self, url: str, token: str, command: bytes) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._frames = FrameWriter(self._socket)
        self._reader = FrameReader(self._socket, max_message_bytes=_MAX_MESSAGE_BYTES, max_row_bytes=_MAX_ROW_BYTES)
        self._lock = threading.RLock()  # held by whoever calls into the socket: its number may soon be another's
        self._schema: pa.Schema = ROLLOUT_SCHEMA
        try:
            refusal = self._say_hello(url, token, command)
        except (OSError, EOFError, ValueError, TypeError, AttributeError, pa.ArrowException) as error:
            self._socket.close()
            raise HubUnavailable(absent_text(url, reason_of(error))) from None
        if refusal:
            self._socket.close()
            raise (
                ConfigError(token_text(url))
                if refusal == REFUSED_TOKEN
                else HubUnavailable(absent_text(url, refusal))
            )

    def _say_hello(self, url: str, token: str, command: bytes) -> str:
        """Why the hub does not let us in; empty if it does."""
        self._socket.settimeout(CONNECT_SECONDS)
        self._socket.connect(abstract_address(url))
        if not is_own_user(self._socket):
            return "the process there is another user's"
        hello = {**json.loads(command), "token": token}
        self._frames.add(json.dumps(hello).encode(), ROLLOUT_SCHEMA.serialize())
        self._frames.send()  # a socket takes its first bytes
        message, body = self._next()
        refusal = str(json.loads(message).get("refusal"))
        if not refusal:
            self._schema = pa.ipc.read_schema(body)
        self._socket.settimeout(None)
        return refusal

    def _next(self) -> Frame:
        frame = self._reader.next()
        assert frame is not None, "a socket that waits has something"
        return frame

    def hand_over(self, metadata: bytes, rows: pa.RecordBatch | None) -> bool:
        body = rows.serialize() if rows is not None else None
        with self._lock:
            was_empty = self._frames.is_empty
            self._frames.add(metadata, body)
            return was_empty and self._frames.send()

    def go_on(self) -> None:
        while True:
            with self._lock:
                if self._frames.send():
                    return
            self._frames.wait()

    def begin_reading(self) -> None:
        check_schema(self._schema)

    def read(self) -> tuple[bytes, pa.RecordBatch | None]:
        try:
            message, body = self._next()
        except EOFError:
            raise StopIteration from None
        rows = read_rows(body, self._schema)
        if isinstance(rows, Exception):
            raise rows
        return message, rows

    def done_writing(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)

    def cancel(self) -> None:
        with self._lock:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError as error:
                _log.debug("cancel: %s", error)

    def close(self) -> None:
        with self._lock:
            self._socket.close()


def token_text(url: str) -> str:
    """What a role says whose token is not the hub's."""
    return f"the hub at {url} refuses the token; set PIPELINERL_TOKEN to the one the hub has"


def absent_text(url: str, reason: str) -> str:
    """What the caller reads when nobody is there."""
    return f"no hub at {url}: {reason}. Start the hub, or look at hub.json"


def lost_text(url: str, reason: str) -> str:
    """What the caller reads when a connection is gone."""
    return f"the connection to the hub at {url} is lost: {reason}. Look at hub.json for a newer hub, then reconnect"


def reason_of(error: BaseException) -> str:
    """Why there is no exchange, or no more; one line."""
    if "certificate verify failed" in str(error):
        return "it shows another certificate than the one in hub.json"
    return " ".join(str(error).split())[:200] or type(error).__name__
