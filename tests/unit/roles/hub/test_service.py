"""The hub object without a network: messages in, answers out."""

import gc
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa
import pytest

from pipelinerl_core.config import RunConfig
from pipelinerl_core.data.codec import decode_rollouts, encode_rollouts
from pipelinerl_core.data.segments import SegmentWriter
from pipelinerl_core.errors import (
    ConfigError,
    Fenced,
    MissingObject,
    SchemaMismatch,
    StaleLease,
    StoreUnavailable,
    WrongPeer,
)
from pipelinerl_core.ledger import ActorKey, Ledger
from pipelinerl_core.messages import (
    Ack,
    Bye,
    Committed,
    FateRecord,
    Group,
    Lease,
    LeaseRef,
    Message,
    Refused,
    Register,
    Registered,
    Reserve,
    Reserved,
    Rows,
    RowsHeader,
    Sealed,
    SwapRecord,
    SyncReply,
)
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.prompts import build_source
from pipelinerl_core.roles.hub import trainer_side
from pipelinerl_core.roles.hub.heartbeat import HubRecordBuilder
from pipelinerl_core.roles.hub.recovery import read_stored_state, summarize
from pipelinerl_core.roles.hub.service import Hub
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.types import GroupRef, WeightManifest
from tests.builders import (
    group_named,
    put_commit,
    put_epoch,
    rows_of_lease,
    small_config,
    sync_message,
    trained_by,
    weight_manifest,
)
from tests.synthetic_run import make_rollout

CONFIG = small_config(rollouts={"group_size": 2}, engine={"concurrency": 4}, trainer={"steps": 2})
ENDLESS = 3600.0  # a wait that does not end by itself before pytest's limit for a test
APRIL = build_config(CONFIG.model_dump() | {"schedule": {"kind": "april", "alpha": 2, "max_lag": 1}})


def manifest(version: int) -> WeightManifest:
    return weight_manifest(version, epoch=2)


class Talk:
    """A hub, and the messages of its peers."""

    def __init__(
        self, url: str, ledger: Ledger | None = None, rows: dict | None = None, config: RunConfig = CONFIG
    ) -> None:
        self.store = open_store(url)
        self.ledger = ledger or Ledger(config, clock=time.time, boot_id="boot")
        self.hub = Hub(config, self.ledger, build_source(config), self.store, boot_id="boot", rows=rows)
        self.sync_requests = 0
        self.hub.connected("a", self.request_sync)
        self.hub.connected("t", lambda: None)

    def __call__(self, peer: str, message: Message, rows: pa.RecordBatch | None = None) -> Message:
        [(answer, batch)] = self.hub.handle(peer, message.model_copy(update={"id": 7}), rows)
        assert batch is None
        assert answer.re == 7
        return answer

    def request_sync(self) -> None:
        self.sync_requests += 1

    def register(self) -> None:
        self("a", Register(role="actor", name="actor-0", epoch=1))
        self("t", Register(role="trainer", name="trainer", epoch=2))
        self("t", Committed(step=0, epoch=2, manifest=manifest(0)))

    def sync(self, want: int, leases: Sequence[str] = (), version: int = 0, **more) -> SyncReply:
        message = sync_message(engine_version=version, want=want, leases=tuple(leases), **more)
        answer = self("a", message)
        assert isinstance(answer, SyncReply)
        return answer

    def deliver(self, lease: Lease) -> None:
        ref, batch = rows_of_lease(lease)
        assert self("a", Group(lease_id=lease.lease_id, ref=ref), batch) == Ack(re=7, note="ready")

    def reserve(self, step: int, wait_seconds: float = 0.0) -> Reserved:
        answer = self("t", Reserve(step=step, epoch=2, wait_seconds=wait_seconds))
        assert isinstance(answer, Reserved)
        return answer

    def commit(self, step: int, answer: Reserved, **more) -> None:
        self("t", Committed(step=step, epoch=2, manifest=manifest(step), fates=answer.decided, **more))


@pytest.fixture
def talk(tmp_path) -> Talk:
    talk = Talk(str(tmp_path))
    talk.register()
    return talk


