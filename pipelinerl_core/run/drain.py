"""What people want of a run, in its own objects: `pipelinerl drain` writes it, the trainer looks."""

import logging
import threading
import time

from pipelinerl_core.errors import BrokenRecord, MissingObject
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.run.reading import read_record
from pipelinerl_core.run.records import CONTROL_KEY, ControlRecord

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
"""How soon a wish is seen."""


def ask_to_drain(store: ObjectStore, by: str) -> None:
    """Let the run stop after its next commit; `by` says who wants it."""
    store.put(CONTROL_KEY, ControlRecord(desired="drain", at=time.time(), by=by).model_dump_json().encode())


def forget_wishes(store: ObjectStore) -> None:
    """A start means to run, whatever was wanted of the start before."""
    store.delete([CONTROL_KEY])


def wants_drain(store: ObjectStore) -> bool:
    """Whether the run is to stop after its next commit. Raises StoreError."""
    try:
        return read_record(store, CONTROL_KEY, ControlRecord).desired == "drain"
    except MissingObject:
        return False
    except BrokenRecord as error:
        logger.error("%s is ignored: %s", CONTROL_KEY, error)
        return False


def stop_when_drained(store: ObjectStore, stop: threading.Event) -> None:
    """Set `stop` once the run is to drain; looks from a thread of its own."""

    def look() -> None:
        while not stop.wait(LOOK_SECONDS):
            try:
                if wants_drain(store):
                    logger.info("asked to drain: this step is the last one")
                    stop.set()
            except Exception as error:  # noqa: BLE001 - whatever it is, a thread that ended would never see a drain
                logger.warning("%s could not be read: %s: %s", CONTROL_KEY, type(error).__name__, error)

    threading.Thread(target=look, name="control", daemon=True).start()
