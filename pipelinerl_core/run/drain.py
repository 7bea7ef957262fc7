"""A request to drain a run, as an object of the run: `pipelinerl drain` writes it, the trainer reads it."""

import logging
import os
import socket
import threading
import time
from typing import Any

from pipelinerl_core.errors import BrokenRecord, ConfigError, MissingObject
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.run.hub_status import HubWatch
from pipelinerl_core.run.locate import user_name
from pipelinerl_core.run.reading import list_keys, read_record
from pipelinerl_core.run.records import CONTROL_KEY, ControlRecord, parse_commit_key
from pipelinerl_core.storage.object_store import open_store

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
"""Between two reads of the request."""


def request_drain(url: str) -> dict[str, Any]:
    """Request that the live run at a URL stops after its next commit; ConfigError if the run is not live."""
    store = open_store(url)
    if HubWatch(store).find_live() is None:
        raise ConfigError(f"{url}: this run is not live. Only a live run can be drained")
    ask_to_drain(store, by=f"{user_name() or os.getuid()}@{socket.gethostname()}")
    steps = [parse_commit_key(key)[0] for key in list_keys(store, "commits")]
    return {"run_id": url.rpartition("/")[2], "step": max(steps, default=-1)}


def ask_to_drain(store: ObjectStore, by: str) -> None:
    """Write the request; `by` names the user or the part that requests the drain."""
    store.put(CONTROL_KEY, ControlRecord(desired="drain", at=time.time(), by=by).model_dump_json().encode())


def clear_drain_request(store: ObjectStore) -> None:
    """Remove the request of an earlier start, which must not stop a new start."""
    store.delete([CONTROL_KEY])


def wants_drain(store: ObjectStore) -> bool:
    """Whether a drain is requested: the run is to stop after its next commit. Raises StoreError."""
    try:
        return read_record(store, CONTROL_KEY, ControlRecord).desired == "drain"
    except MissingObject:
        return False
    except BrokenRecord as error:
        logger.error("%s is ignored: %s", CONTROL_KEY, error)
        return False


def drained_by(store: ObjectStore) -> str:
    """Who has requested the drain that `wants_drain` returns. Raises MissingObject, StoreError."""
    return read_record(store, CONTROL_KEY, ControlRecord).by


def stop_when_drained(store: ObjectStore, stop: threading.Event) -> None:
    """Set `stop` once a drain is requested; a separate thread polls for the request."""

    def poll() -> None:
        while not stop.wait(LOOK_SECONDS):
            try:
                if wants_drain(store):
                    logger.info("drain requested: the current step is the last step")
                    stop.set()
            except Exception as error:  # noqa: BLE001 - if the thread ended, it would miss later requests
                logger.warning("%s could not be read: %s: %s", CONTROL_KEY, type(error).__name__, error)

    threading.Thread(target=poll, name="control", daemon=True).start()
