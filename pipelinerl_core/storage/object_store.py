"""Open an object store by its URL, and check that the store can be written.

To add a store: a file in this folder with a class that has the methods of `Store`, and a line in STORES.
"""

import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from pipelinerl_core.errors import ConfigError, StoreError
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.storage.keys import check_prefix
from pipelinerl_core.storage.local import FileStore, MemoryStore

CHECK_SECONDS = 5.0
"""How long `check_writable` waits for an endpoint."""


class Store(ObjectStore, Protocol):
    """An object store as `open_store` returns one."""

    def child(self, prefix: str) -> "Store":
        """The store below a prefix."""

    def written_at(self, key: str) -> float:
        """Unix time of the last write of an object by the clock of the store; 0 without the object."""

    def limited(self, seconds: float) -> ObjectStore:
        """The same store, which repeats a failing request for at most `seconds`."""


def _open_s3(rest: str) -> Store:
    from pipelinerl_core.storage.s3 import S3Store  # noqa: PLC0415 - a run on local disk needs no client of S3

    return S3Store(f"s3://{check_prefix(rest)}")


STORES: Mapping[str, Callable[[str], Store]] = MappingProxyType(
    {
        "file": lambda rest: FileStore(Path(rest).expanduser().absolute()),
        "memory": lambda rest: MemoryStore(check_prefix(rest)),
        "s3": _open_s3,
    }
)
"""URL scheme -> function from the part of the URL after "://" to the store."""


def open_store(url: str) -> Store:
    """The store at a path or at a URL with a scheme of STORES. Raises ConfigError; sends no request."""
    if not url:
        raise ConfigError("the store URL is empty; give a path, file://..., memory://... or s3://bucket/prefix")
    scheme, separator, rest = url.partition("://")
    if not separator:
        try:
            scheme, rest = "file", str(Path(url).expanduser())
        except RuntimeError as error:  # ~NAME of an unknown user
            raise ConfigError(f"{url!r}: {error} Give a path without ~") from None
    if scheme not in STORES:
        raise ConfigError(
            f"{url!r}: unknown scheme {scheme!r}; give a path, file://, memory:// or s3://bucket/prefix"
        )
    try:
        return STORES[scheme](rest)
    except StoreError as error:
        raise ConfigError(f"{url!r} is no store URL: {error}") from None


def check_writable(store: Store, option: str = "--root") -> None:
    """Write, list and remove a small object. option: what names the store, for the message.

    Raises ConfigError (one line) if that fails, takes longer than 5 seconds, or if a listing of this host does not
    follow the write and the removal at once.
    """
    target = store.limited(CHECK_SECONDS)
    folder = f"check-{uuid.uuid4().hex}"  # of its own: another process may check the same root
    key = f"{folder}/check"
    try:
        target.put(key, b"check")
        has_it = key in target.list(folder)
        target.delete([key])
        if not has_it or key in target.list(folder):
            raise ConfigError(
                f"the root {store.url} does not list an object right after its write, or still lists it after its "
                "removal. Runs need a store that does; for NFS see docs/storage.md for the mount options"
            )
        if isinstance(target, FileStore):
            target.remove_empty(folder)
    except StoreError as error:
        line = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(
            f"the root {store.url} cannot be written: {line}. Set {option} to a writable store"
        ) from None
