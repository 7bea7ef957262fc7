"""An object store that measures the duration and counts the failures of every request."""

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from pipelinerl_core.errors import MissingObject, StoreError
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.storage.local import FileStore
from pipelinerl_core.telemetry.role_metrics import RoleMetrics

T = TypeVar("T")


class ObservedStore:
    """Forwards every request to a store. A missing object does not count as a failure."""

    def __init__(self, store: ObjectStore, metrics: RoleMetrics) -> None:
        self._store = store
        self._metrics = metrics
        self.url = store.url

    def put(self, key: str, data: bytes | memoryview, *, create_only: bool = False) -> None:
        self._time("put", lambda: self._store.put(key, data, create_only=create_only))

    def get(self, key: str) -> bytes:
        """The bytes of an object. Raises MissingObject if it does not exist."""
        return self._time("get", lambda: self._store.get(key))

    def exists(self, key: str) -> bool:
        return self._time("exists", lambda: self._store.exists(key))

    def children(self) -> list[str]:
        return self._time("list", self._store.children)

    def list(self, prefix: str) -> list[str]:
        return self._time("list", lambda: self._store.list(prefix))

    def delete(self, keys: Iterable[str]) -> None:
        self._time("delete", lambda: self._store.delete(keys))

    def remove_empty(self, prefix: str) -> None:
        """Remove empty directories of a store on a file system."""
        if isinstance(self._store, FileStore):
            self._store.remove_empty(prefix)

    def sizes(self, prefix: str) -> dict[str, int]:
        return self._time("list", lambda: self._store.sizes(prefix))

    def unfinished(self) -> dict[str, int]:
        return self._time("list", self._store.unfinished)

    def discard(self, names: Iterable[str]) -> None:
        self._time("delete", lambda: self._store.discard(names))

    def child(self, prefix: str) -> ObjectStore:
        return ObservedStore(self._store.child(prefix), self._metrics)

    def _time(self, operation: str, request: Callable[[], T]) -> T:
        begun = time.monotonic()
        try:
            return request()
        except MissingObject:
            raise
        except StoreError:
            self._metrics.add("store_errors_total", label=operation)
            raise
        finally:
            self._metrics.observe("store_seconds", time.monotonic() - begun, operation)