def test_an_actor_that_makes_other_tokens_of_a_text_is_refused(tmp_path):
    """Also an actor that has registered before the trainer, at its next sync."""
    talk, own = Talk(str(tmp_path)), {"vocabulary": "a", "chat template": "b"}
    talk("a", Register(role="actor", name="actor-0", epoch=1, tokens=own | {"chat template": "c"}))
    talk("t", Register(role="trainer", name="trainer", epoch=2, tokens=own))
    talk("t", Register(role="trainer", name="trainer", epoch=2))
    with pytest.raises(ConfigError, match=r"actor-0/1: chat template of its model\.path differ"):
        talk.sync(1)
    with pytest.raises(ConfigError, match=r"actor-0/2: vocabulary of its model\.path differ"):
        talk("a", Register(role="actor", name="actor-0", epoch=2, tokens=own | {"vocabulary": "c"}))
    talk("a", Register(role="actor", name="actor-0", epoch=3, tokens=own))
    assert talk.sync(1).leases


def test_a_summary_counts_tokens_per_version_of_scored_rollouts_only():
    rollouts = [
        make_rollout(group_id=3, rollout_index=index, spans=spans, reward=reward)
        for index, (spans, reward) in enumerate(
            [([(0, 0, 3), (1, 3, 5)], 1.0), ([(1, 0, 4)], None), ([(0, 0, 1), (2, 1, 7)], 0.25)]
        )
    ]
    ref = group_named(3, num_rollouts=3, num_tokens=16)
    [summary] = summarize([ref], encode_rollouts("run", rollouts))
    assert summary.tokens_by_version == {0: 3 + 1, 1: 2, 2: 6}
    assert summary.rewards == (1.0, 0.25)


def test_leases_carry_the_prompts_of_their_position(talk):
    source = build_source(CONFIG)
    leases = talk.sync(want=3).leases
    assert [lease.prompt for lease in leases] == [source.prompt(0), source.prompt(1), source.prompt(2)]
    assert leases[0].group_size == 2


def test_an_unregistered_peer_and_a_peer_of_another_boot_are_told_to_register(talk):
    talk.hub.connected("new", lambda: None)
    stranger = talk("new", sync_message(concurrency=1))
    assert isinstance(stranger, Refused)
    assert stranger.code == "unknown_boot"
    old = talk("a", sync_message(boot_id="older", concurrency=1))
    assert isinstance(old, Refused)
    assert old.code == "unknown_boot"


def other_actor(talk: Talk) -> None:
    """Peer "b": actor-1, epoch 5."""
    talk.hub.connected("b", lambda: None)
    talk("b", Register(role="actor", name="actor-1", epoch=5))


def test_an_actor_delivers_in_its_own_name_and_under_its_own_lease(talk):
    other_actor(talk)
    [lease] = talk.sync(want=1).leases
    ref, batch = rows_of_lease(lease)
    before = talk.ledger.tokens()
    with pytest.raises(WrongPeer, match="actor-1/5 sent a message of actor-0/1"):
        talk("b", Group(lease_id=lease.lease_id, ref=ref), batch)
    own = replace(ref, actor="actor-1", actor_epoch=5)
    with pytest.raises(WrongPeer, match="actor-1/5 sent group 0 attempt 0, which is actor-0/1's"):
        talk("b", Group(lease_id=lease.lease_id, ref=own), batch)
    assert talk.ledger.tokens() == before
    talk.deliver(lease)
    with pytest.raises(WrongPeer, match="which is actor-0/1's"):  # no copy of what is ready is acknowledged either
        talk("b", Group(lease_id=lease.lease_id, ref=own), batch)


def test_an_actor_seals_in_its_own_name_and_only_its_own_groups(talk):
    other_actor(talk)
    leased, delivered = talk.sync(want=2).leases
    talk.deliver(delivered)
    for sealed in (
        Sealed(actor="actor-0", epoch=1, seq=0, groups=()),
        Sealed(actor="actor-1", epoch=4, seq=0, groups=()),
        Sealed(actor="actor-1", epoch=5, seq=0, groups=((leased.group_id, 0),)),
        Sealed(actor="actor-1", epoch=5, seq=0, groups=((delivered.group_id, 0),)),
    ):
        with pytest.raises(WrongPeer):
            talk("b", sealed)
    assert talk.ledger.segment_of(0, 0) is talk.ledger.segment_of(1, 0) is None
    assert talk("b", Sealed(actor="actor-1", epoch=5, seq=0, groups=((7, 0),))) == Ack(re=7)  # of long ago
    talk.hub.connected("new", lambda: None)
    assert talk("new", Sealed(actor="actor-1", epoch=5, seq=0, groups=())).code == "unknown_boot"


