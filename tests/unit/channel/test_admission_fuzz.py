"""Any bytes from a peer result in a typed refusal or a valid request for the service, with bounded memory.

Batches are passed as Flight passes them, without validation: lengths, offsets and buffers may have any value.
"""

import json
import resource
from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipelinerl_core.channel.dispatcher import PeerConnection
from pipelinerl_core.channel.server import HubServer
from pipelinerl_core.data.checks import check_groups
from pipelinerl_core.data.codec import decode_rollouts, encode_rollouts
from pipelinerl_core.data.schema import ROLLOUT_SCHEMA
from pipelinerl_core.messages import (
    ANSWER,
    REQUEST,
    Ack,
    Bye,
    Committed,
    Group,
    Introduction,
    Register,
    Reserve,
    Rows,
    Sealed,
    encode,
)
from pipelinerl_core.types import TurnSpan
from tests.builders import sync_message
from tests.rollout_rows import build_group, group_ref

FAST = settings(
    deadline=None,
    max_examples=200,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
ROLLOUTS = build_group(0, group_id=1, size=2)
VALID = encode_rollouts("run", ROLLOUTS)
TURNED = encode_rollouts(
    "run", [replace(rollout, turn_spans=(TurnSpan(0, 5), TurnSpan(5, 12))) for rollout in ROLLOUTS]
)
GROUP = Group(id=5, lease_id="1.0.b", ref=group_ref(ROLLOUTS))
SYNC = sync_message(
    engine_version=1,
    running=1,
    want=2,
    leases=("1.0.b",),
    num_tokens=5,
    running_seconds=1.0,
    counters={"cpu_seconds": 1.0},
)
MESSAGES = [
    Register(role="actor", name="fuzz", epoch=1), SYNC, GROUP, Sealed(actor="fuzz", epoch=1, seq=0, groups=((1, 0),)),
    Reserve(step=1, epoch=1), Rows(step=1, groups=((1, 0),)), Committed(step=1, epoch=1, manifest=None),
    Bye(),
]  # fmt: skip


class Service:
    """Accepts every request, and checks that admission has validated the request and its rows."""

    def connected(self, peer, request_sync) -> None: ...

    def disconnected(self, peer) -> None: ...

    def handle(self, peer, request, rows) -> Iterator[tuple[Ack, None]]:
        assert REQUEST.validate_json(encode(request)) == request
        assert (rows is not None) == isinstance(request, Group)
        if rows is not None:
            assert rows.schema.equals(ROLLOUT_SCHEMA, check_metadata=True)
            rows.validate(full=True)
            check_groups([request.ref], rows)
            for rollout in decode_rollouts(rows):
                check_turns(rollout)
        yield Ack(re=request.id), None


def check_turns(rollout) -> None:
    """Turns are ordered, do not overlap and are not empty; only tokens in turns are trained."""
    in_turns = [token for turn in rollout.turn_spans for token in range(turn.start, turn.end)]
    assert in_turns == sorted(set(in_turns))
    if rollout.turn_spans:
        assert all(turn.end > turn.start for turn in rollout.turn_spans)
        assert set(rollout.loss_mask.nonzero()[0].tolist()) <= set(in_turns) <= set(range(rollout.num_tokens))


class Writer:
    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write_metadata(self, metadata) -> None:
        self.written.append(metadata)


@pytest.fixture(scope="module")
def flight():
    server = HubServer(Service(), host="127.0.0.1", port=0, token="t", max_tokens_per_row=1000)
    yield server._dispatcher
    assert server.shutdown(60.0)


def ask(flight, metadata: bytes, rows: pa.RecordBatch | None = None, role: str = "actor"):
    """The single answer to a message; the code "internal" would be an unhandled exception."""
    writer = Writer()
    flight.answer(PeerConnection(f"{role}/fuzz#1", Introduction(role=role, name="fuzz"), writer), metadata, rows)
    (answer,) = [ANSWER.validate_json(written) for written in writer.written]
    assert answer.kind == "ack" or answer.code in ("schema", "wrong_peer"), answer
    assert len(encode(answer)) < 4000  # bytes
    return answer


# ---- metadata ----------------------------------------------------------------------------------------------------

NUMBERS = st.integers() | st.sampled_from([-1, 1 << 31, 1 << 63, 1 << 64, 10**400])
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | NUMBERS
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["\x00", "\ud800", "/"]),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=8), values, max_size=3),
    max_leaves=8,
)


