"""Every message that the admission of the hub accepts is valid for all later stages: no message can break a run.

Actors send messages and rows with numbers at and beyond every limit to a real hub with its real admission. Then
another actor and a trainer continue: reservation, commit, metrics, MLflow, Prometheus, report and Parquet table, and
a hub that restarts from the commits. The hub may refuse a message by name; no later stage may fail.
"""

import io
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pipelinerl.tasks.run_watch import version_rows
from pipelinerl_core.batching.assemble import assemble_rows
from pipelinerl_core.channel.bundles import unbundled
from pipelinerl_core.channel.dispatcher import Dispatcher
from pipelinerl_core.data.codec import decode_batch, decode_rollouts, encode_batch, encode_rollouts, to_segment
from pipelinerl_core.ledger import Ledger
from pipelinerl_core.messages import (
    ANSWER,
    Ack,
    Answer,
    Bye,
    Committed,
    Introduction,
    Lease,
    Message,
    Refused,
    Register,
    Registered,
    Reserve,
    Reserved,
    Rows,
    SyncReply,
    encode,
)
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.prompts import build_source
from pipelinerl_core.ranges import MAX_COUNT, MAX_NUMBER, MAX_REWARD, MAX_SECONDS, MAX_STEP
from pipelinerl_core.report.html import write_report
from pipelinerl_core.report.live_view import format_status, run_status
from pipelinerl_core.roles.hub.heartbeat import HubRecordBuilder
from pipelinerl_core.roles.hub.main import ATTEMPTS_PER_BOOT
from pipelinerl_core.roles.hub.recovery import read_stored_state
from pipelinerl_core.roles.hub.service import Hub
from pipelinerl_core.roles.trainer.committer import Committer, ComputedStep
from pipelinerl_core.run.follow import Forwarder, RunFollower
from pipelinerl_core.run.records import HUB_KEY, REPORT_JSON_KEY, WEIGHTS_TABLE_KEY, batch_key
from pipelinerl_core.telemetry.metrics import step_metrics
from pipelinerl_core.telemetry.mlflow import MlflowTracker
from pipelinerl_core.telemetry.role_metrics import runs_exposition
from pipelinerl_core.types import NO_STEP
from pipelinerl_core.weights.files import entry_of
from tests.builders import put_epoch, put_run, sync_message
from tests.fakes import MemoryStore
from tests.rollout_rows import build_group
from tests.snapshots import snapshot_of

CONFIG = build_config(
    {
        "rollouts": {"group_size": 2},
        "engine": {"concurrency": 4},
        "schedule": {"max_lag": 2},
        "trainer": {"groups_per_step": 2, "steps": 9},
        "weights": {"transport": "object_store"},
        "placement": {"actors": 2},
        "emulation": {"accelerators": 2},
    }
)
STEPS = 2
"""Trained after the messages; the first takes up what the messages said."""
BOOT = "1-boot"
START = 1_700_000_000.0
EPOCHS = {"intruder": 3, "other": 4, "honest": 5}


class Wire:
    """A peer's end: bytes in, bytes out, as over Flight."""

    def __init__(self, dispatcher: Dispatcher, role: str, name: str) -> None:
        self._dispatcher = dispatcher
        self._written: list[tuple[bytes, pa.RecordBatch | None]] = []
        self.peer = dispatcher.connect(Introduction(role=role, name=name), self)

    def write_metadata(self, metadata: bytes) -> None:
        self._written.append((metadata, None))

    def write_with_metadata(self, rows: pa.RecordBatch, metadata: bytes) -> None:
        self._written.append((metadata, rows))

    def ask(self, metadata: bytes, rows: pa.RecordBatch | None = None) -> list[tuple[Answer, pa.RecordBatch | None]]:
        """The answers without SyncNow."""
        self._written.clear()
        self._dispatcher.answer(self.peer, metadata, rows)
        answers = [(ANSWER.validate_json(metadata), batch) for metadata, batch in self._written]
        for answer, _ in answers:
            assert not isinstance(answer, Refused) or answer.code != "internal", answer
        return [(answer, batch) for answer, batch in answers if answer.kind != "sync_now"]

    def say(self, message: Message, rows: pa.RecordBatch | None = None) -> Answer:
        [(answer, _)] = self.ask(encode(message), rows)
        return answer

    def request(self, message: Message) -> Answer:
        """As a HubLink has it."""
        return self.say(message)


