"""A process that ends with the process that started it, even by kill -9. As a script, it becomes any command:

    python -I -S parent_death.py PARENT_PID COMMAND...

The parent-death signal survives exec, so the command itself needs to know nothing of it. Standard library only: this
file starts before every role and must cost milliseconds.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int | None = None) -> None:
    """End this process with its parent; at once if `parent_pid` is not its parent any more. None: whoever it is.

    Call it first in main, on the main thread. The kernel (Linux) sends SIGKILL when the thread that started this
    process ends: a supervisor starts a role from the thread that watches it. Elsewhere only a parent that is gone
    already is noticed. Raises OSError when the kernel refuses.
    """
    if sys.platform == "linux" and _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent_pid is not None and os.getppid() != parent_pid:  # it died before the signal was asked for
        os._exit(1)


def main(arguments: list[str]) -> None:
    """End with the parent from here on, then become the command."""
    parent_pid, command = int(arguments[0]), arguments[1:]
    die_with_parent(parent_pid)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
