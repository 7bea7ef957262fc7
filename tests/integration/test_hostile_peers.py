"""A hostile or broken peer that has the token, against a real hub process over the real channel.

The hub refuses the message of each case with a code. After each case the hub serves an honest actor and an honest
trainer as before, and its totals have not changed.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl
import pytest

from pipelinerl_core.channel.client import HubClient
from pipelinerl_core.data.codec import decode_rollouts, encode_rollouts
from pipelinerl_core.data.schema import ROLLOUT_SCHEMA
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.messages import (
    Ack,
    Answer,
    Bye,
    Committed,
    Group,
    Lease,
    LeaseRef,
    Register,
    Registered,
    Reserve,
    Reserved,
    Rows,
    Sealed,
    SwapRecord,
    Sync,
    SyncReply,
)
from pipelinerl_core.run.records import HubRecord
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.types import Rollout, WeightSpan
from tests.builders import put_run, small_config, sync_message, weight_manifest
from tests.integration.exchange_case import leave, raw_exchange, refusal
from tests.rollout_rows import build_group, group_ref

TOKEN = "a-token-for-tests"
ROOT = Path(__file__).parents[2]
CONFIG = small_config(
    rollouts={"group_size": 2}, trainer={"groups_per_step": 4, "steps": 1}, placement={"lease_seconds": 60.0}
)
# The hub with smaller limits, so that a message above a limit is sent quickly, and with hub.json written at every
# tick, so that tests do not wait for the totals. `patch.object` fails if the hub no longer has a name.
HUB = """
import functools
from unittest.mock import patch
from pipelinerl_core.roles.hub import main as hub
from pipelinerl_core.roles.runtime.process import leave
server = functools.partial(hub.HubServer, max_row_bytes=1 << 20, max_tokens_per_row=1000)
with patch.object(hub, "_HEARTBEAT_SECONDS", 0.0), patch.object(hub, "HubServer", server):
    leave(hub.main())
