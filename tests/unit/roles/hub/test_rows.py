"""The hub's memory for rows: what is counted, what leaves, and that credit keeps to it."""

import time

import pyarrow as pa
import pytest

from pipelinerl_core.channel.bundles import MIN_VIEW_BYTES, bundled, unbundled
from pipelinerl_core.data.codec import encode_rollouts
from pipelinerl_core.data.segments import SegmentWriter
from pipelinerl_core.ledger import ActorKey, Ledger
from pipelinerl_core.messages import Committed, Group, Register, Reserve, Rows, RowsHeader, Sealed
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.prompts import build_source
from pipelinerl_core.roles.hub.recovery import read_stored_state
from pipelinerl_core.roles.hub.rows import GROUP_BYTES, SEALED_SHARE, RowMemory, WrittenGroup
from pipelinerl_core.roles.hub.service import Hub
from pipelinerl_core.storage.object_store import open_store
from tests.builders import sync_message, weight_manifest
from tests.rollout_rows import build_group, group_ref

NUM_TOKENS = 400


def rows_of(group_id: int, num_tokens: int = NUM_TOKENS) -> pa.RecordBatch:
    return encode_rollouts("run", build_group(0, group_id=group_id, size=2, num_tokens=num_tokens))


VALUES = rows_of(0).get_total_buffer_size()
SIZE = VALUES + GROUP_BYTES


def memory(num_groups: float) -> RowMemory:
    return RowMemory(budget_bytes=int(num_groups * SIZE), default_group_bytes=VALUES)


def test_kept_rows_are_counted_once_and_forgotten_rows_are_free_again():
    rows = memory(10)
    for group_id in (1, 2, 2, 3):
        rows.keep((group_id, 0), rows_of(group_id))
    assert (len(rows), rows.used_bytes) == (3, 3 * SIZE)
    assert rows.free_groups() == pytest.approx(7)
    rows.keep_only({(2, 0)})
    assert (len(rows), rows.used_bytes) == (1, SIZE)
    assert rows.get((2, 0)).equals(rows_of(2))
    assert rows.get((1, 0)) is None


def test_the_memory_of_a_write_is_in_use_until_its_last_group_has_gone():
    whole = pa.concat_batches([rows_of(1), rows_of(2), rows_of(3)])
    rows = memory(10)
    for group_id in (1, 2, 3):
        rows.keep((group_id, 0), whole.slice(2 * group_id - 2, 2))
    assert rows.used_bytes == whole.get_total_buffer_size() + 3 * GROUP_BYTES
    rows.keep_only({(3, 0)})
    assert rows.used_bytes == whole.get_total_buffer_size() + GROUP_BYTES
    rows.keep_only(set())
    assert rows.used_bytes == 0


def test_beyond_the_budget_sealed_rows_leave_the_last_ones_first_and_unsealed_ones_stay():
    rows = memory(4)
    for group_id in range(4):
        rows.keep((group_id, 0), rows_of(group_id))
    assert len(rows) == 4  # more than the share of sealed ones, but none is sealed
    rows.seal([(0, 0), (2, 0), (9, 0)])
    assert [group_id for group_id in range(4) if rows.get((group_id, 0)) is not None] == [0, 1, 3]
    assert rows.used_bytes <= SEALED_SHARE * 4 * SIZE
    rows.keep((4, 0), rows_of(4), is_sealed=True)
    assert rows.get((4, 0)) is None
    rows.keep((5, 0), rows_of(5))
    assert [group_id for group_id in range(6) if rows.get((group_id, 0)) is not None] == [1, 3, 5]


def test_a_group_larger_than_the_budget_still_has_its_turn():
    rows = memory(0.5)
    assert rows.free_groups() == 1
    rows.keep((1, 0), rows_of(1))
    assert rows.free_groups() < 0
    rows.seal([(1, 0)])
    assert rows.free_groups() == 1


def test_sealed_rows_leave_until_one_more_group_fits():
    rows = memory(2.9)  # a group needs more than the quarter that SEALED_SHARE leaves free
    rows.keep((0, 0), rows_of(0))
    rows.keep((1, 0), rows_of(1), is_sealed=True)
    assert (len(rows), rows.free_groups()) == (1, pytest.approx(1.9, rel=1e-3))


NUM_ACTORS = 5
CONFIG = build_config(
    {
        "rollouts": {"group_size": 2, "max_tokens": NUM_TOKENS},
        "engine": {"concurrency": 4},
        "schedule": {"max_lag": 99},
        "trainer": {"groups_per_step": 400, "steps": 2},
        "placement": {"hub_bytes": 4 << 20},
    }
)


class Stalled:
    """A hub, actors that send whatever they may, and a trainer that takes nothing."""

    def __init__(self, url: str) -> None:
        self.store = open_store(url)
        ledger = Ledger(CONFIG, clock=time.time, boot_id="boot")
        self.hub = Hub(CONFIG, ledger, build_source(CONFIG), self.store, boot_id="boot")
        self.names = [f"actor-{index}" for index in range(NUM_ACTORS)]
        self.writers = {
            name: SegmentWriter(self.store, name, 1, "run", max_seconds=0, max_bytes=1 << 30) for name in self.names
        }
        for name in (*self.names, "trainer"):
            self.hub.connected(name, lambda: None)
            self(name, Register(role="trainer" if name == "trainer" else "actor", name=name, epoch=1))
        manifest = weight_manifest(0)
        self("trainer", Committed(step=0, epoch=1, manifest=manifest))
        self.most_bytes = 0

    def __call__(self, peer, message, rows=None):
        [(answer, _)] = self.hub.handle(peer, message, rows)
        return answer

    def send(self, name: str) -> int:
        """One sync, and all groups that its credit is good for."""
        sync = sync_message(want=1 << 20)
        credit = self(name, sync.model_copy(update={"want": 0})).credit
        for lease in self(name, sync.model_copy(update={"want": credit})).leases[:credit]:
            rollouts = build_group(0, group_id=lease.group_id, size=2, num_tokens=NUM_TOKENS, actor=name)
            batch, ref = encode_rollouts("run", rollouts), group_ref(rollouts, actor_epoch=1)
            assert self(name, Group(lease_id=lease.lease_id, ref=ref), batch).note == "ready"
            self.writers[name].append(batch, ref)
            self.most_bytes = max(self.most_bytes, self.hub.row_bytes)
        return credit

    def seal(self, name: str) -> None:
        sealed = self.writers[name].seal()
        if sealed is not None:
            self(name, Sealed(actor=name, epoch=1, seq=sealed.seq, groups=sealed.groups))


