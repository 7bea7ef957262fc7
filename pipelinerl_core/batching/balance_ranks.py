"""Distribute packs over ranks."""

from collections.abc import Sequence

from pipelinerl_core.batching.pack import Packing, pack


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