def test_an_actor_reports_its_own_swaps(talk):
    swap = SwapRecord(
        actor="actor-1", actor_epoch=5, version=1, at=0.0, pause_seconds=0.0, num_bytes=1, num_running=1, num_tokens=1
    )
    with pytest.raises(WrongPeer, match="a swap of actor-1/5"):
        talk.sync(want=0, swaps=(swap,))
    assert talk.hub.num_swaps == 0


def test_a_group_that_no_hub_can_have_leased_is_refused_before_the_groups_before_are_queued(tmp_path):
    ledger = Ledger(CONFIG, clock=time.time, boot_id="boot", first_attempt=3000)
    talk = Talk(str(tmp_path), ledger)
    talk.register()
    lease = LeaseRef(group_id=10**12, attempt=0, lease_id="x")
    source = build_source(CONFIG)
    far = Lease(**lease.model_dump(), deadline_seconds=0.0, group_size=2, prompt=source.prompt(0))
    ref, batch = rows_of_lease(far)
    fate = FateRecord(group_id=10**12, attempt=0, fate="trained", num_tokens=1)
    for peer, message, rows in (
        ("a", Register(role="actor", name="actor-0", epoch=1, leases=(lease,)), None),
        ("a", Group(lease_id="x", ref=ref), batch),
        ("t", Register(role="trainer", name="trainer", epoch=2, step=1, reservation=(ref,)), None),
        ("t", Committed(step=1, epoch=2, manifest=None, fates=(fate,)), None),
    ):
        with pytest.raises(SchemaMismatch, match="group 1000000000000 was never leased, the next one is 0"):
            talk(peer, message, rows)
    near = lease.model_copy(update={"group_id": 100})
    assert talk("a", Register(role="actor", name="actor-0", epoch=1, leases=(near,))).kind == "registered"
    assert (ledger.next_group_id, ledger.num_leased) == (101, 1)


def test_a_late_group_of_a_lost_lease_is_stale_and_not_the_group_of_the_new_holder(talk):
    other_actor(talk)
    [lease] = talk.sync(want=1).leases
    talk.ledger.bye(ActorKey("actor-0", 1))
    sync = sync_message(want=1)
    assert talk("b", sync).leases[0].attempt == 1
    ref, batch = rows_of_lease(lease)
    with pytest.raises(StaleLease):
        talk("a", Group(lease_id=lease.lease_id, ref=ref), batch)
    assert talk("a", Sealed(actor="actor-0", epoch=1, seq=0, groups=((0, 0),))) == Ack(re=7)


def test_an_actor_that_comes_back_while_its_old_exchange_looks_alive_goes_on(talk):
    [lease] = talk.sync(want=1).leases
    talk.hub.connected("again", lambda: None)
    held = LeaseRef(group_id=0, attempt=0, lease_id=lease.lease_id)
    assert talk("again", Register(role="actor", name="actor-0", epoch=1, leases=(held,))).kind == "registered"
    ref, batch = rows_of_lease(lease)
    assert talk("again", Group(lease_id=lease.lease_id, ref=ref), batch) == Ack(re=7, note="ready")
    assert talk("a", Group(lease_id=lease.lease_id, ref=ref), batch) == Ack(re=7, note="known")  # sent before


