"""A seccomp filter that allows only the system calls of a process that computes and answers on a pipe.

An allow-list, because new kernels add system calls. The list suffices for Python, numpy and sympy to compute, to
import modules and to read files. See seccomp(2) and <linux/filter.h>.
"""

import ctypes
import errno
import platform
import struct
from collections.abc import Iterator
from functools import lru_cache

# <linux/prctl.h>, <linux/seccomp.h>
_PR_GET_SECCOMP, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 21, 22, 38
_SECCOMP_MODE_FILTER = 2
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000

# <linux/audit.h>, and the number from which on a call of x86_64 is one of the x32 ABI.
_AUDIT_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000

# Name, number on x86_64, number on aarch64.
_CALLS = """
read 0 63, write 1 64, close 3 57, close_range 436 436, lseek 8 62, pread64 17 67, readv 19 65, writev 20 66,
dup 32 23, dup2 33 -, dup3 292 24, pipe 22 -, pipe2 293 59, poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72,
stat 4 -, fstat 5 80, lstat 6 -, newfstatat 262 79, statx 332 291, statfs 137 43, fstatfs 138 44, access 21 -,
faccessat 269 48, faccessat2 439 439, readlink 89 -, readlinkat 267 78, getdents64 217 61, getcwd 79 17,
fadvise64 221 223, mmap 9 222, mprotect 10 226, munmap 11 215, mremap 25 216, madvise 28 233, brk 12 214,
rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, sigaltstack 131 132, restart_syscall 219 128,
sched_yield 24 124, sched_getaffinity 204 123, getcpu 309 168, futex 202 98, membarrier 324 283, rseq 334 293,
set_robust_list 273 99, set_tid_address 218 96, nanosleep 35 101, clock_nanosleep 230 115, clock_gettime 228 113,
clock_getres 229 114, gettimeofday 96 169, setitimer 38 103, getitimer 36 102, times 100 153, getrusage 98 165,
getrlimit 97 163, setrlimit 160 164, sysinfo 99 179, uname 63 160, getrandom 318 278, getpid 39 172,
getppid 110 173, gettid 186 178, getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177,
getgroups 115 158, exit 60 93, exit_group 231 94
"""

# Further calls of a process that forks: to set up, wait for and end the fork, and to empty its output.
_FORKING_CALLS = "fork 57 -, wait4 61 260, kill 62 129, prctl 157 167, ftruncate 77 46"

# Further calls of a process that may open connections: sockets without `listen` and `accept`, and event loops.
_NETWORK_CALLS = """
connect 42 203, sendto 44 206, recvfrom 45 207, sendmsg 46 211, recvmsg 47 212, sendmmsg 307 269, recvmmsg 299 243,
shutdown 48 210, bind 49 200, getsockname 51 204, getpeername 52 205, socketpair 53 199, setsockopt 54 208,
getsockopt 55 209, epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, eventfd2 290 19
"""

# Reported as unknown calls: the C library then uses older calls, whose arguments a filter can read.
_UNKNOWN_CALLS = "clone3 435 435, openat2 437 437"

# Allowed with some values of one argument: name, numbers, index of the argument, values.
_CHOICES = (
    ("ioctl", (16, 29), 1, (0x5401, 0x5413, 0x541B, 0x5450, 0x5451)),  # TCGETS, TIOCGWINSZ, FIONREAD, FIO(N)CLEX
    ("fcntl", (72, 25), 1, (0, 1, 2, 3, 4, 1030)),  # not F_SETOWN and F_SETSIG: they send signals to others
    ("prlimit64", (302, 261), 0, (0,)),  # of this process only
)
_NETWORK_CHOICES = (
    ("socket", (41, 198), 0, (2, 10, 16)),  # AF_INET, AF_INET6, AF_NETLINK (getaddrinfo); no AF_UNIX
    ("ioctl", (16, 29), 1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),  # also FIONBIO
    ("clone", (56, 220), 0, (0x3D0F00,)),  # a thread of the C library
)
# Allowed if these bits of one argument are zero: name, numbers, index of the argument, bits.
_WRITES = 0o3 | 0o100 | 0o1000 | 0o20000000  # O_WRONLY and O_RDWR, O_CREAT, O_TRUNC, O_TMPFILE
_MASKS = (("open", (2, None), 1, _WRITES), ("openat", (257, 56), 2, _WRITES))
_NEW_NAMESPACES = 0x7E020080
_FORKING_MASKS = (("clone", (56, 220), 0, _NEW_NAMESPACES),)

# <linux/bpf_common.h>: load a word of struct seccomp_data, compare, return.
_LOAD, _EQUAL, _AT_LEAST, _BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_INSTRUCTION_BYTES = 8
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET, _ARGUMENTS_OFFSET = 0, 4, 16


class _Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def is_available() -> bool:
    """Whether this kernel supports filters and this module has the machine's system calls. Changes nothing."""
    return platform.machine() in _AUDIT_ARCHITECTURES and _libc().prctl(_PR_GET_SECCOMP, 0, 0, 0, 0) >= 0


