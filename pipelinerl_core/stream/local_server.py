"""The hub's side of the channel to processes of its own host: a Unix socket, and one thread for all actors.

What Flight costs an actor's group on the same host is mostly gRPC, and a thread per actor that hands the interpreter
on. Here one thread reads what has come, has it answered, and writes what sockets take; what they do not take waits in
memory, and a peer that leaves too much there is cut off. A trainer's requests wait and bring many rows, so it has a
thread of its own.

The socket has an abstract name (Linux), so no file is left of a hub that was killed. The kernel says whose process is
at the other end: only this user's is let in, and only with the token of the run.
"""

import errno
import hmac
import json
import logging
import secrets
import select
import socket
import sys
import threading
import time

import pyarrow as pa

from pipelinerl_core.messages import Introduction
from pipelinerl_core.stream.desk import Desk, Peer
from pipelinerl_core.stream.door import MAX_MESSAGE_BYTES, introduction
from pipelinerl_core.stream.exchanges import REFUSED_TOKEN, WIRE_ERRORS
from pipelinerl_core.stream.frames import (
    ABSTRACT,
    Frame,
    FrameReader,
    FrameWriter,
    abstract_address,
    is_own_user,
    read_rows,
)
from pipelinerl_core.stream.schema import ROLLOUT_SCHEMA

HELLO_SECONDS = 10.0
"""Longest time from a connection to its first message."""
_MAX_HELLO_BYTES = 1 << 16
_SLACK_BYTES = 1 << 16  # of Arrow's own words about a record batch; its values are counted at the door
_MAX_WAITING_BYTES = 4 << 20  # that an actor has not read; answers to actors are small
_BACKLOG = 1024
_FRAMES_PER_TURN = 8  # of one peer, before the others have theirs
_SWEEP_SECONDS = 1.0
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

_log = logging.getLogger(__name__)


class _Writer:
    """PeerWriter of one socket. `write` returns at once for an actor; for a trainer when the socket has taken all."""

    def __init__(self, connection: socket.socket, loop: "LocalServer") -> None:
        self._socket = connection
        self._frames = FrameWriter(connection)
        self._loop = loop
        self._lock = threading.Lock()
        self.waits = False

    def write_metadata(self, metadata: bytes) -> None:
        self.write(metadata, None)

    def write_with_metadata(self, rows: pa.RecordBatch, metadata: bytes) -> None:
        self.write(metadata, rows.serialize())

    def write(self, message: bytes, body: pa.Buffer | None) -> None:
        with self._lock:
            if self._frames.num_waiting_bytes > _MAX_WAITING_BYTES:
                self._socket.shutdown(socket.SHUT_RDWR)  # its reader ends, and with it the peer
                raise OSError("it does not read what it is told")
            was_empty = self._frames.is_empty
            self._frames.add(message, body)
            if self.waits:
                while not self._frames.send():
                    self._frames.wait()
            elif was_empty and not self._frames.send():
                self._loop.watch(self._socket, writes=True)

    def go_on(self) -> None:
        """The socket takes more."""
        with self._lock:
            if self._frames.send():
                self._loop.watch(self._socket, writes=False)


class _Caller:
    """One connection."""

    def __init__(self, connection: socket.socket, max_row_bytes: int, loop: "LocalServer") -> None:
        self.socket = connection
        self.reader = FrameReader(connection, max_message_bytes=_MAX_HELLO_BYTES, max_row_bytes=_MAX_HELLO_BYTES)
        self.writer = _Writer(connection, loop)
        self.came_at = time.monotonic()
        self.peer: Peer | None = None
        self.schema: pa.Schema = ROLLOUT_SCHEMA
        self._max_row_bytes = max_row_bytes

    def admit(self, peer: Peer, schema: pa.Schema) -> None:
        """It is let in."""
        self.peer, self.schema = peer, schema
        self.reader.max_message_bytes = MAX_MESSAGE_BYTES
        self.reader.max_row_bytes = self._max_row_bytes + _SLACK_BYTES