"""
MANIFEST = weight_manifest(0)


@contextmanager
def hub_process(run: Path) -> Iterator[subprocess.Popen[str]]:
    put_run(open_store(str(run)), CONFIG)
    environment = {**os.environ, "PIPELINERL_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", HUB, "--run", str(run), "--parent-pid", str(os.getpid())]
    with (run / "hub.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stderr=log, text=True, cwd=ROOT)
    try:
        yield process
    finally:
        process.kill()
        process.wait(timeout=30)


class Peer:
    """An actor, or the trainer."""

    def __init__(self, url: str, role: str, name: str, epoch: int) -> None:
        self.name, self.epoch = name, epoch
        self.leases: list[str] = []
        self.client = HubClient(url, token=TOKEN, role=role, name=name)
        answer = self.client.request(Register(role=role, name=name, epoch=epoch))
        assert isinstance(answer, Registered)
        self.boot_id = answer.boot_id

    def sync(self, want: int = 0, leases: tuple[str, ...] = (), **more) -> Answer:
        fields = {
            "boot_id": self.boot_id, "engine_version": 0, "running": 0, "waiting": 0, "concurrency": 8, "want": want,
            "leases": leases, "num_tokens": 0, "running_seconds": 0.0, **more,
        }  # fmt: skip
        # Without validation: the hub must refuse wrong values.
        return self.client.request(Sync.model_construct(**fields))

    def lease(self) -> Lease:
        """Get one more lease."""
        (lease,) = self.sync(want=1, leases=tuple(self.leases)).leases
        self.leases.append(lease.lease_id)
        return lease

    def group(self, lease: Lease | LeaseRef, *, num_tokens: int = 12) -> list[Rollout]:
        return build_group(
            0, group_id=lease.group_id, attempt=lease.attempt, size=2, num_tokens=num_tokens, actor=self.name
        )

    def deliver(self, lease: Lease | LeaseRef) -> Answer:
        """Send a finished group under a lease, which the peer then no longer holds."""
        if lease.lease_id in self.leases:
            self.leases.remove(lease.lease_id)
        return self.send(lease.lease_id, self.group(lease))

    def send(self, lease_id: str, rollouts: list[Rollout], *, epoch: int | None = None) -> Answer:
        """Send rollouts under the id of a lease; `epoch`: other than the epoch of the peer."""
        ref = group_ref(rollouts, actor_epoch=self.epoch if epoch is None else epoch)
        return self.client.request(Group(lease_id=lease_id, ref=ref), encode_rollouts("run", rollouts))


class World:
    """A hub, an honest actor and trainer, and an intruder: a registered actor, which also has leases of its own."""

    def __init__(self, run: Path, process: subprocess.Popen[str]) -> None:
        """Two groups of 24 tokens are delivered, one by each actor, and each actor holds a lease."""
        self.run = run
        self.process = process
        self.url = self.hub_record(0.0).url
        self.trainer = Peer(self.url, "trainer", "trainer", 1)
        self.trainer.client.request(Committed(step=0, epoch=1, manifest=MANIFEST))
        self.intruder = Peer(self.url, "actor", "intruder", 9)
        self.intruder_lost = self.intruder.lease()
        self.intruder.client.request(Bye())
        self.intruder.leases.clear()
        self.intruder.client.request(Register(role="actor", name="intruder", epoch=9))
        self.actor = Peer(self.url, "actor", "actor-0", 1)
        self.actor_held = self.actor.lease()
        assert (self.actor_held.group_id, self.actor_held.attempt) == (self.intruder_lost.group_id, 1)
        self.actor_delivered = self.actor.lease()
        assert self.actor.deliver(self.actor_delivered).note == "ready"
        self.intruder_delivered = self.intruder.lease()
        assert self.intruder.deliver(self.intruder_delivered).note == "ready"
        self.intruder_held = self.intruder.lease()
        self.tokens = self.hub_record(time.time()).live["tokens"]
        assert self.tokens["ready"] == self.tokens["generated"] == 48

    def hub_record(self, since: float) -> HubRecord:
        """hub.json with the state of the hub after `since`, in Unix seconds; 0: any."""
        deadline, beats = time.monotonic() + 60, set()
        path = self.run / "hub.json"
        while time.monotonic() < deadline:
            assert self.process.poll() is None, (self.run / "hub.log").read_text()
            if path.exists() and (record := HubRecord.model_validate_json(path.read_text())).beat > since:
                beats.add(record.beat)
                if since == 0.0 or len(beats) > 1:  # the hub may have read the state of the first before `since`
                    return record
            time.sleep(0.02)
        raise AssertionError("hub.json was not written")

    def answer_to(
        self, metadata: bytes, batch: pa.RecordBatch | None = None, schema: pa.Schema = ROLLOUT_SCHEMA
    ) -> dict:
        """The hub's answer to a message of these bytes."""
        client, writer, reader = raw_exchange(self.url, schema, token=TOKEN)
        answer = refusal(writer, reader, metadata, batch)
        leave(client, writer, reader)
        return answer

    def check_served(self, **moved: int) -> None:
        """The hub serves actor and trainer, and its totals have changed by `moved` only: class -> tokens."""
        synced = self.actor.sync(leases=(self.actor_held.lease_id,))
        assert isinstance(synced, SyncReply)
        assert (synced.state, synced.leases, synced.stop_leases) == ("run", (), ())
        reserved = self.trainer.client.request(Reserve(step=1, epoch=1, wait_seconds=0.0))
        assert isinstance(reserved, Reserved)
        assert (reserved.is_ready, reserved.ready_groups) == (False, 2)
        self.tokens = {name: number + moved.get(name, 0) for name, number in self.tokens.items()}
        tokens = self.hub_record(time.time()).live["tokens"]
        assert tokens == self.tokens
        assert tokens["generated"] == sum(number for name, number in tokens.items() if name != "generated")


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[World]:
    run = tmp_path_factory.mktemp("run")
    with hub_process(run) as process:
        shared = World(run, process)
        yield shared
        for peer in (shared.actor, shared.intruder, shared.trainer):
            peer.client.close(bye=False)


# ---- the table ---------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A message that the hub refuses."""

    name: str
    act: Callable[[World], Answer | dict]
    """Sends the message; returns the answer, as a message or as its JSON."""
    code: str
    detail: str
    """A part of the answer's detail."""


def changed(**fields) -> Callable[[World], Answer]:
    """A group under the intruder's own lease, with other values in the first rollout."""

    def act(world: World) -> Answer:
        first, second = world.intruder.group(world.intruder_held)
        return world.intruder.send(world.intruder_held.lease_id, [replace(first, **fields), second])

    return act


def spans(*items: tuple[int, int, int]) -> Callable[[World], Answer]:
    return changed(weight_spans=tuple(WeightSpan(*item) for item in items))


