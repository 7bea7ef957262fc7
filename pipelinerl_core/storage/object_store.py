"""Open an object store by its URL, and find out whether it can be used."""

import hashlib
import uuid
from pathlib import Path

from pipelinerl_core.errors import ConfigError, StoreError
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.storage.keys import check_prefix
from pipelinerl_core.storage.local import FileStore, MemoryStore
from pipelinerl_core.storage.s3 import S3Store

CHECK_SECONDS = 5.0
"""How long `check_writable` waits for an endpoint."""


def open_store(url: str) -> ObjectStore:
    """The store at a path, file://, memory:// or s3:// URL. Raises ConfigError for anything else; touches nothing."""
    if not url:
        raise ConfigError("the store URL is empty; give a path, file://..., memory://... or s3://bucket/prefix")
    scheme, separator, rest = url.partition("://")
    if not separator:
        return FileStore(Path(url).expanduser().absolute())
    if scheme == "file":
        return FileStore(Path(rest).expanduser().absolute())
    try:
        root = check_prefix(rest)
    except StoreError as error:
        raise ConfigError(f"{url!r} is no store URL: {error}") from None
    if scheme == "memory":
        return MemoryStore(root)
    if scheme == "s3":
        return S3Store(url)
    raise ConfigError(f"{url!r}: unknown scheme {scheme!r}; give a path, file://, memory:// or s3://bucket/prefix")


def check_writable(store: ObjectStore) -> None:
    """Write and remove a small object. Raises ConfigError (one line) if that fails or takes longer than 5 seconds."""
    target = store.limited(CHECK_SECONDS) if isinstance(store, FileStore | S3Store) else store
    key = f"check-{uuid.uuid4().hex}"
    try:
        target.put(key, b"check")
        target.delete([key])
    except StoreError as error:
        line = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(f"the root {store.url} cannot be written: {line}. Set --root to one that can") from None


def supports_create_only(store: ObjectStore) -> bool:
    """Whether the store itself refuses a second creator. Files and memory: yes; S3: if it knows conditional PUT."""
    return store.is_conditional if isinstance(store, S3Store) else True


def sha256_hex(data: bytes | memoryview) -> str:
    """Digest that manifests and commits record."""
    return hashlib.sha256(data).hexdigest()
