"""hub.json: the address of a run's hub, and whether the hub is live."""

import os
import socket
import time
from collections.abc import Callable

import psutil

from pipelinerl_core.errors import MissingObject, PipelineRLError
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.run.reading import read_record
from pipelinerl_core.run.records import HUB_KEY, HubRecord

HEARTBEAT_SECONDS = 5.0
"""A hub rewrites hub.json every second; without a heartbeat for this long, a hub on another host counts as dead."""


def read_hub(store: ObjectStore) -> HubRecord | None:
    """hub.json, or None before the hub has started."""
    try:
        return read_record(store, HUB_KEY, HubRecord)
    except MissingObject:
        return None


def is_live(hub: HubRecord | None) -> bool:
    """Whether a run is live: its hub runs on this host, or runs on another host and its heartbeat is recent.

    The last heartbeat of a stopping hub has the state `stopped` or `done`.
    """
    if hub is None:
        return False
    if hub.host != socket.gethostname():
        return hub.live.get("state") not in ("stopped", "done") and time.time() - hub.beat < HEARTBEAT_SECONDS
    # A process that reuses the pid has another start time.
    return process_lives(hub.pid, lambda started_at: abs(started_at - hub.process_started_at) < 1.0)


def process_lives(pid: int, is_same: Callable[[float], bool]) -> bool:
    """Whether a process with this pid runs whose start time `is_same`; a zombie does not count."""
    try:
        process = psutil.Process(pid)
        return bool(is_same(process.create_time()) and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def refuse_second_hub(store: ObjectStore, refusal: type[PipelineRLError] = PipelineRLError) -> None:
    """Raise `refusal` if another hub of this run is live; a new hub may replace a dead hub."""
    hub = read_hub(store)
    if hub is not None and is_live(hub):
        raise refusal(
            f"{store.url}: this run is live: its hub has pid {hub.pid} on {hub.host}, last heartbeat "
            f"{time.time() - hub.beat:.1f} s ago. Stop the run first, or follow the run with `pipelinerl status`"
        )


def is_descendant(pid: int) -> bool:
    """Whether a process is a direct or indirect child of this process."""
    try:
        return os.getpid() in {process.pid for process in psutil.Process(pid).parents()}
    except psutil.Error:
        return False
