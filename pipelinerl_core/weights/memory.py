"""Memory for the bytes of weight versions: private to a process, or files in shared memory; both are used in turn.

A file in shared memory is locked as long as somebody uses it: exclusively while it is written, shared afterwards, by
the trainer and by every engine whose weights are views of it. A lock ends with the last tensor of the version, or
with its process. The trainer writes the next version into a file that nobody uses, because a write into fresh pages
takes several times as long. The name of a file says which version it holds, and is changed before the file is written
again.
"""

import errno
import fcntl
import mmap
import os
import re
import uuid
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pipelinerl_core.run.context import private_directory

SHM_ROOT = Path("/dev/shm")
# Files beyond this number that nobody maps are removed.
_SPARE_FILES = 1
_UNNAMED = ".unnamed-"
_FILE = re.compile(r"\.unnamed-.+|\d+\.\d+\.safetensors")
"""A file that is written, or <version>.<epoch>.safetensors."""


@dataclass(slots=True, eq=False)
class SharedFile:
    """A file that this process has mapped, for all of its versions: mapping takes longer than a copy."""

    path: Path
    descriptor: int
    mapping: mmap.mmap
    is_used: bool = False
    """Whether this process has a tensor of the version in the file."""

    def use(self) -> memoryview:
        """The bytes of a file that this process has locked.

        The lock ends with the result and the last tensor of it; a slice of the result does not keep the lock.
        """
        view = memoryview(self.mapping)
        self.is_used = True
        weakref.finalize(view, self._end)
        return view

    def _end(self) -> None:
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        self.is_used = False  # last: `lock` may be called on another thread

    def lock(self) -> bool:
        """Lock the file for writing; False if a process uses it."""
        if self.is_used:
            return False
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    @property
    def is_named(self) -> bool:
        """Whether `path` is still the name of this file."""
        try:
            return self.path.stat().st_ino == os.fstat(self.descriptor).st_ino
        except FileNotFoundError:
            return False

    def remove(self) -> None:
        """Remove, unmap and close a file that `lock` has locked."""
        if self.is_named:
            self.path.unlink()
        self.mapping.close()
        os.close(self.descriptor)


@dataclass(slots=True, eq=False)
class Region:
    """Memory of one version."""

    buffer: "memoryview | mmap.mmap"
    """Keeps the lock of the file."""
    file: SharedFile | None = None
    """The file in shared memory; None for private memory."""

    def publish(self, path: Path) -> None:
        """Let other processes map the file, as `path`. The bytes must not change afterwards. Raises OSError."""
        if self.file is not None and self.file.path != path:
            if not self.file.is_named:
                raise FileNotFoundError(errno.ENOENT, "another process has removed it", str(self.file.path))
            os.replace(self.file.path, path)
            self.file.path = path
            fcntl.flock(self.file.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


WeightMemory = Callable[[int], Region]
"""Memory of a number of bytes, of undefined content."""


def private_memory(size: int) -> Region:
    """Memory of this process."""
    return Region(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class PrivateMemory:
    """Memory of this process for one version after the other: a region is used again after its last tensor."""

    def __init__(self) -> None:
        self._free: deque[mmap.mmap] = deque(maxlen=1)

    def allocate(self, size: int) -> Region:
        """As `private_memory`. The region is free again with the last tensor of it; a slice does not keep it."""
        memory = self._free.popleft() if self._free else None
        if memory is None or len(memory) != size:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        view = memoryview(memory)
        weakref.finalize(view, self._free.append, memory)
        return Region(view)


def shm_directory(run_id: str) -> Path:
    """Shared-memory directory of a run on this host."""
    return SHM_ROOT / f"pipelinerl-{run_id}"


class SharedFiles:
    """The files of a run's versions on this host, for the trainer."""

    def __init__(self, run_id: str) -> None:
        self._directory = shm_directory(run_id)
        self._mapped: list[SharedFile] = []

    def path(self, version: int, epoch: int) -> Path:
        return self._directory / f"{version:08d}.{epoch}.safetensors"

    def allocate(self, size: int) -> Region:
        """A file of this size that nobody uses. Raises OSError if the shared memory has no space for it."""
        private_directory(self._directory)
        self._remove_left_behind()
        unnamed = self._directory / f"{_UNNAMED}{uuid.uuid4().hex}"
        free = [file for file in sorted(self._mapped, key=lambda file: file.path) if file.lock()]
        fitting = [file for file in free if len(file.mapping) == size and file.is_named]
        for file in free:
            if file not in fitting[: 1 + _SPARE_FILES]:
                self._mapped.remove(file)
                file.remove()
        for file in fitting[1 : 1 + _SPARE_FILES]:
            fcntl.flock(file.descriptor, fcntl.LOCK_UN)
        if not fitting:
            self._mapped.append(_new_file(unnamed, size))
            return Region(self._mapped[-1].use(), self._mapped[-1])
        os.replace(fitting[0].path, unnamed)
        fitting[0].path = unnamed
        return Region(fitting[0].use(), fitting[0])

    def _remove_left_behind(self) -> None:
        """Remove files of earlier trainers that nobody uses."""
        own = {file.path.name for file in self._mapped}
        for name in os.listdir(self._directory):
            if _FILE.fullmatch(name) and name not in own:
                with suppress(FileNotFoundError, BlockingIOError), open(self._directory / name, "rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(self._directory / name)


def _new_file(path: Path, size: int) -> SharedFile:
    """A new file with memory for all of its pages, locked."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.posix_fallocate(descriptor, 0, size)  # a write into a page without memory would end the process
        return SharedFile(path, descriptor, mmap.mmap(descriptor, size))
    except OSError:
        path.unlink(missing_ok=True)
        os.close(descriptor)
        raise


class Shared(NamedTuple):
    """The mapped file of a version."""

    data: mmap.mmap
    inode: int


def open_shared(path: Path) -> Shared | None:
    """Map a version's file, which stays as it is as long as the result or a tensor of it exists.

    None if the file is gone, written again, or another user's. Writes to the result change private copies of its
    pages.
    """
    with suppress(FileNotFoundError, BlockingIOError, PermissionError), open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        inode = os.fstat(file.fileno()).st_ino
        if inode == path.stat().st_ino:
            return Shared(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), inode)
    return None
