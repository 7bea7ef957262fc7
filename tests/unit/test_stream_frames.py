"""Frames over a real pair of sockets: whatever is cut wherever, and whatever is no frame at all."""

import socket
import struct
import threading

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipelinerl_core.errors import SchemaMismatch
from pipelinerl_core.stream.codec import encode_rollouts
from pipelinerl_core.stream.frames import FrameReader, FrameWriter, TooLarge, is_own_user, read_rows
from pipelinerl_core.testing.rollout_rows import build_group

LIMIT = 1 << 21  # bytes, of a message and of rows
SIZES = (0, 1, 65535, 65536, 65537, 1 << 20)  # the inbox holds 65,536
ROWS = encode_rollouts("run", build_group(0, group_id=1, size=2))
FAST = settings(
    deadline=None,
    max_examples=60,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


class Pair:
    """A writer, and a reader at the other end."""

    def __init__(self, *, max_message_bytes: int = LIMIT, max_row_bytes: int = LIMIT) -> None:
        self.near, self.far = socket.socketpair()
        self.far.settimeout(60)
        self.writer = FrameWriter(self.near)
        self.reader = FrameReader(self.far, max_message_bytes=max_message_bytes, max_row_bytes=max_row_bytes)

    def send_all(self, data: bytes, *, ends: bool = False) -> threading.Thread:
        """Bytes on their way, on a thread of their own; to be joined."""

        def send() -> None:
            self.near.sendall(data)
            if ends:
                self.near.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=send)
        thread.start()
        return thread

    def close(self) -> None:
        self.near.close()
        self.far.close()


@pytest.fixture
def pair():
    made = Pair()
    yield made
    made.close()


def frame(message: bytes, rows: bytes = b"") -> bytes:
    """As docs/protocol.md says it, by hand."""
    return struct.pack("<II", len(message), len(rows)) + message + rows


def told(found) -> tuple[bytes, bytes]:
    """A frame as bytes; no rows are b""."""
    message, rows = found
    return message, rows.to_pybytes() if rows is not None else b""


