"""Landlock: restrict a process and its children to reading some files, or only to processes of their own.

See landlock(7). Newer ABI versions restrict more: TCP from version 4, abstract sockets and signals to other processes
from version 6. Standard library only, and for Python 3.9, as privileges.py.
"""

import ctypes
import os
import stat
import struct
from collections.abc import Iterable, Mapping

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_VERSION_FLAG = 1
_RULE_PATH_BENEATH = 1
_READ_FILE, _READ_DIRECTORY = 1 << 2, 1 << 3
_MAKE_BLOCK_DEVICE, _REFER = 1 << 11, 1 << 13
_FIRST_FILE_RIGHTS = (1 << 13) - 1
_MORE_FILE_RIGHTS = {2: _REFER, 3: 1 << 14, 5: 1 << 15}  # refer, truncate, ioctl of devices
_TCP_BIND, _TCP_CONNECT = 1 << 0, 1 << 1
_ABSTRACT_SOCKETS_AND_SIGNALS = 0b11
_PR_SET_NO_NEW_PRIVS = 38


def version() -> int:
    """The kernel's Landlock ABI version; 0: no Landlock."""
    abi_version: int = ctypes.CDLL(None).syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION_FLAG)
    return max(0, abi_version)


def restrict(readable: Iterable[str], *, network: bool = False) -> None:
    """Restrict this thread and its children to opening files in or below `readable`, for reading only; irreversible.

    network: whether TCP connections may be opened.
    Open descriptors stay open. Missing paths are skipped. Raises OSError if the kernel refuses.
    """
    known = version()
    files = _FIRST_FILE_RIGHTS | sum(right for since, right in _MORE_FILE_RIGHTS.items() if known >= since)
    tcp = (_TCP_BIND if network else _TCP_BIND | _TCP_CONNECT) if known >= 4 else 0
    scope = _ABSTRACT_SOCKETS_AND_SIGNALS if known >= 6 else 0
    _enforce(files, tcp, scope, dict.fromkeys(readable, _READ_FILE | _READ_DIRECTORY))


def separate() -> None:
    """Put this thread and its children into a domain of their own; irreversible.

    A process in a domain cannot trace processes outside, or read their memory, variables and descriptors. Root must
    drop privileges.OVER_PROCESSES too, because CAP_PERFMON allows reading. From version 6 on, a process in a domain
    cannot send signals to processes outside, or connect to their abstract sockets. Files stay as they are; version 1,
    however, refuses to rename a file into another directory. Raises OSError if the kernel refuses.
    """
    known = version()
    if known >= 6:
        _enforce(0, 0, _ABSTRACT_SOCKETS_AND_SIGNALS, {})
    else:  # a ruleset must restrict something
        right = _REFER if known >= 2 else _MAKE_BLOCK_DEVICE
        _enforce(right, 0, 0, {"/": right})


def _enforce(files: int, tcp: int, scope: int, allowed: Mapping[str, int]) -> None:
    """Restrict to the allowed rights of files: path -> rights in or below the path."""
    libc = ctypes.CDLL(None, use_errno=True)
    attributes = struct.pack("QQQ", files, tcp, scope)  # older kernels accept zeros in fields of newer versions
    ruleset = _checked(libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0))
    try:
        for path, rights in allowed.items():
            _allow(libc, ruleset, path, rights)
        _checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        _checked(libc.syscall(_RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(ruleset)


def _allow(libc: ctypes.CDLL, ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _READ_FILE
        rule = struct.pack("=Qi", rights, descriptor)
        _checked(libc.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0))
    finally:
        os.close(descriptor)


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"Landlock: {os.strerror(ctypes.get_errno())}")
    return result
