"""Several trainer processes that take one optimizer step together.

Every rank computes its share of the packs; sums over ranks make the step whole. A rank that is alone needs no process
group, and all of this costs it nothing.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

# Gradients are summed in flat buffers of this size: few large messages, and little memory beside the gradients.
_BUCKET_BYTES = 64 << 20


class Ranks:
    """This process among the trainer's ranks, over torch's default process group when there are several."""

    def __init__(self, rank: int = 0, size: int = 1, per_node: int | None = None) -> None:
        """`per_node`: ranks on each host; None: all of them."""
        self.rank = rank
        self.size = size
        self.local_rank = rank % (per_node or size)
        self.local_size = per_node or size

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the ranks, in place; the same bits on every rank."""
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
        """The vector of every rank, in order of rank, exactly, once its device has computed it; all are as long."""
        found = [own]
        if self.size > 1:
            found = [torch.empty_like(own) for _ in range(self.size)]
            dist.all_gather(found, own)
        rows: list[list[float]] = torch.stack(found).tolist()
        return rows


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
