"""The channel between roles and hub: in one process, and with hub and clients in processes of their own.

Tests delay the private dispatcher and read its peers: no public call shows that no peer is left behind.
"""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil
import pyarrow as pa
import pyarrow.flight as fl
import pytest

from pipelinerl_core.channel.client import HubClient
from pipelinerl_core.channel.server import HubServer
from pipelinerl_core.data.codec import decode_rollouts, encode_rollouts
from pipelinerl_core.data.schema import ROLLOUT_SCHEMA
from pipelinerl_core.errors import ConfigError, HubUnavailable, MissingObject, StaleLease
from pipelinerl_core.messages import Ack, Bye, Group, Register, Reserve, Rows, Sync, encode
from pipelinerl_core.roles.runtime.hub_link import HubLink
from pipelinerl_core.run.records import HUB_KEY
from pipelinerl_core.storage.object_store import open_store
from tests.builders import hub_record, sync_message
from tests.integration.exchange_case import TOKEN, leave, raw_exchange, refusal
from tests.rollout_rows import build_group, group_ref
from tests.stream_hub import QueueHub
from tests.synthetic_run import put_record
from tests.waiting import wait_for

SYNC = sync_message(running=1, want=1)


class Channel:
    """A server around a service, and the clients that a test opens; all are closed at its end."""

    def __init__(self, service):
        self.service = service
        self.server = HubServer(service, host="127.0.0.1", port=0, token=TOKEN, max_tokens_per_row=100)
        self.server.start()
        self.url = self.server.url
        self.clients = []

    def client(self, role="actor", name="actor-0", **options):
        self.clients.append(HubClient(self.url, token=TOKEN, role=role, name=name, **options))
        return self.clients[-1]

    def close(self):
        for client in self.clients:
            client.close(bye=False)
        assert self.server.shutdown(30.0)


@pytest.fixture
def channel():
    made = Channel(QueueHub(credit=2))
    yield made
    made.close()


def group_message(rollouts):
    return Group(lease_id=rollouts[0].lease_id, ref=group_ref(rollouts))


def send_group(client, group_id):
    rollouts = build_group(0, group_id=group_id)
    return client.request(group_message(rollouts), encode_rollouts("run", rollouts))


def step_rows(client, step):
    reserved = client.request(Reserve(step=step, epoch=0))
    assert reserved.is_ready
    return client.request_rows(Rows(step=step, groups=tuple((ref.group_id, ref.attempt) for ref in reserved.groups)))


# ---- one process ----


def test_rows_arrive_at_the_trainer_as_the_actor_sent_them(channel):
    actor, trainer = channel.client(), channel.client("trainer", "trainer-0")
    assert actor.request(Register(role="actor", name="actor-0", epoch=0)).credit == 2
    assert send_group(actor, 7).note == "new"
    ((header, rows),) = step_rows(trainer, 1)
    assert (header.group_id, header.attempt, header.remaining) == (7, 0, 0)
    assert rows.schema.equals(ROLLOUT_SCHEMA, check_metadata=True)
    expected = build_group(0, group_id=7)
    for received, sent in zip(decode_rollouts(rows), expected, strict=True):
        assert received.completion_token_ids.tolist() == sent.completion_token_ids.tolist()
        assert received.rollout_logprobs.tolist() == sent.rollout_logprobs.tolist()
        assert (received.rollout_index, received.reward) == (sent.rollout_index, sent.reward)


def test_an_actor_is_asked_to_sync_once_per_group_that_the_trainer_takes(channel):
    asked = []
    actor, trainer = channel.client(on_sync_now=lambda: asked.append(1)), channel.client("trainer", "trainer-0")
    send_group(actor, 0)
    assert send_group(actor, 0).note == "known"
    actor.request(SYNC)
    assert asked == []
    step_rows(trainer, 1)
    step_rows(trainer, 1)
    wait_for(lambda: asked, "the request to sync")
    actor.request(SYNC)
    assert asked == [1]