def test_a_step_from_lease_to_announcement(talk):
    leases = talk.sync(want=4).leases
    for lease in leases[:2]:
        talk.deliver(lease)
    answer = talk.reserve(1)
    assert [ref.group_id for ref in answer.groups] == [0, 1]
    sent = list(talk.hub.handle("t", Rows(id=9, step=1, groups=((1, 0), (0, 0))), None))
    assert [header for header, _ in sent] == [
        RowsHeader(re=9, group_id=1, attempt=0, remaining=1),
        RowsHeader(re=9, group_id=0, attempt=0, remaining=0),
    ]
    assert decode_rollouts(sent[0][1].rows())[1].reward == 1.0
    assert talk.sync(want=0).manifest.version == 0
    talk.commit(1, answer, metrics={"reward/mean": 0.5})
    assert talk.sync(want=0).manifest.version == 1
    with pytest.raises(StopIteration):
        next(iter(talk.hub.handle("t", Rows(step=1, groups=()), None)))
    [(gone, _)] = talk.hub.handle("t", Rows(step=1, groups=((0, 0),)), None)
    assert gone.code == "not_reserved"


def test_reserve_waits_until_the_missing_group_arrives(talk, monkeypatch):
    monkeypatch.setattr(trainer_side, "_MAX_WAIT_SECONDS", ENDLESS)
    leases = talk.sync(want=2).leases
    talk.deliver(leases[0])
    threading.Timer(0.1, talk.deliver, [leases[1]]).start()
    assert talk.reserve(1, wait_seconds=ENDLESS).is_ready


def test_reserve_says_after_its_wait_that_nothing_is_ready(talk, monkeypatch):
    monkeypatch.setattr(trainer_side, "_MAX_WAIT_SECONDS", ENDLESS)
    begun = time.monotonic()
    assert not talk.reserve(1, wait_seconds=0.1).is_ready
    assert time.monotonic() - begun >= 0.1  # a wait is never shorter, on any machine


def test_credit_falls_with_groups_at_the_hub_and_returns_when_the_trainer_takes_them(talk):
    leases = talk.sync(want=2).leases
    assert talk.sync(want=0).credit == 8
    for lease in leases:
        talk.deliver(lease)
    assert talk.sync(want=0).credit == 6
    before = talk.sync_requests
    talk.reserve(1)
    assert talk.sync_requests == before + 1
    assert talk.sync(want=0).credit == 8


def test_nothing_is_written_to_a_silent_actor_until_its_next_message(tmp_path):
    now = [1000.0]
    talk = Talk(str(tmp_path), Ledger(CONFIG, clock=lambda: now[0], boot_id="boot"))
    talk.register()
    for lease in talk.sync(want=4).leases:
        talk.deliver(lease)
    now[0] += CONFIG.placement.lease_seconds + 1.0
    talk.hub.tick()
    before = talk.sync_requests
    talk.commit(1, talk.reserve(1))
    assert talk.sync_requests == before
    talk.sync(want=0, version=1)
    talk.commit(2, talk.reserve(2))
    assert talk.sync_requests == before + 2, "credit is free, and a version is announced"


def test_a_group_that_does_not_stay_returns_its_credit(talk):
    [lease] = talk.sync(want=1).leases
    before = talk.sync_requests
    ref, batch = rows_of_lease(lease, rewards=(0.0, None))
    assert talk("a", Group(lease_id=lease.lease_id, ref=ref), batch) == Ack(re=7, note="failed")
    ref, batch = rows_of_lease(lease.model_copy(update={"attempt": 3}))
    with pytest.raises(StaleLease):
        talk("a", Group(lease_id="other", ref=ref), batch)
    assert talk.sync_requests == before + 2


def test_a_goodbye_frees_leases_at_once_and_a_lost_connection_does_not(talk):
    talk.sync(want=2)
    talk.hub.disconnected("a")
    assert talk.ledger.num_leased == 2
    talk.hub.connected("a", talk.request_sync)
    talk("a", Register(role="actor", name="actor-0", epoch=1))
    talk("a", Bye())
    assert (talk.ledger.num_leased, talk.ledger.num_queued) == (0, 2)


def test_one_actor_evaluates_and_another_actor_after_its_end(talk):
    talk.hub.connected("b", talk.request_sync)
    talk("b", Register(role="actor", name="actor-1", epoch=1))
    second = sync_message(engine_version=0, want=0, leases=())
    assert talk.sync(want=0).evaluates
    assert not talk("b", second).evaluates
    talk.hub.disconnected("a")
    assert talk("b", second).evaluates


