"""How ranks other than 0 write their parts of a checkpoint, beside the next steps, and report the files to rank 0.

rank r  --> checkpoints/<step>.<k>/state-<r>-<number>.safetensors, reports each file in the rendezvous
rank 0  --> waits for the reports of all ranks, then writes the manifest
"""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from pydantic import BaseModel
from torch.distributed import Store  # type: ignore[attr-defined]

from pipelinerl_core.errors import DeadlineExceeded, StoreError, StoreUnavailable
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.training.live_state import LiveState
from pipelinerl_core.types import FileEntry
from pipelinerl_core.weights.checkpoint import write_state

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.05
SILENT_SECONDS = 400.0
"""Longest time without another file of a rank: longer than a request to the store with its repetitions."""


class _Report(BaseModel, frozen=True):
    """What a rank has written for a checkpoint."""

    files: tuple[FileEntry, ...] = ()
    is_complete: bool = False
    error: str = ""
    is_outage: bool = False


def _key(prefix: str, rank: int) -> str:
    return f"{prefix}/{rank}"


class RankFiles:
    """Rank 0's side."""

    def __init__(self, rendezvous: Store, num_ranks: int) -> None:
        self._rendezvous = rendezvous
        self._num_ranks = num_ranks

    def wait(self, prefix: str) -> Sequence[FileEntry]:
        """The files that the other ranks have written below a prefix, after all are stored.

        Raises StoreError if a rank cannot write, DeadlineExceeded after SILENT_SECONDS without a file of a rank.
        """
        return [entry for rank in range(1, self._num_ranks) for entry in self._wait_for(prefix, rank)]

    def _wait_for(self, prefix: str, rank: int) -> tuple[FileEntry, ...]:
        report, key, changed_at = _Report(), _key(prefix, rank), time.monotonic()
        while not report.is_complete:
            newest = _Report()
            if self._rendezvous.check([key]):
                newest = _Report.model_validate_json(self._rendezvous.get(key))
            if newest.error:
                kind = StoreUnavailable if newest.is_outage else StoreError
                raise kind(f"rank {rank} has not written its part of {prefix}: {newest.error}")
            if newest != report:
                report, changed_at = newest, time.monotonic()
            elif time.monotonic() - changed_at > SILENT_SECONDS:
                raise DeadlineExceeded(f"rank {rank} has written no file of {prefix} for {SILENT_SECONDS:.0f} s")
            else:
                time.sleep(_POLL_SECONDS)
        self._rendezvous.delete_key(key)
        return report.files


class RankWriter:
    """The side of another rank: writes states one after the other, on a thread of its own."""

    def __init__(self, run_url: str, rendezvous: Store, rank: int) -> None:
        self._run_url = run_url
        self._rendezvous = rendezvous
        self._rank = rank
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")

    def write(self, prefix: str, state: LiveState) -> None:
        """Begin to write a state below a prefix."""
        self._thread.submit(self._write, prefix, state)

    def _write(self, prefix: str, state: LiveState) -> None:
        report = _Report()
        try:
            for entry in write_state(open_store(self._run_url), prefix, state, rank=self._rank):
                report = report.model_copy(update={"files": (*report.files, entry)})
                self._report(prefix, report)
            self._report(prefix, report.model_copy(update={"is_complete": True}))
        except Exception as error:  # the result of this thread has no reader; rank 0 raises the error
            logger.exception("this rank's part of %s is not written", prefix)
            text = f"{type(error).__name__}: {error}"
            self._report(prefix, _Report(error=text, is_outage=isinstance(error, StoreUnavailable)))

    def _report(self, prefix: str, report: _Report) -> None:
        self._rendezvous.set(_key(prefix, self._rank), report.model_dump_json())
