"""The hub: accounts for prompts, leases, lag and tokens; carries rollouts from actors to the trainer in memory.

Start and restart are one path: newest commit, segments above its low-water marks, registrations during a grace time.
It ends when the last step is committed or it is asked to, after telling the actors to leave; and with exit code 3
when another hub of the run has started in the same moment and has taken its epoch later.
"""

import contextlib
import gc
import logging
import threading
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil

from pipelinerl_core.channel.server import HubServer
from pipelinerl_core.channel.tls import make_credentials
from pipelinerl_core.errors import ConfigError, StoreError
from pipelinerl_core.ledger import Ledger
from pipelinerl_core.prompts import build_source
from pipelinerl_core.roles.hub.beat import LiveRecord
from pipelinerl_core.roles.hub.recovery import read_past
from pipelinerl_core.roles.hub.service import Hub
from pipelinerl_core.roles.runtime.addresses import is_loopback, reachable_url
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
from pipelinerl_core.run.hub_status import refuse_second_hub
from pipelinerl_core.run.records import HUB_KEY, EpochRecord

logger = logging.getLogger(__name__)

# Attempts of one group that one hub may grant before they would look like the next hub's.
ATTEMPTS_PER_BOOT = 1000
_TICK_SECONDS = 0.1
_STANDSTILL_SECONDS = 2.0
_BEAT_SECONDS = 1.0
# Between two looks whether another hub has taken over: to two that live, no actor knows where it belongs.
_FENCE_SECONDS = 3.0
# Beside the rows; a connection takes about 100 kB of it.
_MAX_FREE_BYTES = 256 << 20
_GIVE_BACK_SECONDS = 5.0
# What comes and goes here are groups, of some thirty objects each and without cycles: to look for these after every
# 700 new objects takes a tenth of the hub's time.
_COLLECT_AFTER = (20_000, 50, 100)
# How long actors may take to seal and leave once the last step is committed.
DRAIN_SECONDS = 5.0
# The same when asked to stop: the supervisor kills a hub that has not left after 3 s.
STOP_SECONDS = 1.5
# A run that was complete at the start: its trainer comes, sees that, and goes.
_IDLE_SECONDS = 60.0
_THREAD_END_SECONDS = 0.5


def start_hub(context: RunContext) -> tuple[Hub, EpochRecord]:
    """Take the next epoch and restore the ledger from the store; PipelineRLError while another hub lives."""
    refuse_second_hub(context.store)
    past = read_past(context.store, context.config.placement.hub_bytes)
    committed = past.commit.step if past.commit else -1
    refuse_second_hub(context.store)  # reading takes a while: one that has come up meanwhile is not to be fenced
    epoch = take_epoch(context.store, "hub", committed)
    boot_id = f"{epoch.epoch}-{uuid.uuid4().hex[:8]}"
    is_first = epoch.parent is None
    ledger = Ledger(
        context.config,
        clock=time.time,
        boot_id=boot_id,
        first_attempt=0 if is_first else epoch.epoch * ATTEMPTS_PER_BOOT,
    )
    if past.commit is not None:
        ledger.restore(past.commit, past.sealed, past.manifest)
    else:
        ledger.restore_segments(past.sealed)
    ledger.restore_holders(past.holders)
    logger.info(
        "hub epoch %d, boot %s: after commit %d, %d groups ready from %d in segments, %d open, next group %d",
        epoch.epoch, boot_id, committed, ledger.num_ready, len(past.sealed), ledger.num_queued, ledger.next_group_id,
    )  # fmt: skip
    source = build_source(context.config)
    return Hub(context.config, ledger, source, context.store, boot_id=boot_id, rows=past.rows), epoch


