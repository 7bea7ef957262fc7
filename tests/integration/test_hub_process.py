"""The hub as a process: over Flight, killed, restarted, refused twice, stopped, and finished."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipelinerl_core.channel.client import HubClient
from pipelinerl_core.data.codec import decode_rollouts
from pipelinerl_core.data.segments import SegmentWriter
from pipelinerl_core.messages import (
    Ack,
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
    SyncReply,
)
from pipelinerl_core.run.history import take_epoch
from pipelinerl_core.run.records import HUB_KEY, HubRecord
from pipelinerl_core.storage.object_store import open_store
from tests.builders import (
    hub_record,
    put_commit,
    put_run,
    rows_of_lease,
    small_config,
    sync_message,
    trained_by,
    weight_manifest,
)
from tests.processes import is_running
from tests.synthetic_run import put_record
from tests.waiting import wait_for

pytestmark = pytest.mark.slow

TOKEN = "a-token-for-tests"
CONFIG = small_config(
    rollouts={"group_size": 2}, engine={"concurrency": 4}, trainer={"steps": 2}, placement={"lease_seconds": 60.0}
)


def environment() -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    return {**os.environ, "PIPELINERL_TOKEN": TOKEN, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}


def command_of(run: Path) -> list[str]:
    module = "pipelinerl_core.roles.hub.main"
    return [sys.executable, "-m", module, "--run", str(run), "--parent-pid", str(os.getpid())]


class HubProcess:
    def __init__(self, run: Path) -> None:
        self.run = run
        self.process = subprocess.Popen(command_of(run), env=environment(), stderr=subprocess.PIPE, text=True)

    def wait_until_up(self) -> HubRecord:
        return self.wait_for(lambda record: record.pid == self.process.pid)

    def wait_for(self, condition: Callable[[HubRecord], bool]) -> HubRecord:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if (self.run / "hub.json").exists():
                record = HubRecord.model_validate_json((self.run / "hub.json").read_text())
                if condition(record):
                    return record
            assert self.process.poll() is None, self.process.communicate()[1]
            time.sleep(0.05)
        raise AssertionError(f"hub.json never said so: {(self.run / 'hub.json').read_text()}")

    def end(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=30)


@pytest.fixture
def run(tmp_path) -> Path:
    put_run(open_store(str(tmp_path)), CONFIG)
    return tmp_path


@pytest.fixture
def start(run) -> Iterator[Callable[[], HubProcess]]:
    started: list[HubProcess] = []

    def start_one() -> HubProcess:
        started.append(HubProcess(run))
        return started[-1]

    yield start_one
    for hub in started:
        hub.end()


class Actor:
    def __init__(self, record: HubRecord, leases: tuple[LeaseRef, ...] = ()) -> None:
        self.client = HubClient(record.url, token=TOKEN, role="actor", name="actor-0")
        answer = self.client.request(Register(role="actor", name="actor-0", epoch=1, leases=leases))
        assert isinstance(answer, Registered)
        self.boot_id = answer.boot_id

    def sync(self, want: int, leases: tuple[str, ...] = (), version: int = 0) -> SyncReply:
        message = sync_message(boot_id=self.boot_id, engine_version=version, want=want, leases=leases)
        answer = self.client.request(message)
        assert isinstance(answer, SyncReply)
        return answer

    def deliver(self, lease: Lease) -> str:
        ref, batch = rows_of_lease(lease)
        answer = self.client.request(Group(lease_id=lease.lease_id, ref=ref), batch)
        assert isinstance(answer, Ack)
        return answer.note


class Trainer:
    def __init__(self, record: HubRecord, run: Path, **registration) -> None:
        self.store = open_store(str(run))
        self.client = HubClient(record.url, token=TOKEN, role="trainer", name="trainer")
        answer = self.client.request(Register(role="trainer", name="trainer", epoch=1, **registration))
        assert isinstance(answer, Registered)

    def reserve(self, step: int) -> Reserved:
        answer = self.client.request(Reserve(step=step, epoch=1, wait_seconds=2.0))
        assert isinstance(answer, Reserved)
        assert answer.is_ready, answer.reason
        return answer

    def commit(self, step: int, answer: Reserved | None = None, *, is_announced: bool = True) -> None:
        put_commit(self.store, step, manifest=weight_manifest(step), **(trained_by(answer) if answer else {}))
        if is_announced:
            fates = answer.decided if answer else ()
            self.client.request(
                Committed(step=step, epoch=1, manifest=weight_manifest(step), fates=fates, is_last=step == 2)
            )


def test_a_hub_killed_in_the_middle_of_a_step_goes_on_from_its_state_before_the_kill(run, start):
    first = start()
    record = first.wait_until_up()
    trainer, actor = Trainer(record, run), Actor(record)
    trainer.commit(0)
    leases = actor.sync(want=4).leases
    assert len(leases) == 4
    writer = SegmentWriter(trainer.store, "actor-0", 1, "run", max_seconds=1.0, max_bytes=1 << 20)
    for lease in leases[:3]:
        assert actor.deliver(lease) == "ready"
        writer.append(*reversed(rows_of_lease(lease)))
    seq, groups = writer.seal()
    actor.client.request(Sealed(actor="actor-0", epoch=1, seq=seq, groups=groups))
    reserved = trainer.reserve(1)
    trainer.commit(1, reserved, is_announced=False)

    first.end()
    second = start()
    record = second.wait_until_up()
    assert record.boot_id.startswith("2-")
    trainer = Trainer(record, run, committed_step=1, manifest=weight_manifest(1))
    kept = LeaseRef(group_id=3, attempt=0, lease_id=leases[3].lease_id)
    actor = Actor(record, leases=(kept,))
    assert actor.sync(want=0, leases=(kept.lease_id,)).stop_leases == ()
    assert actor.deliver(leases[0]) == "known"
    assert actor.deliver(leases[3]) == "ready"
    reserved = trainer.reserve(2)
    assert [ref.group_id for ref in reserved.groups] == [2, 3]
    rows = trainer.client.request_rows(Rows(step=2, groups=((2, 0), (3, 0))))
    assert [decode_rollouts(batch)[1].group_id for _, batch in rows] == [2, 3]
    assert reserved.tokens["trained"] == 20
    trainer.commit(2, reserved)

    assert actor.sync(want=4, version=2).state == "drain"
    actor.client.close()
    trainer.client.close()
    assert second.process.wait(timeout=30) == 0
    assert HubRecord.model_validate_json((run / "hub.json").read_text()).live["state"] == "done"


def test_a_second_hub_is_refused_with_one_line_and_exit_code_1(start):
    start().wait_until_up()
    second = start()
    assert second.process.wait(timeout=60) == 1
    lines = second.process.stderr.read().strip().splitlines()
    assert "this run is live" in lines[-1]
    assert not any("Traceback" in line for line in lines)


def test_of_two_hubs_that_started_at_once_the_hub_with_the_older_epoch_ends_with_one_line(run, start):
    hub = start()
    hub.wait_until_up()
    store = open_store(str(run))
    take_epoch(store, "trainer", -1)  # is no hub
    take_epoch(store, "hub", -1)
    assert hub.process.wait(timeout=60) == 3
    errors = hub.process.stderr.read().strip()
    assert errors.splitlines()[-1].startswith("Fenced: hub epoch 1 was taken over by epoch 3 on ")
    assert "Traceback" not in errors


def test_a_stopped_hub_ends_although_a_peer_stays(start):
    hub = start()
    actor = Actor(hub.wait_until_up())
    hub.process.send_signal(signal.SIGTERM)
    # Without the limit for a stop the hub would wait for the peer for 60 s: no trainer has registered.
    assert hub.process.wait(timeout=40) == 0
    actor.client.close()


def test_a_hub_dies_with_its_parent(run):
    script = textwrap.dedent(f"""
        import os, subprocess, sys, time
        hub = subprocess.Popen([sys.executable, "-m", "pipelinerl_core.roles.hub.main", "--run", {str(run)!r},
                                "--parent-pid", str(os.getpid())], stderr=subprocess.DEVNULL)
        print(hub.pid, flush=True)
        time.sleep(60)
    """)
    parent = subprocess.Popen([sys.executable, "-c", script], env=environment(), stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    wait_for((run / "hub.json").exists, "hub.json")
    parent.kill()
    parent.communicate()
    wait_for(lambda: not is_running(pid), "the end of the hub, whose parent was killed", 20)


def test_a_hub_without_a_token_names_the_variable_to_set(run):
    result = subprocess.run(
        command_of(run), env={**environment(), "PIPELINERL_TOKEN": ""}, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2
    assert "PIPELINERL_TOKEN is not set" in result.stderr


def test_a_changing_beat_from_another_host_keeps_a_second_hub_away(run, start):
    store, ended = open_store(str(run)), threading.Event()

    def beat() -> None:
        while not ended.wait(0.2):
            put_record(store, HUB_KEY, hub_record(beat=time.time() - 3600))  # its clock is an hour behind

    put_record(store, HUB_KEY, hub_record(beat=1.0))
    other = threading.Thread(target=beat)
    other.start()
    refused = start()
    assert refused.process.wait(timeout=60) == 1
    ended.set()
    other.join()
    put_record(store, HUB_KEY, hub_record(beat=time.time() + 3600))  # it died, and its clock was an hour ahead
    start().wait_until_up()
