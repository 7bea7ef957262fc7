"""A receiver of broadcast weights over gloo, and the publisher of such weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import distributed as dist

from pipelinerl_core.interfaces import BroadcastGroup, ObjectStore
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.roles.trainer.broadcasting import BroadcastPublisher
from pipelinerl_core.weights.broadcast import gloo_receiver_key
from pipelinerl_core.weights.publish import WeightPublisher


def connect(group: BroadcastGroup, rank: int) -> dist.ProcessGroupGloo:
    """Join a group as its receiver `rank`."""
    host, _, port = group.ticket.removeprefix("gloo:").rpartition(":")
    deadline = timedelta(seconds=group.deadline_seconds)
    store = dist.TCPStore(host, int(port), group.world_size, is_master=False, timeout=deadline)
    store.set(gloo_receiver_key(rank), "")
    return dist.ProcessGroupGloo(store, rank, group.world_size, deadline)


def receive(collective: dist.ProcessGroupGloo, tensor: torch.Tensor) -> None:
    """Fill a tensor with the next broadcast."""
    collective.broadcast([tensor], dist.BroadcastOptions()).wait()


@contextmanager
def broadcast_publisher(store: ObjectStore, epoch: int, seconds: float) -> Iterator[BroadcastPublisher]:
    """Publishes without shared memory; `seconds`: deadline of a broadcast."""
    weights = {"transport": "nccl", "broadcast_seconds": seconds}
    config = build_config({"engine": {"kind": "vllm"}, "weights": weights})
    publisher = BroadcastPublisher(
        store, WeightPublisher(store, run_id="run", epoch=epoch, use_shm=False), config, epoch=epoch
    )
    yield publisher
    publisher.close()
