"""Trainer side of weights that go from memory to memory: the group of receivers, and one broadcast per version.

Actors hear of a group with a version's manifest and join it; versions go through the store until all have. A member
that is gone breaks the collective, so before each broadcast the members are compared with the actors that are there,
and every wait has a deadline: beyond it the group is given up and the version goes through the store.

On a GPU the collective is NCCL's, packed as vLLM's own weight transfer does it; without one it is gloo's. The ticket
of an NCCL group is its unique id, which goes through the store: vLLM's rendezvous by TCP would send pickles.
"""

import base64
import functools
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from pipelinerl_core.errors import BroadcastError
from pipelinerl_core.interfaces import BroadcastGroup, ObjectStore, TensorMeta
from pipelinerl_core.run.records import broadcast_key

logger = logging.getLogger(__name__)

GROUP_COUNTER = "broadcast_group"
"""Counter of an actor's sync: the broadcast group it is in."""

# Groups of one trainer epoch; beyond it numbers of two epochs could meet.
_GROUPS_PER_EPOCH = 1_000_000
_POLL_SECONDS = 0.02
_THREAD_END_SECONDS = 5.0


def layout_of(tensors: Mapping[str, Tensor]) -> tuple[TensorMeta, ...]:
    """The order of sending: by name."""
    return tuple(
        TensorMeta(name, str(tensors[name].dtype).removeprefix("torch."), tuple(tensors[name].shape))
        for name in sorted(tensors)
    )


def gloo_receiver_key(rank: int) -> str:
    """What a member sets in the TCPStore of a gloo group before it connects."""
    return f"here/{rank}"


def read_group(store: ObjectStore, number: int) -> BroadcastGroup:
    """A group by its number. Raises MissingObject."""
    values = json.loads(store.get(broadcast_key(number)))
    values["layout"] = tuple(TensorMeta(name, dtype, tuple(shape)) for name, dtype, shape in values["layout"])
    return BroadcastGroup(**values)


class Sender(Protocol):
    """Rank 0 of a collective."""

    ticket: str

    def connect(self, is_closed: threading.Event) -> None:
        """Returns when every member is there; raises when it is over before."""
        ...

    def send(self, tensors: Mapping[str, Tensor], layout: tuple[TensorMeta, ...]) -> None:
        """Broadcast all tensors, in the order of the layout; returns when they have left."""
        ...

    def close(self) -> None:
        """Give the collective up; a call under way in another thread fails."""
        ...


class GlooSender:
    """Over TCP, from CPU memory; its deadlines are gloo's own."""

    def __init__(self, host: str, world_size: int, deadline: timedelta) -> None:
        self._store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            host, 0, world_size, is_master=True, wait_for_workers=False, timeout=deadline
        )
        self.ticket = f"gloo:{host}:{self._store.port}"
        self._world_size = world_size
        self._deadline = deadline
        self._group: Any = None

    def connect(self, is_closed: threading.Event) -> None:
        """Connect to every member. Each says that it is there first: connecting cannot be interrupted."""
        members = [gloo_receiver_key(rank) for rank in range(1, self._world_size)]
        deadline = time.monotonic() + self._deadline.total_seconds()
        while not self._store.check(members):
            if is_closed.wait(_POLL_SECONDS) or time.monotonic() > deadline:
                raise BroadcastError("its members did not come")
        self._group = dist.ProcessGroupGloo(self._store, 0, self._world_size, self._deadline)

    def send(self, tensors: Mapping[str, Tensor], layout: tuple[TensorMeta, ...]) -> None:
        """One broadcast per tensor."""
        for meta in layout:
            self._group.broadcast([tensors[meta.name].contiguous()], dist.BroadcastOptions()).wait()

    def close(self) -> None:
        """Free sockets and threads."""
        self._group = self._store = None


