"""Hub process: accounts for prompts, leases, lag and tokens; passes rollouts from actors to the trainer in memory.

Start and restart follow the same path: the hub reads the newest commit and the segments above the commit's low-water
marks, and accepts registrations during a grace period. The hub ends when the last step is committed or when the
supervisor stops the hub. Before it ends, the hub asks the actors to leave. If a hub with a newer epoch has started,
the hub ends with exit code 3.
"""

import contextlib
import gc
import logging
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psutil

from pipelinerl_core.channel.server import HubServer
from pipelinerl_core.errors import ConfigError, StoreError
from pipelinerl_core.host import is_loopback, reachable_url
from pipelinerl_core.ledger import Ledger
from pipelinerl_core.prompts import build_source
from pipelinerl_core.roles.hub.heartbeat import HubRecordBuilder
from pipelinerl_core.roles.hub.recovery import read_stored_state
from pipelinerl_core.roles.hub.retiring import RetiringThread
from pipelinerl_core.roles.hub.service import Hub
from pipelinerl_core.roles.runtime.monitor import RoleMonitor
from pipelinerl_core.roles.runtime.process import (
    RoleProcess,
    freeze_startup_objects,
    give_back_freed_memory,
    keep_freed_memory,
    leave,
    own_descriptors,
    run_role,
)
from pipelinerl_core.run.context import TOKEN_VARIABLE, RunContext
from pipelinerl_core.run.history import check_not_fenced, take_epoch
from pipelinerl_core.run.hub_status import HubWatch, refuse_second_hub
from pipelinerl_core.run.records import HUB_KEY, Commit, EpochRecord

logger = logging.getLogger(__name__)

# Attempt numbers that each hub epoch has per group: attempts of different epochs never share a number.
ATTEMPTS_PER_BOOT = 1000
_TICK_SECONDS = 0.1
_STANDSTILL_SECONDS = 2.0
_HEARTBEAT_SECONDS = 1.0
# Interval between checks for a newer hub epoch. While two hubs run, actors may connect to either of them.
_FENCE_SECONDS = 3.0
# Limit of free memory that the process keeps, rows excluded. A connection uses about 100 kB.
_MAX_FREE_BYTES = 256 << 20
_TRIM_SECONDS = 5.0
# Thresholds of the garbage collector. A group consists of about 30 objects without reference cycles. The default
# threshold of 700 new objects costs a tenth of the hub's time.
_COLLECT_AFTER = (20_000, 50, 100)
# Time for actors to seal their segments and leave after the last step is committed.
DRAIN_SECONDS = 5.0
# The same time if the supervisor stops the hub. The supervisor kills a hub that has not ended after 3 s.
STOP_SECONDS = 1.5
# The same time if no trainer has registered: if the run was complete at the start, the trainer still connects once.
_IDLE_SECONDS = 60.0
_THREAD_END_SECONDS = 0.5


def start_hub(context: RunContext) -> tuple[Hub, EpochRecord]:
    """Take the next hub epoch and restore the ledger from the store.

    Raises PipelineRLError while another hub of the run is live.
    """
    watch = HubWatch(context.store)
    refuse_second_hub(context.store, watch=watch)
    past = read_stored_state(context.store, context.config.placement.hub_bytes)
    committed = past.commit.step if past.commit else -1
    refuse_second_hub(context.store, watch=watch)  # again: a hub that started during the read must not be fenced
    epoch = take_epoch(context.store, "hub", committed)
    boot_id = f"{epoch.epoch}-{uuid.uuid4().hex[:8]}"
    is_first = epoch.parent is None
    ledger = Ledger(
        context.config,
        clock=steady_clock(past.commit),
        boot_id=boot_id,
        first_attempt=0 if is_first else epoch.epoch * ATTEMPTS_PER_BOOT,
    )
    if past.commit is not None:
        ledger.restore(past.commit, past.sealed, past.manifest, past.retired)
    else:
        ledger.restore_segments(past.sealed)
    ledger.restore_holders(past.holders)
    logger.info(
        "hub epoch %d, boot %s: after commit %d, %d groups ready from %d in segments, %d open, next group %d",
        epoch.epoch, boot_id, committed, ledger.num_ready, len(past.sealed), ledger.num_queued, ledger.next_group_id,
    )  # fmt: skip
    source = build_source(context.config)
    return Hub(context.config, ledger, source, context.store, boot_id=boot_id, rows=past.rows), epoch


def steady_clock(commit: Commit | None) -> Callable[[], float]:
    """A clock of Unix seconds for leases and samples of actors, unaffected when the clock of the host is set.

    The clock begins after every sample of `commit`, whose hub may have run on a host with another clock.
    """
    samples = commit.actors.values() if commit is not None else ()
    offset = max([time.time(), *(sample.at for sample in samples)]) - time.monotonic()
    return lambda: offset + time.monotonic()


