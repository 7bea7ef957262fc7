"""End a process group so that nothing of it stays, shared memory neither; wait for those that were started here."""

import os
import signal
import time
from contextlib import suppress

import psutil

TRACKER_SECONDS = 1.0
"""For Python's resource trackers to remove what the processes have left; it takes milliseconds."""
_TRACKER = "resource_tracker"
_POLL_SECONDS = 0.1


def kill_group(group: int) -> None:
    """SIGKILL for all processes of a group; for Python's resource trackers last.

    A tracker removes shared memory and semaphores of its processes once the last of them has ended: hundreds of MB of
    a vLLM engine. One that is killed with them leaves it all.
    """
    trackers = []
    for process in _members(group):
        with suppress(psutil.Error):  # gone
            if any(_TRACKER in argument for argument in process.cmdline()):
                trackers.append(process)
            else:
                process.kill()
    psutil.wait_procs(trackers, timeout=TRACKER_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def await_groups(seconds: float) -> list[int]:
    """Wait until none of this process's children leads a group, as roles and servers do; those that are left."""
    deadline = time.monotonic() + seconds
    while (left := _leaders()) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return left


def _leaders() -> list[int]:
    found = []
    for child in psutil.Process().children():
        with suppress(ProcessLookupError, psutil.Error):
            if os.getpgid(child.pid) == child.pid and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child.pid)
    return found


def _members(group: int) -> list[psutil.Process]:
    found = []
    for pid in psutil.pids():
        with suppress(ProcessLookupError, psutil.Error):
            if os.getpgid(pid) == group:
                found.append(psutil.Process(pid))
    return found
