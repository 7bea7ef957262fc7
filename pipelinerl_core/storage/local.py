"""Object stores in a directory and in the memory of this process."""

import fcntl
import itertools
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, TypeVar

from pipelinerl_core.errors import ConfigError, MissingObject, StoreError
from pipelinerl_core.storage.failures import RETRY_SECONDS, repeated
from pipelinerl_core.storage.keys import HIDDEN_PREFIX, TEMPORARY_PREFIX, check_key, check_prefix, join_key

R = TypeVar("R")

_NEW_SECONDS = 60.0
"""A temporary file that is newer may not be locked yet."""
_UNLOCKABLE_SECONDS = 86400.0
"""On a file system without locks, the age at which a temporary file counts as abandoned."""


class FileStore:
    """Objects as files below a directory. A reader sees a whole object or none, also after a crash in a write."""

    def __init__(self, root: Path, *, retry_seconds: float = RETRY_SECONDS) -> None:
        self.url = f"file://{root}"
        self._root = root
        self._retry_seconds = retry_seconds
        self._numbers = itertools.count()

    def put(self, key: str, data: bytes | memoryview, *, create_only: bool = False) -> None:
        """Write to a temporary file, fsync, then rename (or link, which fails on an existing name).

        The temporary file is locked meanwhile: `unfinished` finds the files of killed writers by their missing lock.
        """
        path = self._path(key)
        self._call("write", key, lambda: self._write(path, data, create_only=create_only))
        # An operation of its own: a repeated link would find the file of the first one.
        self._call("write", key, lambda: _sync_directory(path.parent))

    def _write(self, path: Path, data: bytes | memoryview, *, create_only: bool) -> None:
        temporary = path.with_name(
            f"{TEMPORARY_PREFIX}{os.getpid()}-{threading.get_ident()}-{next(self._numbers)}-{path.name}"
        )
        try:
            _make_synced(path.parent)
            try:
                with open(temporary, "xb") as file:
                    _write_synced(file, data)
                    if create_only:
                        os.link(temporary, path)
                    else:
                        os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
        except FileExistsError:
            if create_only and path.is_file():
                raise
            raise StoreError(f"cannot write {path}: a file has the name of a needed directory") from None
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:  # of a read: a missing object
            raise StoreError(f"cannot write {path}: {error.strerror}") from None

    def get(self, key: str) -> bytes:
        return self._call("read", key, self._path(key).read_bytes)

    def exists(self, key: str) -> bool:
        path = self._path(key)
        try:
            return stat.S_ISREG(self._call("look up", key, lambda: os.stat(path)).st_mode)
        except MissingObject:
            return False

    def children(self) -> list[str]:
        def names() -> list[str]:
            with os.scandir(self._root) as entries:
                return sorted(
                    entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(HIDDEN_PREFIX)
                )

        try:
            return self._call("list", "", names)
        except MissingObject:
            above = next(path for path in (self._root, *self._root.parents) if os.path.lexists(path))
            if not above.is_dir():
                raise ConfigError(f"{above} is no directory") from None
            return []

    def list(self, prefix: str) -> list[str]:
        top = self._root / check_prefix(prefix)
        paths = self._call("list", prefix, lambda: list(_files(top)))
        return sorted(
            path.relative_to(self._root).as_posix() for path in paths if not path.name.startswith(HIDDEN_PREFIX)
        )

    def sizes(self, prefix: str) -> dict[str, int]:
        sizes = {}
        for key in self.list(prefix):
            with suppress(MissingObject):  # removed since the listing
                sizes[key] = self._call("look up", key, (self._root / key).stat).st_size
        return sizes

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            with suppress(MissingObject):
                self._call("delete", key, self._path(key).unlink)

    def unfinished(self) -> dict[str, int]:
        """Temporary files of killed writers, relative to the root."""
        paths = self._call("list", "", lambda: list(_files(self._root)))
        sizes = {}
        for path in paths:
            if path.name.startswith(TEMPORARY_PREFIX) and _is_abandoned(path):
                with suppress(FileNotFoundError):
                    sizes[path.relative_to(self._root).as_posix()] = path.stat().st_size
        return sizes

    def discard(self, names: Iterable[str]) -> None:
        for name in names:
            path = self._root / name
            if path.name.startswith(TEMPORARY_PREFIX) and _is_abandoned(path):
                path.unlink(missing_ok=True)

    def find_link(self) -> Path | None:
        """A link that listings do not follow: this directory, a directory below it, or a link to nothing; or None."""
        if self._root.is_symlink():
            return self._root
        for directory, folders, files in os.walk(self._root):
            folders[:] = [name for name in folders if not name.startswith(HIDDEN_PREFIX)]
            for path in (Path(directory, name) for name in [*folders, *files] if not name.startswith(HIDDEN_PREFIX)):
                if path.is_symlink() and not path.is_file():
                    return path
        return None

    def written_at(self, key: str) -> float:
        """Unix time of the last write by the clock of the file system; 0 without the object."""
        try:
            return self._call("look up", key, self._path(key).stat).st_mtime
        except MissingObject:
            return 0.0

    def remove_empty(self, prefix: str) -> None:
        """Remove the directories without files at and below a prefix; another process may use them."""
        for directory, _, _ in os.walk(self._root / check_prefix(prefix), topdown=False):
            with suppress(OSError):
                os.rmdir(directory)

    def child(self, prefix: str) -> "FileStore":
        return FileStore(self._root / check_key(prefix), retry_seconds=self._retry_seconds)

    def limited(self, seconds: float) -> "FileStore":
        """The same store, whose requests fail after an outage of `seconds`."""
        return FileStore(self._root, retry_seconds=seconds)

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _call(self, verb: str, key: str, operation: Callable[[], R]) -> R:
        return repeated(operation, verb, key, self.url, retry_seconds=self._retry_seconds)