def places(value, path=()):
    """The path of every value inside a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


@st.composite
def messages(draw) -> bytes:
    """A message with some values changed, left out, or added."""
    fields = {"message": json.loads(encode(draw(st.sampled_from(MESSAGES))))}
    for _ in range(draw(st.integers(0, 3))):
        path = draw(st.sampled_from([path for path in places(fields) if path]))
        inner = fields
        for key in path[:-1]:
            inner = inner[key]
        change = draw(st.sampled_from(["change", "leave out", "add"]))
        if change == "add" and isinstance(inner, dict) and len(path) > 1:
            inner[draw(st.text(max_size=300))] = draw(VALUES)
        elif change == "leave out" and isinstance(inner, dict) and len(path) > 1:
            del inner[path[-1]]
        else:
            inner[path[-1]] = draw(VALUES)
    return json.dumps(fields["message"]).encode()


@FAST
@given(
    st.binary(max_size=200) | messages() | VALUES.map(lambda value: json.dumps(value).encode()),
    st.sampled_from([None, VALID]),
    st.sampled_from(["actor", "trainer"]),
)
def test_any_metadata(flight, metadata, rows, role):
    ask(flight, metadata, rows, role)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind)
def test_a_valid_message_is_accepted_only_from_roles_that_may_send_its_kind(flight, message):
    rows = VALID if message is GROUP else None
    kinds = {role: ask(flight, encode(message), rows, role).kind for role in ("actor", "trainer")}
    may = {
        "actor": ("register", "sync", "group", "sealed", "bye"),
        "trainer": ("reserve", "rows", "committed", "bye"),
    }
    assert kinds == {role: "ack" if message.kind in may[role] else "refused" for role in may}


# ---- rows --------------------------------------------------------------------------------------------------------

SIZES = st.sampled_from([-1, 0, 1, 2, 3, 24, 1 << 20, (1 << 31) - 1, 1 << 31, 1 << 40, 1 << 62])


def schema_of(version: bytes) -> pa.Schema:
    return VALID.schema.with_metadata({**VALID.schema.metadata, b"schema_version": version})


EDGES = st.integers(0, 12) | st.sampled_from([-(1 << 31), -1, 13, (1 << 31) - 1])
TURNS = st.none() | st.lists(st.tuples(EDGES, EDGES) | st.none(), max_size=3)


@st.composite
def batches(draw) -> pa.RecordBatch:
    """Valid Arrow batches: some columns replaced, left out or added, under the same or another schema."""
    columns = dict(zip(VALID.schema.names, VALID.columns, strict=True))
    if draw(st.booleans()):
        columns["turn_spans"] = pa.array([draw(TURNS), draw(TURNS)], columns["turn_spans"].type)
    for name in draw(st.lists(st.sampled_from(VALID.schema.names), max_size=3)):
        column = columns[name]
        columns[name] = draw(
            st.sampled_from([pa.nulls(2, column.type), column.take([1, 0]), column.take([0, 0]), pa.array([1, 2])])
        )
    for name in draw(st.lists(st.sampled_from(VALID.schema.names), max_size=2)):
        columns.pop(name, None)
    if draw(st.booleans()):
        columns[draw(st.text(max_size=8))] = pa.nulls(2)
    fields = [
        VALID.schema.field(name)
        if name in VALID.schema.names and VALID.schema.field(name).type == column.type
        else pa.field(name, column.type)
        for name, column in columns.items()
    ]
    versions = [b"1.0", b"1.1", b"1.2", b"1.9", b"2.0", b"1", b"\xff", b"1." + b"9" * 5000]
    schema = pa.schema(fields, metadata=schema_of(draw(st.sampled_from(versions))).metadata)
    batch = pa.RecordBatch.from_arrays(list(columns.values()), schema=schema)
    return batch.slice(draw(st.integers(0, 2)), draw(st.integers(0, 2)))


@FAST
@given(TURNS, TURNS)
def test_any_turns(flight, first, second):
    index = VALID.schema.get_field_index("turn_spans")
    turns = pa.array([first, second], VALID.schema.field(index).type)
    ask(flight, encode(GROUP), VALID.set_column(index, VALID.schema.field(index), turns))


def test_rows_with_turns_are_accepted(flight):
    assert ask(flight, encode(GROUP), TURNED).kind == "ack"


@FAST
@given(batches())
def test_any_rows(flight, rows):
    ask(flight, encode(GROUP), rows)


@FAST
@given(st.data())
def test_rows_whose_bytes_are_damaged(flight, data):
    """Arrow's reader validates neither lengths nor offsets, so admission receives damaged batches."""
    batch = data.draw(st.sampled_from([VALID, TURNED, older(VALID)]))
    message = bytearray(batch.serialize().to_pybytes())
    for _ in range(data.draw(st.integers(1, 3))):
        size = data.draw(st.sampled_from([8, 8, 4, 1]))  # lengths, offsets and values
        offset = size * data.draw(st.integers(0, len(message) // size - 1))
        value = data.draw(SIZES if size > 1 else st.integers(0, 255))
        message[offset : offset + size] = (value % (1 << 8 * size)).to_bytes(size, "little")
    try:
        rows = pa.ipc.read_record_batch(pa.py_buffer(bytes(message)), batch.schema)
    except (pa.ArrowException, OSError, EOFError, MemoryError):
        return  # the exchange ends
    ask(flight, encode(GROUP), rows)


def older(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch as an earlier release without the column `origins` wrote it."""
    columns = batch.drop_columns(["origins"])
    return columns.replace_schema_metadata(schema_of(b"1.0").metadata)


def claiming(batch: pa.RecordBatch, num_rows: int) -> pa.RecordBatch:
    """The same bytes with a header that claims `num_rows` rows."""
    message = bytearray(batch.serialize().to_pybytes())
    for place in range(8, 8 + int.from_bytes(message[4:8], "little"), 8):  # the header: lengths of rows and columns
        if message[place : place + 8] == batch.num_rows.to_bytes(8, "little"):
            message[place : place + 8] = num_rows.to_bytes(8, "little", signed=True)
    claimed = pa.ipc.read_record_batch(pa.py_buffer(bytes(message)), batch.schema)
    assert claimed.num_rows == num_rows
    return claimed


def reaching(offset: int, column: int) -> pa.RecordBatch:
    """Valid rows with a wrong last offset in one of the token columns."""
    message = bytearray(VALID.serialize().to_pybytes())
    offsets = b"".join(number.to_bytes(4, "little") for number in (0, 12, 24))
    place = -1
    for _ in range(column + 1):
        place = message.index(offsets, place + 1)
    message[place + 8 : place + 12] = offset.to_bytes(4, "little", signed=True)
    return pa.ipc.read_record_batch(pa.py_buffer(bytes(message)), VALID.schema)


LENGTHS = (-1, 1 << 24, 1 << 31, 1 << 40, 1 << 62)
HUGE = [
    *(claiming(batch, num_rows) for batch in (VALID, TURNED, older(VALID)) for num_rows in LENGTHS),
    *(reaching(offset, column) for column in range(3) for offset in (-1, 25, (1 << 31) - 1, -(1 << 31))),
]


@pytest.mark.parametrize("rows", HUGE)
def test_rows_that_claim_a_huge_size_are_refused_before_memory_of_that_size_is_allocated(flight, rows):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    allocated = pa.default_memory_pool().max_memory()
    assert ask(flight, encode(GROUP), rows).code == "schema"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KiB
    assert pa.default_memory_pool().max_memory() - allocated < 20 << 20
