"""A dispatch mode that refuses operations after which the host waits for the device, and packs to run under it."""

import itertools

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipelinerl_core.batching.assemble import assemble_rows
from pipelinerl_core.batching.collate import PackBatcher
from tests.rollout_rows import build_rollout

aten = torch.ops.aten
# A number of the data for the host, or as many results as the data say.
ASKING = {
    aten._local_scalar_dense, aten.is_nonzero, aten.equal, aten.nonzero, aten.masked_select, aten.bincount,
    aten._unique, aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.repeat_interleave,
}  # fmt: skip
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._unsafe_index, aten._index_put_impl_}
# TensorIterator's kernels take a number on the CPU as an argument; these copy it to the device first.
COPYING = {aten.where, aten._to_copy, aten.copy_, aten.index_fill_}


class NoWaiting(TorchDispatchMode):
    """Refuses whatever would make the host wait for a GPU; counts the rest."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        packet = function.overloadpacket
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if packet in ASKING:
            raise AssertionError(f"{function} waits for the device")
        if packet in INDEXING and any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors[1:]):
            raise AssertionError(f"{function} by a mask waits for the device")
        result = function(*args, **(kwargs or {}))
        devices = {value.device for value in [*tensors, *tree_leaves(result)] if isinstance(value, torch.Tensor)}
        if packet in COPYING and len(devices) > 1:
            raise AssertionError(f"{function} copies between {devices}")
        self.seen.append(packet)
        return result


def packs_of(config):
    """Packs in which some tokens are too old to be trained."""
    rng = np.random.default_rng(0)
    groups = [
        [
            build_rollout(
                rng, group_id=group, rollout_index=index, num_tokens=int(rng.integers(3, 20)), reward=index / 8,
                num_versions=5,
            )
            for index in range(8)
        ]
        for group in range(2)
    ]  # fmt: skip
    for rollout in itertools.chain.from_iterable(groups):
        rollout.prompt_token_ids[:] %= 19
        rollout.completion_token_ids[:] %= 19
    packs = list(PackBatcher(64).rows(assemble_rows(5, groups, config).rows))
    assert len(packs) > 2
    assert 0 < sum(len(pack.trained_M) for pack in packs) < sum(len(pack.target_ids_N) for pack in packs)
    return packs
