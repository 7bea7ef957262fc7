"""Simulated time and threads. Every thread of every simulated process is a greenlet; one of them runs at a time.

A thread runs until it waits: for time, a lock, a store or a message. Then the seed chooses the next thread among
those that can go on. If none can, the clock jumps to the next time that a thread waits for.
"""

import asyncio
import heapq
import random
import sys
from collections.abc import Callable
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

EPOCH = 1_800_000_000.0
"""Unix seconds at the start of a simulation."""


class Hang(Exception):
    """No thread can go on, and none waits for a time."""


class Process:
    """A simulated process of a host. `kill` ends its threads where they are: no `finally` block runs."""

    def __init__(self, world: "World", name: str, host: str, pid: int) -> None:
        self.world, self.name, self.host, self.pid = world, name, host, pid
        self.is_alive = True
        self.clock_offset = 0.0
        """Seconds by which this host's clock is ahead."""
        self.paused_until = 0.0
        self.code: int | None = None
        self.on_end: list[Callable[[Process], None]] = []
        self.stop: Any = None
        """Event that SIGTERM sets."""
        self.stall: tuple[int, float, str] | None = None
        """After this number of requests to the store, a request takes these seconds."""
        self.changes_left: int | None = None
        """The process is killed right after this number of objects more that it writes or deletes."""
        self.lacking: tuple[int, float] | None = None
        """After this number of listings, a listing has only this share of its keys, the oldest."""
        self.cut_off_until = 0.0
        """Until then no message from or to this process arrives."""
        self.store_fails_until = 0.0
        """Until then the store does not answer this process."""
        self.has_bad_engine = False
        """A fault has changed the engine of this actor: one of the next three."""
        self.engine_fails = False
        """The engine of this actor has ended."""
        self.failing_swaps = 0
        """The next swaps of this number fail."""
        self.engine_is_foreign = False
        """From now on the engine samples with other weights than its version's."""

    def start(self, main: Callable[[], int]) -> None:
        """Run `main` in a thread; its result is the exit code."""

        def body() -> None:
            self.end(main())

        self.world.spawn(self, body)

    def end(self, code: int) -> None:
        """The process is gone."""
        if not self.is_alive:
            return
        self.is_alive, self.code = False, code
        for action in self.on_end:
            action(self)

    def kill(self) -> None:
        """SIGKILL."""
        self.end(-9)


class Task:
    """A simulated thread."""

    __slots__ = ("glet", "hooks", "is_done", "loop", "process", "token", "waiters", "woken")

    def __init__(self, process: Process, glet: greenlet) -> None:
        self.process, self.glet = process, glet
        self.token = 0
        """Number of waits so far: a wake or a time that belongs to an earlier wait has no effect."""
        self.woken = False
        self.loop: Any = None
        self.hooks: Any = (None, None)
        self.is_done = False
        self.waiters: list[tuple[Task, int]] = []


class World:
    """The clock and the threads of one simulation."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.current: Task | None = None
        self.is_over = False
        self.is_finished = False
        """Ends `run`."""
        self.failure: BaseException | None = None
        self._ready: list[Task] = []
        self._times: list[tuple[float, int, Task, int, Callable[[], None] | None]] = []
        self._serial = 0
        self._hub = getcurrent()
        self._tasks: dict[Task, None] = {}

    # ---- threads -------------------------------------------------------------------------------------------------

    def spawn(self, process: Process, body: Callable[[], Any]) -> Task:
        """Start a thread of a process."""

        def run() -> None:
            try:
                body()
            except GreenletExit as ended:
                if process.is_alive and not self.is_over:
                    self.failure = RuntimeError("a thread of a living process was ended")
                    self.failure.__cause__ = ended
            except BaseException as error:  # noqa: BLE001 - ends the simulation
                self.failure = self.failure or error
            task.is_done = True
            self._tasks.pop(task, None)
            for waiter, token in task.waiters:
                self.wake(waiter, token)

        task = Task(process, greenlet(run, self._hub))
        self._tasks[task] = None
        self._ready.append(task)
        return task

    def park(self, seconds: float | None = None) -> bool:
        """Wait for `wake`, at most `seconds`; False after that time."""
        task = self.current
        if self.is_over or task is None or not task.process.is_alive:
            raise GreenletExit
        task.woken = False
        if seconds is not None:
            self._serial += 1
            heapq.heappush(self._times, (self.now + max(0.0, seconds), self._serial, task, task.token, None))
        self._switch(task)
        return task.woken

    def sleep(self, seconds: float) -> None:
        """Wait for a time; at least lets other threads go on."""
        if seconds > 0:
            self.park(seconds)
        else:
            self.pause()

    def pause(self) -> None:
        """Let any other thread that can go on go first."""
        task = self.current
        if self.is_over or task is None or not task.process.is_alive:
            raise GreenletExit
        self._ready.append(task)
        self._switch(task)

    def wake(self, task: Task, token: int) -> None:
        """Let a thread go on, if it still waits as it did when `token` was its token."""
        if task.token == token and not task.is_done:
            task.token += 1
            task.woken = True
            self._ready.append(task)

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Call `action` at a time, between the threads."""
        self._serial += 1
        heapq.heappush(self._times, (when, self._serial, None, 0, action))  # type: ignore[arg-type]

    def _switch(self, task: Task) -> None:
        task.loop = asyncio._get_running_loop()
        if task.loop is not None:
            task.hooks = sys.get_asyncgen_hooks()
        self._hub.switch()
        if self.is_over or not task.process.is_alive:
            raise GreenletExit

    # ---- the scheduler -------------------------------------------------------------------------------------------

    def run(self, until: float) -> None:
        """Run until `is_finished` is set, or until a time. Raises the first failure of a thread, and Hang."""
        ready, times, rng = self._ready, self._times, self.rng
        while not self.is_finished and self.now < until:
            if ready:
                index = int(rng.random() * len(ready))
                ready[index], ready[-1] = ready[-1], ready[index]
                task = ready.pop()
                process = task.process
                if not process.is_alive:
                    continue
                if process.paused_until > self.now:
                    self.at(process.paused_until, lambda task=task: ready.append(task))
                    continue
                self.current = task
                asyncio._set_running_loop(task.loop)
                if task.loop is not None:
                    sys.set_asyncgen_hooks(*task.hooks)
                task.glet.switch()
                asyncio._set_running_loop(None)
                self.current = None
                if self.failure is not None:
                    raise self.failure
            elif times:
                when, _, task, token, action = heapq.heappop(times)
                self.now = max(self.now, when)
                if action is not None:
                    action()
                elif task.token == token and not task.is_done:
                    task.token += 1
                    ready.append(task)
            else:
                raise Hang("no thread can go on")

    def close(self) -> None:
        """End all threads; nothing that their `finally` blocks do has an effect."""
        self.is_over = True
        for task in self._tasks:
            task.process.is_alive = False
        self._tasks.clear()
        self._ready.clear()
        self._times.clear()
