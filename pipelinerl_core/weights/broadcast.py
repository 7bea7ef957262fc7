"""Trainer side of weight broadcasts: the broadcast group of the actors' engines, and one broadcast per version.

A version's manifest names the broadcast group, and actors join the group. Until all actors have joined, versions go
through the store. A receiver that has ended breaks the collective, so the broadcaster compares the receivers with the
active actors before each broadcast. Every wait has a deadline, after which the group is closed and the version goes
through the store.

On a GPU the collective is NCCL's, packed as in vLLM's weight transfer; without a GPU it is gloo's. The unique id of
an NCCL group goes through the run's store, because vLLM's rendezvous by TCP sends pickles.
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
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from pipelinerl_core.errors import BroadcastError
from pipelinerl_core.interfaces import GO, BroadcastGroup, ObjectStore, TensorMeta, member_key
from pipelinerl_core.run.records import broadcast_key
from pipelinerl_core.weights.files import metas_of

logger = logging.getLogger(__name__)


# More groups in one trainer epoch would give two epochs the same group numbers.
_GROUPS_PER_EPOCH = 1_000_000
_POLL_SECONDS = 0.02
_THREAD_END_SECONDS = 5.0
# Receivers that could not connect say so this long after the trainer could not; the others are named in the error.
_FAILED_SECONDS = 2.0


def read_group(store: ObjectStore, number: int) -> BroadcastGroup:
    """Read a broadcast group by its number. Raises MissingObject."""
    values = json.loads(store.get(broadcast_key(number)))
    values["layout"] = tuple(TensorMeta(name, dtype, tuple(shape)) for name, dtype, shape in values["layout"])
    return BroadcastGroup(**values)


class Meeting:
    """Where the members of a group wait for each other, so that they connect only when all of them are there.

    A member that connects cannot be interrupted, and waits for one that is missing. The workers of the engines wait
    and connect on a thread, while they generate.
    """

    def __init__(self, world_size: int, deadline: timedelta) -> None:
        # The server listens on all addresses; this process reaches it by loopback, whatever address the others use.
        self.store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False, timeout=deadline
        )
        self.port: int = self.store.port
        self.world_size = world_size
        self.deadline = deadline

    def wait(self, state: Literal["here", "joined"], is_closed: threading.Event) -> None:
        """Wait until every receiver is in a state.

        Raises MembersMissing after the deadline, BroadcastError if `is_closed` is set before.
        """
        deadline = time.monotonic() + self.deadline.total_seconds()
        while missing := self._without(state):
            if is_closed.wait(_POLL_SECONDS):
                raise BroadcastError("the group was closed")
            if time.monotonic() > deadline:
                raise MembersMissing(missing, f"not {state} within {self.deadline.total_seconds():g} s")
        if is_closed.is_set():
            raise BroadcastError("the group was closed")

    def go(self) -> None:
        """Let all members connect."""
        self.store.set(GO, "")

    def silent(self) -> list[int]:
        """After connecting has failed: the ranks that say neither that they joined nor that they failed, too."""
        deadline = time.monotonic() + _FAILED_SECONDS
        while (silent := self._without("joined", "failed")) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return silent

    def _without(self, *states: Literal["here", "joined", "failed"]) -> list[int]:
        return [
            rank
            for rank in range(1, self.world_size)
            if not any(self.store.check([member_key(state, rank)]) for state in states)
        ]


class MembersMissing(BroadcastError):
    """The receivers with these ranks did not join."""

    def __init__(self, ranks: list[int], cause: str) -> None:
        super().__init__(cause)
        self.ranks = ranks


class Sender(Protocol):
    """Rank 0 of a collective."""

    nccl_id: str

    def connect(self, meeting: Meeting) -> None:
        """Connect to the receivers, which are all there; cannot be interrupted."""

    def send(self, tensors: Mapping[str, Tensor], layout: tuple[TensorMeta, ...]) -> None:
        """Broadcast all tensors in the order of the layout; returns when all are sent."""

    def close(self) -> None:
        """Close the collective; a call in progress on another thread fails."""


class GlooSender:
    """Broadcasts from CPU memory over TCP, with gloo's own deadlines."""

    nccl_id = ""

    def __init__(self) -> None:
        self._group: Any = None

    def connect(self, meeting: Meeting) -> None:
        """Connect over the store of the meeting. Raises MembersMissing."""
        try:
            self._group = dist.ProcessGroupGloo(meeting.store, 0, meeting.world_size, meeting.deadline)
        except RuntimeError as error:
            raise MembersMissing(meeting.silent(), str(error).splitlines()[0]) from None

    def send(self, tensors: Mapping[str, Tensor], layout: tuple[TensorMeta, ...]) -> None:
        """One broadcast per tensor."""
        for meta in layout:
            self._group.broadcast([tensors[meta.name].contiguous()], dist.BroadcastOptions()).wait()

    def close(self) -> None:
        """Free sockets and threads."""
        self._group = None


