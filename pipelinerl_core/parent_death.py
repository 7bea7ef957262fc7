"""Ends a process when its parent ends, even if SIGKILL ends the parent. The script does the same for any command:

    python -I -S parent_death.py PARENT_PID COMMAND...

The parent-death signal survives exec, so the command needs no change. Standard library only, because the script runs
before every role and must start within milliseconds.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int | None = None) -> None:
    """End this process when its parent ends.

    parent_pid: pid of the parent that started this process. If the parent now has another pid, the first parent has
    ended, and this process exits with code 1 at once. None: no check.

    Call this function first in main, on the main thread. The kernel (Linux) sends SIGKILL when the thread that
    started this process ends; therefore a supervisor starts a role from the thread that watches the role. On other
    systems, only the check of `parent_pid` happens. Raises OSError if the kernel refuses.
    """
    if sys.platform == "linux" and _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent_pid is not None and os.getppid() != parent_pid:  # the parent ended before the call to prctl
        os._exit(1)


def main(arguments: list[str]) -> None:
    """Set the parent-death signal, then replace this process by the command. arguments: PARENT_PID COMMAND..."""
    parent_pid, command = int(arguments[0]), arguments[1:]
    die_with_parent(parent_pid)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
