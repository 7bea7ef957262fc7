"""Memory that an environment process shares with its parent: the episode whose code runs now, and since when.

The process may be blocked in code that cannot be interrupted, or may have ended; the parent then finds the episode
that is the cause.
"""

import mmap
import os
import struct
import tempfile

_LAYOUT = struct.Struct("=qd")
NO_EPISODE = -1


class RunningStep:
    """The shared memory, in either process. Times are time.monotonic(), which all processes of a host share."""

    def __init__(self, descriptor: int) -> None:
        """Map the file of a descriptor, which may be closed afterwards."""
        memory = memoryview(mmap.mmap(descriptor, _LAYOUT.size))
        # Each assignment is one store of eight aligned bytes. `struct.pack_into` would clear the memory first: the
        # parent would read the time 0, and kill a process that works.
        self._episode, self._since = memory[:8].cast("q"), memory[8:].cast("d")

    def set(self, episode: int, since: float) -> None:
        """Store that the code of an episode runs since now; NO_EPISODE: the event loop."""
        self._since[0] = since
        self._episode[0] = episode

    def get(self) -> tuple[int, float]:
        """Episode and start time as stored by the process; not trusted."""
        return self._episode[0], self._since[0]


def new_descriptor() -> int:
    """A descriptor of a nameless file for one RunningStep; the caller closes the descriptor."""
    with tempfile.TemporaryFile() as file:
        file.write(_LAYOUT.pack(NO_EPISODE, 0.0))
        file.flush()
        return os.dup(file.fileno())