def test_an_actor_evaluates_although_the_exchange_of_a_dead_actor_looks_alive(talk):
    talk.hub.connected("b", talk.request_sync)
    talk("b", Register(role="actor", name="actor-1", epoch=1))
    second = sync_message(engine_version=0, want=0, leases=())
    assert not talk("b", second).evaluates
    talk.ledger.bye(ActorKey("actor-0", 1))  # as `expire` and a newer epoch do
    assert talk("b", second).evaluates


def test_april_pauses_every_engine_from_the_nth_ready_group_until_the_engine_has_the_new_weights(tmp_path):
    talk = Talk(str(tmp_path), config=APRIL)
    talk.register()
    first, second, third, fourth = talk.sync(want=9).leases  # alpha * N = 4
    before = talk.sync_requests
    talk.deliver(first)
    assert (talk.sync(want=9).state, talk.sync_requests) == ("run", before)
    talk.deliver(second)  # the second of N = 2
    assert talk.sync_requests == before + 1  # actors hear of the pause at once
    held = (third.lease_id, fourth.lease_id)
    answer = talk.sync(want=9, leases=held)
    assert (answer.state, answer.leases, answer.stop_leases) == ("pause", (), ())  # nothing is given up
    reserved = talk.reserve(1)
    assert talk.sync(want=9, leases=held).state == "pause"
    before = talk.sync_requests
    talk.commit(1, reserved)
    assert talk.sync_requests == before + 1
    behind = talk.sync(want=9, leases=held)
    assert (behind.state, behind.manifest.version, behind.leases) == ("pause", 1, ())  # the swap is under the pause
    answer = talk.sync(want=9, leases=held, version=1)
    assert (answer.state, [lease.group_id for lease in answer.leases]) == ("run", [4, 5])


def test_a_group_that_comes_during_the_pause_is_taken_and_brings_no_second_request_to_sync(tmp_path):
    talk = Talk(str(tmp_path), config=APRIL)
    talk.register()
    leases = talk.sync(want=9).leases
    before = talk.sync_requests
    for lease in leases[:3]:
        talk.deliver(lease)
    assert talk.sync_requests == before + 1
    talk.commit(1, talk.reserve(1))
    assert talk.sync(want=9, leases=(leases[3].lease_id,), version=1).state == "run"  # one ready, N - 1


def test_april_drains_after_the_last_step_although_the_engine_has_not_its_weights(tmp_path):
    talk = Talk(str(tmp_path), config=APRIL)
    talk.register()
    for lease in talk.sync(want=9).leases:
        talk.deliver(lease)
    for step in (1, 2):
        talk.commit(step, talk.reserve(step), is_last=step == 2)
    assert talk.sync(want=9).state == "drain"


@pytest.mark.parametrize("config", [{"max_lag": 1}, {"kind": "conventional", "steps_per_phase": 2, "max_lag": 1}])
def test_other_schedules_never_pause_and_request_a_sync_only_after_a_commit(tmp_path, config):
    talk = Talk(str(tmp_path), config=build_config(CONFIG.model_dump() | {"schedule": config}))
    talk.register()
    leases = talk.sync(want=9).leases
    before = talk.sync_requests
    for lease in leases:
        talk.deliver(lease)
        assert talk.sync(want=0).state == "run"
    assert talk.sync_requests == before
    reserved = talk.reserve(1)
    assert talk.sync(want=0).state == "run"
    before = talk.sync_requests
    talk.commit(1, reserved)
    assert talk.sync_requests == before + 1
    talk.commit(1, reserved)  # a repeat is no news
    assert (talk.sync(want=0).state, talk.sync_requests) == ("run", before + 1)


def test_after_the_last_step_actors_are_told_to_leave(talk):
    for step in (1, 2):
        for lease in talk.sync(want=2, version=step - 1).leases:
            talk.deliver(lease)
        talk.commit(step, talk.reserve(step), is_last=step == 2)
    assert talk.hub.is_finished
    assert talk.sync(want=4, version=2).state == "drain"


def test_a_stopping_hub_drains_and_answers_a_waiting_reserve(talk, monkeypatch):
    monkeypatch.setattr(trainer_side, "_MAX_WAIT_SECONDS", ENDLESS)
    threading.Timer(0.1, talk.hub.stop).start()
    assert not talk.reserve(1, wait_seconds=ENDLESS).is_ready
    assert talk.sync(want=4).state == "drain"
    assert not talk.hub.is_finished


