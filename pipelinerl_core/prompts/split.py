"""Which problems are held out, and seeds that are the same in every process."""

import hashlib
from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")

GENERATED_SHARE = 0.2
"""Held-out share of generated problems: large, because few problems are short."""
TABLE_SHARE = 0.05
"""Held-out share of the rows of a file or data set."""


def prompt_id(source: str, text: str) -> str:
    """16 hex digits of sha256 over source and text: equal for equal problems, whatever their position."""
    return hashlib.sha256(f"{source}\0{text}".encode()).hexdigest()[:16]


def is_held_out(identity: str, share: float) -> bool:
    """Whether the first 8 hex digits, as a fraction of 2^32, fall below `share`.

    Only the problem decides, not the seed, the position or other problems.
    """
    return int(identity[:8], 16) < share * 2**32


def stable_seed(*parts: object) -> int:
    """64 bits that depend only on the parts (`hash` also depends on the process)."""
    text = "\0".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def repeated(items: Sequence[Item], count: int) -> list[Item]:
    """The first `count` items of an endless repetition of `items`, which must not be empty."""
    return [items[position % len(items)] for position in range(count)]
