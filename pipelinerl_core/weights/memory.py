"""Memory for the bytes of weight versions: private to a process, or files in shared memory that are used in turn.

A file in shared memory is locked as long as somebody maps it: exclusively while it is written, shared afterwards, by
the trainer and by every engine whose weights are views of it. A lock belongs to the mapping and ends with it, also if
the process is killed. The trainer writes the next version into a file that nobody maps, because a write into fresh
pages takes three times as long. The name of a file says which version it holds, and is changed before the file is
written again.
"""

import fcntl
import itertools
import mmap
import os
import re
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipelinerl_core.run.context import private_directory

SHM_ROOT = Path("/dev/shm")
# Files beyond this number that nobody maps are removed.
_SPARE_FILES = 1
_UNNAMED, _NUMBERS = ".unnamed-", itertools.count()
_FILE = re.compile(r"\.unnamed-.+|\d+\.\d+\.safetensors")
"""A file that is written, or <version>.<epoch>.safetensors. Sorted by name, unfinished files come first."""


@dataclass(slots=True, eq=False)
class Region:
    """Memory of one version."""

    buffer: mmap.mmap
    """Keeps the lock of the file."""
    path: Path | None = None
    """The file in shared memory; None for private memory."""
    descriptor: int = -1
    """The open file, which is closed with the buffer."""

    def publish(self, path: Path) -> None:
        """Let other processes map the file, as `path`. The bytes must not change afterwards. Raises OSError."""
        if self.path is not None and self.path != path:
            os.replace(self.path, path)
            self.path = path
            fcntl.flock(self.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


WeightMemory = Callable[[int], Region]
"""Memory of a number of bytes, of undefined content."""


def private_memory(size: int) -> Region:
    """Memory of this process."""
    return Region(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def shm_directory(run_id: str) -> Path:
    """Shared-memory directory of a run on this host."""
    return SHM_ROOT / f"pipelinerl-{run_id}"


class SharedFiles:
    """The files of a run's versions on this host, for the trainer."""

    def __init__(self, run_id: str) -> None:
        self._directory = shm_directory(run_id)

    def path(self, version: int, epoch: int) -> Path:
        """The file of a version."""
        return self._directory / f"{version:08d}.{epoch}.safetensors"

    def allocate(self, size: int) -> Region:
        """A file of this size that nobody else maps. Raises OSError if the shared memory has no space for it."""
        private_directory(self._directory)
        unnamed = self._directory / f"{_UNNAMED}{os.getpid()}-{next(_NUMBERS)}"
        descriptor = self._reuse(unnamed)
        if descriptor is None:
            descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_size != size:
                os.ftruncate(descriptor, size)
                os.posix_fallocate(descriptor, 0, size)  # a write into a page without memory would end the process
            buffer = mmap.mmap(descriptor, size)
        except OSError:
            unnamed.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        weakref.finalize(buffer, os.close, descriptor)
        return Region(buffer, unnamed, descriptor)

    def _reuse(self, path: Path) -> int | None:
        """The oldest file that nobody maps, locked and renamed to `path`, as an open file; None if there is none.

        Removes further such files beyond _SPARE_FILES.
        """
        free = [(name, descriptor) for name in sorted(os.listdir(self._directory)) if _FILE.fullmatch(name)
                and (descriptor := _lock(self._directory / name)) is not None]  # fmt: skip
        for name, descriptor in free[1 + _SPARE_FILES :]:
            (self._directory / name).unlink(missing_ok=True)
            os.close(descriptor)
        for _, descriptor in free[1 : 1 + _SPARE_FILES]:
            os.close(descriptor)
        if not free:
            return None
        os.replace(self._directory / free[0][0], path)
        return free[0][1]


def _lock(path: Path) -> int | None:
    """The file, open and locked for writing; None if a process maps it, or if it is gone."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def open_shared(path: Path) -> mmap.mmap | None:
    """Map a version's file, which stays as it is as long as the result or a view of it exists.

    None if the file is gone or written again. Writes to the result change private copies of its pages.
    """
    with suppress(FileNotFoundError, BlockingIOError), open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return None
