"""A receiver of broadcast weights over gloo, and the publisher of such weights."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import distributed as dist

from pipelinerl_core.interfaces import GO, BroadcastGroup, ObjectStore, member_key
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.roles.trainer.broadcasting import BroadcastPublisher
from pipelinerl_core.weights.publish import WeightPublisher

JOIN_POINTS = ("before", "here", "go", "connected")


def connect(
    group: BroadcastGroup, rank: int, at: Callable[[str], None] = lambda point: None
) -> dist.ProcessGroupGloo:
    """Join a group as its receiver `rank`, like a worker of vLLM; calls `at` with each of JOIN_POINTS."""
    deadline = timedelta(seconds=group.deadline_seconds)
    at("before")
    store = dist.TCPStore(group.host, group.port, group.world_size, is_master=False, timeout=deadline)
    store.set(member_key("here", rank), "")
    at("here")
    store.wait([GO], deadline)
    at("go")
    try:
        collective = dist.ProcessGroupGloo(store, rank, group.world_size, deadline)
    except RuntimeError:
        store.set(member_key("failed", rank), "")
        raise
    at("connected")
    store.set(member_key("joined", rank), "")
    return collective


def join_until(group: BroadcastGroup, rank: int, point: str, how: str) -> None:
    """In a process of its own: join, and send this process the signal `how` at one of JOIN_POINTS."""

    def at(reached: str) -> None:
        if reached == point:
            os.kill(os.getpid(), signal.Signals[how])

    connect(group, rank, at)


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
