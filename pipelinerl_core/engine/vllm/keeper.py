"""Pauses, updates and restarts one engine core, so that its weight version is known at all times.

After a failed update the weights of an engine core are unknown, and a dead engine core has none. In both cases the
engine core is started again with the last good version, and the sequences return to the queue.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pipelinerl_core.engine.vllm.core import VLLMCore
from pipelinerl_core.engine.vllm.weights import StagedWeights
from pipelinerl_core.errors import EngineError, SwapError
from pipelinerl_core.interfaces import BroadcastGroup, WeightUpdate
from pipelinerl_core.restart_budget import RestartBudget

logger = logging.getLogger(__name__)

# With more restarts within the window the engine gives up.
_RESTARTS = 3
_RESTART_WINDOW_SECONDS = 600.0
# A reason to be closed: the restarted core has weights older than `version`, which was never in a file.
_WEIGHTS = "weights"


class CoreKeeper:
    """One engine core and its weights.

    on_open is called whenever requests may be sent again; on_failure once, with the reason, after the last restart.
    """

    def __init__(
        self,
        core: VLLMCore,
        staged: StagedWeights,
        *,
        version: int,
        on_open: Callable[[], None],
        on_failure: Callable[[str], None],
    ) -> None:
        self.core = core
        self.version = version
        """Version that samples the next token."""
        self.is_paused = False
        self.num_deaths = 0
        self.group: BroadcastGroup | None = None
        """The broadcast group of the core's workers, if any."""
        self._num_received = 0
        """Broadcasts received in `group`."""
        self._is_on_disk = True
        self._staged = staged
        self._on_open = on_open
        self._on_failure = on_failure
        self._closed_for = {"start"}
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._restart_task: asyncio.Task[None] | None = None
        self._restarts = RestartBudget(
            _RESTARTS, f"at most {_RESTARTS} within {_RESTART_WINDOW_SECONDS:.0f} s", clock=time.monotonic,
            window_seconds=_RESTART_WINDOW_SECONDS,
        )  # fmt: skip
        self._has_failed = False

    @property
    def is_open(self) -> bool:
        """Whether requests may be sent: no pause, no swap, no restart."""
        return not self._closed_for

    @property
    def needs_weights(self) -> bool:
        """Whether the restarted core waits for a file with `version` or newer; `version` itself came by broadcast."""
        return _WEIGHTS in self._closed_for

    async def join(self, group: BroadcastGroup, first_rank: int) -> None:
        """Begin to join a broadcast group. After an EngineError the engine is in no group, and the core restarts."""
        async with self._lock:
            self.group = None
            try:
                await self.core.join(group, first_rank)
            except EngineError as error:
                self.restart(str(error))
                raise
            self.group, self._num_received = group, 0

    async def open(self) -> None:
        """Set the version of a started core, and allow requests."""
        await self.core.set_version(self.version)
        self._open("start")

    def set_paused(self, is_paused: bool) -> None:
        """Pause between two steps, or continue."""
        if is_paused == self.is_paused:
            return
        self.is_paused = is_paused
        if is_paused:
            self._closed_for.add("pause")
        self._spawn(self._follow_pause(), "vllm-pause")

    async def swap(
        self, update: WeightUpdate, *, clear_cache: bool, in_pause: Callable[[], Awaitable[None]]
    ) -> float:
        """Load a checked update; returns the seconds of the pause.

        in_pause is awaited in the pause, before the weights change. Raises SwapError: if the update is not the next
        broadcast of the group, the core continues unchanged; otherwise the core restarts with the last good version.
        """
        path = None if update.group else await asyncio.to_thread(self._staged.stage, update)
        if self._restart_task is not None:
            await self._restart_task
        if self._has_failed:
            raise SwapError(f"no swap to version {update.version}: vLLM has ended")
        self._closed_for.add("swap")
        try:
            async with self._lock:
                if update.group:
                    self._check_next_broadcast(update)
                start = time.perf_counter()
                await self.core.pause(clear_cache=clear_cache)
                await in_pause()
                await self._load(path, update.version)
                self._closed_for.discard(_WEIGHTS)
                if not self.is_paused:
                    await self.core.resume()
                return time.perf_counter() - start
        except SwapError:  # raised before the pause
            raise
        except EngineError as error:
            self.restart(str(error))
            raise SwapError(f"no swap to version {update.version}, vLLM restarts: {error}") from error
        finally:
            self._open("swap")

    @asynccontextmanager
    async def resting(self) -> AsyncIterator[None]:
        """`VLLMCore.rest` and `wake` around the block. A core that dies meanwhile starts again after the block."""
        self._closed_for.add("rest")
        async with self._lock:
            rests = True
            try:
                await self.core.rest()
            except EngineError as error:
                rests = False
                self.restart(str(error))
                await self.core.close()  # its memory is free in the block
            yield
            try:
                if rests:
                    await self.core.wake()
                    if self.is_paused:
                        await self.core.pause(clear_cache=False)
            except EngineError as error:
                self.restart(str(error))
        self._open("rest")

    def restart(self, cause: str) -> None:
        """Start a restart of the engine core unless one is in progress; fail if the restart budget is spent."""
        if self._has_failed or (self._restart_task is not None and not self._restart_task.done()):
            return
        self.num_deaths += 1
        if not self._restarts.take():
            self._fail(f"vLLM's engine core died, {self._restarts.spent_text}; last: {cause}")
            return
        self._closed_for.add("restart")
        self.group = None
        self._restart_task = self._spawn(self._restart(), "vllm-restart")

    async def close(self) -> None:
        """End the engine core; closing twice is harmless."""
        self._has_failed = True
        tasks = [task for task in self._tasks if not task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.core.close()
        self._staged.close()

    def _check_next_broadcast(self, update: WeightUpdate) -> None:
        """Raise SwapError unless this update is the broadcast that the workers would receive next.

        The trainer may announce a broadcast before the last receiver has read the previous broadcast. If this engine
        has missed a broadcast, its workers would load old weights under the new version; so the engine leaves the
        group and loads the version from a file.
        """
        number = self.group.number if self.group is not None else 0
        if update.group != number:
            raise SwapError(
                f"version {update.version} is broadcast to group {update.group}, the engine is in {number}"
            )
        if update.broadcast_index != self._num_received + 1:
            self.group = None
            raise SwapError(
                f"version {update.version} is broadcast {update.broadcast_index} of group {number}, the engine has "
                f"received {self._num_received}: the engine leaves the group"
            )

    async def _load(self, path: Path | None, version: int) -> None:
        """Load from a file, or, if `path` is None, from the current broadcast."""
        if path is not None:
            await self.core.load_weights(str(path), version)
        elif self.group is not None:
            # Each member waits for the others to join, and then for the transfer.
            await self.core.receive_weights(self.group.layout, version, 2 * self.group.deadline_seconds)
            self._num_received += 1
        else:
            raise EngineError("the engine has left the broadcast group")
        self.version = version
        self._is_on_disk = path is not None
        self._staged.set_current(path)

    async def _follow_pause(self) -> None:
        """Pause or resume the core as requested last."""
        async with self._lock:
            try:
                if self.is_paused:
                    await self.core.pause(clear_cache=False)
                    return
                await self.core.resume()
            except EngineError as error:
                self.restart(str(error))
            if not self.is_paused:
                self._open("pause")

    async def _restart(self) -> None:
        try:
            async with self._lock:
                await self.core.start()
                if not self._is_on_disk:
                    self._closed_for.add(_WEIGHTS)
                if self._staged.current is None:
                    await self.core.set_version(self.version)
                else:
                    await self.core.load_weights(str(self._staged.current), self.version)
                if self.is_paused:
                    await self.core.pause(clear_cache=False)
        except EngineError as error:
            self._fail(f"vLLM's engine core could not be restarted: {error}")
            return
        self._open("restart")

    def _open(self, reason: str) -> None:
        self._closed_for.discard(reason)
        if self.is_open:
            self._on_open()

    def _fail(self, message: str) -> None:
        self._has_failed = True
        logger.error("%s", message)
        self._on_failure(message)

    def _spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