def content(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


def buffer(rows: bytes) -> pa.Buffer | None:
    return pa.py_buffer(rows) if rows else None


# ---- what is sent comes out ----


@pytest.mark.parametrize("row_bytes", SIZES)
@pytest.mark.parametrize("message_bytes", SIZES)
def test_frames_of_all_sizes(pair, message_bytes, row_bytes):
    sent = [(content(message_bytes), content(row_bytes)), (b"next", b"rows")]
    thread = pair.send_all(b"".join(frame(*one) for one in sent))
    assert [told(pair.reader.next()) for _ in sent] == sent
    thread.join(60)


def test_the_writer_writes_what_the_protocol_says(pair):
    pair.writer.add(b"{}", None)
    pair.writer.add(b"[1]", pa.py_buffer(b"rows"))
    assert pair.writer.num_waiting_bytes == 8 + 2 + 8 + 3 + 4
    assert not pair.writer.is_empty
    assert pair.writer.send()
    assert (pair.writer.is_empty, pair.writer.num_waiting_bytes) == (True, 0)
    expected = b"\x02\0\0\0\0\0\0\0{}" + b"\x03\0\0\0\x04\0\0\0[1]rows"
    assert pair.far.recv(100) == expected


def test_rows_of_no_bytes_are_no_rows(pair):
    pair.writer.add(b"{}", pa.py_buffer(b""))
    pair.writer.add(b"next", None)
    assert pair.writer.send()
    assert [told(pair.reader.next()), told(pair.reader.next())] == [(b"{}", b""), (b"next", b"")]


def test_many_frames_in_one_read(pair):
    sent = [(b"%d" % number, content(number)) for number in range(100)]
    pair.near.sendall(b"".join(frame(*one) for one in sent))
    pair.far.setblocking(False)
    assert [told(pair.reader.next()) for _ in sent] == sent
    assert pair.reader.next() is None


def test_more_parts_than_one_system_call_takes(pair):
    sent = [(b"%d" % number, b"rows") for number in range(2000)]
    for message, rows in sent:
        pair.writer.add(message, buffer(rows))
    assert pair.writer.send()
    assert [told(pair.reader.next()) for _ in sent] == sent


def test_a_frame_that_arrives_byte_by_byte(pair):
    pair.far.setblocking(False)
    data = frame(b'{"kind": "sync"}', b"some rows")
    for place in range(len(data) - 1):
        pair.near.sendall(data[place : place + 1])
        assert pair.reader.next() is None
    pair.near.sendall(data[-1:])
    assert told(pair.reader.next()) == (b'{"kind": "sync"}', b"some rows")
    assert pair.reader.next() is None


def test_rows_are_read_once_a_turn_when_the_reader_does_not_wait(pair):
    """Else a peer that sends as fast as it is read holds up all others for as long as its rows last."""
    pair.far.setblocking(False)
    rows = content(1 << 20)
    thread = pair.send_all(frame(b"{}", rows))
    num_turns = 1
    while (found := pair.reader.next()) is None:
        num_turns += 1
    thread.join(60)
    assert told(found) == (b"{}", rows)
    assert num_turns >= 4  # the inbox holds 64 KiB of them, and a read of the rest brings 256 KiB at most


def test_the_inbox_is_small_again_after_a_large_message(pair):
    thread = pair.send_all(frame(content(1 << 20)) + frame(b"next"))
    assert told(pair.reader.next()) == (content(1 << 20), b"")
    assert len(pair.reader._inbox) > 1 << 20
    assert told(pair.reader.next()) == (b"next", b"")
    thread.join(60)
    pair.near.sendall(frame(b"last"))
    assert told(pair.reader.next()) == (b"last", b"")
    assert len(pair.reader._inbox) == 1 << 16


@st.composite
def cut_frames(draw) -> tuple[list[tuple[bytes, bytes]], list[bytes]]:
    """Frames, and their bytes in pieces."""
    sizes = st.integers(0, 300) | st.sampled_from([65527, 65528, 65529, 65536, 100_000])
    frames = [(content(draw(sizes)), content(draw(sizes))) for _ in range(draw(st.integers(1, 5)))]
    data = b"".join(frame(*one) for one in frames)
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=8)))
    return frames, [data[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


@FAST
@given(cut_frames())
def test_any_frames_cut_anywhere_come_out_as_they_went_in(case):
    frames, pieces = case
    pair, found = Pair(), []
    pair.far.setblocking(False)
    for piece in pieces:
        rest = memoryview(piece)
        while True:
            if rest:
                rest = rest[pair.near.send(rest[:50_000]) :]
            while (one := pair.reader.next()) is not None:
                found.append(told(one))
            if not rest:
                break
    while len(found) < len(frames):  # rows are read once a turn
        one = pair.reader.next()
        found += [told(one)] if one is not None else []
    pair.close()
    assert found == frames


# ---- a socket that is full ----


def test_a_writer_whose_socket_is_full_goes_on_in_order(pair):
    sent = [(b"%d" % number, content(50_000 + number)) for number in range(200)]
    for message, rows in sent:
        pair.writer.add(message, buffer(rows))
    assert not pair.writer.send()
    before = pair.writer.num_waiting_bytes
    assert 0 < before < sum(len(frame(*one)) for one in sent)
    assert not pair.writer.send()
    assert pair.writer.num_waiting_bytes == before
    found = []
    pair.far.setblocking(False)
    while len(found) < len(sent):
        one = pair.reader.next()
        if one is not None:
            found.append(told(one))
        pair.writer.send()
    assert found == sent
    assert pair.writer.is_empty


def test_a_writer_waits_until_the_socket_takes_more(pair):
    pair.writer.add(b"", pa.py_buffer(content(1 << 24)))
    assert not pair.writer.send()
    thread = threading.Thread(target=pair.reader.next)
    thread.start()
    while not pair.writer.send():
        pair.writer.wait()
    thread.join(60)
    assert pair.writer.num_waiting_bytes == 0


def test_a_writer_whose_reader_has_gone(pair):
    pair.far.close()
    pair.writer.add(b"{}", None)
    with pytest.raises(OSError, match="Broken pipe"):
        pair.writer.send()


# ---- what is beyond the limits, or no frame ----


def test_a_message_beyond_the_limit_ends_the_reading_and_names_both_numbers():
    pair = Pair(max_message_bytes=1000)
    pair.near.sendall(struct.pack("<II", 1001, 0))
    with pytest.raises(EOFError, match=r"^a message of 1001 bytes, the limit is 1000$"):
        pair.reader.next()
    pair.close()


def test_a_message_and_rows_of_exactly_the_limit():
    pair = Pair(max_message_bytes=1000, max_row_bytes=2000)
    pair.near.sendall(frame(content(1000), content(2000)))
    assert told(pair.reader.next()) == (content(1000), content(2000))
    pair.close()


@pytest.mark.parametrize("row_bytes", [2001, 65536 + 2001, 1 << 20])
@pytest.mark.parametrize("is_blocking", [True, False])
def test_rows_beyond_the_limit_are_thrown_away_and_the_next_frame_is_intact(row_bytes, is_blocking):
    pair = Pair(max_row_bytes=2000)
    before, inbox = pa.total_allocated_bytes(), len(pair.reader._inbox)
    thread = pair.send_all(frame(b"big", content(row_bytes)) + frame(b"next", b"rows"))
    if not is_blocking:
        pair.far.setblocking(False)
    while (found := pair.reader.next()) is None:
        pass
    message, rows = found
    assert (message, rows.num_bytes) == (b"big", row_bytes)
    assert isinstance(rows, TooLarge)
    assert (pa.total_allocated_bytes(), len(pair.reader._inbox)) == (before, inbox)
    while (found := pair.reader.next()) is None:
        pass
    assert told(found) == (b"next", b"rows")
    thread.join(60)
    pair.close()


def test_four_gigabytes_of_rows_are_promised_and_nothing_is_allocated():
    pair = Pair()
    before = pa.total_allocated_bytes()
    pair.far.setblocking(False)
    pair.near.sendall(struct.pack("<II", 2, 0xFFFFFFFF) + b"{}" + bytes(1000))
    assert pair.reader.next() is None
    assert pa.total_allocated_bytes() == before
    pair.close()


@pytest.mark.parametrize("num_bytes", [0, 3, 8, 11, 15])
def test_an_end_anywhere_is_an_end(pair, num_bytes):
    pair.near.sendall(frame(b"message", b"rows")[:num_bytes])
    pair.near.close()
    with pytest.raises(EOFError, match="the other side has gone"):
        pair.reader.next()


@FAST
@given(st.binary(max_size=400))
def test_random_bytes_are_frames_or_an_end(data):
    pair = Pair(max_message_bytes=1000, max_row_bytes=1000)
    pair.near.sendall(data)
    pair.near.close()
    with pytest.raises(EOFError):  # noqa: PT012 - however many frames there are before the end
        while True:
            _, rows = pair.reader.next()
            read_rows(rows, ROWS.schema)
    pair.close()


# ---- rows ----


def ipc_message(batch: pa.RecordBatch, **options) -> pa.Buffer:
    """Its rows as one message of a stream with these IpcWriteOptions."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_batch(batch)
    reader = pa.ipc.MessageReader.open_stream(sink.getvalue())
    assert reader.read_next_message().type == "schema"
    return reader.read_next_message().serialize()


def test_rows_are_read_without_a_copy():
    before = pa.total_allocated_bytes()
    body = pa.py_buffer(ROWS.serialize().to_pybytes())
    rows = read_rows(body, ROWS.schema)
    assert rows.equals(ROWS)
    assert pa.total_allocated_bytes() == before
    assert read_rows(None, ROWS.schema) is None
    empty = ROWS.slice(0, 0)
    assert read_rows(empty.serialize(), ROWS.schema).num_rows == 0


def test_rows_that_were_thrown_away_are_named_with_their_size():
    found = read_rows(TooLarge(12345), ROWS.schema)
    assert isinstance(found, SchemaMismatch)
    assert "12345 bytes of rows in one message" in str(found)


@FAST
@given(st.binary(max_size=400) | st.binary(max_size=200).map(lambda tail: struct.pack("<iI", -1, len(tail)) + tail))
def test_random_bytes_are_no_rows(data):
    assert isinstance(read_rows(pa.py_buffer(data), ROWS.schema), SchemaMismatch)


@settings(FAST, max_examples=400)
@given(st.data())
def test_rows_with_flipped_bits_are_rows_or_a_mismatch(data):
    """What is in them is for the door (test_fuzz_door.py)."""
    options = data.draw(st.sampled_from([{}, {"compression": "zstd"}, {"compression": "lz4"}]))
    body = bytearray(ipc_message(ROWS, **options).to_pybytes())
    head = struct.unpack_from("<I", body, 4)[0] + 8  # Arrow's own words, then the values
    places = st.integers(0, head - 1) | st.integers(0, len(body) - 1)
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(places)] ^= 1 << data.draw(st.integers(0, 7))
    before = pa.total_allocated_bytes()
    found = read_rows(pa.py_buffer(bytes(body)), ROWS.schema)
    assert isinstance(found, pa.RecordBatch | SchemaMismatch)
    assert pa.total_allocated_bytes() - before < 1 << 20


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_a_compressed_batch_is_refused_before_it_grows(codec):
    """64 MiB of zeros: 2 KiB on the wire with zstd. As many bytes as are let in would be terabytes."""
    zeros = pa.record_batch({"x": np.zeros(1 << 23, np.int64)})
    body = ipc_message(zeros, compression=codec)
    assert body.size < zeros.nbytes / 200
    pool = pa.default_memory_pool()
    del zeros
    before = pool.bytes_allocated()
    found = read_rows(body, pa.schema({"x": pa.int64()}))
    assert isinstance(found, SchemaMismatch)
    assert "compressed" in str(found)
    assert pool.bytes_allocated() == before


def test_a_batch_of_a_format_that_may_hide_its_codec_is_refused():
    """Arrow 0.17 named it in free metadata of V4, and Arrow still reads that."""
    found = read_rows(ipc_message(ROWS, metadata_version=pa.ipc.MetadataVersion.V4), ROWS.schema)
    assert isinstance(found, SchemaMismatch)
    assert read_rows(ipc_message(ROWS), ROWS.schema).equals(ROWS)


def test_a_message_that_is_no_batch(pair):
    found = read_rows(ROWS.schema.serialize(), ROWS.schema)
    assert isinstance(found, SchemaMismatch)
    assert "got schema" in str(found)


def test_the_other_end_of_a_pair_is_this_user(pair):
    assert is_own_user(pair.near)