class World:
    """A run in memory: a hub that has just been restarted, and its clients."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.now = START
        put_run(store, created_at=START, config=CONFIG)
        self.epoch = put_epoch(store, 1, started_at=START)
        self.num_hubs = 0
        self.start_hub()
        self.samples = self.tokens = 0

    def start_hub(self) -> None:
        """Or another one, from what the store has."""
        past = read_stored_state(self.store)
        self.num_hubs += 1
        self.boot_id = f"{self.num_hubs}-boot"
        ledger = Ledger(
            CONFIG, clock=lambda: self.now, boot_id=self.boot_id, first_attempt=self.num_hubs * ATTEMPTS_PER_BOOT
        )
        if past.commit is not None:
            ledger.restore(past.commit, past.sealed, past.manifest)
        self.hub = Hub(CONFIG, ledger, build_source(CONFIG), self.store, boot_id=self.boot_id, rows=past.rows)
        self.dispatcher = Dispatcher(self.hub, max_row_bytes=1 << 20, max_tokens_per_row=1000)
        self.dispatcher.is_open = True
        self.live = HubRecordBuilder(self.hub, CONFIG, "grpc://127.0.0.1:1")
        self.now += 10.0  # the grace time is over
        self.wires = {name: Wire(self.dispatcher, "actor", name) for name in EPOCHS}
        for name, wire in self.wires.items():
            assert isinstance(wire.say(Register(role="actor", name=name, epoch=EPOCHS[name])), Registered)
        self.trainer = Wire(self.dispatcher, "trainer", "trainer")
        assert isinstance(self.trainer.say(Register(role="trainer", name="trainer", epoch=1)), Registered)

    def committer(self) -> Committer:
        return Committer(self.store, CONFIG, run_id="run", epoch=self.epoch, link=self.trainer)

    def sync(self, name: str, *, want: int = 0) -> SyncReply:
        answer = self.wires[name].say(sync_message(boot_id=self.boot_id, want=want))
        assert isinstance(answer, SyncReply)
        return answer

    def train(self, committer: Committer, step: int) -> None:
        """Honest groups until a step is reserved, then everything up to its commit."""
        lease_groups = 0
        while not isinstance(reserved := self._reserve(step), Reserved) or not reserved.is_ready:
            assert lease_groups < 40, reserved
            lease_groups += 1
            for lease in self.sync("honest", want=1).leases:
                rows, ref = group_of(lease, "honest", EPOCHS["honest"])
                message = {"kind": "group", "lease_id": lease.lease_id, "ref": ref}
                [(answer, _)] = self.wires["honest"].ask(json.dumps(message).encode(), rows)
                assert isinstance(answer, Ack)
        keys = tuple((ref.group_id, ref.attempt) for ref in reserved.groups)
        parts = [
            reply for answer in self.trainer.ask(encode(Rows(step=step, groups=keys))) for reply in unbundled(*answer)
        ]
        groups = [decode_rollouts(batch) for _, batch in parts if batch is not None]
        assert len(groups) == len(keys)
        assembled = assemble_rows(step, groups, CONFIG)
        batch = encode_batch("run", step, assembled.rows)
        rows = decode_batch(batch)
        data, key = to_segment([batch]), batch_key(step, 1, rank=0)
        self.store.put(key, data)
        self.samples += len(rows)
        self.tokens += sum(row.rollout.num_tokens for row in rows)
        metrics = step_metrics(
            LEARNED, rows, step=step, masked_stale=assembled.num_masked_stale, num_errors=assembled.num_errors,
            reserve_wait_seconds=0.1, samples=self.samples, tokens=self.tokens, seconds=self.now - START,
        )  # fmt: skip
        committer.submit(
            ComputedStep(
                step=step, weights=snapshot_of({"w": torch.ones(2)}), state=None, batch=Done(entry_of(key, data)),
                reserved=reserved, metrics=metrics, reserved_at=self.now, computed_at=self.now + 1.0,
            )
        )  # fmt: skip
        committer.flush()
        self.now += 2.0

    def _reserve(self, step: int) -> Answer:
        [(answer, _)] = self.trainer.ask(encode(Reserve(step=step, epoch=1, wait_seconds=0.0)))
        return answer

    def beat(self) -> None:
        """hub.json, and what is read from it."""
        self.store.put(HUB_KEY, self.live.record("run").model_dump_json().encode())
        runs_exposition([json.loads(json.dumps(run_status(self.store), allow_nan=False))])
        format_status(self.store, run_status(self.store))


class Done:
    """A Future of an upload that has ended."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def result(self, timeout: float) -> Any:
        return self._value


