"""A store that counts requests as S3 bills them: listings and deletions cost one request per 1,000 keys."""

import math
from collections import Counter
from collections.abc import Iterable

from pipelinerl_core.interfaces import ObjectStore

PAGE_KEYS = 1000
"""Keys of one page of a listing on S3."""


class CountingStore:
    """Forwards every request to a store and counts the requests."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.url = store.url
        self.requests: Counter[str] = Counter()
        """"<operation> <first part of the key>" -> requests. Example: "list rollouts"."""

    @property
    def total(self) -> int:
        """All requests."""
        return self.requests.total()

    def put(self, key: str, data: bytes | memoryview, *, create_only: bool = False) -> None:
        self._count("put", key)
        self._store.put(key, data, create_only=create_only)

    def get(self, key: str) -> bytes:
        self._count("get", key)
        return self._store.get(key)

    def exists(self, key: str) -> bool:
        self._count("exists", key)
        return self._store.exists(key)

    def children(self) -> list[str]:
        self._count("list", "")
        return self._store.children()

    def list(self, prefix: str) -> list[str]:
        keys = self._store.list(prefix)
        self._count("list", prefix, max(1, math.ceil(len(keys) / PAGE_KEYS)))
        return keys

    def delete(self, keys: Iterable[str]) -> None:
        named = list(keys)
        if named:
            self._count("delete", named[0], math.ceil(len(named) / PAGE_KEYS))
        self._store.delete(named)

    def child(self, prefix: str) -> ObjectStore:
        return self._store.child(prefix)

    def _count(self, operation: str, key: str, number: int = 1) -> None:
        self.requests[f"{operation} {key.partition('/')[0]}"] += number
