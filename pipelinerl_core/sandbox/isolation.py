"""Isolation of a process before it gets a model's text: from files, network, other processes and memory.

The process keeps read access to its Python's modules, its open descriptors, and the system calls needed to compute.
child_process.py sets its environment variables. A process that evaluates has further limits (`limit_evaluation`).
"""

import ctypes
import gc
import os
import resource
import sys
import sysconfig

from pipelinerl_core.sandbox import landlock, privileges, seccomp

EVALUATION_BYTES = 1 << 30
"""Memory that an evaluation may allocate beyond the memory of its process."""

_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")
_NETWORK_FILES = (
    *("/etc/resolv.conf", "/etc/hosts", "/etc/host.conf", "/etc/nsswitch.conf", "/etc/gai.conf", "/etc/services"),
    *("/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/usr/share/ca-certificates", "/usr/local/share/ca-certificates"),
    *("/etc/pki/tls/certs", "/etc/pki/tls/openssl.cnf", "/etc/pki/ca-trust/extracted"),
)
_MADV_COLLAPSE, _HUGE_PAGE = 25, 2 << 20  # <linux/mman.h>
_LIBC = ctypes.CDLL(None, use_errno=True)


def missing() -> tuple[str, ...]:
    """Names of the kernel features for `seal` that this host lacks, as text. Changes nothing."""
    lacks = []
    if sys.platform != "linux" or landlock.version() == 0:
        lacks.append("Landlock (Linux 5.13 and newer, enabled), which restricts access to files")
    if sys.platform != "linux" or not seccomp.is_available():
        lacks.append("seccomp on x86_64 or aarch64, which restricts access to the network and other processes")
    return tuple(lacks)


def seal(key: str, *, forks: bool = False, network: bool = False) -> None:
    """Drop all permissions besides computing and reading Python's modules, as far as the kernel allows; irreversible.

    Call after the imports and before other threads start, because running threads keep their permissions. Raises
    OSError if the kernel refuses a supported call, RuntimeError if other threads run.

    Args:
        key: of the configuration, which turns the isolation off, for messages.
        forks: may start and end processes: each evaluation runs in a fork, which has no such permission.
        network: may open connections, read the system's files for names and certificates, and start threads.
    """
    if others := _other_threads():
        raise RuntimeError(
            f"an imported module has started threads ({', '.join(others)}), which cannot be isolated. Do without the "
            f"module, or set {key}=none"
        )
    privileges.forbid_dumps()
    privileges.drop_capabilities()
    if forks:
        _make_forks_cheap()
    if landlock.version() > 0:
        landlock.restrict([*readable_paths(), *(_network_paths() if network else ())], network=network)
    if seccomp.is_available():
        seccomp.install(forks=forks, network=network)
        seccomp.program(forks=False)  # cached here, so that the forks need not build the program


def _other_threads() -> list[str]:
    """Names of the threads besides the main thread. Requires /proc."""
    names = []
    for thread in sorted(set(os.listdir("/proc/self/task")) - {str(os.getpid())}):
        with open(f"/proc/self/task/{thread}/comm") as comm:
            names.append(comm.read().strip())
    return names


def readable_paths() -> list[str]:
    """Interpreter, standard library, site-packages, shared libraries, and loaded packages.

    Other directories of sys.path, such as a user's working directory, are not readable; import their modules before.
    """
    loaded = [path for name, module in list(sys.modules.items()) if "." not in name
              for path in getattr(module, "__path__", ())]  # fmt: skip
    return sorted({*installed_paths(), *loaded})


def installed_paths() -> list[str]:
    """Standard library, site-packages, and shared libraries."""
    installed = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    site = [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
    own = [] if sys.base_prefix == "/usr" else [os.path.join(sys.base_prefix, "lib")]
    return sorted({*installed, *site, *own, *_LIBRARIES})


def _network_paths() -> list[str]:
    """Files to resolve names and verify certificates; no private keys."""
    chosen = [os.environ[name] for name in ("SSL_CERT_FILE", "SSL_CERT_DIR") if os.environ.get(name)]
    return [*_NETWORK_FILES, *chosen]


def limit_evaluation(cpu_seconds: int, memory_bytes: int, file_bytes: int = 0, *, has_filter: bool = False) -> None:
    """Limit this process, a fork that evaluates: CPU time, memory, files; no new processes or threads.

    file_bytes: size up to which the process may write files that are open already. has_filter: the parent has
    installed the filter of a process that forks.
    """
    for name, limit in (
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, 0),
    ):
        resource.setrlimit(name, (limit, limit))
    if has_filter:
        seccomp.deny_forking()
    else:
        seccomp.install(forks=False)


def address_space_bytes() -> int:
    """Size of this process's address space. Requires /proc."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


def _make_forks_cheap() -> None:
    """Reduce the cost of a fork, which copies the page table, and each page that the fork writes.

    Huge pages shrink the page table and halve the time of a fork (MADV_COLLAPSE, Linux 6.1; older kernels refuse).
    gc.freeze prevents later garbage collections from writing to, and thereby copying, pages of existing objects.
    """
    gc.collect()
    gc.freeze()
    with open("/proc/self/maps") as maps:
        private = [line.split()[0].split("-") for line in maps if line.split()[1:5:3] == ["rw-p", "0"]]
    for start, end in private:
        first, last = -(-int(start, 16) // _HUGE_PAGE), int(end, 16) // _HUGE_PAGE
        for page in range(first, last):
            _LIBC.madvise(ctypes.c_void_p(page * _HUGE_PAGE), ctypes.c_size_t(_HUGE_PAGE), _MADV_COLLAPSE)