LEARNED = {"train/loss": 0.1, "train/tokens": 10.0, "importance/ess": 0.9, "time/compute_seconds": 1.0}


def group_of(lease: Lease, name: str, epoch: int) -> tuple[pa.RecordBatch, dict[str, Any]]:
    """Rows of a leased group, and the reference that names them."""
    rollouts = build_group(0, group_id=lease.group_id, attempt=lease.attempt, size=2, num_tokens=6, actor=name)
    ref = {
        "group_id": lease.group_id, "attempt": lease.attempt, "actor": name, "actor_epoch": epoch,
        "num_rollouts": 2, "num_tokens": 12,
    }  # fmt: skip
    return encode_rollouts("run", rollouts), ref


# ---- what actors say ---------------------------------------------------------------------------------------------

EDGES = [0, 1, (1 << 30), (1 << 31) - 1, 1 << 31, (1 << 53) - 1, 1 << 53, (1 << 63) - 1, 1 << 63, 1 << 70, 10**400]
REALS = [0.0, 0.5, 1.0, 1e9, 1e11, 1.1e11, 1e15, 1.1e15, 1e19, 1e38, 1e308]
NUMBERS = st.sampled_from([sign * number for number in [*EDGES, *REALS] for sign in (1, -1)])


def templates(name: str, lease: Lease) -> dict[str, dict[str, Any]]:
    """Sound messages of an actor, by kind."""
    epoch = EPOCHS[name]
    swap = {
        "actor": name, "actor_epoch": epoch, "version": 0, "at": START, "pause_seconds": 0.01, "num_bytes": 8,
        "num_running": 2, "num_tokens": 3,
    }  # fmt: skip
    _, ref = group_of(lease, name, epoch)
    return {
        "sync": {
            "kind": "sync", "boot_id": BOOT, "engine_version": 0, "running": 2, "waiting": 1, "concurrency": 4,
            "want": 1, "leases": [lease.lease_id], "num_tokens": 5, "running_seconds": 2.0, "swaps": [swap],
            "counters": {"cpu_seconds": 1.0, "emulation_overrun_seconds": 1.0, "step_delay_seconds": 0.0},
        },
        "register": {
            "kind": "register", "role": "actor", "name": name, "epoch": epoch,
            "leases": [{"group_id": 1, "attempt": 0, "lease_id": "1.0.b"}],
        },
        "sealed": {"kind": "sealed", "actor": name, "epoch": epoch, "seq": 0, "groups": [[lease.group_id, 9]]},
        "group": {"kind": "group", "lease_id": lease.lease_id, "ref": ref, "seq": 0},
        "bye": {"kind": "bye", "id": 1},
    }  # fmt: skip


