"""What roles import as `time`, `threading` and `ThreadPoolExecutor`, on a simulated clock.

`installed` puts these into the modules of the project, whose code stays as it is.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import queue as real_queue
import socket as real_socket
import sys
import threading as real_threading
import time as real_time
import uuid as real_uuid
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from tests.simulation.world import EPOCH, Process, Task, World

_WORLD: World | None = None


def world() -> World:
    """The running simulation."""
    assert _WORLD is not None
    return _WORLD


def process() -> Process:
    """The process of the running thread."""
    task = world().current
    assert task is not None
    return task.process


class Time:
    """The module `time`."""

    strftime, gmtime, localtime = real_time.strftime, real_time.gmtime, real_time.localtime

    @staticmethod
    def monotonic() -> float:
        return 1000.0 + world().now

    perf_counter = monotonic

    @staticmethod
    def time() -> float:
        return EPOCH + world().now + process().clock_offset

    @staticmethod
    def time_ns() -> int:
        return int(Time.time() * 1e9)

    @staticmethod
    def process_time() -> float:
        return 0.0

    thread_time = process_time

    @staticmethod
    def sleep(seconds: float) -> None:
        world().sleep(seconds)


class Lock:
    """threading.Lock, and RLock with `is_reentrant`."""

    is_reentrant = False

    def __init__(self) -> None:
        self._owner: Task | None = None
        self._depth = 0
        self._waiters: deque[tuple[Task, int]] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        own = world()
        me = own.current
        while self._owner is not None and not (self.is_reentrant and self._owner is me):
            if not blocking:
                return False
            assert me is not None
            self._waiters.append((me, me.token))
            if not own.park(None if timeout < 0 else timeout):
                return False
        self._owner = me
        self._depth += 1
        return True

    def check_owned(self) -> None:
        """RuntimeError if another thread, or none, holds the lock; a thread that ends may do anything."""
        me = world().current
        if self._owner is not me and me is not None and me.process.is_alive:
            raise RuntimeError("the lock is not held")

    def release(self) -> None:
        if self.is_reentrant:
            self.check_owned()
        self._depth -= 1
        if not self._depth:
            self._owner = None
            while self._waiters:
                task, token = self._waiters.popleft()
                if task.token == token and task.process.is_alive:
                    world().wake(task, token)
                    return

    def locked(self) -> bool:
        return self._owner is not None

    def __enter__(self) -> "Lock":
        self.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


class RLock(Lock):
    """threading.RLock."""

    is_reentrant = True


class Condition:
    """threading.Condition."""

    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = lock or RLock()
        self._waiters: list[tuple[Task, int]] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> "Condition":
        self._lock.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        own = world()
        me = own.current
        assert me is not None
        self._lock.check_owned()
        self._waiters.append((me, me.token))
        depth, self._lock._depth = self._lock._depth, 1
        self._lock.release()
        is_woken = own.park(timeout)
        self._lock.acquire()
        self._lock._depth = depth
        return is_woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        until = None if timeout is None else world().now + timeout
        while not (result := predicate()):
            left = None if until is None else until - world().now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    def notify(self, number: int = 1) -> None:
        self._lock.check_owned()
        while number and self._waiters:
            task, token = self._waiters.pop(0)
            if task.token == token and task.process.is_alive:
                number -= 1
                world().wake(task, token)

    def notify_all(self) -> None:
        self.notify(len(self._waiters))


class Event:
    """threading.Event."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: list[tuple[Task, int]] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        waiters, self._waiters = self._waiters, []
        for task, token in waiters:
            world().wake(task, token)

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            me = world().current
            assert me is not None
            self._waiters.append((me, me.token))
            world().park(timeout)
        return self._is_set


