"""Collectives of the trainer's ranks, which compute one optimizer step together.

Each rank computes its share of the packs; the results are summed over ranks. A single rank needs no process group.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

# Size of the flat buffers in which gradients are summed: few large messages, little additional memory.
_BUCKET_BYTES = 64 << 20


class Ranks:
    """The position of this process among the trainer's ranks; several ranks use torch's default process group."""

    def __init__(self, rank: int = 0, size: int = 1, per_node: int | None = None) -> None:
        """`per_node`: number of ranks on each host; None: all ranks are on one host."""
        self.rank = rank
        self.size = size
        self.local_rank = rank % (per_node or size)
        self.local_size = per_node or size

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the ranks, in place; all ranks have the same bits."""
        if self.size == 1:
            return
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            dist.all_reduce(flat)
            start = 0
            for tensor in bucket:
                tensor.copy_(flat[start : start + tensor.numel()].view_as(tensor))
                start += tensor.numel()

    def gather(self, own: Tensor) -> list[list[float]]:
        """The vector of every rank, in the order of ranks, without rounding; waits for the device. Equal lengths."""
        vectors = [own]
        if self.size > 1:
            vectors = [torch.empty_like(own) for _ in range(self.size)]
            dist.all_gather(vectors, own)
        rows: list[list[float]] = torch.stack(vectors).tolist()
        return rows

    def gather_vectors(self, own: Tensor) -> list[Tensor]:
        """The vector of every rank, in the order of ranks, on the CPU; lengths may differ. A collective."""
        if self.size == 1:
            return [own.cpu()]
        lengths = [int(length) for (length,) in self.gather(torch.tensor([len(own)], device=own.device))]
        padded = own.new_zeros(max(lengths))
        padded[: len(own)] = own
        vectors = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(vectors, padded)
        return [vector[:length].cpu() for vector, length in zip(vectors, lengths, strict=True)]


ALONE = Ranks()
"""One trainer process."""


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    buckets: list[list[Tensor]] = []
    used = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if not buckets or used + size > _BUCKET_BYTES or tensor.dtype != buckets[-1][0].dtype:
            buckets.append([])
            used = 0
        buckets[-1].append(tensor)
        used += size
    return buckets
