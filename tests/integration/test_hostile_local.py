"""Processes of the hub's own host that mean harm, or are broken, on its Unix socket; all others are served as before.

The same of Arrow Flight, with a hub process and its ledger: test_hostile_peers.py.
"""

import errno
import json
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pyarrow as pa
import pytest

from pipelinerl_core.messages import Committed, Group, Groups, Register, Reserve, Rows, Sealed, encode
from pipelinerl_core.stream import local_server
from pipelinerl_core.stream.client import HubClient
from pipelinerl_core.stream.codec import encode_rollouts
from pipelinerl_core.stream.frames import FrameReader, abstract_address
from pipelinerl_core.stream.schema import ROLLOUT_SCHEMA
from pipelinerl_core.stream.server import HubServer
from pipelinerl_core.testing.rollout_rows import build_group, group_ref
from pipelinerl_core.testing.stream_hub import QueueHub
from tests.integration.pipeline import wait_for
from tests.integration.test_stream_channel import SYNC, TOKEN, group_message, send_group

MAX_ROW_BYTES = 1 << 20
SECONDS = 60.0  # of every wait; only so that nothing hangs


def frame(message: bytes, rows: bytes = b"") -> bytes:
    return struct.pack("<II", len(message), len(rows)) + message + rows


class Raw:
    """A socket that says what it is told to."""

    def __init__(self, url: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(SECONDS)
        self.socket.connect(abstract_address(url))
        self._reader = FrameReader(self.socket, max_message_bytes=1 << 24, max_row_bytes=1 << 24)

    def say(self, message: bytes, rows: bytes = b"") -> None:
        self.socket.sendall(frame(message, rows))

    def hear(self) -> dict:
        """The hub's next message."""
        message, _ = self._reader.next()
        return json.loads(message)

    def ask(self, message: bytes, rows: bytes = b"") -> dict:
        self.say(message, rows)
        return self.hear()

    def is_cut_off(self) -> bool:
        """Whether nothing more comes before the hub hangs up."""
        try:
            self._reader.next()
        except (EOFError, ConnectionError):
            return True
        return False

    def close(self) -> None:
        self.socket.close()


class World:
    """A hub, and whoever comes to it."""

    def __init__(self) -> None:
        self.service = QueueHub(credit=2)
        self.server = HubServer(
            self.service, host="127.0.0.1", port=0, token=TOKEN, max_row_bytes=MAX_ROW_BYTES, max_tokens_per_row=1000
        )
        self.server.start()
        self._open: list[Raw | HubClient] = []

    def raw(self) -> Raw:
        self._open.append(Raw(self.server.local_url))
        return self._open[-1]

    def admitted(self, role: str = "actor", name: str = "raw", schema: pa.Schema = ROLLOUT_SCHEMA) -> Raw:
        """One that has said a good hello."""
        made = self.raw()
        assert made.ask(hello(role=role, name=name), schema.serialize().to_pybytes()) == {"refusal": ""}
        return made

    def client(self, role="actor", name="honest") -> HubClient:
        made = HubClient(self.server.local_url, token=TOKEN, role=role, name=name)
        self._open.append(made)
        return made

    @property
    def num_here(self) -> int:
        """Connections that the hub holds, let in or not; a trainer's are not among them."""
        return len(self.server._local._callers)

    def close(self) -> None:
        for one in self._open:
            one.close()
        assert self.server.shutdown(SECONDS)


@pytest.fixture
def world():
    made = World()
    yield made
    made.close()


@pytest.fixture
def no_patience(monkeypatch):
    """Who does not say hello at once is late."""
    monkeypatch.setattr(local_server, "HELLO_SECONDS", 0.0)


def hello(**fields) -> bytes:
    return json.dumps({"role": "actor", "name": "raw", "token": TOKEN, **fields}).encode()


SCHEMA = ROLLOUT_SCHEMA.serialize().to_pybytes()
ROLLOUTS = build_group(0, group_id=1, size=2)
ROWS = encode_rollouts("run", ROLLOUTS)
GROUP = Group(id=5, lease_id="1.0.b", ref=group_ref(ROLLOUTS))


def serves(world: World) -> None:
    """A newcomer is let in, its group is taken, and everybody's thread lives."""
    client = world.client(name="newcomer")
    group_id = 1000 + len(world.service.rows)
    assert send_group(client, group_id).note == "new"
    client.close()
    assert world.server._local._thread.is_alive()


# ---- before the hello ----


def test_a_connection_that_says_nothing_is_dropped(world, no_patience):
    silent, half = world.raw(), world.raw()
    half.socket.sendall(b"\x10\0")
    assert silent.is_cut_off()
    assert half.is_cut_off()
    assert (world.num_here, world.service.connections) == (0, [])


def test_nobody_who_was_let_in_is_dropped_for_its_silence(world, no_patience):
    quiet = world.client()
    assert world.raw().is_cut_off()  # the sweep has passed
    assert quiet.request(SYNC).kind == "sync_reply"


GARBAGE = [
    b"", b"{", b"\xff\xfe", b"null", b"1", b'"text"', b"[]", b"[1]", b"{}", b"[" * 60_000, b'{"token": 1}',
    b'{"token": "\\ud800"}', b"9" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("message", GARBAGE, ids=range(len(GARBAGE)))
def test_a_hello_that_is_none_is_refused_and_the_log_shows_no_traceback(world, caplog, message):
    raw = world.raw()
    refusal = raw.ask(message, SCHEMA)["refusal"]
    assert refusal in ("no hello of this protocol", "wrong or missing token")
    assert raw.is_cut_off()
    assert [record for record in caplog.records if record.exc_info] == []
    serves(world)


@pytest.mark.parametrize(
    ("fields", "rows", "says"),
    [
        ({"token": "wrong"}, SCHEMA, "wrong or missing token"),
        ({"token": ""}, SCHEMA, "wrong or missing token"),
        ({"token": TOKEN + "x", "role": "hub"}, SCHEMA, "wrong or missing token"),
        ({"role": "hub"}, SCHEMA, "no hello of this protocol"),
        ({"name": "a/b"}, SCHEMA, "no hello of this protocol"),
        ({"name": ".hidden"}, SCHEMA, "no hello of this protocol"),
        ({"name": "x" * 101}, SCHEMA, "no hello of this protocol"),
        ({"more": 1}, SCHEMA, "no hello of this protocol"),
        ({}, b"", "a hello comes with the schema of the rows"),
        ({}, bytes(100_000), "a hello comes with the schema of the rows"),
        ({}, b"no schema", "no hello of this protocol"),
        ({}, ROWS.serialize().to_pybytes(), "no hello of this protocol"),
    ],
)
def test_a_hello_that_is_refused_is_told_why_and_nothing_else(world, fields, rows, says):
    raw = world.raw()
    assert raw.ask(hello(**fields), rows) == {"refusal": says}
    assert raw.is_cut_off()
    assert world.service.connections == []
    wait_for(lambda: world.num_here == 0, "its going")


def test_what_follows_a_refused_hello_is_not_read(world):
    raw = world.raw()
    raw.socket.sendall(frame(hello(token="wrong"), SCHEMA) + frame(encode(SYNC)))
    assert raw.hear() == {"refusal": "wrong or missing token"}
    assert raw.is_cut_off()
    assert world.service.received == []


def test_a_hello_of_a_megabyte_is_hung_up_on(world):
    raw = world.raw()
    raw.socket.sendall(struct.pack("<II", 1 << 20, 0))
    assert raw.is_cut_off()
    serves(world)


def test_nobody_is_let_in_before_the_start():
    server = HubServer(QueueHub(), host="127.0.0.1", port=0, token=TOKEN)
    raw = Raw(server.local_url)
    assert raw.ask(hello(), SCHEMA) == {"refusal": "the hub is starting or shutting down"}
    assert raw.is_cut_off()
    raw.close()
    server.start()
    raw = Raw(server.local_url)
    assert raw.ask(hello(), SCHEMA) == {"refusal": ""}
    raw.close()
    assert server.shutdown(SECONDS)


def test_a_process_of_another_user_is_turned_away_before_it_says_a_word(world, caplog, monkeypatch):
    if os.geteuid() != 0:  # only root may become another user: then it is the hub that takes itself for one
        monkeypatch.setattr(os, "geteuid", lambda: 65534)
    program = (
        "import os, socket, sys; os.geteuid() or os.setuid(65534);"
        "s = socket.socket(socket.AF_UNIX); s.settimeout(60);"
        "s.connect('\\0' + sys.argv[1]); print(len(s.recv(100)))"
    )
    name = abstract_address(world.server.local_url)[1:]
    done = subprocess.run([sys.executable, "-c", program, name], capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
    assert "another user" in caplog.text
    assert (world.num_here, world.service.connections) == (0, [])


# ---- after a good hello ----


@pytest.mark.parametrize("message", [*GARBAGE, b'{"kind": "no such"}', b'{"kind": "goodbye"}'])
def test_messages_of_no_protocol_are_refused_and_the_connection_stays(world, message):
    raw = world.admitted()
    refused = raw.ask(message)
    assert (refused["kind"], refused["code"]) == ("refused", "schema")
    assert raw.ask(encode(SYNC))["kind"] == "sync_reply"


@pytest.mark.parametrize(
    ("role", "messages"),
    [
        ("actor", [Reserve(step=1, epoch=1), Rows(step=1, groups=((1, 0),)),
                   Committed(step=1, epoch=1, manifest=None, groups=()), Register(role="actor", name="x", epoch=1)]),
        ("trainer", [SYNC, GROUP, Sealed(actor="raw", epoch=1, seq=0, groups=((1, 0),)),
                     Register(role="actor", name="raw", epoch=1)]),
    ],
)  # fmt: skip
def test_messages_of_another_role_or_name_are_refused(world, role, messages):
    raw = world.admitted(role)
    for message in messages:
        rows = ROWS.serialize().to_pybytes() if message is GROUP else b""
        refused = raw.ask(encode(message), rows)
        assert (refused["kind"], refused["code"]) == ("refused", "wrong_peer"), message
    assert world.service.received == []
    assert raw.ask(encode(Register(role=role, name="raw", epoch=1)))["kind"] == "registered"


def compressed() -> bytes:
    """128 MiB of zeros in 4 KiB."""
    sink = pa.BufferOutputStream()
    zeros = pa.record_batch({"x": np.zeros(1 << 24, np.int64)})
    with pa.ipc.new_stream(sink, zeros.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_batch(zeros)
    reader = pa.ipc.MessageReader.open_stream(sink.getvalue())
    reader.read_next_message()
    return reader.read_next_message().serialize().to_pybytes()


UNREADABLE = {
    "no Arrow": b"no rows",
    "a schema": SCHEMA,
    "half of them": ROWS.serialize().to_pybytes()[: ROWS.serialize().size // 2],
    "another schema": pa.record_batch({"x": [1, 2]}).serialize().to_pybytes(),
    "compressed": compressed(),
    "too many bytes": bytes(2 * MAX_ROW_BYTES),
    "values beyond the limit": encode_rollouts("run", build_group(0, group_id=1, size=2, num_tokens=66_000))
    .serialize()
    .to_pybytes(),
    "none": b"",
}


@pytest.mark.parametrize("rows", UNREADABLE.values(), ids=UNREADABLE)
def test_rows_that_cannot_be_read_are_refused_and_the_connection_stays(world, rows):
    raw = world.admitted()
    refused = raw.ask(encode(GROUP), rows)
    assert (refused["kind"], refused["code"], refused["re"]) == ("refused", "schema", GROUP.id)
    assert world.service.rows == {}
    assert raw.ask(encode(GROUP), ROWS.serialize().to_pybytes())["note"] == "new"


def test_rows_beyond_the_limit_are_named_by_their_size(world):
    raw = world.admitted()
    refused = raw.ask(encode(GROUP), UNREADABLE["too many bytes"])
    assert f"{2 * MAX_ROW_BYTES} bytes of rows in one message" in refused["detail"]
    refused = raw.ask(encode(GROUP), UNREADABLE["values beyond the limit"])  # so little that they are looked at
    assert f"bytes of rows in one message, the limit is {MAX_ROW_BYTES}" in refused["detail"]


def test_rows_under_the_schema_of_their_hello_are_refused_when_it_is_another(world):
    batch = pa.record_batch({"x": [1, 2]})
    raw = world.admitted(schema=batch.schema)
    refused = raw.ask(encode(GROUP), batch.serialize().to_pybytes())
    assert (refused["code"], refused["re"]) == ("schema", GROUP.id)
    assert raw.ask(encode(SYNC))["kind"] == "sync_reply"


def test_each_group_of_a_message_whose_rows_cannot_be_read_is_refused(world):
    raw = world.admitted()
    groups = tuple(
        Group(id=number, lease_id="x", ref=group_ref(build_group(0, group_id=number, size=2))) for number in (7, 8, 9)
    )
    answers = raw.ask(encode(Groups(id=7, groups=groups)), b"no rows")
    assert answers["kind"] == "answers"
    assert [(one["kind"], one["code"], one["re"]) for one in answers["answers"]] == [
        ("refused", "schema", number) for number in (7, 8, 9)
    ]
    assert world.service.rows == {}


def test_a_message_beyond_its_limit_ends_the_exchange(world):
    raw = world.admitted()
    raw.socket.sendall(struct.pack("<II", (8 << 20) + 1, 0))
    assert raw.is_cut_off()
    assert world.service.wait_for(1, SECONDS)
    serves(world)


# ---- many at once ----


def test_fifty_half_frames_and_silence_keep_nobody_waiting(world):
    whole = frame(encode(GROUP), ROWS.serialize().to_pybytes())
    for number in range(50):
        raw = world.admitted(name=f"half-{number}")
        raw.socket.sendall(whole[: 1 + number * (len(whole) - 2) // 49])
    client = world.client()
    for group_id in range(20):
        assert send_group(client, group_id).note == "new"
    assert world.service.disconnections == []


def test_a_peer_that_floods_has_one_turn_like_everybody(world):
    """Whoever has more frames at hand waits for its next turn, in which it still has one."""
    waiting = []
    handle = world.service.handle
    gate = threading.Event()

    def watched(peer, request, rows):
        assert gate.wait(SECONDS)
        waiting.append(peer)
        yield from handle(peer, request, rows)

    world.service.handle = watched
    flooding, patient = world.admitted(name="flooding"), world.admitted(name="patient")
    data = frame(encode(SYNC))
    num_floods = 400
    flooding.socket.sendall(data * num_floods)  # fits the socket
    patient.socket.sendall(data * 40)
    gate.set()
    for _ in range(num_floods):
        assert flooding.hear()["kind"] == "sync_reply"
    for _ in range(40):
        assert patient.hear()["kind"] == "sync_reply"
    last = max(place for place, peer in enumerate(waiting) if peer.startswith("actor/patient"))
    assert waiting[: last + 1].count("actor/flooding#1") <= 8 * 6 + 8  # 40 are five turns of eight; it had come first


def test_a_peer_that_reads_no_answers_is_cut_off(world, monkeypatch):
    monkeypatch.setattr(local_server, "_MAX_WAITING_BYTES", 1 << 18)
    flooding, client = world.admitted(name="flooding"), world.client()
    data = frame(encode(SYNC)) * 100
    before = psutil.Process().memory_info().rss
    with pytest.raises(ConnectionError):  # noqa: PT012 - whenever the hub has had enough
        for _ in range(100):  # 10,000 messages
            flooding.socket.sendall(data)
        wait_for(lambda: world.service.disconnections != [], "its going")
        flooding.socket.sendall(data)
    assert world.service.wait_for(1, SECONDS)
    assert world.service.disconnections == ["actor/flooding#1"]
    assert psutil.Process().memory_info().rss - before < 64 << 20
    assert client.request(SYNC).kind == "sync_reply"
    serves(world)


def test_a_peer_that_dies_within_a_frame_leaves_once(world):
    whole = frame(encode(GROUP), ROWS.serialize().to_pybytes())
    for number, role in enumerate(("actor", "trainer"), 1):
        for num_bytes in (3, 20, len(whole) - 1):
            raw = world.admitted(role, name=f"dying-{num_bytes}")
            raw.socket.sendall(whole[:num_bytes])
            raw.close()
        assert world.service.wait_for(3 * number, SECONDS)
    serves(world)
    assert world.service.wait_for(7, SECONDS)
    assert sorted(world.service.disconnections) == sorted(world.service.connections)
    assert len(set(world.service.disconnections)) == 7


def test_two_peers_of_one_name_are_two(world):
    first, second = world.admitted(name="twin"), world.admitted(name="twin")
    wait_for(lambda: world.service.connections == ["actor/twin#1", "actor/twin#2"], "their coming")
    first.close()
    assert world.service.wait_for(1, SECONDS)
    assert world.service.disconnections == ["actor/twin#1"]
    assert second.ask(encode(SYNC))["kind"] == "sync_reply"


def test_peers_that_come_and_go_leave_nothing_behind(world):
    process = psutil.Process()
    serves(world)
    wait_for(lambda: world.num_here == 0, "the going of the first")
    before = (process.num_fds(), threading.active_count())
    for number in range(200):
        if number % 4 == 3:
            raw = Raw(world.server.local_url)  # without a word
        else:
            raw = world.admitted(("actor", "trainer")[number % 2], name=f"guest-{number}")
            if number % 4 == 2:
                raw.say(encode(SYNC))  # gone before the answer
        raw.close()
    local, desk = world.server._local, world.server._desk
    wait_for(lambda: (process.num_fds(), threading.active_count()) <= before, "their going")
    wait_for(lambda: (local._callers, local._peers, desk._peers) == ({}, set(), {}), "their going")
    assert sorted(world.service.disconnections) == sorted(world.service.connections)
    assert len(world.service.connections) == 151
    serves(world)


def test_many_at_once(world):
    def work(number: int) -> list[str]:
        client = HubClient(world.server.local_url, token=TOKEN, role="actor", name=f"one-{number}")
        notes = [send_group(client, 100 * number + group).note for group in range(5)]
        client.close()
        return notes

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(work, range(16), timeout=SECONDS)) == [["new"] * 5] * 16
    assert world.service.wait_for(16, SECONDS)


# ---- a hub in need ----


def test_without_descriptors_the_others_are_served_and_who_waits_is_let_in_later(world, monkeypatch, caplog):
    client, refusals = world.client(), []
    accept = world.server._local._accept
    monkeypatch.setattr(world.server._local, "_accept", lambda: (refusals.append(1), accept()))
    late = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    free = os.dup(0)
    os.close(free)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        late.connect(abstract_address(world.server.local_url))
        wait_for(lambda: len(refusals) == 1, "an attempt without descriptors")
        answers = [client.request(SYNC).kind for _ in range(50)]
        num_attempts = len(refusals)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert answers == ["sync_reply"] * 50
    assert num_attempts < 10  # one per sweep, not one per turn
    assert f"[Errno {errno.EMFILE}]" in caplog.text
    late.settimeout(SECONDS)
    late.sendall(frame(hello(), SCHEMA))
    assert late.recv(8)
    late.close()


def test_a_service_that_fails_at_a_going_ends_nobody_else(world, monkeypatch, caplog):
    def fail(peer):
        raise KeyError(peer)

    client = world.client()
    raw = world.admitted()
    with monkeypatch.context() as context:
        context.setattr(world.service, "disconnected", fail)
        raw.close()
        wait_for(lambda: "its going failed" in caplog.text, "its going")
    assert client.request(SYNC).kind == "sync_reply"
    serves(world)


def test_a_service_that_fails_at_a_coming_turns_away_and_serves_on(world, monkeypatch):
    def fail(peer, sink):
        raise KeyError(peer)

    for role in ("actor", "trainer"):
        with monkeypatch.context() as context:
            context.setattr(world.service, "connected", fail)
            assert world.admitted(role).is_cut_off()
    serves(world)


def test_a_trainer_without_a_thread_is_hung_up_on(world, monkeypatch):
    def fail(thread):
        raise RuntimeError("can't start new thread")

    raw = world.raw()
    with monkeypatch.context() as context:
        context.setattr(threading.Thread, "start", fail)
        raw.say(hello(role="trainer"), SCHEMA)
        assert raw.hear() == {"refusal": ""}
        assert raw.is_cut_off()
    serves(world)


def test_a_trainer_that_reads_no_rows_holds_up_itself_alone(world):
    client, trainer = world.client(), world.admitted("trainer")
    rollouts = build_group(0, group_id=3, num_tokens=1000)
    assert client.request(group_message(rollouts), encode_rollouts("run", rollouts)).note == "new"
    asked = [frame(encode(Rows(id=number, step=1, groups=((3, 0),)))) for number in range(100)]
    trainer.socket.sendall(b"".join(asked))  # 66 KB of rows each, of which the socket takes 200 KB
    wait_for(lambda: sum(request.kind == "rows" for request in world.service.received) > 1, "its first rows")
    assert [client.request(SYNC).kind for _ in range(20)] == ["sync_reply"] * 20
    assert not world.server._local.shutdown(0.0)
    assert [trainer.hear()["re"] for _ in range(100)] == list(range(100))
    trainer.close()
    assert world.service.wait_for(1, SECONDS)
    serves(world)


# ---- the end ----


def test_goodbye_is_said_and_a_silent_peer_does_not_hold_up_the_end():
    server = HubServer(QueueHub(), host="127.0.0.1", port=0, token=TOKEN)
    server.start()
    peers = []
    for role in ("actor", "trainer"):
        peers.append(Raw(server.local_url))
        assert peers[-1].ask(hello(role=role), SCHEMA) == {"refusal": ""}
    peers[1].ask(encode(Register(role="trainer", name="raw", epoch=1)))  # its thread has begun
    assert not server.shutdown(0.5)
    assert [peer.hear()["kind"] for peer in peers] == ["goodbye", "goodbye"]
    late = Raw(server.local_url)
    assert late.ask(hello(), SCHEMA) == {"refusal": "the hub is starting or shutting down"}
    for peer in (*peers, late):
        peer.close()
    assert server._local.shutdown(SECONDS)


def test_a_client_hears_goodbye():
    server = HubServer(QueueHub(), host="127.0.0.1", port=0, token=TOKEN)
    server.start()
    client = HubClient(server.local_url, token=TOKEN, role="actor", name="honest")
    assert server.shutdown(SECONDS)
    assert not client.is_connected
    client.close()