def test_requests_of_many_threads_get_their_own_answers(channel):
    actor = channel.client()
    answers = {}

    def send(group_id):
        answers[group_id] = send_group(actor, group_id)

    threads = [threading.Thread(target=send, args=(group_id,)) for group_id in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(answer.note == "new" for answer in answers.values())
    assert len({answer.re for answer in answers.values()}) == 16
    assert set(channel.service.rows) == {(group_id, 0) for group_id in range(16)}


def test_losing_every_third_message_both_ways_changes_nothing(channel):
    counter = itertools.count(1)
    lost = []

    def faults(direction):
        is_lost = next(counter) % 3 == 0
        if is_lost:
            lost.append(direction)
        return is_lost

    asked = []
    actor = channel.client(on_sync_now=lambda: asked.append(1), retry_seconds=0.05, faults=faults)
    trainer = channel.client("trainer", "trainer-0", retry_seconds=0.05, faults=faults)
    for group_id in range(6):
        send_group(actor, group_id)
    taken = [header.group_id for step in range(1, 7) for header, _ in step_rows(trainer, step)]
    assert taken == list(range(6))
    everything = Rows(step=1, groups=tuple((group_id, 0) for group_id in range(6)))
    assert [header.group_id for header, _ in trainer.request_rows(everything)] == list(range(6))
    actor.request(SYNC)
    wait_for(lambda: asked, "a request to sync, which several groups may share")
    assert len(asked) <= 6
    assert {"send", "receive"} == set(lost)


def test_a_wrong_token_is_refused_before_anything_is_read(channel):
    with pytest.raises(ConfigError, match="PIPELINERL_TOKEN") as caught:
        HubClient(channel.url, token="wrong-token", role="actor", name="x")
    assert TOKEN not in str(caught.value)
    with pytest.raises(fl.FlightUnauthenticatedError):
        raw_exchange(channel.server.url, token="")[2].read_chunk()
    assert channel.service.connections == []


def test_the_server_needs_a_token():
    with pytest.raises(ValueError, match="token"):
        HubServer(QueueHub(), host="127.0.0.1", port=0, token="")


def test_rows_that_break_the_rules_are_refused_and_the_exchange_goes_on(channel):
    actor = channel.client()
    rollouts = build_group(0, group_id=1)
    batch = encode_rollouts("run", rollouts)
    long = build_group(0, group_id=1, num_tokens=101)
    cases = [
        (group_message(rollouts), None, "carries its rows"),
        (group_message(rollouts), batch.slice(1), "their message names"),
        (group_message(long), encode_rollouts("run", long), "101 tokens, the limit is 100"),
        (SYNC, batch, "carries no rows"),
    ]
    for message, rows, says in cases:
        answer = actor.request(message, rows)
        assert (answer.kind, answer.code) == ("refused", "schema")
        assert says in answer.detail
    assert channel.service.received == []
    assert send_group(actor, 1).note == "new"


@pytest.mark.parametrize("message", [Reserve(step=1, epoch=0), Rows(step=1, groups=())])
def test_an_actor_says_nothing_of_the_trainers(channel, message):
    answer = channel.client().request(message)
    assert (answer.code, answer.detail) == (
        "wrong_peer",
        f"actor/actor-0 sent {message.kind}: role actor may not send it",
    )
    assert channel.service.received == []


def test_a_trainer_says_nothing_of_an_actors(channel):
    trainer = channel.client("trainer", "trainer")
    rollouts = build_group(0, group_id=1)
    assert trainer.request(SYNC).code == "wrong_peer"
    assert trainer.request(group_message(rollouts), encode_rollouts("run", rollouts)).code == "wrong_peer"
    assert channel.service.received == []


@pytest.mark.parametrize(("role", "name"), [("trainer", "actor-0"), ("actor", "actor-1")])
def test_a_peer_must_register_with_the_role_and_name_of_its_exchange(channel, role, name):
    answer = channel.client().request(Register(role=role, name=name, epoch=0))
    assert (answer.code, channel.service.received) == ("wrong_peer", [])
    assert answer.detail.startswith(f"actor/actor-0 registers as {role}/{name}: ")


@pytest.mark.parametrize(
    "command",
    [
        b"",
        b"{",
        b"[1]",
        b"[" * 10**5,
        b'{"role": "actor"}',
        b'{"role": "hub", "name": "x"}',
        b'{"role": ["actor"], "name": "x"}',
        b'{"role": "actor", "name": ""}',
        b'{"role": "actor", "name": "a/b"}',
        b'{"role": "actor", "name": "a\\nb"}',
        json.dumps({"role": "actor", "name": "x" * 101}).encode(),
    ],
)
def test_an_exchange_opens_with_a_role_and_a_plain_name(channel, command):
    options = fl.FlightCallOptions(headers=[(b"authorization", f"Bearer {TOKEN}".encode())])

    def knock(client):  # the refusal comes at once or with the first word
        writer, reader = client.do_exchange(fl.FlightDescriptor.for_command(command), options)
        with writer:
            reader.read_chunk()

    with fl.FlightClient(channel.server.url) as client, pytest.raises(fl.FlightServerError) as caught:
        knock(client)
    assert "role actor or trainer" in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert channel.service.connections == []


def test_another_schema_is_refused_by_name(channel):
    newer = ROLLOUT_SCHEMA.with_metadata({**ROLLOUT_SCHEMA.metadata, b"schema_version": b"4"})
    client, writer, reader = raw_exchange(channel.server.url, newer)
    rollouts = build_group(0, group_id=1)
    batch = pa.RecordBatch.from_arrays(encode_rollouts("run", rollouts).columns, schema=newer)
    message = group_message(rollouts).model_copy(update={"id": 5}).model_dump_json().encode()
    answer = refusal(writer, reader, message, batch)
    assert (answer["kind"], answer["re"], answer["code"]) == ("refused", 5, "schema")
    assert "'4' cannot be read" in answer["detail"]
    leave(client, writer, reader)


@pytest.mark.parametrize(
    ("metadata", "number"),
    [
        (b"{not json", 0),
        (b"\xff\xfe", 0),
        (b"[]", 0),
        (b'{"kind": "dance", "id": 9}', 9),
        (b'{"kind": "bye", "x": 1}', 0),
    ],
)
def test_a_message_that_is_none_is_refused_and_the_exchange_goes_on(channel, metadata, number):
    client, writer, reader = raw_exchange(channel.server.url)
    answer = refusal(writer, reader, metadata)
    assert (answer["kind"], answer["re"], answer["code"]) == ("refused", number, "schema")
    assert refusal(writer, reader, b'{"kind": "bye", "id": 10}') == {"kind": "ack", "re": 10, "note": ""}
    leave(client, writer, reader)


class FailingHub(QueueHub):
    """Every request fails, each kind in its own way."""

    def handle(self, peer, request, rows):
        if isinstance(request, Bye):
            yield Ack(re=request.id), None
        elif isinstance(request, Register):
            raise StaleLease("lease-3 is held by actor-1")
        else:
            raise ZeroDivisionError("a secret of the hub")


def test_errors_of_the_service_become_refusals_without_its_insides():
    channel = Channel(FailingHub())
    actor = channel.client()
    answer = actor.request(Register(role="actor", name="actor-0", epoch=0))
    assert (answer.code, answer.detail) == ("stale_lease", "lease-3 is held by actor-1")
    answer = actor.request(SYNC)
    assert (answer.code, answer.detail) == ("internal", "sync: ZeroDivisionError in the hub")
    channel.close()


def test_rows_that_the_hub_does_not_have_raise_missing_object(channel):
    with pytest.raises(MissingObject, match=r"no rows of group \(99, 0\)"):
        channel.client("trainer", "trainer-0").request_rows(Rows(step=1, groups=((99, 0),)))


class SilentHub(QueueHub):
    """Never answers a sync."""

    def handle(self, peer, request, rows):
        if not isinstance(request, Sync):
            yield from super().handle(peer, request, rows)


def test_a_hub_that_does_not_answer_is_given_up_at_the_deadline():
    channel = Channel(SilentHub())
    actor = channel.client(retry_seconds=0.1, deadline_seconds=0.5)
    started = time.monotonic()
    with pytest.raises(HubUnavailable, match=r"no answer to sync .* within 0\.5 s"):
        actor.request(SYNC)
    assert 0.5 <= time.monotonic() - started < 30  # two minutes without a deadline
    rollouts = build_group(0, group_id=0)
    assert actor.request(group_message(rollouts), encode_rollouts("run", rollouts), timeout=60).note == "new"
    channel.close()


def test_a_reserve_waits_for_its_wait_seconds_and_is_not_sent_twice(channel):
    trainer = channel.client("trainer", "trainer-0", retry_seconds=0.3)
    later = threading.Timer(1.0, send_group, args=(channel.client(), 0))
    later.start()
    answer = trainer.request(Reserve(step=1, epoch=0, wait_seconds=60))  # repeated after 0.3 s it would come 4 times
    later.join()
    assert answer.is_ready
    assert not trainer.request(Reserve(step=2, epoch=0, wait_seconds=0.6)).is_ready
    assert [m.step for m in channel.service.received if isinstance(m, Reserve)].count(1) == 1


def test_goodbye_ends_clients_at_once_and_no_client_connects_until_the_next_hub(channel):
    actor = channel.client()
    assert actor.is_connected
    started = time.monotonic()
    assert channel.server.shutdown(20.0)
    assert time.monotonic() - started < 15
    assert not actor.is_connected
    with pytest.raises(HubUnavailable, match="said goodbye"):
        actor.request(SYNC)
    with pytest.raises(HubUnavailable, match="no hub at"):
        channel.client()
    second = Channel(QueueHub())
    assert second.client().request(SYNC).kind == "sync_reply"
    second.close()


def test_a_peer_that_connects_during_the_goodbye_receives_the_goodbye(channel, monkeypatch):
    dispatcher = channel.server._dispatcher
    connect = dispatcher.connect

    def late(who, writer):
        assert channel.gate.wait(60)  # the client thinks that it is connected; the hub does not know its name yet
        return connect(who, writer)

    channel.gate = threading.Event()
    monkeypatch.setattr(dispatcher, "connect", late)
    actor = channel.client()
    assert actor.is_connected
    threading.Timer(0.2, channel.gate.set).start()
    assert channel.server.shutdown(30.0)
    wait_for(lambda: not actor.is_connected, "the end of the connection")


def test_connection_and_disconnection_of_a_peer_are_announced(channel):
    channel.client(name="first").close()
    channel.client(name="second").close(bye=False)
    assert channel.service.wait_for(disconnections=2, seconds=5)
    assert channel.service.connections == channel.service.disconnections == ["actor/first#1", "actor/second#2"]
    assert [request.kind for request in channel.service.received] == ["bye"]


def test_two_peers_of_one_name_are_two(channel):
    first, second = channel.client(name="twin"), channel.client(name="twin")
    first.close()
    assert channel.service.wait_for(disconnections=1, seconds=60)
    assert channel.service.disconnections == ["actor/twin#1"]
    assert second.request(SYNC).kind == "sync_reply"


def test_peers_that_come_and_go_leave_nothing_behind(channel):
    for number in range(20):
        name, says_bye = f"guest-{number}", number % 4 < 2
        channel.client(("actor", "trainer")[number % 2], name).close(bye=says_bye)
    assert channel.service.wait_for(disconnections=20, seconds=60)
    assert sorted(channel.service.disconnections) == sorted(channel.service.connections)
    wait_for(lambda: not [thread for thread in threading.enumerate() if "guest" in thread.name], "their threads")
    assert channel.server._dispatcher._peers == {}


def fail(*arguments):
    raise KeyError("a secret of the hub")


@pytest.mark.parametrize("role", ["actor", "trainer"])
def test_a_service_that_fails_at_a_coming_turns_the_peer_away_and_serves_on(channel, monkeypatch, role):
    with monkeypatch.context() as context:
        context.setattr(channel.service, "connected", fail)
        with pytest.raises(fl.FlightInternalError) as caught:  # raised when the exchange begins or by the first read
            raw_exchange(channel.url, role=role)[2].read_chunk()
        assert "the hub ended the exchange: KeyError" in str(caught.value)
        assert "secret" not in str(caught.value)
    assert channel.server._dispatcher._peers == {}
    assert send_group(channel.client(), 0).note == "new"


def test_a_service_that_fails_at_one_disconnection_ends_no_other_connection(channel, monkeypatch, caplog):
    other = channel.client(name="other")
    with monkeypatch.context() as context:
        context.setattr(channel.service, "disconnected", fail)
        channel.client().close()
        wait_for(lambda: "exchange failed" in caplog.text, "its going")
    assert other.request(SYNC).kind == "sync_reply"
    assert send_group(channel.client(name="next"), 0).note == "new"


def test_a_request_to_sync_for_a_peer_that_has_gone_does_nothing(channel):
    requests = []
    connected = channel.service.connected
    channel.service.connected = lambda peer, request: (requests.append(request), connected(peer, request))[1]
    channel.client().close()
    assert channel.service.wait_for(disconnections=1, seconds=5)
    for _ in range(100):
        requests[0]()
    assert send_group(channel.client(name="next"), 0).note == "new"


def test_a_name_that_is_none_is_refused_before_anything_is_sent():
    with pytest.raises(ConfigError, match="'a/b' is no valid name of a peer"):
        HubClient("grpc://127.0.0.1:1", token=TOKEN, role="actor", name="a/b")


def test_nothing_is_sent_on_a_new_connection_before_the_registration(channel, tmp_path):
    store = open_store(str(tmp_path))
    record = hub_record(url=channel.url, host=socket.gethostname(), beat=time.time())
    put_record(store, HUB_KEY, record)
    asked, gate = threading.Event(), threading.Event()

    def registration():
        asked.set()
        assert gate.wait(60)
        return Register(role="actor", name="actor-0", epoch=1)

    link = HubLink(store, token=TOKEN, role="actor", name="actor-0", registration=registration)
    threads = [threading.Thread(target=link.connect), threading.Thread(target=link.request, args=(SYNC,))]
    threads[0].start()
    assert asked.wait(5)
    threads[1].start()
    threads[1].join(0.2)
    assert channel.service.received == []
    gate.set()
    for thread in threads:
        thread.join()
    link.close()
    kinds = [request.kind for request in channel.service.received]
    assert (kinds[0], kinds[-2:]) == ("register", ["sync", "bye"])


def test_a_failing_callback_of_sync_now_loses_the_connection_loudly(channel):
    def fail():
        raise ValueError("no")

    actor, trainer = channel.client(on_sync_now=fail), channel.client("trainer", "trainer-0")
    send_group(actor, 0)
    step_rows(trainer, 1)
    wait_for(lambda: not actor.is_connected, "the request to sync")
    with pytest.raises(HubUnavailable, match="reading thread failed: ValueError"):
        actor.request(SYNC)


# ---- several processes ----


@pytest.fixture
def start_hub():
    processes = []

    def start():
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.stream_hub"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PIPELINERL_TOKEN": TOKEN},
        )
        processes.append(process)
        return process, process.stdout.readline().strip()

    yield start
    for process in processes:
        process.kill()
        process.wait(5)
        process.stdin.close()
        process.stdout.close()


