"""How rank 0 of the trainer sends commands to the other ranks: lengths, JSON header, bytes; over gloo.

    rank 0   --{"command": ...}, rows of this rank-->   rank r       waits here, outside of any collective
    all      == collectives of the learner ==>          all          begin only when every rank has its data

While a rank waits for a command, rank 0 sends a heartbeat every HEARTBEAT_SECONDS. If a rank receives nothing for
trainer.collective_seconds, rank 0 is gone. While a command is executed, rank 0 sends no heartbeats, because the other
ranks do not receive then.
"""

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pyarrow as pa
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from pipelinerl_core.errors import RankLost

Payload = tuple[Mapping[str, Any], pa.Buffer]
"""For one rank: values beside those of the command, and bytes."""
NO_BYTES = pa.py_buffer(b"")
MIN_SILENCE_SECONDS = 20.0
"""Shortest time without a message after which a rank treats the others as lost."""
HEARTBEAT_SECONDS = 5.0
"""Interval of heartbeats to ranks that wait for a command."""
_HEARTBEAT = "beat"


def join_ranks(
    rank: int, size: int, *, store: Store, device: torch.device, collective_seconds: float
) -> "RankChannel":
    """Join torch's default process group and open the command channel; returns when all ranks have joined.

    Raises RankLost if a rank has not joined within `collective_seconds`.
    """
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    with translate_rank_errors("joining the process group"):
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=collective_seconds)
        )
        return RankChannel(rank, size, max(MIN_SILENCE_SECONDS, collective_seconds))


class RankChannel:
    """One end of the channel; rank 0 sends, the others receive."""

    def __init__(self, rank: int, size: int, silence_seconds: float) -> None:
        self.rank = rank
        self.size = size
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=silence_seconds))
        self._lock = threading.RLock()
        self._sent_at = time.monotonic()
        self._closed = threading.Event()
        self.is_lost = False
        """Whether a heartbeat could not be sent: a rank is gone."""
        if rank == 0 and size > 1:
            threading.Thread(target=self._send_heartbeats, name="rank-beat", daemon=True).start()

    @contextmanager
    def command(self, name: str) -> Iterator[None]:
        """Keep heartbeats off the channel while rank 0 sends a command and takes part in its execution.

        Raises RankLost, in which `name` is the name of the command, if a rank is gone.
        """
        with translate_rank_errors(name), self._lock:
            yield
            self._sent_at = time.monotonic()

    def send(self, command: str, *, payloads: Sequence[Payload] = (), **values: Any) -> None:
        """Send a command to every other rank; `payloads`: what only rank 1, 2, ... receives, in this order."""
        with self._lock:
            for rank in range(1, self.size):
                more, data = payloads[rank - 1] if payloads else ({}, NO_BYTES)
                self._send(rank, {"command": command, **values, **more}, data)

    def receive(self) -> tuple[dict[str, Any], memoryview]:
        """Wait for the next command; returns its values and bytes. Raises RankLost if rank 0 is gone."""
        while True:
            with translate_rank_errors("the next command of rank 0"):
                sizes = torch.zeros(2, dtype=torch.int64)
                dist.recv(sizes, src=0, group=self._group)
                text, data = (torch.empty(size, dtype=torch.uint8) for size in sizes.tolist())
                for part in filter(len, (text, data)):
                    dist.recv(part, src=0, group=self._group)
            header: dict[str, Any] = json.loads(text.numpy().tobytes())
            if header["command"] != _HEARTBEAT:
                return header, data.numpy().data

    def broadcast(self, tensor: Tensor) -> None:
        """Copy rank 0's tensor (on the CPU) into the tensor of every rank; collective."""
        with self._lock:
            dist.broadcast(tensor, src=0, group=self._group)

    def close(self) -> None:
        """On rank 0: command the other ranks to stop."""
        self._closed.set()
        self.send("stop")

    def _send(self, rank: int, header: Mapping[str, Any], data: pa.Buffer) -> None:
        text = bytearray(json.dumps(header).encode())
        sizes = torch.tensor([len(text), len(data)], dtype=torch.int64)
        dist.send(sizes, dst=rank, group=self._group)
        for part in filter(len, (text, data)):
            dist.send(torch.frombuffer(part, dtype=torch.uint8), dst=rank, group=self._group)

    def _send_heartbeats(self) -> None:
        while not self._closed.wait(HEARTBEAT_SECONDS / 4):
            if not self._lock.acquire(blocking=False):
                continue  # a command is being executed
            try:
                if time.monotonic() - self._sent_at > HEARTBEAT_SECONDS and not self._closed.is_set():
                    self.send(_HEARTBEAT)
                    self._sent_at = time.monotonic()
            except RuntimeError:  # the next command raises RankLost
                self.is_lost = True
                return
            finally:
                self._lock.release()


@contextmanager
def translate_rank_errors(operation: str) -> Iterator[None]:
    """Raise errors of torch's process groups as RankLost; the message starts with `operation`. Other errors pass
    unchanged."""
    try:
        yield
    except RuntimeError as error:
        text = str(error).strip()
        if not isinstance(error, dist.DistError) and "gloo" not in text.lower() and "nccl" not in text.lower():
            raise
        raise RankLost(
            f"{operation}: a rank of the trainer is gone or silent ({text.splitlines()[0].split('. ')[0]})"
        ) from error
