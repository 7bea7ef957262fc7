"""Landlock: a process gives up every file but some that it may read, for itself and what it starts. See landlock(7).

A version of the ABI that knows more gives up more: TCP from 4, sockets and signals to processes outside from 6.
"""

import ctypes
import os
import stat
import struct
from collections.abc import Iterable

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_VERSION_FLAG = 1
_RULE_PATH_BENEATH = 1
_READ_FILE, _READ_DIRECTORY = 1 << 2, 1 << 3
_FIRST_FILE_RIGHTS = (1 << 13) - 1
_MORE_FILE_RIGHTS = {2: 1 << 13, 3: 1 << 14, 5: 1 << 15}  # refer, truncate, ioctl of devices
_TCP_BIND_AND_CONNECT = 0b11
_ABSTRACT_SOCKETS_AND_SIGNALS = 0b11
_PR_SET_NO_NEW_PRIVS = 38


def version() -> int:
    """The ABI that the kernel has; 0: none."""
    found: int = ctypes.CDLL(None).syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION_FLAG)
    return max(0, found)


def restrict(readable: Iterable[str]) -> None:
    """From here on this thread, and what it starts, opens nothing but the files in or below `readable`, to read.

    What is open stays open. Paths that do not exist are left out. Raises OSError when the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    known = version()
    files = _FIRST_FILE_RIGHTS | sum(right for since, right in _MORE_FILE_RIGHTS.items() if known >= since)
    network = _TCP_BIND_AND_CONNECT if known >= 4 else 0
    scope = _ABSTRACT_SOCKETS_AND_SIGNALS if known >= 6 else 0
    attributes = struct.pack("QQQ", files, network, scope)  # zeros beyond what a kernel knows are taken
    ruleset = _checked(libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0))
    try:
        for path in readable:
            _allow_reading(libc, ruleset, path)
        _checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        _checked(libc.syscall(_RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(ruleset)


def _allow_reading(libc: ctypes.CDLL, ruleset: int, path: str) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        is_directory = stat.S_ISDIR(os.fstat(place).st_mode)
        rights = _READ_FILE | (_READ_DIRECTORY if is_directory else 0)
        rule = struct.pack("=Qi", rights, place)
        _checked(libc.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0))
    finally:
        os.close(place)


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"Landlock: {os.strerror(ctypes.get_errno())}")
    return result