def test_credit_keeps_the_rows_of_all_actors_within_the_budget(tmp_path):
    run = Stalled(str(tmp_path))
    for _ in range(100):
        for name in run.names:
            run.send(name)
    budget = CONFIG.placement.hub_bytes
    assert budget - 2 * SIZE < run.most_bytes <= budget
    assert run.hub.row_bytes == run.most_bytes


def test_a_waiting_trainer_gets_groups_although_the_rows_of_dead_actors_fill_the_memory(tmp_path, monkeypatch):
    run = Stalled(str(tmp_path))
    first, *others = run.names
    for _ in range(50):
        for name in others:
            run.send(name)
    for name in others:  # they have not sealed their rows
        run.hub.disconnected(name)
    assert [run.send(first) for _ in range(100)][-20:] == [0] * 20
    monkeypatch.setattr(run.hub._state, "awaited_step", 1)  # as during the wait of a reservation
    assert {run.send(first) for _ in range(50)} == {0, 1}  # shares are rounded at random


def test_the_credit_of_an_actor_that_hangs_returns_when_it_expires(tmp_path):
    run = Stalled(str(tmp_path))
    credits = {name: run(name, sync_message(want=0)).credit for name in run.names}
    assert run.hub._state.granted == sum(credits.values())
    hanging = max(credits, key=credits.get)
    assert credits[hanging]
    run.hub._ledger.bye(ActorKey(hanging, 1))  # as if it had expired; its exchange looks alive
    run.hub.tick()
    assert run.hub._state.granted == sum(credits.values()) - credits[hanging]


def test_rows_that_left_the_memory_are_read_back_from_their_segments(tmp_path):
    run = Stalled(str(tmp_path))
    num_sent = 0
    while num_sent < 400:  # several times as many as fit
        for name in run.names:
            num_sent += run.send(name)
            run.seal(name)
    assert run.most_bytes <= CONFIG.placement.hub_bytes < 400 * SIZE / 2
    reserved = run("trainer", Reserve(step=1, epoch=1, wait_seconds=0))
    keys = tuple((ref.group_id, ref.attempt) for ref in reserved.groups)
    answers = list(run.hub.handle("trainer", Rows(step=1, groups=keys), None))
    assert [(header.group_id, header.attempt) for header, _ in answers] == list(keys)
    for header, rows in answers:
        assert rows.rows().column("group_id").to_pylist() == [header.group_id] * 2
    assert run.hub.row_bytes <= CONFIG.placement.hub_bytes


def test_a_hub_that_starts_reads_no_more_rows_than_its_limit(tmp_path):
    store = open_store(str(tmp_path))
    writer = SegmentWriter(store, "actor-0", 1, "run", max_seconds=0, max_bytes=1 << 30)
    for group_id in range(10):
        rollouts = build_group(0, group_id=group_id, size=2, num_tokens=NUM_TOKENS)
        writer.append(encode_rollouts("run", rollouts), group_ref(rollouts, actor_epoch=1))
    writer.seal()
    past = read_stored_state(store, 4.5 * VALUES)
    assert len(past.sealed) == 10
    assert [group_id for group_id, _ in past.rows] == [0, 1, 2, 3]


def test_groups_of_one_write_that_are_wanted_in_their_order_are_sent_as_one_view():
    rows = memory(100)
    large, small = ([rows_of(group_id, num) for group_id in range(4)] for num in (MIN_VIEW_BYTES // 16, 8))
    for batch, offset in ((pa.concat_batches(large), 0), (pa.concat_batches(small), 10)):
        rows.keep_all(batch, [WrittenGroup((offset + index, 0), 2 * index, 2, False) for index in range(4)])

    def views(*group_ids):
        """The writes of the answer, and whether each is a view of the memory."""
        answers = [(RowsHeader(re=1, group_id=group_id, attempt=0, remaining=0), rows.find((group_id, 0)))
                   for group_id in group_ids]  # fmt: skip
        own = {rows.find((group_id, 0)).batch.column("reward").buffers()[1].address for group_id in group_ids}
        return [
            ([part.answer.group_id for part in unbundled(answer, batch)],
             batch.column("reward").buffers()[1].address in own)
            for answer, batch in bundled(answers)
        ]  # fmt: skip

    assert views(0, 1, 2, 3) == [([0, 1, 2, 3], True)]
    assert views(1, 2, 0, 10, 3) == [([1, 2], True), ([0, 10, 3], False)]
    assert views(10, 11, 12, 13) == [([10, 11, 12, 13], False)]  # few bytes: copied into a bundle
    assert rows.get((2, 0)).equals(large[2])
    rows.keep_only({(2, 0), (11, 0)})
    assert views(2, 11) == [([2, 11], False)]
    assert rows.get((11, 0)).equals(small[1])