def _files(top: Path) -> Iterator[Path]:
    """All files below a directory, without hidden directories. Raises OSError for every error but a directory that
    does not exist: a listing that fails is no empty listing."""
    directories = [top]
    while directories:
        directory = directories.pop()
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    if entry.is_file():
                        yield Path(entry.path)
                    elif entry.is_dir(follow_symlinks=False) and not entry.name.startswith(HIDDEN_PREFIX):
                        directories.append(Path(entry.path))
        except FileNotFoundError:
            continue
        except NotADirectoryError:
            if directory is top:  # a file stands in the place of a folder of the run
                raise


def _make_synced(directory: Path) -> None:
    """Create a directory and its missing parents, and sync the parent of each new directory."""
    made: list[Path] = []
    for path in (directory, *directory.parents):
        if path.is_dir():
            break
        made.append(path)
    directory.mkdir(parents=True, exist_ok=True)
    for path in reversed(made):
        _sync_directory(path.parent)


def _write_synced(file: IO[bytes], data: bytes | memoryview) -> None:
    """Lock a new file for the lifetime of this process or until the file is closed, and write it to the disk."""
    with suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_EX)
    file.write(data)
    file.flush()
    os.fsync(file.fileno())


def _is_abandoned(path: Path) -> bool:
    """Whether no process on any host writes this temporary file: the kernel drops the lock of a killed writer."""
    try:
        age_seconds = time.time() - path.stat().st_mtime
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (FileNotFoundError, BlockingIOError):
        return False
    except OSError:
        return age_seconds > _UNLOCKABLE_SECONDS
    return age_seconds > _NEW_SECONDS


def _sync_directory(path: Path) -> None:
    """Make a new file name durable, so that after a crash a commit cannot exist without the objects in the commit."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_OBJECTS: dict[str, bytes] = {}
_WRITTEN_AT: dict[str, float] = {}
_OBJECTS_LOCK = threading.Lock()


class MemoryStore:
    """Objects in the memory of this process, shared by all stores opened with the same memory:// name."""

    def __init__(self, root: str) -> None:
        self.url = f"memory://{root}"
        self._root = root

    def put(self, key: str, data: bytes | memoryview, *, create_only: bool = False) -> None:
        path = self._path(key)
        with _OBJECTS_LOCK:
            if create_only and path in _OBJECTS:
                raise FileExistsError(f"{self.url}/{key} exists already")
            _OBJECTS[path], _WRITTEN_AT[path] = bytes(data), time.time()

    def get(self, key: str) -> bytes:
        path = self._path(key)
        with _OBJECTS_LOCK:
            if path not in _OBJECTS:
                raise MissingObject(f"no object {key!r} in {self.url}")
            return _OBJECTS[path]

    def exists(self, key: str) -> bool:
        path = self._path(key)
        with _OBJECTS_LOCK:
            return path in _OBJECTS

    def children(self) -> list[str]:
        return sorted({first for first, separator, _ in (key.partition("/") for key in self.list("")) if separator})

    def list(self, prefix: str) -> list[str]:
        return [*self.sizes(prefix)]

    def sizes(self, prefix: str) -> dict[str, int]:
        base = f"{self._root}/"
        top = f"{join_key(self._root, check_prefix(prefix))}/"
        with _OBJECTS_LOCK:
            return {
                path.removeprefix(base): len(data) for path, data in sorted(_OBJECTS.items()) if path.startswith(top)
            }

    def delete(self, keys: Iterable[str]) -> None:
        paths = [self._path(key) for key in keys]
        with _OBJECTS_LOCK:
            for path in paths:
                _OBJECTS.pop(path, None)

    def written_at(self, key: str) -> float:
        path = self._path(key)
        with _OBJECTS_LOCK:
            return _WRITTEN_AT.get(path, 0.0) if path in _OBJECTS else 0.0

    def unfinished(self) -> dict[str, int]:
        return {}

    def discard(self, names: Iterable[str]) -> None: ...

    def child(self, prefix: str) -> "MemoryStore":
        return MemoryStore(join_key(self._root, check_key(prefix)))

    def limited(self, seconds: float) -> "MemoryStore":
        return self

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"
