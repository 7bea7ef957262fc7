"""Run a command that cannot outlive the process that started it: `python -I guard.py PARENT_PID COMMAND...`.

The parent-death signal survives exec, so the command itself needs to know nothing of it. Standard library only: this
file starts before every role and must cost milliseconds.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main(arguments: list[str]) -> None:
    """Arm the guard, then become the command."""
    parent_pid, command = int(arguments[0]), arguments[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent died before the guard was armed
        os._exit(3)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
