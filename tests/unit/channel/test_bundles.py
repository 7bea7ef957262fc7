"""Several groups in one write, both ways."""

import threading
from types import SimpleNamespace

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipelinerl_core.channel.admission import parse
from pipelinerl_core.channel.bundles import (
    BUNDLE_BYTES,
    GROUPS_BYTES,
    Frame,
    bundled,
    frames_of_writes,
    merged,
    unbundled,
)
from pipelinerl_core.channel.dispatcher import PeerConnection
from pipelinerl_core.channel.server import HubServer
from pipelinerl_core.data.checks import check_groups, rows_of_groups
from pipelinerl_core.data.codec import decode_rollouts, encode_rollouts
from pipelinerl_core.data.schema import ROLLOUT_SCHEMA
from pipelinerl_core.errors import StaleLease
from pipelinerl_core.interfaces import RowSlice
from pipelinerl_core.messages import ANSWER, Ack, Group, Introduction, RowsBundle, RowsHeader, encode
from tests.rollout_rows import build_group, group_ref


def answers(*sizes: int):
    """Header and rows of one group each, with so many tokens in a rollout."""
    for index, num_tokens in enumerate(sizes):
        rows = encode_rollouts("run", build_group(0, group_id=index, size=2 + index % 3, num_tokens=num_tokens))
        yield (
            RowsHeader(re=3, group_id=index, attempt=1, remaining=len(sizes) - 1 - index),
            RowSlice(rows, 0, rows.num_rows),
        )


def test_bundled_answers_are_unbundled_unchanged():
    sent = list(answers(5, 9, 1, 300))
    written = list(bundled(iter(sent)))
    assert [answer for answer, _ in written] == [
        RowsBundle(re=3, groups=((0, 1, 2), (1, 1, 3), (2, 1, 4), (3, 1, 2)), remaining=0)
    ]
    received = [part for answer, rows in written for part in unbundled(answer, rows)]
    assert [part.answer for part in received] == [header for header, _ in sent]
    for part, (_, rows) in zip(received, sent, strict=True):
        assert part.rows.equals(rows.rows())
        for actual, expected in zip(decode_rollouts(part.rows), decode_rollouts(rows.rows()), strict=True):
            assert actual.weight_spans == expected.weight_spans
            assert actual.completion_token_ids.tolist() == expected.completion_token_ids.tolist()
            assert actual.rollout_logprobs.tolist() == expected.rollout_logprobs.tolist()
            assert actual.loss_mask.tolist() == expected.loss_mask.tolist()


def test_a_bundle_has_a_size_and_a_large_group_goes_alone():
    large = BUNDLE_BYTES // 8  # tokens of each of its two or more rollouts, of more than 8 bytes
    written = list(bundled(answers(5, 5, large, 5)))
    kinds = [(answer.kind, answer.remaining, rows.num_rows) for answer, rows in written]
    assert kinds == [("rows_bundle", 2, 5), ("rows_header", 1, 4), ("rows_header", 0, 2)]


def test_views_count_for_themselves_only():
    whole = pa.concat_batches([rows.rows() for _, rows in answers(*[2000] * 8)])
    views = [(header, RowSlice(whole.slice(2 * header.group_id, 2), 0, 2)) for header, _ in answers(*[2000] * 8)]
    assert whole.get_total_buffer_size() > BUNDLE_BYTES / 4
    [(bundle, rows)] = list(bundled(iter(views)))
    assert (len(bundle.groups), rows.num_rows) == (8, 16)


def test_other_answers_keep_their_place():
    (first, second), ack = answers(5, 5), (Ack(re=3), None)
    written = [answer for answer, _ in bundled(iter([ack, first, ack, second]))]
    assert written == [ack[0], first[0], ack[0], second[0]]
    assert unbundled(*ack) == [ack]


def test_a_failure_in_the_middle_is_reported():
    def failing():
        yield from answers(5)
        raise ValueError("gone")

    with pytest.raises(ValueError, match="gone"):
        list(bundled(failing()))


# ---- to the hub ----


def frame(group_id: int, num_tokens: int = 5, *, is_group: bool = True) -> Frame:
    rollouts = build_group(0, group_id=group_id, size=2, num_tokens=num_tokens)
    message = Group(id=100 + group_id, lease_id=f"{group_id}.0.b", ref=group_ref(rollouts))
    return Frame(encode(message), encode_rollouts("run", rollouts) if is_group else None, is_group, threading.Event())


