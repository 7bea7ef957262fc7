"""Messages on a socket between processes of one host: two lengths, the message as JSON, its rows as Arrow IPC.

Nothing is trusted: lengths are looked at before anything is allocated, rows are read as Arrow reads any foreign
bytes, and what is in them is for the door (stream/checks.py).
"""

import os
import select
import socket
import struct
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from pipelinerl_core.errors import SchemaMismatch

ABSTRACT = "unix-abstract:"
"""How URLs of such sockets begin: their names lie in no directory (Linux), so nothing is left of a killed hub."""

_HEADER = struct.Struct("<II")  # bytes of the message, bytes of its rows
_INBOX_BYTES = 1 << 16
_MAX_PARTS = 512  # of one sendmsg; Linux takes 1,024
_TURN_BYTES = 1 << 18  # of rows in one read, which else lasts as long as the other side keeps up with it
_SEND_BYTES = 1 << 20  # as much as travels in one write (stream/bundles.py): it leaves in one call
_POLL_SECONDS = 1.0

_OFFSET, _SIGNED_OFFSET, _VTABLE_ENTRY = struct.Struct("<I"), struct.Struct("<i"), struct.Struct("<H")
_HEADER_FIELD = 2  # of Message: version, header_type, header, ...
_COMPRESSION_FIELD = 3  # of RecordBatch: length, nodes, buffers, compression, ...

Frame = tuple[bytes, "pa.Buffer | TooLarge | None"]
"""A message, and its rows, still as bytes."""