def logprobs(value: float) -> Callable[[World], Answer]:
    return changed(rollout_logprobs=np.full(12, value, np.float32))


def sends_tokens(num_tokens: int) -> Callable[[World], Answer]:
    return lambda world: world.intruder.send(
        world.intruder_held.lease_id, world.intruder.group(world.intruder_held, num_tokens=num_tokens)
    )


def sends(message) -> Callable[[World], Answer]:
    return lambda world: world.intruder.client.request(message)


def the_actors_own_group(world: World) -> Answer:
    """The next message of the honest actor, word for word, from the intruder."""
    return world.intruder.client.request(
        Group(lease_id=world.actor_held.lease_id, ref=group_ref(world.actor.group(world.actor_held), actor_epoch=1)),
        encode_rollouts("run", world.actor.group(world.actor_held)),
    )


def a_group_under_the_actors_lease(world: World) -> Answer:
    return world.intruder.deliver(world.actor_held)


def a_group_that_the_actor_delivered(world: World) -> Answer:
    return world.intruder.deliver(world.actor_delivered)


def a_group_under_a_lost_lease(world: World) -> Answer:
    return world.intruder.deliver(world.intruder_lost)


def a_group_under_an_invented_lease(world: World) -> Answer:
    return world.intruder.deliver(LeaseRef(group_id=7, attempt=0, lease_id="7.0.x"))


def a_negative_attempt(world: World) -> dict:
    rollouts = [replace(rollout, attempt=-1) for rollout in world.intruder.group(world.intruder_held)]
    message = Group.model_construct(id=3, lease_id="x", ref=group_ref(rollouts, actor_epoch=9))
    return world.answer_to(message.model_dump_json().encode(), encode_rollouts("run", rollouts))


def a_newer_schema(world: World) -> dict:
    schema = ROLLOUT_SCHEMA.with_metadata({**ROLLOUT_SCHEMA.metadata, b"schema_version": b"4"})
    rows = encode_rollouts("run", world.intruder.group(world.intruder_held))
    message = Group(id=1, lease_id="x", ref=group_ref(world.intruder.group(world.intruder_held), actor_epoch=9))
    batch = pa.RecordBatch.from_arrays(rows.columns, schema=schema)
    return world.answer_to(message.model_dump_json().encode(), batch, schema)


def other_columns(world: World) -> dict:
    schema = pa.schema([("x", pa.int64())])
    message = Group(id=1, lease_id="x", ref=group_ref(world.intruder.group(world.intruder_held), actor_epoch=9))
    return world.answer_to(message.model_dump_json().encode(), pa.record_batch([[1]], schema=schema), schema)


def other_rows_than_named(world: World) -> Answer:
    rollouts = world.intruder.group(world.intruder_held)
    ref = replace(group_ref(rollouts, actor_epoch=9), num_tokens=25)
    return world.intruder.client.request(
        Group(lease_id=world.intruder_held.lease_id, ref=ref), encode_rollouts("run", rollouts)
    )


def rows_beside_a_sync(world: World) -> Answer:
    sync = sync_message(boot_id=world.intruder.boot_id)
    return world.intruder.client.request(sync, encode_rollouts("run", world.intruder.group(world.intruder_held)))


def a_lease_far_ahead(world: World) -> Answer:
    lease = LeaseRef(group_id=10**15, attempt=0, lease_id="x")
    return world.intruder.client.request(Register(role="actor", name="intruder", epoch=9, leases=(lease,)))


def sealing_the_actors_group(world: World) -> Answer:
    key = (world.actor_delivered.group_id, world.actor_delivered.attempt)
    return world.intruder.client.request(Sealed(actor="intruder", epoch=9, seq=0, groups=(key,)))


def a_swap(**fields) -> Callable[[World], Answer]:
    swap = {
        "actor": "intruder", "actor_epoch": 9, "version": 1, "at": 0.0, "pause_seconds": 0.0, "num_bytes": 1,
        "num_running": 0, "num_tokens": 0, **fields,
    }  # fmt: skip
    # Without validation: the hub must refuse wrong values.
    return lambda world: world.intruder.sync(swaps=(SwapRecord.model_construct(**swap),))