def numbers_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every number."""
    if isinstance(value, int | float):
        yield path
    for key, inner in (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        yield from numbers_in(inner, (*path, key))


def changed(message: dict[str, Any], path: Sequence[Any], number: float) -> dict[str, Any]:
    inner: Any = message
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = number
    return message


COLUMNS = [
    "started_at", "finished_at", "scored_at", "temperature", "top_p", "seed", "max_tokens", "reward", "group_size",
    "version", "completion_token_ids", "prompt_token_ids", "rollout_logprobs",
]  # fmt: skip


def with_number(rows: pa.RecordBatch, name: str, number: float) -> pa.RecordBatch:
    """The first value of a column replaced, as far as its type goes."""
    at = rows.schema.get_field_index("weight_spans" if name == "version" else name)
    kind, values = rows.schema.field(at).type, rows.column(at).to_pylist()
    leaf = pa.int64() if name == "version" else kind.value_type if pa.types.is_list(kind) else kind
    try:
        scalar = pa.scalar(int(number) if pa.types.is_integer(leaf) else number, leaf).as_py()
    except (pa.ArrowInvalid, OverflowError):
        return rows
    if name == "version":
        values[0][0]["version"] = scalar
    elif pa.types.is_list(kind):
        values[0][0] = scalar
    else:
        values[0] = scalar
    return rows.set_column(at, rows.schema.field(at), pa.array(values, kind))


Said = tuple[str, str, list[tuple[int, float]], list[tuple[str, float]]]
"""Who says which kind of message, with which of its numbers and of its columns changed."""

SAID: st.SearchStrategy[Said] = st.tuples(
    st.sampled_from(["intruder", "other"]),
    st.sampled_from(["sync", "sync", "sync", "register", "sealed", "group", "group", "bye"]),
    st.lists(st.tuples(st.integers(0, 30), NUMBERS), max_size=2),
    st.lists(st.tuples(st.sampled_from(COLUMNS), NUMBERS), max_size=2),
)


def say(world: World, said: Said, leases: dict[str, Lease]) -> Answer:
    name, kind, numbers, columns = said
    message = templates(name, leases[name])[kind]
    for index, number in numbers:
        paths = list(numbers_in(message))
        message = changed(message, paths[index % len(paths)], number)
    rows = None
    if kind == "group":
        rows, _ = group_of(leases[name], name, EPOCHS[name])
        for column, number in columns:
            rows = with_number(rows, column, number)
    [(answer, _)] = world.wires[name].ask(json.dumps(message).encode(), rows)
    return answer


@pytest.fixture(scope="module")
def tracker(tmp_path_factory) -> Iterator[MlflowTracker]:
    """One MLflow run for all examples: the steps of each are others."""
    made = MlflowTracker(f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db", "e", "accepted")
    yield made
    made.close()
    assert (made.num_failures, made.num_lost) == (0, 0)


class Shifted:
    """A tracker whose steps begin elsewhere."""

    steps = 0

    def __init__(self, tracker: MlflowTracker) -> None:
        self._tracker = tracker
        Shifted.steps += 10
        self._first = Shifted.steps

    logged = NO_STEP
    room = 1000

    def log(self, step: int, metrics: dict[str, float], *, at: float | None = None, weights_digest: str = "") -> None:
        self._tracker.log(self._first + step, metrics, at=at, weights_digest=weights_digest)


def sync_with(path: tuple[Any, ...], number: float) -> Said:
    """An intruder's sync with one number changed, by its place."""
    message = templates("intruder", Lease.model_construct(group_id=0, attempt=0, lease_id=""))["sync"]
    return "intruder", "sync", [(list(numbers_in(message)).index(path), number)], []


# The message of an actor that says as much as an actor may, and what it is to say.
LARGEST: list[Said] = [
    sync_with(("engine_version",), MAX_STEP),
    sync_with(("num_tokens",), MAX_COUNT),
    sync_with(("running_seconds",), MAX_NUMBER),
    sync_with(("counters", "emulation_overrun_seconds"), MAX_NUMBER),
    sync_with(("swaps", 0, "version"), MAX_STEP),
    sync_with(("swaps", 0, "at"), MAX_SECONDS),
    sync_with(("swaps", 0, "num_bytes"), MAX_COUNT),
    ("intruder", "group", [], [("scored_at", MAX_SECONDS), ("reward", MAX_REWARD)]),
]


