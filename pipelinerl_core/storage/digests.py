"""Digests of objects. A record names the digest of each object that it needs, and readers compare the bytes with it.

BLAKE3 (https://github.com/BLAKE3-team/BLAKE3-specs) is a cryptographic hash, several times as fast as SHA-256.
"""

import mmap

from blake3 import blake3

from pipelinerl_core.errors import ChecksumMismatch
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.types import FileEntry

SHOWN_DIGITS = 12
"""Digits of a digest in messages."""


def digest(data: "bytes | bytearray | memoryview | mmap.mmap") -> str:
    """64 hexadecimal digits. Other threads of the process run meanwhile."""
    return blake3(data).hexdigest()


def entry_of(name: str, data: "bytes | memoryview | mmap.mmap") -> FileEntry:
    """Name, size and digest of some bytes."""
    return FileEntry(name=name, size=len(data), digest=digest(data))


def verify(data: "bytes | bytearray | memoryview | mmap.mmap", entry: FileEntry, where: str) -> None:
    """Raise ChecksumMismatch unless size and digest of the bytes are those of the entry. where: for the message."""
    if len(data) != entry.size:
        raise ChecksumMismatch(f"{where}: {len(data)} bytes, its record says {entry.size}")
    actual = digest(data)
    if actual != entry.digest:
        raise ChecksumMismatch(
            f"{where}: the digest is {actual[:SHOWN_DIGITS]}, its record says {entry.digest[:SHOWN_DIGITS]}"
        )


def read_verified(store: ObjectStore, key: str, entry: FileEntry) -> bytes:
    """The bytes of an object. Raises MissingObject, and ChecksumMismatch if they differ from the entry."""
    data = store.get(key)
    verify(data, entry, f"{store.url}/{key}")
    return data