class HubProcess:
    """A hub that serves: its Flight server, ticks, hub.json."""

    def __init__(self, context: RunContext, monitor: RoleMonitor | None = None) -> None:
        """Raises ConfigError without a token, PipelineRLError while another hub of the run lives."""
        if not context.token:
            raise ConfigError(
                f"{TOKEN_VARIABLE} is not set: the hub admits nobody without a token. Set it, or let the flow"
            )
        placement = context.config.placement
        self._store = context.store
        self.hub, self._epoch = start_hub(context)
        credentials = make_credentials() if placement.hub_tls else None
        # gRPC accepts the connections of anybody, without a bound, before it asks for the token. What says in the
        # store that this hub lives has descriptors that connections cannot use up, on a thread older than they are.
        self._keeper = ThreadPoolExecutor(1, thread_name_prefix="keeper", initializer=own_descriptors)
        self._keeper.submit(int).result()
        self._server = HubServer(
            self.hub,
            host=placement.hub_host,
            port=placement.hub_port,
            token=context.token,
            credentials=credentials,
        )
        certificate = credentials.certificate if credentials else ""
        self._live = LiveRecord(self.hub, context.config, reachable_url(self._server.url), certificate)
        if not placement.hub_tls and not is_loopback(placement.hub_host):
            logger.warning(
                "placement.hub_host=%s: the token and the rows cross the network in the clear; "
                "set placement.hub_tls=true",
                placement.hub_host,
            )
        self._monitor = monitor or RoleMonitor("hub", "hub", context.run_id)
        self._monitor.facts["epoch"] = self._epoch.epoch
        self._beat_at = self._gave_back_at = self._checked_at = 0.0
        self._process = psutil.Process()
        self._bytes_at_start = self._process.memory_info().rss

    def run(self, stop: threading.Event) -> None:
        """Serve until the last step is committed and the actors have left, or until `stop`.

        Raises Fenced once a newer hub of the run has taken over.
        """
        self._server.start()
        self._keep("run", is_due=True)
        logger.info("listening at %s", self._server.url)
        self._monitor.set_readiness_check(lambda: "")
        while not stop.wait(_TICK_SECONDS) and not self.hub.is_finished:
            self.hub.tick()
            self._keep("run")
        was_stopped = stop.is_set() and not self.hub.is_finished
        logger.info("draining: %s", "asked to stop" if was_stopped else "the last step is committed")
        if was_stopped:
            self.hub.stop()
        self._drain(stop)
        self._keep("stopped" if was_stopped else "done", is_due=True)
        has_ended = self._server.shutdown(_THREAD_END_SECONDS)
        logger.info("hub left%s", "" if has_ended else ", some peers had not")

    def _drain(self, stop: threading.Event) -> None:
        """Answer syncs with `drain` until everybody has gone."""
        begun = time.monotonic()
        while True:
            limit = STOP_SECONDS if stop.is_set() else DRAIN_SECONDS if self.hub.has_met_trainer else _IDLE_SECONDS
            is_alone = self.hub.num_peers == 0 and (self.hub.has_met_trainer or stop.is_set())
            if is_alone or time.monotonic() - begun > limit:
                return
            self.hub.tick()
            self._keep("drain")
            slept_from = time.monotonic()
            time.sleep(_TICK_SECONDS)
            stood_still = time.monotonic() - slept_from
            if stood_still > _STANDSTILL_SECONDS:  # this host, or this process: nobody had the time to hear of it
                begun += stood_still

    def _keep(self, state: str, *, is_due: bool = False) -> None:
        self._keeper.submit(self._beat, state, is_due=is_due).result()
        if state == "run":
            self._keeper.submit(self._check_epoch).result()

    def _beat(self, state: str, *, is_due: bool) -> None:
        if not is_due and time.monotonic() - self._beat_at < _BEAT_SECONDS:
            return
        self._beat_at = time.monotonic()
        with contextlib.suppress(OSError):  # where the keeper has no descriptors apart, there may be none left
            self._limit_memory()
        record = self._live.record(state)
        self._monitor.heartbeat(f"state {state}, step {record.live['step']}")
        self._monitor.facts.update(step=record.live["step"], weight_version=record.live["newest_version"])
        for name, value in (("hub_peers", self.hub.num_peers), *_exported(record.live)):
            self._monitor.metrics.set(name, value)
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
            logger.warning("cannot see whether another hub has taken over: %s", error)

    def _limit_memory(self) -> None:
        """What is free but kept for the next rows stays small, beside the rows themselves."""
        free_bytes = self._process.memory_info().rss - self._bytes_at_start - self.hub.row_bytes
        if free_bytes > _MAX_FREE_BYTES and self._beat_at - self._gave_back_at > _GIVE_BACK_SECONDS:
            self._gave_back_at = self._beat_at
            give_back_freed_memory()


def _exported(live: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Gauge -> value, of what hub.json says."""
    keys = {"hub_row_bytes": "row_bytes", "role_weight_version": "newest_version"}
    return [(name, float(live[key])) for name, key in keys.items()]


def _serve(own: RoleProcess) -> None:
    keep_freed_memory(_MAX_FREE_BYTES)
    process = HubProcess(own.context, own.monitor)
    freeze_startup_objects()
    gc.set_threshold(*_COLLECT_AFTER)
    process.run(own.stop)


def main() -> int:
    """Command line of the role."""
    return run_role("hub", "The hub of a run.", _serve)


if __name__ == "__main__":
    leave(main())
