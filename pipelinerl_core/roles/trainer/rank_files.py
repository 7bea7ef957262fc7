"""How ranks other than 0 write their parts of a checkpoint, beside the next steps, and report the files to rank 0.

rank r writes its files below checkpoints/<step>.<k>/, and gives signs of life, then the names of the files, through
torch's rendezvous. Rank 0 waits for the files of all ranks, then writes the manifest.
"""

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from pydantic import BaseModel
from torch.distributed import Store  # type: ignore[attr-defined]

from pipelinerl_core.errors import RankLost, StoreError, StoreUnavailable
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.training.live_state import LiveState
from pipelinerl_core.types import FileEntry
from pipelinerl_core.weights.checkpoint import write_state

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.05
_BEAT_SECONDS = 5.0
SILENT_SECONDS = 60.0
"""Time without a sign of life of a rank that writes, after which the rank is lost. The store bounds the writing."""


class _Report(BaseModel, frozen=True):
    """What a rank says of its part of a checkpoint."""

    beat: int = 0
    files: tuple[FileEntry, ...] = ()
    is_complete: bool = False
    error: str = ""
    is_outage: bool = False


def _key(prefix: str, rank: int) -> str:
    return f"{prefix}/{rank}"


class RankFiles:
    """Rank 0's side."""

    def __init__(self, rendezvous: Store, num_ranks: int, is_lost: Callable[[], bool]) -> None:
        """is_lost: whether a rank is known to be gone, or the ranks are ended."""
        self._rendezvous = rendezvous
        self._num_ranks = num_ranks
        self._is_lost = is_lost

    def wait(self, prefix: str) -> Sequence[FileEntry]:
        """The files that the other ranks have written below a prefix, after all are stored.

        Raises StoreError if a rank cannot write, RankLost if a rank is gone or has been silent for SILENT_SECONDS.
        """
        reports = {rank: _Report() for rank in range(1, self._num_ranks)}
        changed_at = dict.fromkeys(reports, time.monotonic())
        while waiting := [rank for rank, report in reports.items() if not report.is_complete]:
            if self._is_lost():  # first: the rendezvous may be gone, too
                raise RankLost(f"writing of {prefix}: a rank of the trainer is gone")
            for rank in waiting:
                report = self._read(prefix, rank)
                if report.error:
                    kind = StoreUnavailable if report.is_outage else StoreError
                    raise kind(f"rank {rank} has not written its part of {prefix}: {report.error}")
                if report != reports[rank]:
                    reports[rank], changed_at[rank] = report, time.monotonic()
                elif time.monotonic() - changed_at[rank] > SILENT_SECONDS:
                    raise RankLost(f"writing of {prefix}: rank {rank} has been silent for {SILENT_SECONDS:.0f} s")
            time.sleep(_POLL_SECONDS)
        for rank in reports:
            self._rendezvous.delete_key(_key(prefix, rank))
        return [entry for report in reports.values() for entry in report.files]

    def _read(self, prefix: str, rank: int) -> _Report:
        key = _key(prefix, rank)
        return _Report.model_validate_json(self._rendezvous.get(key)) if self._rendezvous.check([key]) else _Report()


class RankWriter:
    """The side of another rank: writes states one after the other, on a thread that ends with the process."""

    def __init__(self, run_url: str, rendezvous: Store, rank: int) -> None:
        self._run_url = run_url
        self._rendezvous = rendezvous
        self._rank = rank
        self._store: ObjectStore | None = None
        self._states: queue.SimpleQueue[tuple[str, LiveState]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="checkpoint", daemon=True).start()

    def write(self, prefix: str, state: LiveState) -> None:
        """Begin to write a state below a prefix."""
        self._states.put((prefix, state))

    def _run(self) -> None:
        while True:
            prefix, state = self._states.get()
            is_written = threading.Event()
            beating = threading.Thread(
                target=self._beat, args=(prefix, is_written), name="checkpoint-beat", daemon=True
            )
            beating.start()
            report = self._write(prefix, state)
            is_written.set()
            beating.join()
            self._report(prefix, report)

    def _write(self, prefix: str, state: LiveState) -> _Report:
        try:
            self._store = self._store or open_store(self._run_url)
            return _Report(files=tuple(write_state(self._store, prefix, state, rank=self._rank)), is_complete=True)
        except Exception as error:  # this thread has no reader; rank 0 raises the error
            logger.exception("this rank's part of %s is not written", prefix)
            return _Report(error=f"{type(error).__name__}: {error}", is_outage=isinstance(error, StoreUnavailable))

    def _beat(self, prefix: str, is_written: threading.Event) -> None:
        for beat in itertools.count(1):
            if is_written.wait(_BEAT_SECONDS):
                return
            self._report(prefix, _Report(beat=beat))

    def _report(self, prefix: str, report: _Report) -> None:
        self._rendezvous.set(_key(prefix, self._rank), report.model_dump_json(exclude_defaults=True))
