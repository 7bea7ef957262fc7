"""Divide sequences into packs, and packs over ranks; the sequences of a pack share a forward pass."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Literal

Packing = Literal["sorted", "filled"]

MOST_OVER_LONGEST = 1.25
"""Rollouts of one prompt may exceed the budget of a pack, up to this multiple of the longest rollout."""

MOST_KEYS = 8
"""Rollouts that share a prompt have at most this multiple of their tokens as keys; each copies the prompt's keys."""

# With packing=filled, a pack above this share of its budget takes no shorter sequences. With 1.0 packs are 1 to 2 %
# fuller, and attention adds 1.3 to 1.9 times as much padding (512 lognormal lengths;
# docs/results/learner.md has 0.9).
_ENOUGH = 0.9


def pack(lengths: Sequence[int], pack_tokens: int, packing: Packing = "sorted") -> list[list[int]]:
    """Cut sequences into packs of at most `pack_tokens` tokens; returns indices into `lengths`.

    Sequences go from long to short, ties by position, and a pack takes the next ones until its budget is spent.
    Neighbours in that order are of similar length, so the padding that attention adds inside a pack (to its longest
    sequence) is small. A pack that is not full costs nothing: the other layers compute only the tokens in the pack.

    With packing "filled", a pack that is not nearly full then takes the longest of the shorter sequences that still
    fit: fewer packs of more equal size, but more padding in attention.

    A sequence longer than the budget is alone in its pack, because every generated sequence must be trained.

    Example: lengths [3, 9, 4, 4] with 8 tokens -> [[1], [2, 3], [0]].
    """
    # From short to long, so that taking from the end is cheap; later positions first, so that ties go by position.
    remaining = sorted((length, -index) for index, length in enumerate(lengths))
    enough = _ENOUGH * pack_tokens if packing == "filled" else 0.0
    packs: list[list[int]] = []
    while remaining:
        used, end = 0, len(remaining)
        taken: list[int] = []
        while end and (not taken or used + remaining[-1][0] <= pack_tokens):
            used, end = _take(remaining, end - 1, taken, used)
        while used < enough and (end := bisect_left(remaining, (pack_tokens - used + 1,))):
            used, end = _take(remaining, end - 1, taken, used)
        packs.append(taken)
    return packs


def share(lengths: Sequence[int], pack_tokens: int, ranks: int, packing: Packing = "sorted") -> list[list[list[int]]]:
    """Cut sequences into packs for several ranks, equally many on each, with about equally many tokens.

    Returns for each rank its packs of indices into `lengths`; a missing pack is empty. The number of packs is
    the number that `pack` makes, rounded up to a multiple of `ranks`; the budget of a pack is lowered as far as this
    number allows. Packs are ordered by the length of their sequences and go to the ranks in turn, forth and back, so
    that ranks get sequences of similar length. No pack exceeds `pack_tokens`, except for a single longer sequence.

    Example: lengths [4, 4, 4, 4, 4, 4], 20 tokens, 2 ranks -> [[[0, 1, 2]], [[3, 4, 5]]].
    """
    num_packs = max(1, -(-len(pack(lengths, pack_tokens, packing)) // ranks)) * ranks
    low, high = 1, pack_tokens
    while low < high:  # the smallest budget that needs no more packs
        middle = (low + high) // 2
        low, high = (low, middle) if len(pack(lengths, middle, packing)) <= num_packs else (middle + 1, high)
    packs = pack(lengths, high, packing)
    if len(packs) > num_packs:  # packing=filled may need one more pack with a larger budget
        packs = pack(lengths, pack_tokens, packing)
    packs += [[] for _ in range(num_packs - len(packs))]
    shares: list[list[list[int]]] = [[] for _ in range(ranks)]
    for start in range(0, num_packs, ranks):
        turn = packs[start : start + ranks]
        is_back = start // ranks % 2 == 1
        for rank, chosen in enumerate(reversed(turn) if is_back else turn):
            shares[rank].append(chosen)
    return shares


def _take(remaining: list[tuple[int, int]], position: int, taken: list[int], used: int) -> tuple[int, int]:
    """Move one sequence of `remaining` to `taken`; returns the tokens used and the number of remaining sequences."""
    length, negative_index = remaining.pop(position)
    taken.append(-negative_index)
    return used + length, len(remaining)
