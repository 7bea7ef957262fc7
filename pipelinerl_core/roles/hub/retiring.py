"""Writes the objects of retired actor lives (ledger/retirement.py), on a thread of its own.

A slow store must not delay the hub's tick, which renews leases.
"""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from pipelinerl_core.errors import StoreError
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.ledger import ActorKey
from pipelinerl_core.roles.hub.service import Hub
from pipelinerl_core.run.records import retired_key

logger = logging.getLogger(__name__)

_PAUSE_SECONDS = 5.0


class RetiringThread:
    """Retires the lives that the hub selects."""

    def __init__(self, hub: Hub, store: ObjectStore) -> None:
        self._hub = hub
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="retire")
        self._running: Future[None] | None = None
        self._looked_at = time.monotonic()

    def tick(self) -> None:
        """Select lives if the pause is over and the previous lives are retired; never waits for the store."""
        is_busy = self._running is not None and not self._running.done()
        if is_busy or time.monotonic() - self._looked_at < _PAUSE_SECONDS:
            return
        self._looked_at = time.monotonic()
        lives = self._hub.lives_to_retire()
        if lives:
            self._running = self._thread.submit(self.retire, lives)

    def retire(self, lives: Sequence[ActorKey]) -> None:
        """Write the object of each life, then remove the life from the ledger."""
        for actor in lives:
            try:
                self._store.put(retired_key(*actor), b"")
            except StoreError as error:
                logger.warning("%s is not retired yet: %s", actor, error)
                return
            self._hub.retire([actor])

    def close(self) -> None:
        """Retire no further lives."""
        self._thread.shutdown(wait=False, cancel_futures=True)
