"""What a scoring process gives up before it sees a word of a model: files, network, other processes, memory.

It keeps the modules of its Python, to read; its open descriptors; and the system calls that computing needs. Its
environment is what child.py gives it. The limits of a process that evaluates are in `limit_evaluation`.
"""

import ctypes
import gc
import os
import resource
import sys
import sysconfig
from dataclasses import dataclass

from pipelinerl_core.rewards import landlock, seccomp

EVALUATION_BYTES = 1 << 30
"""What a scoring that evaluates may allocate beyond what its process has."""

_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")
_PR_SET_DUMPABLE = 4  # <linux/prctl.h>
_CAPABILITY_VERSION_3 = 0x20080522  # <linux/capability.h>
_MADV_COLLAPSE, _HUGE_PAGE = 25, 2 << 20  # <linux/mman.h>
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What a scoring process may do besides computing and reading the modules of its Python."""

    forks: bool = False
    """Start and end processes: each scoring that evaluates has one of its own, which may not."""


def missing() -> tuple[str, ...]:
    """What this host cannot give of `seal`, in words. Changes nothing."""
    lacks = []
    if sys.platform != "linux" or landlock.version() == 0:
        lacks.append("Landlock (Linux 5.13 and newer, switched on), which keeps it from files")
    if sys.platform != "linux" or not seccomp.is_available():
        lacks.append("seccomp on x86_64 or aarch64, which keeps it from the network and other processes")
    return tuple(lacks)


def seal(policy: Policy) -> None:
    """Give up what the policy does not name, as far as this host can. It cannot be taken back.

    Call it after the imports and before other threads start: they would keep everything. Raises OSError when the
    kernel refuses what it has, RuntimeError when there are other threads.
    """
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        raise RuntimeError(f"{threads - 1} threads besides the main thread run: they would not be sealed")
    _LIBC.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    _drop_capabilities()
    if policy.forks:
        _make_forks_cheap()
    if landlock.version() > 0:
        landlock.restrict(readable_paths())
    if seccomp.is_available():
        seccomp.install(forks=policy.forks)
        seccomp.program(forks=False)  # ready for the forks


def readable_paths() -> list[str]:
    """Interpreter, standard library, site-packages, shared libraries, and the packages that are loaded.

    Other places of sys.path, such as a directory of somebody's work, stay shut: what is there is imported before.
    """
    installed = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    site = [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
    loaded = [place for name, module in list(sys.modules.items()) if "." not in name
              for place in getattr(module, "__path__", ())]  # fmt: skip
    own = [] if sys.base_prefix == "/usr" else [os.path.join(sys.base_prefix, "lib")]
    return sorted({*installed, *site, *loaded, *own, *_LIBRARIES})


def limit_evaluation(cpu_seconds: int, memory_bytes: int) -> None:
    """Call it in a fork that evaluates: limits of the fork, no process and no thread besides it."""
    for name, limit in (
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, 0),
    ):
        resource.setrlimit(name, (limit, limit))
    seccomp.install(forks=False)


def address_space_bytes() -> int:
    """Of this process. Needs /proc."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


def _drop_capabilities() -> None:
    """For a process of root: without them it cannot lift a limit. no_new_privs keeps them away."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    if _LIBC.capset(header, (ctypes.c_uint32 * 6)()):
        raise OSError(ctypes.get_errno(), "capset failed")


def _make_forks_cheap() -> None:
    """A fork copies the table of all pages, and every page that it writes to.

    Huge pages make the table small; a fork takes half the time (MADV_COLLAPSE, Linux 6.1; older ones refuse). Objects
    that a garbage collection need not look at again stay shared.
    """
    gc.collect()
    gc.freeze()
    with open("/proc/self/maps") as maps:
        private = [line.split()[0].split("-") for line in maps if line.split()[1:5:3] == ["rw-p", "0"]]
    for start, end in private:
        first, last = -(-int(start, 16) // _HUGE_PAGE), int(end, 16) // _HUGE_PAGE
        for page in range(first, last):
            _LIBC.madvise(ctypes.c_void_p(page * _HUGE_PAGE), ctypes.c_size_t(_HUGE_PAGE), _MADV_COLLAPSE)
