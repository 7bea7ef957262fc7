"""Which sequences share a forward pass."""

from collections.abc import Sequence


def pack(lengths: Sequence[int], pack_tokens: int) -> list[list[int]]:
    """Cut sequences into packs of at most `pack_tokens` tokens; returns indices into `lengths`.

    Sequences go from long to short, ties by position, and a pack takes the next ones until its budget is spent.
    Neighbours in that order are of similar length, so the padding that attention adds inside a pack (to its longest
    sequence) is small. A pack that is not full costs nothing: the other layers see exactly the tokens in it.

    A sequence longer than the budget gets a pack of its own: it was generated and must be trained, and stopping a run
    in the middle for it would help nobody.

    Example: lengths [3, 9, 4, 4] with 8 tokens -> [[1], [2, 3], [0]].
    """
    packs: list[list[int]] = []
    used = 0
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        if not packs or used + lengths[index] > pack_tokens:
            packs.append([])
            used = 0
        packs[-1].append(index)
        used += lengths[index]
    return packs
