"""Which problems are held out, and seeds that are the same in every process."""

import hashlib
import math
from collections.abc import Collection

GENERATED_SHARE = 0.2
"""Held-out share of generated problems: large, because few problems are short."""
TABLE_SHARE = 0.05
"""Held-out share of the prompts of a large file or data set, unless prompts.held_out_share sets another share."""
FEW_HELD_OUT = 16
FEW_SHARE = 0.2
"""If a file or data set is small, FEW_HELD_OUT prompts are held out, but at most FEW_SHARE of the prompts."""


def prompt_id(source: str, text: str) -> str:
    """16 hex digits of sha256 over source and text: equal for equal problems, whatever their position."""
    return hashlib.sha256(f"{source}\0{text}".encode()).hexdigest()[:16]


def is_held_out(identity: str, share: float) -> bool:
    """Whether the first 8 hex digits, as a fraction of 2^32, fall below `share`.

    Only the problem decides, not the seed, the position or other problems.
    """
    return int(identity[:8], 16) < share * 2**32


def held_out_ids(ids: Collection[str], share: float) -> set[str]:
    """The held-out prompts of a table: those with the smallest hashes, at least one; all if there is only one.

    share: prompts.held_out_share. Another row of the table moves another prompt at most across the border.
    """
    ranked = sorted(set(ids))
    count = sum(is_held_out(identity, share or TABLE_SHARE) for identity in ranked)
    if share == 0:
        count = max(count, min(FEW_HELD_OUT, math.ceil(FEW_SHARE * len(ranked))))
    return set(ranked[: count if 0 < count < len(ranked) else 1])


def stable_seed(*parts: object) -> int:
    """64 bits that depend only on the parts (`hash` also depends on the process)."""
    text = "\0".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
