"""Checks keys of object stores: relative paths with "/" that cannot leave the root."""

from pipelinerl_core.errors import StoreError

TEMPORARY_PREFIX = ".tmp-"
"""Prefix of the names of unfinished files. Keys must not use the prefix; listings leave such files out."""


def check_key(key: str) -> str:
    """The key. Raises StoreError if the key could leave the root or cannot be a file name."""
    if any(ord(character) < 32 or ord(character) == 127 or character == "\\" for character in key):
        raise StoreError(f"key {key!r} holds a control character or a backslash; keys are plain text with '/'")
    for part in key.split("/"):
        if part in ("", ".", ".."):
            raise StoreError(f"key {key!r} has a part {part!r}; keys are relative, without empty parts, '.' or '..'")
        if part.startswith(TEMPORARY_PREFIX):
            raise StoreError(f"key {key!r} has a part that starts with {TEMPORARY_PREFIX!r}, which is reserved")
    return key


def check_prefix(prefix: str) -> str:
    """The prefix without the slash at its end; "" is the root. Raises StoreError as `check_key`."""
    trimmed = prefix.removesuffix("/")
    return check_key(trimmed) if trimmed else ""


def join_key(*parts: str) -> str:
    """Parts joined by "/", empty ones left out."""
    return "/".join(part for part in parts if part)