def test_an_older_trainer_is_fenced(talk):
    talk("t", Register(role="trainer", name="trainer", epoch=4))
    with pytest.raises(Fenced):
        talk("t", Committed(step=1, epoch=2, manifest=None))


def test_live_record_shows_the_run(talk):
    for lease in talk.sync(want=4).leases[:3]:
        talk.deliver(lease)
    swap = {"actor": "actor-0", "actor_epoch": 1, "at": 0.0, "num_bytes": 1, "num_running": 1, "num_tokens": 1}
    talk.sync(want=0, swaps=tuple({**swap, "version": v, "pause_seconds": v / 1000} for v in (1, 2, 9)))
    metrics = {"reward/mean": 0.5, "importance/ess": 0.9, "lag/mean": 0.25}
    talk.commit(1, talk.reserve(1), metrics=metrics)
    live = HubRecordBuilder(talk.hub, CONFIG, "grpc://x:1").record("run").live
    seen = {name: live[name] for name in ("step", "steps", "newest_version", "ready", "leased", "reserved", "state")}
    assert seen == {
        "step": 1, "steps": 2, "newest_version": 1, "ready": 1, "leased": 1, "reserved": 0, "state": "run",
    }  # fmt: skip
    assert (live["swap_pause_seconds"], live["swap_pause_seconds_max"], live["num_swaps"]) == (0.002, 0.009, 3)
    assert live["metrics"] == metrics
    assert live["actors"]["actor-0/1"]["leases"] == 1
    assert live["tokens"]["trained"] == 20


# ---- with the store ----------------------------------------------------------------------------------------------


def restarted_before_step_1(talk: Talk, refs: tuple[GroupRef, ...]) -> Talk:
    """A new hub of the same store, to which the trainer presents its reservation of step 1 again."""
    ledger = Ledger(CONFIG, clock=time.time, boot_id="boot", first_attempt=3000)
    ledger.committed(0, (), manifest(0))
    new = Talk(talk.store.url.removeprefix("file://"), ledger)
    new("t", Register(role="trainer", name="trainer", epoch=2, step=1, reservation=refs))
    new("a", Register(role="actor", name="actor-0", epoch=1))
    return new


def seal(talk: Talk, lease: Lease) -> None:
    ref, batch = rows_of_lease(lease)
    writer = SegmentWriter(talk.store, "actor-0", 1, "run", max_seconds=1.0, max_bytes=1 << 20)
    writer.append(batch, ref)
    writer.seal()


def write_commit(talk: Talk, step: int, answer: Reserved | None = None) -> None:
    put_commit(talk.store, step, 2, manifest=manifest(step), **(trained_by(answer) if answer else {}))


def test_a_commit_that_no_hub_was_told_of_is_read_from_the_store(talk):
    for lease in talk.sync(want=2).leases:
        talk.deliver(lease)
    write_commit(talk, 1, talk.reserve(1))
    talk("t", Register(role="trainer", name="trainer", epoch=3, committed_step=1, manifest=manifest(1)))
    assert (talk.ledger.committed_step, talk.ledger.newest_version, talk.ledger.counts.outstanding) == (1, 1, 0)
    assert talk.ledger.tokens()["trained"] == 20


def test_an_actor_that_comes_from_the_hub_before_brings_tokens_of_a_commit_that_this_hub_did_not_see(talk):
    first, second, third = talk.sync(want=3).leases
    write_commit(talk, 1)
    ref = group_named(second.group_id)
    rows = encode_rollouts(
        "run", [make_rollout(group_id=second.group_id, rollout_index=index, spans=((1, 0, 5),)) for index in range(2)]
    )
    assert talk("a", Group(lease_id=second.lease_id, ref=ref), rows) == Ack(re=7, note="ready")
    assert talk.ledger.newest_version == 1
    unknown = encode_rollouts(
        "run", [make_rollout(group_id=third.group_id, rollout_index=index, spans=((2, 0, 5),)) for index in range(2)]
    )
    with pytest.raises(SchemaMismatch, match="weight version 2, but the newest committed version is 1"):
        talk("a", Group(lease_id=third.lease_id, ref=group_named(third.group_id)), unknown)
    talk.deliver(first)