OVERRUN = [(sync_with(("counters", "emulation_overrun_seconds"), 1e308)[2][0][0], 1e308)]


@pytest.mark.parametrize("said", LARGEST, ids=lambda said: f"{said[1]}-{said[2]}-{said[3]}")
def test_the_end_of_a_range_is_accepted_and_values_beyond_are_refused_by_name(said):
    world = World(MemoryStore())
    world.trainer.say(Committed(step=0, epoch=1, manifest=None))
    leases = {name: world.sync(name, want=1).leases[0] for name in ("intruder", "other")}
    name, kind, numbers, columns = said
    beyond = (
        [(path, 2 * number) for path, number in numbers],
        [(column, 2 * number) for column, number in columns],
    )
    refused = say(world, (name, kind, *beyond), leases)
    assert isinstance(refused, Refused)
    assert refused.code == "schema"
    place = (
        columns[0][0] if columns else str(list(numbers_in(templates(name, leases[name])[kind]))[numbers[0][0]][-1])
    )
    assert place in refused.detail
    assert not isinstance(say(world, said, leases), Refused)


@settings(
    deadline=None, max_examples=60, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(st.lists(SAID, min_size=1, max_size=4))
@example([sync_with(("engine_version",), 10**400)])
@example([sync_with(("swaps", 0, "version"), 1 << 70)])
@example([sync_with(("num_tokens",), (1 << 63) - 1), ("other", *sync_with(("num_tokens",), (1 << 63) - 1)[1:])])
@example([sync_with(("swaps", 0, "at"), 1e19)])
@example(
    [("intruder", "sync", [(sync_with(("concurrency",), 0)[2][0][0], 0), (sync_with(("want",), 9)[2][0][0], 9)], [])]
)
@example([("intruder", "sync", OVERRUN, []), ("other", "sync", OVERRUN, [])])
@example(LARGEST)
@example([("intruder", "group", [], [("version", 1)])])
@example([("intruder", "group", [], [("scored_at", 1e308)]), ("other", "group", [], [("reward", 3e38)])])
def test_messages_that_pass_admission_break_no_later_stage(tracker, all_said):
    world = World(MemoryStore())
    committer = world.committer()
    computed = {"weights": snapshot_of({"w": torch.ones(2)}), "state": None, "batch": None, "reserved": None}
    committer.submit(ComputedStep(step=0, **computed, reserved_at=START, computed_at=START))
    committer.flush()
    leases = {name: world.sync(name, want=1).leases[0] for name in ("intruder", "other")}
    for said in all_said:
        say(world, said, leases)
        world.beat()
    for name in leases:
        world.wires[name].say(Bye())
    for step in range(1, STEPS + 1):
        world.train(committer, step)
        world.beat()
    check_objects(world.store, Shifted(tracker))
    committer.close()
    world.start_hub()
    world.beat()
    world.train(again := resumed(world), STEPS + 1)
    again.close()
    check_objects(world.store, Shifted(tracker))


def resumed(world: World) -> Committer:
    """Of a trainer that adopts the newest commit."""
    committer = world.committer()
    follower = RunFollower(world.store)
    follower.refresh()
    assert follower.last is not None
    committer.adopt(follower.last)
    return committer


def check_objects(store: MemoryStore, tracker: Shifted) -> None:
    """What reads a run can read this one: metrics for MLflow, the tables of artifacts, report and weights.parquet."""
    follower = RunFollower(store)
    forwarder = Forwarder(follower, tracker)  # type: ignore[arg-type]
    forwarder.refresh()
    assert forwarder.push()
    version_rows(list(follower.commits.values()))
    write_report(store)
    json.loads(store.get(REPORT_JSON_KEY))
    assert pq.read_table(io.BytesIO(store.get(WEIGHTS_TABLE_KEY))).to_pylist()
