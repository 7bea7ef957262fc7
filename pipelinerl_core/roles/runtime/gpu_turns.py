"""Turns on one GPU (placement.share_gpu=turns): locks of two files in the run's shared memory.

The role that computes on the GPU locks `turn`: the actor, unless the trainer waits. The trainer locks `wanted` from
the wait for its turn to the end of the turn. The kernel releases the locks of a process that dies, so a crash needs
no other mechanism. A GPU belongs to one run (supervision/gpus.py), and so do the files.
"""

import asyncio
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from pipelinerl_core.errors import DeadlineExceeded
from pipelinerl_core.interfaces import Engine
from pipelinerl_core.run.context import RunContext, private_directory
from pipelinerl_core.weights.memory import shm_directory

TURN_SECONDS = 1800.0
"""Longest wait of a role for its turn."""
_POLL_SECONDS = 0.005


@contextmanager
def trainer_turn(context: RunContext, heartbeat: Callable[[str], None]) -> Iterator[None]:
    """The trainer has the turn in the block, if there are turns.

    heartbeat: called while the actor has the turn. Raises DeadlineExceeded, OSError.
    """
    if not context.config.gpu_turns:
        yield
        return
    with ExitStack() as files:
        wanted, turn = (_opened(files, context.run_id, name) for name in ("wanted", "turn"))  # closed in reverse
        started = time.monotonic()
        while not (_locked(wanted) and _locked(turn)):
            _check_deadline(started, "the actor")
            heartbeat("waiting for the GPU")
            time.sleep(_POLL_SECONDS)
        yield
        torch.cuda.empty_cache()


class ActorTurns:
    """The actor's side: the engine rests while the trainer has the turn."""

    def __init__(self, context: RunContext, heartbeat: Callable[[str], None]) -> None:
        """heartbeat: called while the trainer has the turn. Raises OSError."""
        files = ExitStack()
        self._wanted, self._turn = (_opened(files, context.run_id, name) for name in ("wanted", "turn"))
        self._heartbeat = heartbeat
        self.close = files.close

    async def take(self) -> None:
        """Wait until the trainer does not want the GPU, and take the turn. Raises DeadlineExceeded."""
        started = time.monotonic()
        while self._is_wanted() or not _locked(self._turn):
            _check_deadline(started, "the trainer")
            self._heartbeat("the trainer computes on the GPU")
            await asyncio.sleep(_POLL_SECONDS)

    async def run(self, engine: Engine) -> None:
        """Between two decode steps, give the turn to the trainer if it waits, until cancelled."""
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            if self._is_wanted():
                async with engine.resting():
                    torch.cuda.empty_cache()
                    fcntl.flock(self._turn, fcntl.LOCK_UN)
                    await self.take()

    def _is_wanted(self) -> bool:
        if not _locked(self._wanted, fcntl.LOCK_SH):
            return True
        fcntl.flock(self._wanted, fcntl.LOCK_UN)
        return False


def _opened(files: ExitStack, run_id: str, name: str) -> int:
    path = private_directory(shm_directory(run_id)) / name
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    files.callback(os.close, file)
    return file


def _locked(file: int, how: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _check_deadline(started: float, role: str) -> None:
    if time.monotonic() > started + TURN_SECONDS:
        raise DeadlineExceeded(f"{role} has computed on the GPU for {TURN_SECONDS:.0f} s. Look at its log")