def test_tokens_of_a_committed_version_that_only_an_earlier_hub_announced_are_taken(talk):
    """With weights.publish_every, a version may have replaced one that an actor could not read, without a commit."""
    [lease] = talk.sync(want=1).leases
    put_commit(talk.store, 1, 2)
    rows = [make_rollout(group_id=lease.group_id, rollout_index=index, spans=((1, 0, 5),)) for index in range(2)]
    answer = talk("a", Group(lease_id=lease.lease_id, ref=group_named(lease.group_id)), encode_rollouts("run", rows))
    assert answer == Ack(re=7, note="ready")
    assert (talk.ledger.newest_version, talk.ledger.committed_step) == (0, 1)


def test_a_commit_of_a_newer_trainer_takes_its_groups_from_reservations_of_later_steps(talk):
    """The newer trainer has reserved its step at the hub before."""
    for lease in talk.sync(want=4).leases:
        talk.deliver(lease)
    first, second = talk.reserve(1), talk.reserve(2)
    put_commit(talk.store, 1, 3, manifest=manifest(1), **trained_by(second))
    talk("t", Register(role="trainer", name="trainer", epoch=3, committed_step=1, manifest=manifest(1)))
    answer = talk("t", Reserve(step=2, epoch=3, wait_seconds=0.0))
    assert (answer.groups, talk.ledger.counts.ready) == (first.groups, 0)
    assert talk.ledger.tokens()["trained"] == 20


def test_a_claimed_commit_that_is_not_in_the_store_is_an_error(talk):
    with pytest.raises(StoreUnavailable, match="commit of step 1"):
        talk("t", Register(role="trainer", name="trainer", epoch=3, committed_step=1))


def test_a_restarted_hub_serves_sealed_rows_and_reservations_that_are_presented_again(talk):
    leases = talk.sync(want=4).leases
    for lease in leases[:2]:
        talk.deliver(lease)
    first = talk.reserve(1)
    put_epoch(talk.store, 2)
    write_commit(talk, 0)
    write_commit(talk, 1, first)
    seal(talk, leases[2])
    ref, batch = rows_of_lease(leases[3])
    refs = (rows_of_lease(leases[2])[0], ref)

    past = read_stored_state(talk.store)
    ledger = Ledger(CONFIG, clock=time.time, boot_id="boot", first_attempt=3000)
    ledger.restore(past.commit, past.sealed, past.manifest)
    new = Talk(talk.store.url.removeprefix("file://"), ledger, past.rows)
    assert new(
        "t", Register(role="trainer", name="trainer", epoch=2, step=2, reservation=refs, committed_step=1)
    ) == (Registered(re=7, boot_id="boot", newest_version=1, sync_seconds=0.05, credit=0))
    wanted = Rows(step=2, groups=((2, 0), (3, 0)))
    with pytest.raises(MissingObject, match="group 3"):
        list(new.hub.handle("t", wanted, None))
    held = LeaseRef(group_id=3, attempt=0, lease_id=leases[3].lease_id)
    new("a", Register(role="actor", name="actor-0", epoch=1, leases=(held,)))
    assert new("a", Group(lease_id=leases[3].lease_id, ref=ref), batch) == Ack(re=7, note="known")
    assert [header.group_id for header, _ in new.hub.handle("t", wanted, None)] == [2, 3]


def test_rows_are_read_back_from_their_segment_once_the_segment_is_sealed(talk):
    [lease] = talk.sync(want=1).leases
    refs = (rows_of_lease(lease)[0],)
    new = restarted_before_step_1(talk, refs)
    seal(new, lease)
    new("a", Sealed(actor="actor-0", epoch=1, seq=0, groups=((0, 0),)))
    [(header, batch)] = new.hub.handle("t", Rows(step=1, groups=((0, 0),)), None)
    assert (header.group_id, batch.num_rows) == (0, 2)