class TooLarge:
    """In place of rows beyond the limit, which have been read and thrown away."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes


class FrameReader:
    """Takes frames from a socket, blocking or not. Raises EOFError at its end or for a message beyond the limit."""

    def __init__(self, connection: socket.socket, *, max_message_bytes: int, max_row_bytes: int) -> None:
        self.max_message_bytes, self.max_row_bytes = max_message_bytes, max_row_bytes
        self._socket = connection
        self._inbox = memoryview(bytearray(_INBOX_BYTES))
        self._start = self._end = 0
        self._message = b""
        self._rows: Any = None
        self._view = memoryview(b"")
        self._remaining = 0
        """Bytes of rows that are still to come."""

    def next(self) -> Frame | None:
        """The next frame; None when a socket that does not block has no more of it now, or much more."""
        while True:
            if self._rows is not None:
                if not self._fill_rows():  # once a turn, so that nobody's rows keep others waiting
                    return None
                rows, self._rows = self._rows, None
                return self._message, rows
            if self._begin_frame():
                if self._rows is None:
                    return self._message, None
                continue
            if not self._fill_inbox():
                return None

    def _begin_frame(self) -> bool:
        """Whether a whole message was in the inbox; its rows may have begun there too."""
        if self._end - self._start < _HEADER.size:
            return False
        message_bytes, row_bytes = _HEADER.unpack_from(self._inbox, self._start)
        if message_bytes > self.max_message_bytes:
            raise EOFError(f"a message of {message_bytes} bytes, the limit is {self.max_message_bytes}")
        begin = self._start + _HEADER.size
        if self._end - begin < message_bytes:
            self._make_room(_HEADER.size + message_bytes)
            return False
        self._start = begin + message_bytes
        self._message = self._inbox[begin : self._start].tobytes()
        if row_bytes:
            self._begin_rows(row_bytes)
        return True

    def _begin_rows(self, row_bytes: int) -> None:
        at_hand = self._inbox[self._start : min(self._end, self._start + row_bytes)]
        self._start += len(at_hand)
        self._remaining = row_bytes - len(at_hand)
        if row_bytes > self.max_row_bytes:
            self._rows, self._view = TooLarge(row_bytes), memoryview(b"")
            return
        self._rows = pa.allocate_buffer(row_bytes)
        self._view = memoryview(self._rows).cast("B")
        self._view[: len(at_hand)] = at_hand

    def _fill_rows(self) -> bool:
        while self._remaining:
            if len(self._view):
                target = self._view[-self._remaining :][:_TURN_BYTES]
            else:  # thrown away; the inbox is empty
                target = self._inbox[: min(self._remaining, len(self._inbox))]
            num = self._receive(target)
            self._remaining -= num
            if self._remaining and self._socket.gettimeout() == 0.0:
                return False
        self._view = memoryview(b"")
        return True

    def _make_room(self, num_bytes: int) -> None:
        if num_bytes > len(self._inbox):
            grown = memoryview(bytearray(num_bytes + _INBOX_BYTES))
            grown[: self._end] = self._inbox[: self._end]
            self._inbox = grown

    def _fill_inbox(self) -> bool:
        if self._start == self._end and len(self._inbox) > _INBOX_BYTES:  # a large message is rare
            self._inbox = memoryview(bytearray(_INBOX_BYTES))
            self._start = self._end = 0
        elif self._start:
            rest = self._inbox[self._start : self._end].tobytes()
            self._inbox[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        num = self._receive(self._inbox[self._end :])
        self._end += num
        return num > 0

    def _receive(self, target: memoryview) -> int:
        """Bytes received; 0 when there are none now."""
        try:
            num = self._socket.recv_into(target)
        except BlockingIOError:
            return 0
        if not num:
            raise EOFError("the other side has gone")
        return num


class FrameWriter:
    """Sends frames on a socket; what the socket does not take at once stays here. Not thread-safe."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)  # less where the system says so
        self._socket = connection
        self._parts: list[memoryview] = []
        self.num_waiting_bytes = 0
        """What the socket has not taken."""

    @property
    def is_empty(self) -> bool:
        """Whether the socket has taken everything."""
        return not self._parts

    def add(self, message: bytes, body: pa.Buffer | None) -> None:
        """One more frame to be sent."""
        row_bytes = body.size if body is not None else 0
        self._parts.append(memoryview(_HEADER.pack(len(message), row_bytes) + message))
        if body is not None:
            self._parts.append(memoryview(body).cast("B"))
        self.num_waiting_bytes += _HEADER.size + len(message) + row_bytes

    def send(self) -> bool:
        """Whether everything has left; never waits. Raises OSError when the other side has gone."""
        while self._parts:
            try:
                num = self._socket.sendmsg(self._parts[:_MAX_PARTS], (), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            self._parts = _without(self._parts, num)
            self.num_waiting_bytes -= num
        return True

    def wait(self) -> None:
        """Until the socket may take more, a second at most."""
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        poll.poll(_POLL_SECONDS * 1000)


def _without(parts: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of them when the first bytes have gone."""
    for index, part in enumerate(parts):
        if num_bytes < len(part):
            return [part[num_bytes:], *parts[index + 1 :]]
        num_bytes -= len(part)
    return []


def read_rows(body: "pa.Buffer | TooLarge | None", schema: pa.Schema) -> pa.RecordBatch | SchemaMismatch | None:
    """The record batch in the rows of a frame, without a copy, or why there is none."""
    if body is None:
        return None
    if isinstance(body, TooLarge):
        return SchemaMismatch(f"{body.num_bytes} bytes of rows in one message: more than a message may have")
    try:
        message = pa.ipc.read_message(body)
        if _may_be_compressed(message):
            return SchemaMismatch("rows that are compressed, or of an Arrow before 1.0: rows are sent as they are")
        return pa.ipc.read_record_batch(message, schema)
    except (pa.ArrowException, OSError, EOFError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        return SchemaMismatch(f"rows that are no Arrow record batch: {lines[0]}")


def _may_be_compressed(message: pa.ipc.Message) -> bool:
    """Whether Arrow would decompress its body; 32 KiB of zstd become a GiB, and nothing of Arrow's bounds them.

    Of the FlatBuffers table, which Arrow has verified: https://github.com/apache/arrow/blob/main/format/Message.fbs.
    Before format V5 (Arrow 1.0) the codec was named in free metadata, so none of those are taken.
    """
    if message.metadata_version != pa.ipc.MetadataVersion.V5:
        return True
    if message.type != "record batch":
        return False  # read_record_batch says what it is
    table = memoryview(message.metadata)
    (root,) = _OFFSET.unpack_from(table, 0)
    header = _field_at(table, root, _HEADER_FIELD)
    if not header:
        return True
    batch = header + _OFFSET.unpack_from(table, header)[0]
    return _field_at(table, batch, _COMPRESSION_FIELD) != 0


def _field_at(table: memoryview, position: int, field: int) -> int:
    """Where a field of the FlatBuffers table at `position` lies; 0 if it has none."""
    vtable = position - _SIGNED_OFFSET.unpack_from(table, position)[0]
    entry = 2 * _VTABLE_ENTRY.size + field * _VTABLE_ENTRY.size
    if entry >= _VTABLE_ENTRY.unpack_from(table, vtable)[0]:
        return 0
    (offset,) = _VTABLE_ENTRY.unpack_from(table, vtable + entry)
    return position + offset if offset else 0


def abstract_address(url: str) -> str:
    """The address of the socket that a URL names."""
    return "\0" + url.removeprefix(ABSTRACT)


def is_own_user(connection: socket.socket) -> bool:
    """Whether the process at the other end runs as this process's user: the kernel says so."""
    size = struct.calcsize("iII")
    _, uid, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(uid == os.geteuid())
