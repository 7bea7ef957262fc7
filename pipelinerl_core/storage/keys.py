"""Keys of object stores: relative paths with "/" that cannot leave the root."""

from collections.abc import Sequence

from pipelinerl_core.errors import StoreError
from pipelinerl_core.interfaces import ObjectStore

HIDDEN_PREFIX = "."
"""Names that begin so belong to other programs (.nfs..., .DS_Store, .snapshot). No key has such a part, and listings
leave these files and directories out."""
TEMPORARY_PREFIX = ".tmp-"
"""Prefix of the names of unfinished files."""


def check_key(key: str) -> str:
    """The key. Raises StoreError if the key could leave the root or cannot be a file name."""
    if any(ord(character) < 32 or ord(character) == 127 or character == "\\" for character in key):
        raise StoreError(f"key {key!r} holds a control character or a backslash; keys are plain text with '/'")
    for part in key.split("/"):
        if part in ("", ".", ".."):
            raise StoreError(f"key {key!r} has a part {part!r}; keys are relative, without empty parts, '.' or '..'")
        if part.startswith(HIDDEN_PREFIX):
            raise StoreError(f"key {key!r} has a part that begins with '.': listings leave such names out")
    return key


def check_prefix(prefix: str) -> str:
    """The prefix without the slash at its end; "" is the root. Raises StoreError as `check_key`."""
    trimmed = prefix.removesuffix("/")
    return check_key(trimmed) if trimmed else ""


def is_visible(key: str) -> bool:
    """Whether a listing has a key: no part is hidden, and the key is no marker of a directory ("a/b/")."""
    return not any(part.startswith(HIDDEN_PREFIX) or not part for part in key.split("/"))


def join_key(*parts: str) -> str:
    """Parts joined by "/", empty ones left out."""
    return "/".join(part for part in parts if part)


def delete_with_folders(store: ObjectStore, keys: Sequence[str]) -> None:
    """Delete objects, and on a disk their folders if these are empty then: a run would keep an empty folder per step.

    No process may write into these folders at the same time.
    """
    store.delete(keys)
    if remove := getattr(store, "remove_empty", None):
        for folder in {key.rpartition("/")[0] for key in keys}:
            remove(folder)
