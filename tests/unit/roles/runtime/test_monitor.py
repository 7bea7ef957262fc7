"""Health, readiness and metrics of a role: what is served, where that is written, and that a hang shows."""

import asyncio
import json
import re
import time
import types
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pipelinerl_core.errors import ConfigError, StoreError
from pipelinerl_core.messages import SyncReply
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.report.scrape_targets import live_roles, role_progress, targets
from pipelinerl_core.roles.actor.watch import ActorWatch
from pipelinerl_core.roles.runtime import inference, monitor
from pipelinerl_core.roles.runtime.monitor import RoleMonitor, monitored
from pipelinerl_core.roles.trainer.watch import TrainerWatch
from pipelinerl_core.run.context import RunContext
from pipelinerl_core.run.records import FORMAT_VERSION, RoleRecord, role_key
from pipelinerl_core.telemetry.metrics import ALL_ROLES, METRICS
from pipelinerl_core.telemetry.role_metrics import RoleMetrics
from tests.builders import run_record
from tests.fakes import MemoryStore
from tests.synthetic_run import put_record
from tests.waiting import until, wait_for

TOKEN = "the-token-of-the-run"


def context(*overrides):
    config = load_config("quickstart", overrides)
    record = run_record()
    return RunContext(store=MemoryStore(), record=record, config=config, token=TOKEN)


def get(url, method="GET"):
    try:
        with urlopen(Request(url, method=method), timeout=60) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


def record_of(store, role, name):
    wait_for(lambda: store.exists(role_key(role, name)), f"the record of {name}")
    return RoleRecord.model_validate_json(store.get(role_key(role, name)))


def samples(text):
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples  # labels come in the order of their names
    }


def test_a_role_is_found_through_its_record_and_gone_with_its_end():
    run = context()
    with monitored(run, "trainer", "trainer") as (timed, watched):
        record = record_of(run.store, "trainer", "trainer")
        assert record.url.startswith("http://127.0.0.1:")
        assert get(f"{record.url}/healthz") == (200, "ok: starting\n")
        assert get(f"{record.url}/readyz") == (503, "starting\n")
        watched.heartbeat("computing step 3")
        watched.set_readiness_check(lambda: "")
        assert get(f"{record.url}/readyz") == (200, "ready: computing step 3\n")
        timed.store.put("a", b"x")
        status, text = get(f"{record.url}/metrics")
        sampled = samples(text)
        assert status == 200
        assert sampled["pipelinerl_role_info", "trainer", "trainer", "run"] == 1
        assert sampled["pipelinerl_role_ready",] == 1
        assert sampled["pipelinerl_store_seconds_count", "put"] == 1
        assert "process_resident_memory_bytes" in text
        assert TOKEN not in text
        labels = {"run": "run", "role": "trainer", "name": "trainer", "host": record.host}
        assert targets(run.store) == [{"targets": [record.url.removeprefix("http://")], "labels": labels}]
    wait_for(lambda: run.store.list("roles") == [], "the end of the record")  # the end of the role waits a second
    with pytest.raises(OSError, match="refused"):
        urlopen(f"{record.url}/healthz", timeout=5)


def test_nothing_but_get_and_the_three_paths_is_answered():
    run = context()
    with monitored(run, "hub", "hub"):
        url = record_of(run.store, "hub", "hub").url
        assert [get(f"{url}/metrics", method)[0] for method in ("POST", "PUT", "DELETE")] == [501, 501, 501]
        assert [get(f"{url}{path}")[0] for path in ("/", "/debug", "/healthz/../metrics")] == [404, 404, 404]


