"""Waits of tests: each has a deadline, and a failure names what did not happen."""

import asyncio
import subprocess
import time
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")


def wait_for(
    condition: Callable[[], _T],
    description: str,
    seconds: float = 60.0,
    *,
    pause: float = 0.05,
    process: "subprocess.Popen[Any] | None" = None,
) -> _T:
    """The first true result of `condition`; fails after `seconds`, or as soon as `process` has ended."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert process is None or process.poll() is None, f"the process ended before this happened: {description}"
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {description}"
        time.sleep(pause)
    return result


async def until(condition: Callable[[], _T], description: str, seconds: float = 60.0, *, pause: float = 0.005) -> _T:
    """As `wait_for`, in a coroutine: other tasks run during each `pause` (0: one turn of the event loop)."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {description}"
        await asyncio.sleep(pause)
    return result
