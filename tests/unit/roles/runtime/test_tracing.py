"""Traces: spans of one group from two processes join; the roles agree on what is traced; off costs nothing."""

import json
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.messages import Ack, Lease, SyncReply
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.roles.actor.watch import ActorWatch
from pipelinerl_core.roles.runtime.monitor import RoleMonitor
from pipelinerl_core.roles.runtime.tracing import build_tracer
from pipelinerl_core.roles.trainer.watch import TrainerWatch
from pipelinerl_core.run.context import RunContext
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.telemetry import span_export
from pipelinerl_core.telemetry.span_export import FileExporter
from pipelinerl_core.telemetry.traces import Tracer
from pipelinerl_core.types import FileEntry, Prompt, SwapReport
from tests.builders import commit_record, group_named, run_record, weight_manifest
from tests.fakes import MemoryStore
from tests.synthetic_run import make_rollout, training_row

STEP_METRICS = {"time/compute_seconds": 1.0, "time/reserve_wait_seconds": 0.5, "reward/mean": 0.25}
PROMPT = Prompt(prompt_id="p", source="sums", env="sums", text="3+4=", task={})


@pytest.fixture(autouse=True)
def _spans_have_time(monkeypatch):
    monkeypatch.setattr(span_export, "CLOSE_SECONDS", 60.0)


def context(store, *overrides):
    record = run_record()
    return RunContext(store=store, record=record, config=load_config("quickstart", overrides), token="t")


def monitor(run, role, name):
    role_monitor = RoleMonitor(role, name, run.run_id)
    role_monitor.tracer = build_tracer(run, role, name)
    return role_monitor


def spans_in(directory):
    all_spans = []
    for path in sorted(directory.glob("*.traces.jsonl")):
        for line in path.read_text().splitlines():
            for resource in json.loads(line)["resourceSpans"]:
                service = resource["resource"]["attributes"]
                role = next(
                    attribute["value"]["stringValue"] for attribute in service if attribute["key"] == "service.name"
                )
                all_spans += [{**span, "role": role} for scope in resource["scopeSpans"] for span in scope["spans"]]
    return all_spans


def value(span, key):
    (kind, text), *_ = next(
        attribute["value"] for attribute in span["attributes"] if attribute["key"] == f"pipelinerl.{key}"
    ).items()
    return int(text) if kind == "intValue" else text


def rollouts_of(now):
    spans = ((0, 0, 3), (1, 3, 4))
    times = {"started_at": now - 9, "finished_at": now - 6, "scored_at": now - 5.5}
    made = (make_rollout(group_id=17, rollout_index=index, spans=spans) for index in range(2))
    return [replace(rollout, attempt=2, **times) for rollout in made]


def act(run, rollouts, now):
    """What an actor does with group 17: generates it, with a swap in the middle, and sends it."""
    engine = SimpleNamespace(weight_version=0, stats=lambda: SimpleNamespace(num_tokens=8))
    role_monitor = monitor(run, "actor", "actor-0")
    watch = ActorWatch(
        role_monitor, engine, epoch=3, is_current=lambda: True, num_tokens=lambda: engine.stats().num_tokens
    )
    files = (FileEntry(name="f", size=10, digest="0"),)
    manifest = weight_manifest(1, epoch=4, files=files, host="h", published_at=now)
    watch.synced(SyncReply(re=1, boot_id="b", manifest=manifest), num_unsent=0)
    swap = watch.swapped(SwapReport(version=1, pause_seconds=0.01, num_bytes=10, num_running=2))
    assert swap.num_tokens == 8
    lease = Lease(group_id=17, attempt=2, lease_id="l", deadline_seconds=0.0, group_size=2, prompt=PROMPT)
    held = [replace(rollout, finished_at=now + 5, scored_at=now + 5) for rollout in rollouts]
    watch.finished(lease, held, leased_at=now - 10)
    ref = group_named(17, attempt=2, actor_epoch=3, num_tokens=8)
    for _ in range(2):  # a hub that has restarted is sent it again
        watch.answered(ref, Ack(re=1))
    role_monitor.tracer.close()
    return manifest


def train(run, rollouts, now, manifest):
    role_monitor = monitor(run, "trainer", "trainer")
    watch = TrainerWatch(role_monitor, epoch=4)
    watch.computed(1, [training_row(rollout) for rollout in rollouts], STEP_METRICS, (now - 5, now - 4, now - 3))
    watch.committed(
        commit_record(
            1, 4, manifest=manifest, metrics={"time/commit_seconds": 0.5, "weights/published_seconds": 0.2},
            reserved_at=now - 4, computed_at=now - 3, committed_at=now - 2,
        )
    )  # fmt: skip
    role_monitor.tracer.close()


@pytest.fixture
def spans(tmp_path):
    run = context(open_store(str(tmp_path)), "tracking.traces=file", "tracking.trace_share=1")
    now = time.time()
    rollouts = rollouts_of(now)
    train(run, rollouts, now, act(run, rollouts, now))
    return spans_in(tmp_path / "logs")


