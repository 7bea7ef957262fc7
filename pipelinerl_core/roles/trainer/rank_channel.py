"""How rank 0 of the trainer tells the others what to do next: length, JSON header, bytes; over gloo.

    rank 0   --{"command": ...}, rows of this rank-->   rank r       waits here, outside of any collective
    all      == collectives of the learner ==>          all          begin only when every rank has its data

A rank that waits for a command hears of rank 0 every BEAT_SECONDS, so a silence of trainer.collective_seconds means
that it is gone. There are no beats while a command is carried out: nobody would take them.
"""

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from pipelinerl_core.errors import RankLost

Payload = tuple[Mapping[str, Any], bytes]
"""What is for one rank: more values, and bytes."""
MIN_SILENCE_SECONDS = 20.0
"""Shortest silence after which a rank gives the others up."""
BEAT_SECONDS = 5.0
"""Pause between two words to ranks that have nothing to do."""
_BEAT = "beat"


def join_ranks(
    rank: int, size: int, *, store: Store, device: torch.device, collective_seconds: float
) -> "RankChannel":
    """Enter torch's default process group, and the channel beside it; returns when all ranks are there.

    Raises RankLost when they are not within `collective_seconds`.
    """
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    with lost_ranks("the ranks' first meeting"):
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
        self._spoken_at = time.monotonic()
        self._closed = threading.Event()
        if rank == 0 and size > 1:
            threading.Thread(target=self._beat, name="rank-beat", daemon=True).start()

    @contextmanager
    def command(self) -> Iterator[None]:
        """While rank 0 gives a command and takes part in it, nothing else is said."""
        with self._lock:
            yield
            self._spoken_at = time.monotonic()

    def tell(self, command: str, *, payloads: Sequence[Payload] = (), **values: Any) -> None:
        """Send a command to every other rank; `payloads` has what is for rank 1, 2, ... alone."""
        with self._lock:
            for rank in range(1, self.size):
                more, data = payloads[rank - 1] if payloads else ({}, b"")
                self._send(rank, {"command": command, **values, **more}, data)

    def listen(self) -> tuple[dict[str, Any], bytes]:
        """The next command, its values, and bytes. Raises RankLost when rank 0 is gone."""
        while True:
            with lost_ranks("the next command of rank 0"):
                sizes = torch.zeros(2, dtype=torch.int64)
                dist.recv(sizes, src=0, group=self._group)
                data = torch.empty(int(sizes.sum()), dtype=torch.uint8)
                dist.recv(data, src=0, group=self._group)
            raw = data.numpy().tobytes()
            header: dict[str, Any] = json.loads(raw[: int(sizes[0])])
            if header["command"] != _BEAT:
                return header, raw[int(sizes[0]) :]

    def broadcast(self, tensor: Tensor) -> None:
        """Rank 0's tensor (CPU) into that of every rank; call it on all."""
        with self._lock:
            dist.broadcast(tensor, src=0, group=self._group)

    def close(self) -> None:
        """Let the other ranks go."""
        if not self._closed.is_set():
            self._closed.set()
            if self.rank == 0:
                self.tell("stop")

    def _send(self, rank: int, header: Mapping[str, Any], data: bytes) -> None:
        text = json.dumps(header).encode()
        sizes = torch.tensor([len(text), len(data)], dtype=torch.int64)
        dist.send(sizes, dst=rank, group=self._group)
        dist.send(torch.frombuffer(bytearray(text + data), dtype=torch.uint8), dst=rank, group=self._group)

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_SECONDS / 4):
            if not self._lock.acquire(blocking=False):
                continue  # a command is being carried out
            try:
                if time.monotonic() - self._spoken_at > BEAT_SECONDS and not self._closed.is_set():
                    with self.command():
                        self.tell(_BEAT)
            except RuntimeError:  # a rank is gone: whoever needs it finds out
                return
            finally:
                self._lock.release()


@contextmanager
def lost_ranks(what: str) -> Iterator[None]:
    """Errors of torch's process groups as RankLost; everything else as it is."""
    try:
        yield
    except RuntimeError as error:
        text = str(error).strip()
        if not isinstance(error, dist.DistError) and "gloo" not in text.lower() and "nccl" not in text.lower():
            raise
        raise RankLost(
            f"{what}: a rank of the trainer is gone or silent ({text.splitlines()[0].split('. ')[0]})"
        ) from error