def stop_hub(process, seconds=60.0):
    """Ask it to leave; returns the seconds it took. One whose threads keep it alive would never leave."""
    started = time.monotonic()
    process.stdin.write("stop\n")
    process.stdin.flush()
    process.wait(seconds)
    return time.monotonic() - started


@pytest.mark.slow
def test_a_hub_process_serves_loses_messages_and_leaves_in_time(start_hub):
    process, url = start_hub()
    counter = itertools.count(1)
    options = {"token": TOKEN, "retry_seconds": 0.2, "faults": lambda direction: next(counter) % 3 == 0}
    actor = HubClient(url, role="actor", name="actor-0", **options)
    trainer = HubClient(url, role="trainer", name="trainer-0", **options)
    for group_id in range(6):
        send_group(actor, group_id)
    assert [header.group_id for step in range(1, 7) for header, _ in step_rows(trainer, step)] == list(range(6))
    assert stop_hub(process) < 30
    assert process.returncode == 0
    for client in (actor, trainer):
        assert not client.is_connected
        client.close()


@pytest.mark.slow
def test_a_killed_hub_is_noticed_at_once_and_a_new_hub_serves_the_actor(start_hub):
    process, url = start_hub()
    actor = HubClient(url, token=TOKEN, role="actor", name="actor-0")
    process.kill()
    process.wait(5)
    with pytest.raises(HubUnavailable):
        actor.request(SYNC, timeout=5)
    actor.close()
    process, url = start_hub()
    actor = HubClient(url, token=TOKEN, role="actor", name="actor-0")
    assert actor.request(SYNC).kind == "sync_reply"
    actor.close()
    assert stop_hub(process) < 30