def test_rows_in_memory_follow_the_reservation_and_the_others_are_asked_for(talk):
    leases = talk.sync(want=2).leases
    refs = tuple(rows_of_lease(lease)[0] for lease in leases)
    new = restarted_before_step_1(talk, refs)
    message = Reserve(step=1, epoch=2, wait_seconds=0, with_rows=True)
    ((nothing_yet, _),) = new.hub.handle("t", message, None)
    assert (len(nothing_yet.groups), nothing_yet.num_following) == (2, 0)
    held = LeaseRef(group_id=1, attempt=0, lease_id=leases[1].lease_id)
    new("a", Register(role="actor", name="actor-0", epoch=1, leases=(held,)))
    ref, batch = rows_of_lease(leases[1])
    new("a", Group(lease_id=leases[1].lease_id, ref=ref), batch)
    (answer, _), (header, rows) = new.hub.handle("t", message, None)
    assert (len(answer.groups), answer.num_following) == (2, 1)
    assert (header.group_id, header.remaining, rows.num_rows) == (1, 0, 2)
    ((plain, _),) = new.hub.handle("t", message.model_copy(update={"with_rows": False}), None)
    assert (plain.groups, plain.num_following) == (answer.groups, 0)


def test_rows_of_a_damaged_segment_are_refused_and_their_group_is_leased_again(talk, tmp_path):
    leases = talk.sync(want=2).leases
    refs = tuple(rows_of_lease(lease)[0] for lease in leases)
    new = restarted_before_step_1(talk, refs)
    seal(new, leases[0])
    new("a", Sealed(actor="actor-0", epoch=1, seq=0, groups=((0, 0),)))
    (path,) = tmp_path.glob("rollouts/*/*/*.arrow")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(SchemaMismatch, match="torn or corrupt"):
        list(new.hub.handle("t", Rows(step=1, groups=((0, 0),)), None))
    answer = new("t", Reserve(step=1, epoch=2, wait_seconds=0, lost=((0, 0), (1, 0))))
    assert not answer.is_ready
    assert new.ledger.num_queued == 2


def test_groups_of_one_write_are_each_taken_or_refused_for_themselves(talk):
    other_actor(talk)
    first, second, third = talk.sync(want=3).leases
    parts = [rows_of_lease(lease) for lease in (first, first, second, third)]
    refs = [ref for ref, _ in parts]
    refs[2] = replace(refs[2], actor="actor-1", actor_epoch=5)
    leases = [first.lease_id, first.lease_id, second.lease_id, "another"]
    groups = [Group(id=9, lease_id=lease_id, ref=ref) for lease_id, ref in zip(leases, refs, strict=True)]
    whole = pa.concat_batches([batch for _, batch in parts])
    before = talk.sync_requests
    ready, known, foreign, stale = talk.hub.handle_groups("a", groups, whole)
    assert (ready, known) == (Ack(re=9, note="ready"), Ack(re=9, note="known"))
    assert isinstance(foreign, WrongPeer)
    assert isinstance(stale, StaleLease)
    assert talk.ledger.num_ready == 1
    assert talk.sync_requests == before + 1, "credit of the groups that do not wait for the trainer"
    answer = talk.reserve(1)
    assert not answer.is_ready
    talk.deliver(second)
    answer = talk.reserve(1)
    request = Rows(step=1, groups=tuple((ref.group_id, ref.attempt) for ref in answer.groups))
    replies = [rows.rows() for _, rows in talk.hub.handle("t", request, None)]
    assert [rows.equals(expected) for rows, expected in zip(replies, (parts[0][1], parts[2][1]), strict=True)] == [
        True
    ] * 2


def test_a_refused_write_leaves_no_rows_behind_for_the_next_garbage_collection(talk):
    [lease] = talk.sync(want=1).leases
    ref, batch = rows_of_lease(lease)
    rows = weakref.ref(batch)
    whole = pa.concat_batches([batch, batch])
    both = weakref.ref(whole)
    bad = Group(lease_id="another", ref=ref)
    gc.disable()
    try:
        assert all(isinstance(answer, StaleLease) for answer in talk.hub.handle_groups("a", [bad, bad], whole))
        with pytest.raises(StaleLease):
            talk("a", bad, batch)
        del batch, whole
        assert (rows(), both()) == (None, None)
    finally:
        gc.enable()