class NcclSender:
    """Between GPUs. Has never been run: the machines this was made on have none."""

    def __init__(self, world_size: int) -> None:
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

        self._unique_id = bytes(NCCLLibrary().ncclGetUniqueId().internal)
        self.ticket = f"nccl:{base64.b64encode(self._unique_id).decode()}"
        self._world_size = world_size
        self._communicator: Any = None

    def connect(self, is_closed: threading.Event) -> None:
        """Form the communicator; NCCL cannot be interrupted in it."""
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

        device = torch.accelerator.current_device_index()
        self._communicator = uid_init_process_group(self._unique_id, 0, self._world_size, device)

    def send(self, tensors: Mapping[str, Tensor], layout: tuple[TensorMeta, ...]) -> None:
        """Pack into buffers, several in flight, from the snapshot in CPU memory."""
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        packed_nccl_broadcast_producer(
            iterator=iter([(meta.name, tensors[meta.name]) for meta in layout]),
            group=self._communicator,
            src=0,
            post_iter_func=lambda item: item[1].to("cuda", non_blocking=True),
        )

    def close(self) -> None:
        """Abort: a kernel that waits for a dead member would wait for ever."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.nccl.ncclCommAbort(communicator.comm)


class WeightBroadcaster:
    """Keeps one group of the actors that are there, and sends versions to it. One thread calls it."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        epoch: int,
        workers_per_actor: int,
        host: str,
        deadline_seconds: float,
        on_gpu: bool,
    ) -> None:
        self._store = store
        self._number = epoch * _GROUPS_PER_EPOCH
        self._workers = workers_per_actor
        self._host = host
        self._deadline_seconds = deadline_seconds
        self._on_gpu = on_gpu
        self._group: BroadcastGroup | None = None
        self._sender: Sender | None = None
        self._num_sent = 0
        self._is_connected = threading.Event()
        self._has_failed = threading.Event()
        """The group never met."""
        self._confirmed: set[str] = set()
        """Actors that have said that they are in the group."""
        self._opened_at = 0.0
        self._is_closed = threading.Event()
        self._threads: list[threading.Thread] = []
        """An interpreter that ends while one of them is in a collective aborts."""

    @property
    def number(self) -> int:
        """The group that actors are to join, 0 for none."""
        group = self._group
        return 0 if group is None or self._has_failed.is_set() else group.number

    @property
    def next_index(self) -> int:
        """Of the group's next broadcast; members count with it. The first is 1."""
        return self._num_sent + 1

    def ensure_group(self, joined: Mapping[str, int], tensors: Mapping[str, Tensor]) -> bool:
        """Whether a broadcast reaches every actor; opens a new group where none can any more.

        joined: each actor that is there -> the group it says it is in. What it says is a little old: one that has not
        said yet that it is in the group may have joined; one that has said so and says otherwise now has left.
        """
        group = self._group
        if group is not None and not self._has_failed.is_set() and set(joined) == set(group.first_ranks):
            present = {actor for actor, number in joined.items() if number == group.number}
            has_lost = bool(self._confirmed - present)
            self._confirmed |= present
            is_complete = self._is_connected.is_set() and len(present) == len(joined)
            is_late = time.monotonic() - self._opened_at > 2 * self._deadline_seconds
            if is_complete or not (has_lost or is_late):
                return is_complete
        self.close()
        if joined:
            self._open(sorted(joined), layout_of(tensors))
        return False

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """Broadcast one version to the group; raises BroadcastError and gives the group up when that fails.

        When this returns the version has left, and members at the ends of the collective's tree may not have it yet.
        """
        group, sender = self._group, self._sender
        assert group is not None
        assert sender is not None
        error: list[Exception] = []

        def send() -> None:
            try:
                sender.send(tensors, group.layout)
            except Exception as caught:  # noqa: BLE001 - any failure breaks the collective
                error.append(caught)

        thread = self._start(send, "broadcast")
        thread.join(self._deadline_seconds)
        if thread.is_alive() or error:
            self.close()
            cause = error[0] if error else f"not done within {self._deadline_seconds:g} s"
            raise BroadcastError(
                f"broadcast group {group.number} of {sorted(group.first_ranks)} is given up: {cause}"
            )
        self._num_sent += 1

    def close(self) -> None:
        """Give the group up. Harmless without one."""
        self._is_closed.set()
        sender = self._sender
        if sender is not None:
            sender.close()
        for thread in self._threads:
            thread.join(_THREAD_END_SECONDS)
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._group = self._sender = None

    def _open(self, actors: list[str], layout: tuple[TensorMeta, ...]) -> None:
        self._number += 1
        world_size = 1 + self._workers * len(actors)
        sender: Sender
        if self._on_gpu:
            sender = NcclSender(world_size)
        else:
            sender = GlooSender(self._host, world_size, timedelta(seconds=self._deadline_seconds))
        group = BroadcastGroup(
            number=self._number,
            ticket=sender.ticket,
            world_size=world_size,
            first_ranks={actor: 1 + index * self._workers for index, actor in enumerate(actors)},
            deadline_seconds=self._deadline_seconds,
            layout=layout,
        )
        self._store.put(broadcast_key(group.number), json.dumps(asdict(group)).encode())
        self._group, self._sender, self._is_connected = group, sender, threading.Event()
        self._num_sent, self._confirmed, self._opened_at = 0, set(), time.monotonic()
        self._has_failed, self._is_closed = threading.Event(), threading.Event()
        connect = functools.partial(
            self._connect, group, sender, self._is_connected, self._has_failed, self._is_closed
        )
        self._start(connect, "broadcast-connect")
        logger.info("broadcast group %d opened for %s", group.number, actors)

    def _start(self, target: Callable[[], None], name: str) -> threading.Thread:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads = [other for other in self._threads if other.is_alive()]
        self._threads.append(thread)
        thread.start()
        return thread

    @staticmethod
    def _connect(
        group: BroadcastGroup,
        sender: Sender,
        is_connected: threading.Event,
        has_failed: threading.Event,
        is_closed: threading.Event,
    ) -> None:
        """On a thread of its own: what it says is about its group, which may not be the newest any more."""
        try:
            sender.connect(is_closed)
        except Exception as error:  # noqa: BLE001 - whatever it is, there is no group
            logger.warning("broadcast group %d never met: %s", group.number, error)
            has_failed.set()
            return
        is_connected.set()
        logger.info("broadcast group %d has met: %d members", group.number, group.world_size)
