"""Python imports this module at the start of each process of a run: a wall clock that the campaign can set.

The variable CHAOS_CLOCK names a file with the offset of the clock, a double in seconds. time.time, time.time_ns and
psutil's boot time (from which psutil computes the start times of processes) follow the offset; the monotonic clock
does not, as on a host whose clock is set.
"""

import mmap
import os
import struct
import time

_PATH = os.environ.get("CHAOS_CLOCK", "")


def _set_up(path: str) -> None:
    with open(path, "rb") as file:
        offset = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
    now, now_ns = time.time, time.time_ns

    def seconds() -> float:
        return float(struct.unpack("d", offset)[0])

    time.time = lambda: now() + seconds()
    time.time_ns = lambda: now_ns() + int(seconds() * 1e9)

    import psutil._pslinux

    boot_time = psutil._pslinux.boot_time
    psutil._pslinux.boot_time = lambda: boot_time() + seconds()


if _PATH:
    _set_up(_PATH)
