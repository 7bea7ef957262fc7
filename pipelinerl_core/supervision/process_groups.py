"""Kill process groups without leaving shared memory behind, and wait for the process groups of child processes."""

import os
import signal
import time
from contextlib import suppress

import psutil

TRACKER_SECONDS = 1.0
"""For Python's resource trackers to remove the shared memory of ended processes, which takes milliseconds."""
_TRACKER = "resource_tracker"
_POLL_SECONDS = 0.1


def kill_group(group: int) -> None:
    """Send SIGKILL to all processes of a process group, to Python's resource trackers last.

    A tracker removes shared memory and semaphores once the last process using them has ended (hundreds of MB for a
    vLLM engine). If the tracker is killed together with the processes, the memory stays allocated.
    """
    trackers = []
    for process in _members(group):
        with suppress(psutil.Error):  # the process has ended
            if any(_TRACKER in argument for argument in process.cmdline()):
                trackers.append(process)
            else:
                process.kill()
    psutil.wait_procs(trackers, timeout=TRACKER_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def kill_tools() -> None:
    """Send SIGKILL to tools and checks: the children of this process that lead no group, trackers excepted."""
    for child in _children(lead=False):
        with suppress(psutil.Error):
            if not any(_TRACKER in argument for argument in child.cmdline()):
                child.kill()


def await_groups(seconds: float) -> list[int]:
    """Wait until no child of this process leads a process group (roles and servers do); returns the remaining
    pids."""
    deadline = time.monotonic() + seconds
    while (left := [child.pid for child in _children(lead=True)]) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return left


def _children(*, lead: bool) -> list[psutil.Process]:
    """The children of this process that lead a process group, or those that do not."""
    children = []
    for child in psutil.Process().children():
        with suppress(ProcessLookupError, psutil.Error):
            if (os.getpgid(child.pid) == child.pid) == lead and child.status() != psutil.STATUS_ZOMBIE:
                children.append(child)
    return children


def _members(group: int) -> list[psutil.Process]:
    members = []
    for pid in psutil.pids():
        with suppress(ProcessLookupError, psutil.Error):
            if os.getpgid(pid) == group:
                members.append(psutil.Process(pid))
    return members