CLIENT = """
import os, sys
from pipelinerl_core.messages import Register
from pipelinerl_core.channel.client import HubClient
client = HubClient(sys.argv[1], token=os.environ["PIPELINERL_TOKEN"], role="actor", name="child")
client.request(Register(role="actor", name="child", epoch=0))
print("open", flush=True)
if sys.argv[2] == "wait":
    sys.stdin.read()
"""


def start_client(url, mode):
    process = subprocess.Popen(
        [sys.executable, "-c", CLIENT, url, mode],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PIPELINERL_TOKEN": TOKEN},
    )
    assert process.stdout.readline() == "open\n"
    return process


@pytest.mark.slow
def test_a_killed_client_is_seen(channel):
    process = start_client(channel.url, "wait")
    process.kill()
    assert channel.service.wait_for(disconnections=1, seconds=15)
    assert channel.service.disconnections == ["actor/child#1"]
    process.communicate(timeout=5)


@pytest.mark.slow
def test_an_open_client_does_not_delay_the_exit_of_its_process(channel):
    process = start_client(channel.url, "leave")
    process.communicate(timeout=60)  # the fault is a hang for ever
    assert process.returncode == 0
    assert channel.service.wait_for(disconnections=1, seconds=15)


def test_a_hub_that_has_not_started_is_unavailable():
    early = HubServer(QueueHub(), host="127.0.0.1", port=0, token=TOKEN)
    with pytest.raises(HubUnavailable, match="starting"):
        HubClient(early.url, token=TOKEN, role="actor", name="early")
    assert early.shutdown(30.0)


