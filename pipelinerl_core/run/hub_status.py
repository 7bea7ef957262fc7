"""hub.json: where the hub of a run is, and whether that hub lives."""

import os
import socket
import time
from collections.abc import Callable

import psutil

from pipelinerl_core.errors import MissingObject, PipelineRLError
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.run.reading import read_record
from pipelinerl_core.run.records import HUB_KEY, HubRecord

BEAT_SECONDS = 5.0
"""A hub rewrites hub.json every second; a hub on another host that has not done so for this long is dead."""


def read_hub(store: ObjectStore) -> HubRecord | None:
    """hub.json, or None before the hub has started."""
    try:
        return read_record(store, HUB_KEY, HubRecord)
    except MissingObject:
        return None


def is_live(hub: HubRecord | None) -> bool:
    """Whether somebody runs this run: its hub's process lives on this host, or its beat from another one is fresh.

    The last beat of a hub says that it has left.
    """
    if hub is None:
        return False
    if hub.host != socket.gethostname():
        return hub.live.get("state") not in ("stopped", "done") and time.time() - hub.beat < BEAT_SECONDS
    # A reused pid has another start time.
    return process_lives(hub.pid, lambda started_at: abs(started_at - hub.process_started_at) < 1.0)


def process_lives(pid: int, is_same: Callable[[float], bool]) -> bool:
    """Whether there is a process of this pid whose start time `is_same`; one that nobody reaps does not live."""
    try:
        process = psutil.Process(pid)
        return bool(is_same(process.create_time()) and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def refuse_second_hub(store: ObjectStore, refusal: type[PipelineRLError] = PipelineRLError) -> None:
    """Raise `refusal` while another hub of this run lives; a dead one is taken over."""
    hub = read_hub(store)
    if hub is not None and is_live(hub):
        raise refusal(
            f"{store.url}: this run is live: its hub has pid {hub.pid} on {hub.host} and beat "
            f"{time.time() - hub.beat:.1f} s ago. Stop it first, or follow the run with `pipelinerl status`"
        )


def is_descendant(pid: int) -> bool:
    """Whether a process was started by this one, or by one that this one has started."""
    try:
        return os.getpid() in {process.pid for process in psutil.Process(pid).parents()}
    except psutil.Error:
        return False
