"""Privileges of a process over other processes: dumps of its memory, and capabilities.

Standard library only, and for Python 3.9: agents/launcher.py, which the interpreter of a user's program runs, loads
this file by its path.
"""

import ctypes
import os
from collections.abc import Iterable

OVER_PROCESSES = (16, 17, 19, 21, 38, 39, 40)
"""CAP_SYS_MODULE, _SYS_RAWIO, _SYS_PTRACE, _SYS_ADMIN, _PERFMON, _BPF, _CHECKPOINT_RESTORE: each leads to the memory
of other processes."""
_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 4, 24, 38  # <linux/prctl.h>
_CAPABILITY_VERSION_3 = 0x20080522  # <linux/capability.h>
_LIBC = ctypes.CDLL(None, use_errno=True)


def forbid_dumps() -> None:
    """Other processes, also of the same user, can neither trace this process nor read its memory; until an exec."""
    _LIBC.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def drop_capabilities(dropped: Iterable[int] = range(64)) -> None:
    """Drop capabilities of root, for example to raise limits; no_new_privs prevents regaining them.

    Programs that this process starts cannot regain them either, also not by set-user-ID. Raises OSError.
    """
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then the same for the numbers from 32 on
    _checked(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _checked(_LIBC.capget(header, sets))
    for number in dropped:
        _LIBC.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)  # fails without CAP_SETPCAP, and for unknown numbers
        for index in range(3):
            sets[3 * (number // 32) + index] &= ~(1 << number % 32)
    _checked(_LIBC.capset(header, sets))


def _checked(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), "capabilities: " + os.strerror(ctypes.get_errno()))