class NcclSender:
    """Broadcasts between GPUs. Not tested on GPUs yet."""

    def __init__(self) -> None:
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

        self._unique_id = bytes(NCCLLibrary().ncclGetUniqueId().internal)
        self.nccl_id = base64.b64encode(self._unique_id).decode()
        self._communicator: Any = None

    def connect(self, meeting: Meeting) -> None:
        """Create the communicator."""
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

        device = torch.accelerator.current_device_index()
        self._communicator = uid_init_process_group(self._unique_id, 0, meeting.world_size, device)

    def send(self, tensors: Mapping[str, Tensor], layout: tuple[TensorMeta, ...]) -> None:
        """Pack the snapshot in CPU memory into buffers and broadcast them, several in flight."""
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        packed_nccl_broadcast_producer(
            iterator=iter([(meta.name, tensors[meta.name]) for meta in layout]),
            group=self._communicator,
            src=0,
            post_iter_func=lambda item: item[1].to("cuda", non_blocking=True),
        )

    def close(self) -> None:
        """Abort the communicator: a kernel would wait for an ended receiver for ever."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.nccl.ncclCommAbort(communicator.comm)


class WeightBroadcaster:
    """Maintains one broadcast group of the active actors and sends versions to the group. Call it on one thread."""

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
        """Set if the receivers did not connect."""
        self._confirmed: set[str] = set()
        """Actors that have reported that they joined the group."""
        self._opened_at = 0.0
        self._is_closed = threading.Event()
        self._threads: list[threading.Thread] = []
        """Joined at close: the interpreter aborts at exit if one of them is in a collective."""

    @property
    def number(self) -> int:
        """Number of the group for actors to join, 0 for none."""
        group = self._group
        return 0 if group is None or self._has_failed.is_set() else group.number

    @property
    def next_index(self) -> int:
        """Number of the group's next broadcast, from 1; receivers count broadcasts too."""
        return self._num_sent + 1

    def ensure_group(self, joined: Mapping[str, int], tensors: Mapping[str, Tensor]) -> bool:
        """Whether a broadcast reaches every active actor; if the group never can, opens a new group.

        joined: each active actor -> the group that the actor last reported. Reports lag behind: an actor that has
        not reported the group yet may have joined. An actor that has reported it and now reports another has left.
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
            self._open(sorted(joined), metas_of(tensors))
        return False

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """Broadcast one version to the group. If the broadcast fails, closes the group and raises BroadcastError.

        When this returns, the version is sent, but some receivers may not have received all of it yet.
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
            raise BroadcastError(f"broadcast group {group.number} of {sorted(group.first_ranks)} is closed: {cause}")
        self._num_sent += 1

    def close(self) -> None:
        """Close the group; no effect without a group."""
        self._is_closed.set()
        sender = self._sender
        if sender is not None:
            sender.close()
        deadline = time.monotonic() + _THREAD_END_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._threads = []  # a thread that is stuck in NCCL is not waited for again
        self._group = self._sender = None

    def _open(self, actors: list[str], layout: tuple[TensorMeta, ...]) -> None:
        self._number += 1
        world_size = 1 + self._workers * len(actors)
        meeting = Meeting(world_size, timedelta(seconds=self._deadline_seconds))
        sender: Sender = NcclSender() if self._on_gpu else GlooSender()
        group = BroadcastGroup(
            number=self._number,
            host=self._host,
            port=meeting.port,
            nccl_id=sender.nccl_id,
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
            self._connect, group, sender, meeting, self._is_connected, self._has_failed, self._is_closed
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
        meeting: Meeting,
        is_connected: threading.Event,
        has_failed: threading.Event,
        is_closed: threading.Event,
    ) -> None:
        """Runs on a separate thread; the events belong to this group, which a newer group may have replaced."""
        try:
            meeting.wait("here", is_closed)
            meeting.go()
            sender.connect(meeting)
            meeting.wait("joined", is_closed)
        except Exception as error:  # noqa: BLE001 - after any failure there is no group
            ranks = error.ranks if isinstance(error, MembersMissing) else []
            names = "".join(f"{actor}: " for actor in sorted({group.actor_of(rank) for rank in ranks}))
            logger.warning("broadcast group %d not connected: %s%s", group.number, names, error)
            sender.close()  # `close` may have been called while the sender connected
            has_failed.set()
            return
        is_connected.set()
        logger.info("broadcast group %d connected: %d processes", group.number, group.world_size)
