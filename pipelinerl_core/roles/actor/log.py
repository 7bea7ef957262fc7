"""The actor's write-ahead log: partial rollouts of open groups, so that another actor can continue them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from pipelinerl_core.config import RunConfig
from pipelinerl_core.data.partials import PartialLog, PartialReader
from pipelinerl_core.errors import StoreError
from pipelinerl_core.interfaces import Engine, ObjectStore
from pipelinerl_core.messages import Lease
from pipelinerl_core.rollouts.runner import GroupRunner
from pipelinerl_core.types import PartialRow

logger = logging.getLogger(__name__)

# Turns of the event loop until a flushed chunk has passed the engine's generator and the runner.
_TURNS = 3
_READERS = 4
"""Threads that read inherited logs; the leases of a dead actor arrive together, and the store may be slow."""


class GroupLog:
    """The log of one actor epoch. Called on the actor's event loop."""

    def __init__(
        self,
        config: RunConfig,
        store: ObjectStore,
        engine: Engine,
        runner: GroupRunner,
        *,
        actor: str,
        epoch: int,
        seal: Callable[[], Awaitable[None]],
    ) -> None:
        """`seal` writes finished groups to a segment; groups in a segment need no log."""
        self._seal = seal
        self._seconds = config.store.log_seconds(store.url)
        self._engine = engine
        self._runner = runner
        self._log = PartialLog(store, actor=actor, epoch=epoch)
        self._reader = PartialReader(store)
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="inherited-logs")
        self._writing = asyncio.Lock()

    async def run(self) -> None:
        """Write every store.partial_seconds until cancelled; returns at once if the log is switched off."""
        while self._seconds > 0:
            await asyncio.sleep(self._seconds)
            await self._seal()
            await self.flush()

    async def flush(self) -> None:
        """Write everything that was sampled and scored until now."""
        if self._seconds <= 0:
            return
        self._engine.flush()
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        async with self._writing:
            await asyncio.to_thread(self._log.write, self._runner.growth())

    async def forget(self, keys: Iterable[tuple[int, int]]) -> None:
        """Remove groups, (group_id, attempt), that are sealed or no longer leased to this actor."""
        closed = list(keys)
        self._runner.forget(closed)
        if self._seconds > 0 and closed:
            async with self._writing:
                await asyncio.to_thread(self._log.forget, closed)

    async def restore(self, lease: Lease) -> dict[int, PartialRow]:
        """rollout_index -> the logged part of the rollout, from the previous holders of the group.

        If a log cannot be read, the group is sampled from the start.
        """
        if not lease.holders:
            return {}
        try:
            restored = await asyncio.get_running_loop().run_in_executor(
                self._readers, self._reader.read_continuations, lease.group_id, lease.holders
            )
        except StoreError as error:
            logger.warning("group %d is sampled from the start: its log cannot be read: %s", lease.group_id, error)
            return {}
        num_tokens = sum(len(row.token_ids) for row in restored.values())
        num_ended = sum(row.finish_reason is not None for row in restored.values())
        logger.info(
            "group %d attempt %d: continued with %d logged tokens of %d rollouts, %d of which had ended",
            lease.group_id, lease.attempt, num_tokens, len(restored), num_ended,
        )  # fmt: skip
        return restored

    def close(self) -> None:
        """Start no further reading of an inherited log. Does not wait for the current ones."""
        self._readers.shutdown(wait=False, cancel_futures=True)
