"""Ranks of a trainer as child processes: started, watched, and ended with this process."""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress

from pipelinerl_core.run.records import RendezvousRecord

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.1

RANK_STOP_SECONDS = 5.0
"""Time for a rank to end after the stop command."""


class RankProcesses:
    """Some ranks of a trainer, on this host. Call `start` on the main thread: the kernel ends the ranks with it."""

    def __init__(self, run_url: str) -> None:
        """`run_url` is on the command lines of the ranks, which also identifies the run in a list of processes."""
        self._run_url = run_url
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._logged: set[int] = set()
        self._size = 0

    def start(self, ranks: Iterable[int], rendezvous: RendezvousRecord) -> None:
        """Start these ranks; the n-th rank on this host uses its n-th GPU."""
        self._size = rendezvous.size
        command = [sys.executable, "-m", "pipelinerl_core.roles.trainer.rank", "--run", self._run_url]
        command += ["--rendezvous", rendezvous.model_dump_json(), "--parent-pid", str(os.getpid())]
        for rank in ranks:
            self._processes[rank] = subprocess.Popen([*command, "--rank", str(rank)], stdin=subprocess.DEVNULL)

    def log_failures(self, wait_seconds: float = 0.0) -> int | None:
        """Log each failed rank once; returns the exit code for this process, None if no rank has failed.

        wait_seconds: how long to wait for a failure.
        """
        deadline = time.monotonic() + wait_seconds
        while not (failed := self._failed()) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        for rank in sorted(failed.keys() - self._logged):
            code = failed[rank]
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            logger.error("rank %d of %d %s; the current step is not committed", rank, self._size, how)
        self._logged |= failed.keys()
        return max(1, *failed.values()) if failed else None

    def _failed(self) -> dict[int, int]:
        """Rank -> exit code, of each rank that has failed."""
        return {rank: code for rank, process in self._processes.items() if (code := process.poll())}

    def have_ended(self) -> bool:
        return all(process.poll() is not None for process in self._processes.values())

    def wait(self, seconds: float) -> None:
        """Wait at most so long for all ranks to end by themselves."""
        deadline = time.monotonic() + seconds
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))

    def stop(self, seconds: float) -> None:
        """Wait at most so long for the ranks to end by themselves, then kill them."""
        self.wait(seconds)
        for process in self._processes.values():
            process.kill()
            process.wait()
