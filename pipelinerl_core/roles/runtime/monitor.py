"""Health, readiness and metrics of a role's process, served over HTTP.

main loop --heartbeat--> RoleMonitor --/healthz, /readyz, /metrics--> people, Kubernetes, Prometheus
                              |
                              +--> roles/<role>-<name>.json every 10 s: the URL of the server
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from pipelinerl_core.config.sections import PlacementConfig
from pipelinerl_core.errors import StoreError
from pipelinerl_core.host import is_loopback, reachable_url
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.roles.runtime.observed_store import ObservedStore
from pipelinerl_core.roles.runtime.tracing import build_tracer
from pipelinerl_core.run.context import RESTARTS_VARIABLE, RunContext
from pipelinerl_core.run.records import RoleRecord, role_key
from pipelinerl_core.telemetry.log_lines import RoleFormatter
from pipelinerl_core.telemetry.role_metrics import RoleMetrics
from pipelinerl_core.telemetry.role_server import RoleServer
from pipelinerl_core.telemetry.traces import Tracer

logger = logging.getLogger(__name__)

START_SECONDS = 900.0
"""Longest time to the first heartbeat, in which a role loads, compiles or trains again."""
RECORD_SECONDS = 10.0


class RoleMonitor:
    """Health, readiness and metrics of one process. Thread-safe; a heartbeat costs well under a microsecond."""

    def __init__(self, role: str, name: str, run_id: str = "", *, healthy_seconds: float = 300.0) -> None:
        """`healthy_seconds`: a role without a heartbeat for longer is not healthy."""
        self.role, self.name, self.run_id = role, name, run_id
        self.metrics = RoleMetrics(role, name, run_id)
        self._healthy_seconds = healthy_seconds
        self.facts: dict[str, int] = {}
        """State that each log line includes: epoch, weight_version, step."""
        self.tracer: Tracer | None = None
        """None without tracking.traces."""
        self.progress = ""
        """What the role does now, for people, in its record."""
        self._phase = "starting"
        self._heartbeat_at = time.monotonic()
        self._limit_seconds = max(START_SECONDS, healthy_seconds)
        self._reason_not_ready: Callable[[], str] = lambda: "starting"
        self._is_starting = True
        self.start_beat = 0.0
        """Unix seconds of the newest heartbeat before the role was ready."""
        self.metrics.ask("role_healthy", lambda: float(self.health()[0]))
        self.metrics.ask("role_ready", lambda: float(self.readiness()[0]))
        self.metrics.ask("role_beat_age_seconds", lambda: time.monotonic() - self._heartbeat_at)
        self.metrics.add("role_restarts_total", float(os.environ.get(RESTARTS_VARIABLE, "0") or 0))

    def heartbeat(self, phase: str = "") -> None:
        """Report that the main loop makes progress. phase: what the loop does next; "" if unchanged."""
        self._heartbeat_at, self._limit_seconds = time.monotonic(), self._healthy_seconds
        if self._is_starting:
            self.start_beat = time.time()
        if phase:
            self._phase = phase

    def set_readiness_check(self, reason_not_ready: Callable[[], str]) -> None:
        """From now on the role is ready while `reason_not_ready` returns ""; called on other threads."""
        self._reason_not_ready, self._is_starting = reason_not_ready, False

    def health(self) -> tuple[bool, str]:
        """Whether the main loop makes progress, and the reason in one line."""
        age = time.monotonic() - self._heartbeat_at
        if age <= self._limit_seconds:
            return True, f"ok: {self._phase}"
        allowed = f"at most {self._limit_seconds:.0f}"
        return False, f"no heartbeat of the main loop for {age:.0f} s ({allowed}): {self._phase}"

    def readiness(self) -> tuple[bool, str]:
        """Whether the role is ready, and the reason in one line."""
        is_healthy, line = self.health()
        reason = self._reason_not_ready() if is_healthy else line
        return not reason, reason or f"ready: {self._phase}"

    def exposition(self) -> bytes:
        return self.metrics.exposition()


@contextmanager
def monitored(context: RunContext, role: str, name: str) -> Iterator[tuple[RunContext, RoleMonitor]]:
    """Serve and record the monitor of this process during the block; returns it with a context whose store is timed.

    Raises ConfigError if placement.metrics_host cannot be served. If placement.metrics_host is empty, nothing is
    served or recorded.
    """
    monitor = RoleMonitor(role, name, context.run_id, healthy_seconds=context.config.placement.healthy_seconds)
    log_as(monitor, context.config.tracking.log_format, context.token)
    monitor.tracer = build_tracer(context, role, name)
    try:
        with _served(context, monitor):
            yield replace(context, store=ObservedStore(context.store, monitor.metrics)), monitor
    finally:
        if monitor.tracer is not None:
            monitor.tracer.close()


@contextmanager
def _served(context: RunContext, monitor: RoleMonitor) -> Iterator[None]:
    placement = context.config.placement
    if not placement.metrics_host:
        yield
        return
    server = RoleServer(monitor, placement.metrics_host, placement.metrics_port)
    done = threading.Event()
    keeper = _keep_record(context.store, monitor, _shown_url(server, placement), done)
    try:
        yield
    finally:
        done.set()
        keeper.join(timeout=1.0)  # a store that does not answer must not delay the exit; the record expires then
        server.close()


def log_as(monitor: RoleMonitor, form: str, token: str) -> None:
    """Set the form of this process's log lines, text or json, and redact secrets in them."""
    identity = {"run": monitor.run_id, "role": monitor.role, "name": monitor.name}
    formatter = RoleFormatter(as_json=form == "json", identity=identity, facts=monitor.facts, secrets=(token,))
    for handler in logging.getLogger().handlers:
        handler.setFormatter(formatter)


def _shown_url(server: RoleServer, placement: PlacementConfig) -> str:
    url = reachable_url(server.url)
    logger.info("health and metrics at %s", url)
    if not is_loopback(placement.metrics_host):
        logger.info("placement.metrics_host=%s: every host that can connect can read them", placement.metrics_host)
    return url


def _keep_record(store: ObjectStore, monitor: RoleMonitor, url: str, done: threading.Event) -> threading.Thread:
    """Rewrite the role's record on a new thread until `done` is set, then delete the record."""
    key = role_key(monitor.role, monitor.name)
    started_at = time.time()

    def record() -> bytes:
        return RoleRecord(
            run_id=monitor.run_id,
            role=monitor.role,
            name=monitor.name,
            host=socket.gethostname(),
            pid=os.getpid(),
            url=url,
            started_at=started_at,
            beat=time.time(),
            start_beat=monitor.start_beat,
            progress=monitor.progress,
        ).model_dump_json().encode()  # fmt: skip

    def keep() -> None:
        while True:
            try:
                store.put(key, record())
            except StoreError as error:
                logger.debug("%s not written: %s", key, error)
            if done.wait(RECORD_SECONDS):
                break
        with suppress(StoreError):
            store.delete([key])

    thread = threading.Thread(target=keep, name="role-record", daemon=True)
    thread.start()
    return thread
