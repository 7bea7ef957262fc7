"""hub.json: the address of a run's hub, and whether the hub is live.

Clocks of hosts differ, and a clock may be set, so no function compares Unix times of two hosts, or of one host at two
moments. The only exception is the start time of a process that was recorded without `process_mark`. A hub on another
host is live if its heartbeat changes while this host looks.
"""

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
from pydantic_core import from_json

from pipelinerl_core.errors import BrokenRecord, ConfigError, PipelineRLError
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.run.reading import find_record
from pipelinerl_core.run.records import FORMAT_VERSION, HUB_KEY, HubRecord

HEARTBEAT_SECONDS = 5.0
"""A hub rewrites hub.json every second; if hub.json does not change for this long, a hub on another host is dead."""
_POLL_SECONDS = 0.5
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def read_hub(store: ObjectStore) -> HubRecord | None:
    """hub.json; None before the first hub has started. Raises StoreError."""
    return find_record(store, HUB_KEY, HubRecord)


def read_hub_of_any_format(store: ObjectStore) -> HubRecord | None:
    """`read_hub` of a run that another release has written, as far as it has the same fields."""
    try:
        return read_hub(store)
    except BrokenRecord:
        with suppress(ValueError, AttributeError):  # no JSON, no object, or other fields
            values = from_json(store.get(HUB_KEY))
            known = {key: value for key, value in values.items() if key in HubRecord.model_fields}
            return HubRecord.model_validate({**known, "format_version": FORMAT_VERSION})
        raise


def may_be_live(hub: HubRecord | None) -> bool:
    """Whether a run may be live: its hub runs on this host, or ran on another host and has not ended by itself.

    The last heartbeat of a stopping hub has the state `stopped` or `done`. `HubWatch.find_live` decides whether a
    hub on another host is live.
    """
    if hub is None:
        return False
    if hub.host != socket.gethostname():
        return not has_ended(hub)
    # A process that reuses the pid has another start.
    return process_lives(hub.pid, hub.process, lambda started_at: abs(started_at - hub.process_started_at) < 1.0)


def has_ended(hub: HubRecord) -> bool:
    """Whether the hub has ended by itself; then its last heartbeat says so."""
    return hub.live.get("state") in ("stopped", "done")


class HubWatch:
    """Reads hub.json repeatedly, and measures with a monotonic clock how long the heartbeat has not changed.

    Not thread-safe.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        clock: Callable[[], float] | None = None,
        sleep: Callable[[float], None] | None = None,
        read: Callable[[ObjectStore], HubRecord | None] = read_hub,
    ) -> None:
        """clock, sleep: replace time.monotonic and time.sleep in tests. read: reads hub.json."""
        self._read = read
        self._store = store
        self._clock = clock or time.monotonic
        self.sleep = sleep or time.sleep
        self._heartbeat: tuple[str, float] | None = None  # (boot id, time of the heartbeat): the newest that was read
        self._changed_at = self._clock()
        self._has_looked = False
        self._num_changes = 0  # after the first look, whose heartbeat may be old

    def look(self) -> HubRecord | None:
        """hub.json now; returns and raises as `read_hub`."""
        hub = self._read(self._store)
        heartbeat = (hub.boot_id, hub.beat) if hub is not None else None
        if heartbeat is not None and heartbeat != self._heartbeat:
            self._heartbeat, self._changed_at = heartbeat, self._clock()
            self._num_changes += self._has_looked
        self._has_looked = True
        return hub

    @property
    def silent_seconds(self) -> float:
        """Seconds since the newest heartbeat was read for the first time, or since the start of the watch."""
        return self._clock() - self._changed_at

    def find_live(self) -> HubRecord | None:
        """The live hub, or None.

        For a hub on another host this call waits until the heartbeat changes, or is unchanged for HEARTBEAT_SECONDS.
        """
        num_before = self._num_changes
        while True:
            hub = self.look()
            if hub is None or not may_be_live(hub):
                return None
            if hub.host == socket.gethostname() or self._num_changes > num_before:
                return hub
            if self.silent_seconds >= HEARTBEAT_SECONDS:
                return None
            self.sleep(_POLL_SECONDS)


def process_mark(pid: int) -> str:
    """<boot id of this host>/<start of a process, in clock ticks since the boot>; differs if a pid is used again.

    "" without /proc, without such a process, and for a zombie. The Unix time of a start is computed from the clock,
    and changes when the clock is set.
    """
    try:
        # After the name of the program in brackets: fields 3 (state), 4, ... of proc(5); field 22 is starttime.
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in ("Z", "X") else f"{_BOOT_ID.read_text().strip()}/{fields[22 - 4]}"
    except OSError:
        return ""


def process_lives(pid: int, mark: str, is_same: Callable[[float], bool]) -> bool:
    """Whether a process with this pid and this mark runs; a zombie does not count.

    is_same: without a mark, decides from the start time in Unix seconds whether it is the recorded process.
    """
    if mark:
        return process_mark(pid) == mark
    try:
        process = psutil.Process(pid)
        return bool(is_same(process.create_time()) and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def refuse_second_hub(
    store: ObjectStore, refusal: type[PipelineRLError] = PipelineRLError, *, watch: HubWatch | None = None
) -> None:
    """Raise `refusal` if another hub of this run is live; a new hub may replace a dead hub.

    watch: an earlier watch of the same run; the wait is shorter by the time for which it has seen no heartbeat.
    """
    hub = (watch or HubWatch(store)).find_live()
    if hub is not None:
        raise refusal(
            f"{store.url}: this run is live: its hub has pid {hub.pid} on {hub.host}. Stop the run first, or follow "
            "the run with `pipelinerl status`"
        )


def wait_without_hub(store: ObjectStore, seconds: float, watch: HubWatch) -> None:
    """Wait until no hub has sent a heartbeat for `seconds`; no wait if the hub has ended by itself.

    Raises ConfigError if a hub is live.
    """
    while True:
        refuse_second_hub(store, ConfigError, watch=watch)
        hub = watch.look()
        if hub is None or has_ended(hub) or watch.silent_seconds >= seconds:
            return
        watch.sleep(_POLL_SECONDS)


def is_descendant(pid: int) -> bool:
    """Whether a process is a direct or indirect child of this process."""
    try:
        return os.getpid() in {process.pid for process in psutil.Process(pid).parents()}
    except psutil.Error:
        return False
