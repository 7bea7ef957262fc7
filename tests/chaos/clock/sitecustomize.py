"""Python imports this module at the start of each process of a run: a clock and a disk that the campaign can set.

The variable CHAOS_CLOCK names a file with the offset of the clock, a double in seconds. time.time, time.time_ns and
psutil's boot time (from which psutil computes the start times of processes) follow the offset; the monotonic clock
does not, as on a host whose clock is set. While the file <CHAOS_CLOCK>.listings-fail exists, no directory of the runs
can be listed.
"""

import errno
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


def _set_up_listings(path: str) -> None:
    flag, runs, scandir = f"{path}.listings-fail", os.path.join(os.path.dirname(path), "runs", ""), os.scandir

    def list_or_fail(directory: str | os.PathLike[str] = "."):
        if str(directory).startswith(runs) and os.path.exists(flag):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(directory))
        return scandir(directory)

    os.scandir = list_or_fail


if _PATH:
    _set_up(_PATH)
    _set_up_listings(_PATH)