@pytest.mark.slow
def test_closing_towards_a_frozen_hub_is_bounded(start_hub):
    process, url = start_hub()
    actor = HubClient(url, token=TOKEN, role="actor", name="actor-0")
    os.kill(process.pid, signal.SIGSTOP)
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    started = time.monotonic()
    with pytest.raises(HubUnavailable, match="no answer"):
        actor.request(SYNC, timeout=0.5)
    actor.close()
    assert time.monotonic() - started < 30


def test_a_peer_that_does_not_read_blocks_no_sender(channel):
    client, writer, reader = raw_exchange(channel.url)
    wait_for(lambda: channel.service.connections, "the exchange")
    [peer] = channel.service.connections
    request_sync = channel.service.sync_requests[peer]
    requests = threading.Thread(target=lambda: [request_sync() for _ in range(1_000_000)], daemon=True)
    requests.start()
    requests.join(60.0)
    is_held_up = requests.is_alive()
    if not is_held_up:
        assert channel.client().request(SYNC).kind == "sync_reply"
        channel.server._dispatcher.say_goodbye()
    reader.cancel()
    with pytest.raises(fl.FlightCancelledError):
        writer.close()
    client.close()
    assert not is_held_up


def test_a_trainer_that_reads_no_rows_holds_up_itself_alone(channel):
    actor = channel.client()
    rollouts = build_group(0, group_id=3, size=64, num_tokens=100)
    assert actor.request(group_message(rollouts), encode_rollouts("run", rollouts)).note == "new"
    client, writer, reader = raw_exchange(channel.url, role="trainer")
    asked = Rows(step=1, groups=((3, 0),))
    for number in range(200):  # 70 KB of rows each, more than Flight takes for a peer that does not read
        writer.write_metadata(encode(asked.model_copy(update={"id": number})))
    wait_for(lambda: sum(isinstance(request, Rows) for request in channel.service.received) > 1, "its first rows")
    assert [actor.request(SYNC).kind for _ in range(20)] == ["sync_reply"] * 20
    assert [json.loads(reader.read_chunk().app_metadata.to_pybytes())["re"] for _ in range(200)] == list(range(200))
    leave(client, writer, reader)