class LocalServer:
    """Serves peers of this host for a Desk, from its construction on. Closed by `shutdown`."""

    def __init__(self, desk: Desk, token: str) -> None:
        self.url = f"{ABSTRACT}pipelinerl-{secrets.token_hex(16)}"
        self._desk = desk
        self._token = token.encode()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(abstract_address(self.url))
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._callers: dict[int, _Caller] = {}
        self._unread: set[int] = set()
        """Who has more frames in its inbox, of which the socket knows nothing."""
        self._here = threading.Condition()
        self._peers: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="local-hub", daemon=True)
        self._thread.start()

    @staticmethod
    def is_supported() -> bool:
        """Whether the system has such sockets."""
        return sys.platform == "linux"

    def shutdown(self, seconds: float) -> bool:
        """Whether all peers have left within the time; nobody else is let in."""
        with self._here:
            return self._here.wait_for(lambda: not self._peers, seconds)

    def watch(self, connection: socket.socket, *, writes: bool) -> None:
        """Tell the thread when this socket takes more, or no longer."""
        self._epoll.modify(connection, select.EPOLLIN | (select.EPOLLOUT if writes else 0))

    def _run(self) -> None:
        swept_at = time.monotonic()
        while True:
            events = self._epoll.poll(0 if self._unread else _SWEEP_SECONDS)
            turns = {**dict.fromkeys(self._unread, select.EPOLLIN), **dict(events)}  # one each, whoever sends most
            self._unread.clear()
            for number, kinds in turns.items():
                if number == self._listener.fileno():
                    self._accept()
                else:
                    self._attend(number, kinds)
            if time.monotonic() - swept_at > _SWEEP_SECONDS:
                swept_at = time.monotonic()
                self._sweep(swept_at)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _EXHAUSTED:  # the caller stays where it is: the listener would be ready without end
                _log.warning("nobody is let in for %g s: %s", _SWEEP_SECONDS, error)
                self._epoll.modify(self._listener, 0)
            else:  # it has gone already
                _log.debug("nobody to accept: %s", error)
            return
        try:
            if not is_own_user(connection):
                _log.warning("a process of another user was turned away")
                connection.close()
                return
            connection.setblocking(False)
            caller = _Caller(connection, self._desk.max_row_bytes, self)
            self._epoll.register(connection, select.EPOLLIN)
        except (OSError, MemoryError) as error:
            _log.warning("a process of this host was not let in: %s", error)
            connection.close()
            return
        self._callers[connection.fileno()] = caller

    def _sweep(self, now: float) -> None:
        self._epoll.modify(self._listener, select.EPOLLIN)
        late = [
            number
            for number, caller in self._callers.items()
            if caller.peer is None and now - caller.came_at > HELLO_SECONDS
        ]
        for number in late:
            self._leave(number, "it did not say who it is")

    def _attend(self, number: int, kinds: int) -> None:
        caller = self._callers.get(number)
        if caller is None:  # it left in this turn
            return
        try:
            if kinds & select.EPOLLOUT:
                caller.writer.go_on()
            for _ in range(_FRAMES_PER_TURN):
                frame = caller.reader.next()
                if frame is None:
                    return
                if caller.peer is not None:
                    self._answer(caller.peer, caller, frame)
                elif not self._greet(number, caller, frame):
                    return
            self._unread.add(number)
        except (EOFError, OSError) as error:
            self._leave(number, str(error))
        except Exception as error:  # noqa: BLE001 - one peer must not end the thread of all
            _log.exception("%s: exchange failed", caller.peer.name if caller.peer else "a caller")
            self._leave(number, type(error).__name__)

    def _answer(self, peer: Peer, caller: _Caller, frame: Frame) -> None:
        message, body = frame
        self._desk.answer(peer, message, read_rows(body, caller.schema))

    def _greet(self, number: int, caller: _Caller, frame: Frame) -> bool:
        """Whether the thread goes on with this caller."""
        found = self._introduced(frame)
        refusal = found if isinstance(found, str) else ""
        caller.writer.write(json.dumps({"refusal": refusal}).encode(), ROLLOUT_SCHEMA.serialize())
        if isinstance(found, str):
            self._leave(number, refusal)
            return False
        who, schema = found
        if who.role == "actor":
            self._come(who, schema, caller)
            return True
        self._epoll.unregister(caller.socket)
        del self._callers[number]
        caller.socket.setblocking(True)
        caller.writer.waits = True
        thread = threading.Thread(target=self._serve, args=(who, schema, caller), name="local-trainer", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system has none left
            _log.error("%s was not let in: %s", who, error)
            caller.socket.close()
        return False

    def _introduced(self, frame: Frame) -> tuple[Introduction, pa.Schema] | str:
        """Who a caller is and the schema of its rows, or why it is not let in."""
        message, body = frame
        try:
            hello = json.loads(message)
            if not hmac.compare_digest(str(hello.pop("token")).encode(), self._token):
                return REFUSED_TOKEN
            who = introduction(json.dumps(hello).encode())
            if not isinstance(body, pa.Buffer):
                return "a hello comes with the schema of the rows"
            schema = pa.ipc.read_schema(body)
        except (ValueError, LookupError, AttributeError, TypeError, RecursionError, *WIRE_ERRORS):
            return "no hello of this protocol"
        return (who, schema) if self._desk.is_open else "the hub is starting or shutting down"

    def _come(self, who: Introduction, schema: pa.Schema, caller: _Caller) -> Peer:
        peer = self._desk.welcome(who, caller.writer, waits=caller.writer.waits)
        caller.admit(peer, schema)
        with self._here:
            self._peers.add(peer.name)
        return peer

    def _leave(self, number: int, reason: str) -> None:
        caller = self._callers.pop(number)
        self._part(caller, reason)
        self._epoll.unregister(caller.socket)
        caller.socket.close()

    def _part(self, caller: _Caller, reason: str) -> None:
        """Nothing is written to it from now on. Never raises."""
        if caller.peer is None:
            _log.info("a process of this host was not let in: %s", reason)
            return
        try:
            self._desk.part(caller.peer)
        except Exception:  # noqa: BLE001 - one peer must not end the thread of all
            _log.exception("%s: its going failed", caller.peer.name)
        _log.info("%s has gone: %s", caller.peer.name, reason)
        with self._here:
            self._peers.discard(caller.peer.name)
            self._here.notify_all()

    def _serve(self, who: Introduction, schema: pa.Schema, caller: _Caller) -> None:
        """A trainer, from its coming to its going."""
        reason = ""
        try:
            peer = self._come(who, schema, caller)
            while (frame := caller.reader.next()) is not None:
                self._answer(peer, caller, frame)
        except (EOFError, OSError) as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001 - told, and the peer is parted from
            _log.exception("%s: exchange failed", who)
            reason = type(error).__name__
        self._part(caller, reason)
        caller.socket.close()