class SimpleQueue:
    """queue.SimpleQueue."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._changed = Condition()

    def put(self, item: Any) -> None:
        with self._changed:
            self._items.append(item)
            self._changed.notify()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        with self._changed:
            if not self._changed.wait_for(lambda: self._items, timeout):
                raise real_queue.Empty
            return self._items.popleft()


class Queue:
    """The module `queue`."""

    SimpleQueue, Empty = SimpleQueue, real_queue.Empty


class Thread:
    """threading.Thread; daemon or not, it ends with its process."""

    def __init__(
        self, target: Callable[..., Any], name: str = "", args: tuple[Any, ...] = (), *, daemon: bool = True
    ) -> None:
        self._target, self._args, self.name = target, args, name
        self._task: Task | None = None

    def run(self) -> None:
        self._target(*self._args)

    def start(self) -> None:
        self._task = world().spawn(process(), self.run)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.is_done

    def join(self, timeout: float | None = None) -> None:
        wait_for_end(self._task, timeout)


def wait_for_end(task: Task | None, timeout: float | None = None) -> None:
    """Wait until a thread has ended."""
    if task is not None and not task.is_done:
        me = world().current
        assert me is not None
        task.waiters.append((me, me.token))
        world().park(timeout)


class Future(concurrent.futures.Future):  # type: ignore[type-arg]
    """concurrent.futures.Future whose waits are simulated."""

    def _await(self, timeout: float | None) -> None:
        if not self.done():
            ended = Event()
            self.add_done_callback(lambda _: ended.set())
            if not ended.wait(timeout):
                raise TimeoutError

    def result(self, timeout: float | None = None) -> Any:
        self._await(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._await(timeout)
        return super().exception(0)


class Pool:
    """concurrent.futures.ThreadPoolExecutor."""

    def __init__(self, max_workers: int = 8, thread_name_prefix: str = "", initializer: Any = None) -> None:
        self._max, self._process = max_workers, process()
        self._queue: deque[tuple[Future, Callable[[], Any]]] = deque()
        self._idle: list[tuple[Task, int]] = []
        self._num = 0
        self._is_closed = False

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        if self._is_closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future = Future()
        self._queue.append((future, lambda: function(*args, **kwargs)))
        if self._idle:
            world().wake(*self._idle.pop())
        elif self._num < self._max:
            self._num += 1
            world().spawn(self._process, self._work)
        return future

    def map(self, function: Callable[..., Any], *iterables: Any, timeout: float | None = None) -> Iterator[Any]:
        futures = [self.submit(function, *arguments) for arguments in zip(*iterables, strict=False)]
        return iter([future.result(timeout) for future in futures])

    def _work(self) -> None:
        own = world()
        while True:
            while not self._queue:
                if self._is_closed:
                    return
                me = own.current
                assert me is not None
                self._idle.append((me, me.token))
                own.park()
            future, call = self._queue.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except Exception as error:  # noqa: BLE001 - as the real pool
                future.set_exception(error)
            else:
                future.set_result(result)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._is_closed = True
        if cancel_futures:
            while self._queue:
                self._queue.popleft()[0].cancel()
        while self._idle:
            world().wake(*self._idle.pop())

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()


class Loop(asyncio.BaseEventLoop):
    """An event loop that waits on the simulated clock."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = self
        self._default_executor = Pool(32)
        self._parked: tuple[Task, int] | None = None
        self._is_written = False

    def time(self) -> float:
        return world().now

    def select(self, timeout: float | None) -> list[Any]:
        own = world()
        if timeout == 0 or self._is_written:
            self._is_written = False
            if own.rng.random() < 0.25:
                own.pause()
            return []
        me = own.current
        assert me is not None
        self._parked = (me, me.token)
        own.park(timeout)
        self._parked, self._is_written = None, False
        return []

    def _process_events(self, events: list[Any]) -> None: ...

    def _write_to_self(self) -> None:
        self._is_written = True
        if self._parked is not None:
            world().wake(*self._parked)


class Threading:
    """The module `threading`."""

    Lock, RLock, Condition, Event, Thread = Lock, RLock, Condition, Event, Thread
    local = real_threading.local
    get_ident = staticmethod(lambda: id(world().current))


class Random:
    """The module `random`, from the seed."""

    def __getattr__(self, name: str) -> Any:
        import random

        return random.Random if name == "Random" else getattr(world().rng, name)


class Socket:
    """The module `socket`."""

    @staticmethod
    def gethostname() -> str:
        return process().host

    def __getattr__(self, name: str) -> Any:
        return getattr(real_socket, name)


class Uuid:
    """The module `uuid`, from the seed."""

    @staticmethod
    def uuid4() -> real_uuid.UUID:
        return real_uuid.UUID(int=world().rng.getrandbits(128), version=4)


_REPLACED = {
    "time": (real_time, Time()), "threading": (real_threading, Threading()),
    "ThreadPoolExecutor": (concurrent.futures.ThreadPoolExecutor, Pool), "uuid": (real_uuid, Uuid()),
    "socket": (real_socket, Socket()), "queue": (real_queue, Queue()),
}  # fmt: skip


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Inside, modules of the project have simulated time, threads and random numbers."""
    places = _places(frozenset(name for name in sys.modules if name.startswith("pipelinerl_core.")))
    for module, key, _, simulated in places:
        setattr(module, key, simulated)
    try:
        yield
    finally:
        for module, key, real, _ in places:
            setattr(module, key, real)


@functools.cache
def _places(names: frozenset[str]) -> list[tuple[Any, str, Any, Any]]:
    """(module, name, real value, simulated value) for all modules that have a real value."""
    import random as real_random

    replaced = {**_REPLACED, "random": (real_random, Random())}
    return [
        (sys.modules[name], key, real, simulated)
        for name in sorted(names) for key, (real, simulated) in replaced.items()
        if getattr(sys.modules[name], key, None) is real
    ]  # fmt: skip


@contextlib.contextmanager
def running(new: World) -> Iterator[World]:
    """Inside, `new` is the simulation."""
    global _WORLD
    _WORLD = new
    try:
        yield new
    finally:
        new.close()
        _WORLD = None