def test_a_main_loop_that_hangs_is_unhealthy_and_names_its_last_activity(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(monitor, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    role_monitor = RoleMonitor("trainer", "trainer", healthy_seconds=0.05)
    assert role_monitor.health()[0], "a start may take longer than a turn of the loop"
    role_monitor.set_readiness_check(lambda: "")
    role_monitor.heartbeat("computing step 7")
    assert role_monitor.health() == (True, "ok: computing step 7")
    now[0] += 0.1
    is_healthy, line = role_monitor.health()
    assert not is_healthy
    assert "no heartbeat of the main loop for 0 s" in line
    assert line.endswith("computing step 7")
    assert role_monitor.readiness() == (False, line)
    assert samples(role_monitor.exposition().decode())["pipelinerl_role_healthy",] == 0


class Engine:
    """Has sequences, and samples only when told to."""

    def __init__(self):
        self.weight_version = 3
        self.num_tokens = 0

    def stats(self):
        return types.SimpleNamespace(
            running=4,
            waiting=1,
            kv_usage=0.5,
            num_tokens=self.num_tokens,
            num_steps=self.num_tokens,
            num_prefilled=0,
            num_reused=0,
        )


async def test_an_actor_is_ready_once_the_hub_answers_and_unhealthy_when_its_engine_stands_still(monkeypatch):
    monkeypatch.setattr(inference, "HEARTBEAT_SECONDS", 0.005)
    engine, role_monitor = Engine(), RoleMonitor("actor", "a", healthy_seconds=2.0)
    is_current = [False]
    watch = ActorWatch(role_monitor, engine, epoch=1, is_current=lambda: is_current[0], num_tokens=lambda: 0)
    assert role_monitor.readiness() == (False, "not registered at the hub yet")
    watch.synced(SyncReply(re=1, boot_id="b"), num_unsent=2)
    assert role_monitor.readiness() == (False, "the newest weights are not loaded yet")
    is_current[0] = True
    loop = asyncio.create_task(watch.run())
    for _ in range(30):  # it samples
        engine.num_tokens += 1
        await asyncio.sleep(0.01)
    assert role_monitor.readiness()[0]
    await until(lambda: not role_monitor.health()[0], "an engine that hangs")  # the event loop turns
    watch.synced(SyncReply(re=2, boot_id="b", state="pause"), num_unsent=0)
    await asyncio.sleep(0.05)
    assert role_monitor.health()[0], "an engine that is paused has nothing to do"
    loop.cancel()


def test_without_a_host_nothing_is_served_or_written():
    run = context("placement.metrics_host=")
    with monitored(run, "hub", "hub"):
        time.sleep(0.05)
        assert run.store.list("roles") == []


def test_roles_of_one_host_share_a_range_of_ports_and_a_wrong_address_is_one_line():
    run = context()
    with monitored(run, "hub", "hub"):
        port = int(record_of(run.store, "hub", "hub").url.rpartition(":")[2])
        beside = context(f"placement.metrics_port={port}")
        with monitored(beside, "trainer", "trainer"):
            assert int(record_of(beside.store, "trainer", "trainer").url.rpartition(":")[2]) > port
    with (
        pytest.raises(ConfigError, match=r"placement\.metrics_host=192\.0\.2\.1.*Set an address"),
        monitored(context("placement.metrics_host=192.0.2.1"), "hub", "hub"),
    ):
        pass


def test_the_record_of_a_role_shows_how_its_start_goes_and_then_stands_still(monkeypatch):
    monkeypatch.setattr(monitor, "RECORD_SECONDS", 0.01)
    run = context()

    def await_record(condition):
        wait_for(lambda: condition(record_of(run.store, "trainer", "trainer")), "the record of the trainer")
        return record_of(run.store, "trainer", "trainer")

    with monitored(run, "trainer", "trainer") as (_, watched):
        assert await_record(lambda record: True).start_beat == 0.0
        watch = TrainerWatch(watched, epoch=1)
        watch.replayed(3, 4)
        first = await_record(lambda record: record.start_beat > 0.0)
        assert first.progress == role_progress(run.store) == "the trainer restarts: step 4/4 is trained again"
        watch.replayed(4, 4)
        assert await_record(lambda record: record.start_beat > first.start_beat).progress == ""
        watch.registered()
        last = watched.start_beat
        watch.waiting(5)
        written = time.time()
        assert await_record(lambda record: record.beat > written).start_beat == last


def test_a_role_that_died_is_a_target_for_two_minutes_and_a_broken_record_is_skipped(store, monkeypatch):
    dead = RoleRecord(
        run_id="r", role="actor", name="a", host="h", pid=1, url="http://h:1", started_at=0.0, beat=1000.0
    )
    put_record(store, role_key("actor", "a"), dead)
    store.put(role_key("actor", "b"), b"{")
    assert [role.name for role in live_roles(store, now=1060.0)] == ["a"]
    assert live_roles(store, now=1130.0) == []


def test_the_loopback_address_of_another_host_is_no_target(store):
    for name, url in (("a", "http://127.0.0.1:1"), ("b", "http://10.0.0.7:1")):
        record = RoleRecord(
            run_id="r", role="actor", name=name, host="elsewhere", pid=1, url=url, started_at=0.0, beat=time.time()
        )
        put_record(store, role_key("actor", name), record)
    assert [target["targets"] for target in targets(store)] == [["10.0.0.7:1"]]


def test_a_store_that_fails_is_counted_and_ends_no_role(monkeypatch):
    monkeypatch.setattr(monitor, "RECORD_SECONDS", 0.01)
    run = context()

    def fail(*_, **__):
        raise StoreError("503")

    monkeypatch.setattr(run.store, "put", fail)
    monkeypatch.setattr(run.store, "delete", fail)
    with monitored(run, "hub", "hub") as (timed, watched):
        with pytest.raises(StoreError):
            timed.store.put("k", b"")
        assert samples(watched.exposition().decode())["pipelinerl_store_errors_total", "put"] == 1


def test_names_are_prometheus_names_and_labels_are_declared():
    exported = [metric for metric in METRICS.values() if metric.prometheus]
    assert len({metric.prometheus for metric in exported}) == len(exported)
    for metric in exported:
        assert re.fullmatch("[a-z][a-z0-9_]+", metric.prometheus)
        assert (metric.kind == "counter") == metric.prometheus.endswith("_total")
        assert (metric.group == "role") == bool(metric.roles)
        assert set(metric.roles) <= set(ALL_ROLES)
    with pytest.raises(KeyError, match="not declared"):
        RoleMetrics("actor", "a", "r").add("actor_rollouts_total", label="rollout-17")
    with pytest.raises(KeyError):
        RoleMetrics("hub", "hub", "r").add("actor_rollouts_total", label="scored")


def test_the_records_are_json_that_other_tools_read():
    run = context()
    with monitored(run, "hub", "hub"):
        record_of(run.store, "hub", "hub")
        assert json.loads(run.store.get("roles/hub-hub.json"))["format_version"] == FORMAT_VERSION