def install(*, forks: bool, network: bool = False) -> None:
    """Install the filter for this thread and its children; irreversible, later filters can only restrict further.

    forks: whether the process may start, signal and wait for processes. network: whether the process may open
    connections and start threads. Raises OSError if the kernel refuses.
    """
    _install(program(forks, network))


def _install(instructions: "ctypes.Array[ctypes.c_char]") -> None:
    libc = _libc()
    filter_program = _Program(len(instructions) // _INSTRUCTION_BYTES, ctypes.addressof(instructions))
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(filter_program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "the kernel refused the seccomp filter")


def deny_forking() -> None:
    """Deny this thread the calls that `install(forks=True)` has allowed further; both are `install(forks=False)`.

    The short filter costs 0.1 ms, the whole one 1 ms, which a process pays for each of its forks. Irreversible;
    raises OSError if the kernel refuses.
    """
    _install(_short_program())


@lru_cache
def _short_program() -> "ctypes.Array[ctypes.c_char]":
    # The first filter has ended processes of other architectures and of the x32 ABI.
    column = list(_AUDIT_ARCHITECTURES).index(platform.machine())
    instructions = [_one(_LOAD, _NUMBER_OFFSET)]
    for number in [*_numbers(_FORKING_CALLS, column), *(numbers[column] for _, numbers, _, _ in _FORKING_MASKS)]:
        instructions += [_if(_EQUAL, number, 0, 1), _one(_RETURN, _ERRNO | errno.EPERM)]
    data = b"".join([*instructions, _one(_RETURN, _ALLOW)])
    return ctypes.create_string_buffer(data, len(data))


@lru_cache
def program(forks: bool, network: bool = False) -> "ctypes.Array[ctypes.c_char]":
    """The instructions of the filter; cached, so that a fork gets them from its parent."""
    instructions = b"".join(_instructions(platform.machine(), forks, network))
    return ctypes.create_string_buffer(instructions, len(instructions))


@lru_cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _instructions(machine: str, forks: bool, network: bool) -> Iterator[bytes]:
    column = list(_AUDIT_ARCHITECTURES).index(machine)
    yield _one(_LOAD, _ARCHITECTURE_OFFSET)
    yield from (_if(_EQUAL, _AUDIT_ARCHITECTURES[machine], 1, 0), _one(_RETURN, _KILL))
    yield _one(_LOAD, _NUMBER_OFFSET)
    if machine == "x86_64":
        yield from (_if(_AT_LEAST, _X32, 0, 1), _one(_RETURN, _KILL))
    further = [*([_FORKING_CALLS] * forks), *([_NETWORK_CALLS] * network)]
    for number in _numbers(", ".join([_CALLS, *further]), column):
        yield from (_if(_EQUAL, number, 0, 1), _one(_RETURN, _ALLOW))
    for number in _numbers(_UNKNOWN_CALLS, column):
        yield from (_if(_EQUAL, number, 0, 1), _one(_RETURN, _ERRNO | errno.ENOSYS))
    for _, numbers, argument, values in (*(_NETWORK_CHOICES if network else ()), *_CHOICES):
        yield from _choice(numbers[column], argument, values)
    for _, numbers_or_none, argument, bits in _MASKS + (_FORKING_MASKS if forks else ()):
        if (number_or_none := numbers_or_none[column]) is not None:
            yield from _mask(number_or_none, argument, bits)
    yield _one(_RETURN, _ERRNO | errno.EPERM)


def _numbers(calls: str, column: int) -> Iterator[int]:
    for call in calls.split(","):
        number = call.split()[1 + column]
        if number != "-":
            yield int(number)


def _choice(number: int, argument: int, values: tuple[int, ...]) -> list[bytes]:
    """If the call has this number: allow the call if the argument is one of the values, else refuse the call."""
    checks = [instruction for value in values for instruction in (_if(_EQUAL, value, 0, 1), _one(_RETURN, _ALLOW))]
    body = [_argument(argument), *checks, _one(_RETURN, _ERRNO | errno.EPERM)]
    return [_if(_EQUAL, number, 0, len(body)), *body]


def _mask(number: int, argument: int, bits: int) -> list[bytes]:
    """If the call has this number: allow the call unless the argument has one of the bits."""
    body = [_argument(argument), _if(_BITS, bits, 1, 0), _one(_RETURN, _ALLOW), _one(_RETURN, _ERRNO | errno.EPERM)]
    return [_if(_EQUAL, number, 0, len(body)), *body]


def _argument(index: int) -> bytes:
    """Load the low half of an argument; both machines are little-endian, and the kernel reads only the low half."""
    return _one(_LOAD, _ARGUMENTS_OFFSET + 8 * index)


def _if(operation: int, value: int, skip_if: int, skip_else: int) -> bytes:
    return struct.pack("HBBI", operation, skip_if, skip_else, value)


def _one(operation: int, value: int) -> bytes:
    return struct.pack("HBBI", operation, 0, 0, value)