TRAINER_MESSAGES = (
    Committed(step=1, epoch=9, manifest=None, is_last=True),
    Reserve(step=1, epoch=9),
    Rows(step=1, groups=((1, 0),)),
)
CASES = [
    Case("malformed JSON", lambda world: world.answer_to(b'{"kind": "group", '), "schema", "not a valid request"),
    Case("no JSON", lambda world: world.answer_to(b"\xff\xfe\x00"), "schema", "not a valid request"),
    Case("deep JSON", lambda world: world.answer_to(b"[" * 100_000), "schema", "not a valid request"),
    Case("an oversized message", lambda world: world.answer_to(b" " * (9 << 20)), "schema", "the limit is 8388608"),
    Case("another major schema", a_newer_schema, "schema", "'4' cannot be read"),
    Case("other columns", other_columns, "schema", "schema"),
    Case("rows beside a sync", rows_beside_a_sync, "schema", "carries no rows"),
    Case("other rows than named", other_rows_than_named, "schema", "their message names"),
    Case("a giant batch", sends_tokens(100_000), "schema", "bytes of rows in one message, the limit is 1048576"),
    Case("a giant rollout", sends_tokens(2_000), "schema", "2000 tokens, the limit is 1000"),
    Case("NaN log-probabilities", logprobs(np.nan), "schema", "rollout_logprobs holds nan; each is finite"),
    Case("infinite log-probabilities", logprobs(-np.inf), "schema", "rollout_logprobs holds -inf; each is finite"),
    Case("an infinite reward", changed(reward=float("inf")), "schema", "is not a finite number"),
    Case("spans beyond the tokens", spans((0, 0, 99)), "schema", "weight_spans"),
    Case("spans before the tokens", spans((0, -4, 12)), "schema", "weight_spans"),
    Case("spans with a gap", spans((0, 0, 4), (1, 6, 12)), "schema", "weight_spans"),
    Case("versions that fall", spans((1, 0, 4), (0, 4, 12)), "schema", "weight_spans"),
    Case("a version that is not committed", spans((1, 0, 12)), "schema", "the newest committed version is 0"),
    Case("a version beyond all", spans((1 << 40, 0, 12)), "schema", "weight_spans"),
    Case("a reward beyond all", changed(reward=3e38), "schema", "is not a finite number within 1e+09 of 0"),
    Case("a time beyond all", changed(scored_at=1e300), "schema", "numbers from 0 to 1e+11"),
    Case("an engine version beyond all", lambda world: world.intruder.sync(engine_version=10**400),
         "schema", "sync.engine_version: Input should be less than or equal to 2147483647"),
    Case("a swap to a version beyond all", a_swap(version=1 << 70), "schema", "version: Input should be less than"),
    Case("lengths that disagree", changed(rollout_logprobs=np.zeros(5, np.float32)), "schema", "one each"),
    Case("a mask of another length", changed(loss_mask=np.ones(13, np.bool_)), "schema", "one each"),
    Case("a counter that is not a number", lambda world: world.answer_to(
        b'{"kind": "sync", "id": 1, "boot_id": "b", "engine_version": 0, "running": 0, "waiting": 0, "want": 0,'
        b' "concurrency": 1, "leases": [], "num_tokens": 0, "running_seconds": 0, "counters": {"cpu_seconds": NaN}}'
    ), "schema", "sync.counters.cpu_seconds"),
    Case("a negative attempt", a_negative_attempt, "schema", "group.ref"),
    Case("a lease far ahead", a_lease_far_ahead, "schema", "was never leased"),
    Case("a swap without its fields", lambda world: world.answer_to(
        b'{"kind": "sync", "id": 1, "boot_id": "b", "engine_version": 0, "running": 0, "waiting": 0, "want": 0,'
        b' "concurrency": 1, "leases": [], "num_tokens": 0, "running_seconds": 0, "swaps": [{"version": "x"}]}'
    ), "schema", "sync.swaps.0.actor"),
    Case("somebody else's name", the_actors_own_group, "wrong_peer", "sent a message of actor-0/1"),
    Case("somebody else's lease", a_group_under_the_actors_lease, "wrong_peer", "which is actor-0/1's"),
    Case("a copy of another actor's group", a_group_that_the_actor_delivered, "wrong_peer", "which is actor-0/1's"),
    Case("another epoch", lambda world: world.intruder.send("x", world.intruder.group(world.intruder_held), epoch=8),
         "wrong_peer", "sent a message of intruder/8"),
    Case("sealed for another", sends(Sealed(actor="actor-0", epoch=1, seq=0, groups=())), "wrong_peer", "actor-0/1"),
    Case("sealing another actor's group", sealing_the_actors_group, "wrong_peer", "which is actor-0/1's"),
    Case("a swap of another", a_swap(actor="actor-0", actor_epoch=1), "wrong_peer", "a swap of actor-0/1"),
    *[Case(f"an actor says {message.kind}", sends(message), "wrong_peer", "role actor may not send it")
      for message in TRAINER_MESSAGES],
    Case("registering as the trainer", sends(Register(role="trainer", name="trainer", epoch=99)), "wrong_peer",
         "registers as trainer/trainer"),
    Case("registering as another", sends(Register(role="actor", name="actor-0", epoch=99)), "wrong_peer",
         "registers as actor/actor-0"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_message_is_refused_with_a_code_and_other_peers_are_served(world, case):
    answer = case.act(world)
    if not isinstance(answer, dict):
        answer = answer.model_dump()
    assert (answer["kind"], answer["code"]) == ("refused", case.code)
    assert case.detail in answer["detail"]
    assert "Traceback" not in answer["detail"]
    world.check_served()


def open_exchange(url: str, headers: list[tuple[bytes, bytes]]) -> None:
    """Open an exchange; gRPC raises a refusal at the opening or at the first read."""
    with fl.FlightClient(url) as client:
        descriptor = fl.FlightDescriptor.for_command(b'{"role": "actor", "name": "intruder"}')
        writer, reader = client.do_exchange(descriptor, fl.FlightCallOptions(headers=headers, timeout=10))
        with writer:
            reader.read_chunk()


def test_a_client_without_the_token_is_refused(world):
    with pytest.raises(ConfigError, match="refuses the token"):
        HubClient(world.url, token="wrong", role="actor", name="intruder")
    for headers in ([], [(b"authorization", b"Bearer ")], [(b"authorization", b"Basic eDp4")]):
        with pytest.raises(fl.FlightUnauthenticatedError, match="wrong or missing token"):
            open_exchange(world.url, headers)
    world.check_served()


@pytest.mark.parametrize("act", [a_group_under_a_lost_lease, a_group_under_an_invented_lease])
def test_rows_without_a_lease_in_force_are_stale_and_their_tokens_count_once_as_superseded(world, act):
    for moved in ({"generated": 24, "superseded": 24}, {}):
        sampled = sum(number for name, number in world.tokens.items() if name in ("superseded", "ready")) - 24
        world.intruder.sync(leases=tuple(world.intruder.leases), num_tokens=sampled + moved.get("generated", 0))
        answer = act(world)
        assert answer.code == "stale_lease"
        assert "is not in force" in answer.detail
        world.check_served(**moved)


def test_a_group_that_is_sent_again_is_known_and_counted_once(world):
    for _ in range(2):
        answer = world.intruder.deliver(world.intruder_delivered)
        assert (answer.kind, answer.note) == ("ack", "known")
        world.check_served()


def test_after_all_cases_the_run_trains_the_rows_that_were_delivered_under_leases(tmp_path):
    with hub_process(tmp_path) as process:
        world = World(tmp_path, process)
        for case in CASES:
            case.act(world)
        assert world.actor.deliver(world.actor_held).note == "ready"
        assert world.intruder.deliver(world.intruder_held).note == "ready"
        client = world.trainer.client
        reserved = client.request(Reserve(step=1, epoch=1, wait_seconds=2.0))
        assert reserved.is_ready
        samplers = {ref.group_id: ref.actor for ref in reserved.groups}
        assert samplers == {
            world.actor_held.group_id: "actor-0",
            world.actor_delivered.group_id: "actor-0",
            world.intruder_held.group_id: "intruder",
            world.intruder_delivered.group_id: "intruder",
        }
        keys = tuple((ref.group_id, ref.attempt) for ref in reserved.groups)
        for header, rows in client.request_rows(Rows(step=1, groups=keys)):
            assert {rollout.actor for rollout in decode_rollouts(rows)} == {samplers[header.group_id]}
        assert reserved.tokens["ready"] == reserved.tokens["generated"] == 96
        assert isinstance(client.request(Committed(step=1, epoch=1, manifest=None, fates=reserved.decided)), Ack)
        tokens = world.hub_record(time.time()).live["tokens"]
        assert tokens["trained"] == tokens["generated"] == 96
        for peer in (world.actor, world.intruder, world.trainer):
            peer.client.close()