def test_the_spans_of_a_group_from_actor_and_trainer_are_one_trace(spans):
    (root,) = [span for span in spans if span["name"] == "group"]
    trace = [span for span in spans if span["traceId"] == root["traceId"]]
    names = sorted((span["role"].removeprefix("pipelinerl-"), span["name"]) for span in trace)
    assert names == [
        ("actor", "generate"), ("actor", "generate"), ("actor", "group"), ("actor", "reward"), ("actor", "reward"),
        ("actor", "send"), ("trainer", "optimizer_step"), ("trainer", "ready"),
    ]  # fmt: skip
    assert {span.get("parentSpanId") for span in trace} == {None, root["spanId"]}
    assert len({span["spanId"] for span in trace}) == len(trace)
    assert {(value(span, "group_id"), value(span, "attempt")) for span in trace} == {(17, 2)}
    assert all(int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"]) for span in trace)


def test_a_swap_in_the_middle_of_a_rollout_is_an_event_at_its_token(spans):
    for span in (candidate for candidate in spans if candidate["name"] == "generate"):
        (event,) = span["events"]
        assert event["name"] == "weights_swapped"
        assert {attribute["key"]: int(attribute["value"]["intValue"]) for attribute in event["attributes"]} == {
            "weight_version": 1, "at_token": 3,
        }  # fmt: skip


def test_the_group_links_to_its_step_whose_weights_the_actor_swaps_in(spans):
    (step,) = [span for span in spans if span["name"] == "step"]
    trace = {span["name"]: span for span in spans if span["traceId"] == step["traceId"]}
    assert set(trace) == {"step", "wait", "compute", "publish", "commit", "swap"}
    assert trace["swap"]["parentSpanId"] == trace["publish"]["spanId"]
    assert trace["swap"]["role"] == "pipelinerl-actor"
    assert {value(span, "step") for span in trace.values()} == {1}
    (optimizer_step,) = [span for span in spans if span["name"] == "optimizer_step"]
    assert optimizer_step["links"] == [{"traceId": step["traceId"], "spanId": step["spanId"]}]
    (root,) = [span for span in spans if span["name"] == "group"]
    assert trace["compute"]["links"] == [{"traceId": root["traceId"], "spanId": root["spanId"]}]


def test_roles_agree_on_the_groups_that_are_traced():
    actor, trainer = Tracer("run-1", 0.01, None), Tracer("run-1", 0.01, None)
    chosen = [group for group in range(50_000) if actor.wants(group)]
    assert 400 < len(chosen) < 600
    assert chosen == [group for group in range(50_000) if trainer.wants(group)]
    assert chosen != [group for group in range(50_000) if Tracer("run-2", 0.01, None).wants(group)]
    assert not any(Tracer("run-1", 0.0, None).wants(group) for group in range(1000))
    assert all(Tracer("run-1", 1.0, None).wants(group) for group in range(1000))


def test_without_traces_there_is_no_tracer_and_no_opentelemetry():
    assert monitor(context(MemoryStore()), "actor", "a").tracer is None
    assert build_tracer(context(MemoryStore(), "tracking.traces=file"), "hub", "hub") is None
    code = (
        "import sys, pipelinerl_core.roles.actor.watch, pipelinerl_core.roles.trainer.watch;"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert printed.stdout.strip() == "[]"


def test_a_file_of_spans_stays_small(tmp_path):
    run = context(open_store(str(tmp_path)), "tracking.traces=file", "tracking.log_bytes=65536")
    tracer = build_tracer(run, "trainer", "trainer")
    for step in range(1000):
        tracer.emit("wait", tracer.step(step, 1), None, (0.0, 1.0), {"text": "x" * 200})
        if step % 100 == 99:
            assert tracer._sink._processor.force_flush(5000)
    tracer.close()
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "logs").iterdir()}
    assert set(sizes) == {"trainer.traces.jsonl", "trainer.traces.jsonl.1"}
    assert sum(sizes.values()) < 3 * 65536, "a batch more than its half, each"


def test_a_directory_that_cannot_be_written_loses_spans_and_nothing_else(tmp_path):
    exporter = FileExporter(tmp_path / "a.jsonl", 1000)
    (tmp_path / "a.jsonl").mkdir()
    tracer = Tracer("r", 1.0, span_export.BatchSink(exporter, role="actor", name="a", run_id="r"))
    tracer.emit("wait", tracer.step(1, 1), None, (0.0, 1.0), {})
    tracer.close()


def test_otlp_without_its_package_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"make install.*tracking.traces=file"):
        build_tracer(context(MemoryStore(), "tracking.traces=otlp"), "actor", "a")


class Collector(BaseHTTPRequestHandler):
    bodies: list[tuple[str, bytes]]

    def do_POST(self):
        self.server.bodies.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


def test_a_collector_receives_the_same_ids(monkeypatch):
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    server = HTTPServer(("127.0.0.1", 0), Collector)
    server.bodies = []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    try:
        tracer = build_tracer(context(MemoryStore(), "tracking.traces=otlp"), "trainer", "trainer")
        ref = tracer.step(5, 1)
        tracer.emit("wait", ref, None, (1.0, 2.0), {"step": 5})
        tracer.close()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    ((path, body),) = server.bodies
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    (span,) = resource.scope_spans[0].spans
    assert path == "/v1/traces"
    assert int.from_bytes(span.trace_id, "big") == ref.trace_id
    assert int.from_bytes(span.span_id, "big") == ref.span_id


def test_a_collector_that_never_answers_does_not_hold_up_the_end(monkeypatch):
    monkeypatch.setattr(span_export, "CLOSE_SECONDS", 0.2)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "10")
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        tracer = build_tracer(context(MemoryStore(), "tracking.traces=otlp"), "trainer", "trainer")
        tracer.emit("wait", tracer.step(1, 1), None, (1.0, 2.0), {})
        begun = time.monotonic()
        tracer.close()
        assert time.monotonic() - begun < 5.0
    for thread in threading.enumerate():  # its words about the collector are for no later test
        if thread.name == "traces":
            thread.join(30)
