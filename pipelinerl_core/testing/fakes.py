"""In-memory implementations of interfaces, with the full behaviour of the interface."""

import threading
from collections.abc import Iterable

from pipelinerl_core.errors import MissingObject


class MemoryStore:
    """An ObjectStore in a dictionary; children share the dictionary of their parent. Safe between threads."""

    def __init__(self, url: str = "memory://test") -> None:
        """`url` only appears in errors."""
        self.url = url
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._prefix = ""

    def put(self, key: str, data: bytes | memoryview, *, create_only: bool = False) -> None:
        """Write an object whole. With create_only an existing key raises FileExistsError."""
        path = self._path(key)
        with self._lock:
            if create_only and path in self._objects:
                raise FileExistsError(path)
            self._objects[path] = bytes(data)

    def get(self, key: str) -> bytes:
        """The whole object. Raises MissingObject."""
        path = self._path(key)
        with self._lock:
            if path not in self._objects:
                raise MissingObject(f"{self.url}/{key}: no such object")
            return self._objects[path]

    def exists(self, key: str) -> bool:
        """Whether an object has this key."""
        with self._lock:
            return self._path(key) in self._objects

    def list(self, prefix: str) -> list[str]:
        """Keys under a prefix, sorted, at any depth."""
        start = self._prefix + (f"{self._checked(prefix)}/" if prefix else "")
        with self._lock:
            return sorted(path[len(self._prefix) :] for path in self._objects if path.startswith(start))

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; a missing object is no error."""
        paths = [self._path(key) for key in keys]
        with self._lock:
            for path in paths:
                self._objects.pop(path, None)

    def child(self, prefix: str) -> "MemoryStore":
        """The store below a prefix."""
        below = MemoryStore(f"{self.url}/{prefix}")
        below._objects, below._lock = self._objects, self._lock
        below._prefix = f"{self._path(prefix)}/"
        return below

    def _path(self, key: str) -> str:
        return self._prefix + self._checked(key)

    @staticmethod
    def _checked(key: str) -> str:
        key = key.rstrip("/")
        if not key or key.startswith("/") or any(part in ("", ".", "..") for part in key.split("/")):
            raise ValueError(f"{key!r}: keys are relative, with / between non-empty parts, and without . or ..")
        return key