class HubProcess:
    """Runs the Flight server of the hub, the periodic tick and the updates of hub.json."""

    def __init__(self, context: RunContext, monitor: RoleMonitor | None = None) -> None:
        """Raises ConfigError without a token, PipelineRLError while another hub of the run is live."""
        if not context.token:
            raise ConfigError(
                f"{TOKEN_VARIABLE} is not set, and the hub does not start without a token. Set {TOKEN_VARIABLE}, or "
                "start the run with the flow, which sets the variable"
            )
        placement = context.config.placement
        self._store = context.store
        self.hub, self._epoch = start_hub(context)
        self._retiring = RetiringThread(self.hub, context.store)
        credentials = None
        if placement.hub_tls:
            from pipelinerl_core.channel.tls import make_credentials  # noqa: PLC0415 - only TLS needs cryptography

            credentials = make_credentials()
        # gRPC accepts any number of connections before it checks the token. The thread that writes hub.json starts
        # first and has its own file descriptors, so that connections cannot exhaust them.
        self._report_thread = ThreadPoolExecutor(1, thread_name_prefix="heartbeat", initializer=own_descriptors)
        self._report_thread.submit(int).result()
        self._server = HubServer(
            self.hub,
            host=placement.hub_host,
            port=placement.hub_port,
            token=context.token,
            credentials=credentials,
        )
        certificate = credentials.certificate if credentials else ""
        self._record_builder = HubRecordBuilder(
            self.hub, context.config, reachable_url(self._server.url), certificate
        )
        if not placement.hub_tls and not is_loopback(placement.hub_host):
            logger.warning(
                "placement.hub_host=%s: the token and the rows are sent unencrypted; set placement.hub_tls=true",
                placement.hub_host,
            )
        self._monitor = monitor or RoleMonitor("hub", "hub", context.run_id)
        self._monitor.facts["epoch"] = self._epoch.epoch
        self._written_at = self._trimmed_at = self._checked_at = 0.0
        self._process = psutil.Process()
        self._bytes_at_start = self._process.memory_info().rss

    def run(self, stop: threading.Event) -> None:
        """Serve until the last step is committed and the actors have left, or until `stop`.

        Raises Fenced once a hub of the run with a newer epoch has started.
        """
        self._server.start()
        self._report("run", is_due=True)
        logger.info("listening at %s", self._server.url)
        self._monitor.set_readiness_check(lambda: "")
        while not stop.wait(_TICK_SECONDS) and not self.hub.is_finished:
            self.hub.tick()
            self._retiring.tick()
            self._report("run")
        self._retiring.close()
        was_stopped = stop.is_set() and not self.hub.is_finished
        logger.info("draining: %s", "the hub was asked to stop" if was_stopped else "the last step is committed")
        if was_stopped:
            self.hub.stop()
        self._drain(stop)
        self._report("stopped" if was_stopped else "done", is_due=True)
        has_ended = self._server.shutdown(_THREAD_END_SECONDS)
        logger.info("the hub ends%s", "" if has_ended else "; some peers are still connected")

    def _drain(self, stop: threading.Event) -> None:
        """Answer syncs with state `drain` until all peers have disconnected or the time limit is over."""
        begun = time.monotonic()
        while True:
            limit = (
                STOP_SECONDS if stop.is_set() else DRAIN_SECONDS if self.hub.has_trainer_registered else _IDLE_SECONDS
            )
            is_alone = self.hub.num_peers == 0 and (self.hub.has_trainer_registered or stop.is_set())
            if is_alone or time.monotonic() - begun > limit:
                return
            self.hub.tick()
            self._report("drain")
            slept_from = time.monotonic()
            time.sleep(_TICK_SECONDS)
            was_paused = time.monotonic() - slept_from
            if was_paused > _STANDSTILL_SECONDS:  # the host or the process was suspended: peers received no answer
                begun += was_paused

    def _report(self, state: str, *, is_due: bool = False) -> None:
        self._report_thread.submit(self._write_heartbeat, state, is_due=is_due).result()
        if state == "run":
            self._report_thread.submit(self._check_epoch).result()

    def _write_heartbeat(self, state: str, *, is_due: bool) -> None:
        if not is_due and time.monotonic() - self._written_at < _HEARTBEAT_SECONDS:
            return
        self._written_at = time.monotonic()
        with contextlib.suppress(OSError):  # if the thread shares its descriptors, none may be left
            self._limit_memory()
        record = self._record_builder.record(state)
        self._monitor.heartbeat(f"state {state}, step {record.live['step']}")
        self._monitor.facts.update(step=record.live["step"], weight_version=record.live["newest_version"])
        metrics = self._monitor.metrics
        metrics.set("hub_peers", self.hub.num_peers)
        metrics.set("hub_row_bytes", record.live["row_bytes"])
        metrics.set("role_weight_version", record.live["newest_version"])
        try:
            self._store.put(HUB_KEY, record.model_dump_json().encode())
        except StoreError as error:
            logger.warning("%s not written: %s", HUB_KEY, error)

    def _check_epoch(self) -> None:
        if self._checked_at and time.monotonic() - self._checked_at < _FENCE_SECONDS:
            return
        self._checked_at = time.monotonic()
        try:
            check_not_fenced(self._store, self._epoch)
        except StoreError as error:
            logger.warning("cannot check for a newer hub epoch, the check is repeated: %s", error)

    def _limit_memory(self) -> None:
        """Return freed memory to the operating system if the process keeps too much of it."""
        free_bytes = self._process.memory_info().rss - self._bytes_at_start - self.hub.row_bytes
        if free_bytes > _MAX_FREE_BYTES and self._written_at - self._trimmed_at > _TRIM_SECONDS:
            self._trimmed_at = self._written_at
            give_back_freed_memory()


def _serve(own: RoleProcess) -> None:
    keep_freed_memory()
    process = HubProcess(own.context, own.monitor)
    freeze_startup_objects()
    gc.set_threshold(*_COLLECT_AFTER)
    process.run(own.stop)


def main() -> int:
    """Command line of the role."""
    return run_role("hub", "The hub of a run.", _serve)


if __name__ == "__main__":
    leave(main())
