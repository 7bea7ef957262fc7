"""A request to drain a run, as an object of the run: `pipelinerl drain` writes it, the trainer reads it."""

import getpass
import logging
import socket
import threading
import time
from typing import Any

from pipelinerl_core.errors import BrokenRecord, ConfigError, MissingObject
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.run.hub_status import is_live, read_hub
from pipelinerl_core.run.reading import read_record
from pipelinerl_core.run.records import CONTROL_KEY, ControlRecord, parse_commit_key
from pipelinerl_core.storage.object_store import open_store

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
"""How soon a wish is seen."""


def request_drain(url: str) -> dict[str, Any]:
    """Let the live run at a URL stop after its next commit; ConfigError when it is not live."""
    store = open_store(url)
    if not is_live(read_hub(store)):
        raise ConfigError(f"{url}: this run is not live, there is nothing to drain")
    ask_to_drain(store, by=f"{getpass.getuser()}@{socket.gethostname()}")
    steps = [parse_commit_key(key)[0] for key in store.list("commits")]
    return {"run_id": url.rpartition("/")[2], "step": max(steps, default=-1)}


def ask_to_drain(store: ObjectStore, by: str) -> None:
    """Write the request; `by` says who made it."""
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