def test_groups_that_are_sent_together_are_one_message():
    frames = [frame(1), frame(2), frame(3, is_group=False), frame(4)]
    parts = list(frames_of_writes(frames))
    assert parts == [frames[:2], frames[2:3], frames[3:]]
    metadata, rows = merged(parts[0])
    assert [group.id for group in parse(metadata).groups] == [101, 102]
    assert rows.column("group_id").to_pylist() == [1, 1, 2, 2]
    assert merged(parts[2]) == (frames[3].metadata, frames[3].rows)


def test_a_write_to_the_hub_has_a_size():
    large = GROUPS_BYTES // 20  # tokens of each of two rollouts, of more than 8 bytes
    sizes = [len(part) for part in frames_of_writes([frame(1, large), frame(2, large), frame(3), frame(4)])]
    assert sizes == [1, 3]


class Service:
    def __init__(self):
        self.groups = []

    def connected(self, peer, request_sync): ...

    def disconnected(self, peer): ...

    def handle(self, peer, request, rows):
        yield self._take(request, rows), None

    def handle_groups(self, peer, groups, rows):
        parts = rows_of_groups([group.ref for group in groups], rows)
        return [self._answer(group, part) for group, part in zip(groups, parts, strict=True)]

    def _answer(self, group, rows):
        try:
            return self._take(group, rows)
        except StaleLease as error:
            return error

    def _take(self, group, rows):
        check_groups([group.ref], rows)
        if group.ref.group_id == 13:
            raise StaleLease("not in force")
        self.groups.append(group.ref.group_id)
        return Ack(re=group.id)


@pytest.fixture
def flight():
    server = HubServer(Service(), host="127.0.0.1", port=0, token="t", max_row_bytes=1 << 20)
    yield server._dispatcher
    assert server.shutdown(60.0)


def ask(flight, metadata, rows, role="actor"):
    """Which groups are answered how."""
    written = []
    writer = SimpleNamespace(write_metadata=written.append)
    flight.answer(PeerConnection(f"{role}/a#1", Introduction(role=role, name="a"), writer), metadata, rows)
    (answer,) = [ANSWER.validate_json(text) for text in written]
    return [(part.answer.re, getattr(part.answer, "code", "taken")) for part in unbundled(answer, None)]


def changed(rows: pa.RecordBatch, row: int, name: str, value) -> pa.RecordBatch:
    columns = rows.to_pydict()
    columns[name][row] = value
    return pa.RecordBatch.from_pydict(columns, schema=ROLLOUT_SCHEMA)


def test_each_group_of_a_message_has_its_own_answer(flight):
    metadata, rows = merged([frame(1), frame(13), frame(2)])
    assert ask(flight, metadata, rows) == [(101, "taken"), (113, "stale_lease"), (102, "taken")]
    assert flight._service.groups == [1, 2]


@pytest.mark.parametrize(
    ("row", "name", "value"),
    [(3, "reward", float("nan")), (2, "lease_id", "another"), (2, "group_id", 7), (3, "rollout_index", 0)],
)
def test_a_group_that_is_at_fault_is_refused_alone(flight, row, name, value):
    metadata, rows = merged([frame(1), frame(2), frame(3)])
    assert ask(flight, metadata, changed(rows, row, name, value)) == [(101, "taken"), (102, "schema"), (103, "taken")]


def test_rows_that_cannot_be_told_apart_are_refused_altogether(flight):
    metadata, rows = merged([frame(1), frame(2)])
    refused = [(101, "schema"), (102, "schema")]
    assert ask(flight, metadata, rows.slice(1)) == refused
    assert ask(flight, metadata, None) == refused
    assert ask(flight, *merged([frame(1, 70_000), frame(2, 1)])) == refused  # larger than the server allows
    assert ask(flight, metadata, rows, role="trainer") == [(101, "wrong_peer"), (102, "wrong_peer")]


@settings(deadline=None, max_examples=200, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_damaged_rows_of_several_groups_are_refused_and_nothing_breaks(flight, data):
    """Arrow's reader looks at neither lengths nor offsets, and cutting rows rows_of_groups must not believe them."""
    metadata, rows = merged([frame(1), frame(2)])
    message = bytearray(rows.serialize().to_pybytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place = 8 * data.draw(st.integers(0, len(message) // 8 - 1))
        value = data.draw(st.sampled_from([0, 1, 2, 3, 5, 24, 1 << 20, 1 << 31, 1 << 62, (1 << 64) - 1]))
        message[place : place + 8] = value.to_bytes(8, "little")
    try:
        damaged = pa.ipc.read_record_batch(pa.py_buffer(bytes(message)), rows.schema)
    except (pa.ArrowException, OSError, EOFError, MemoryError):
        return  # the exchange ends
    assert {code for _, code in ask(flight, metadata, damaged)} <= {"taken", "schema"}
