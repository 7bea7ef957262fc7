"""What every role does as a process: dies with its parent, stops when asked, keeps to its cores, logs to stderr."""

import argparse
import contextlib
import ctypes
import functools
import gc
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, ParamSpec

import pyarrow as pa

from pipelinerl_core.errors import EXIT_CONFIG, EXIT_FENCED, ConfigError, Fenced, PipelineRLError
from pipelinerl_core.parent_death import die_with_parent
from pipelinerl_core.roles.runtime.monitor import RoleMonitor, monitored
from pipelinerl_core.run.context import RunContext, open_run
from pipelinerl_core.telemetry.log_lines import RoleFormatter, printable
from pipelinerl_core.telemetry.redact import redact_text

P = ParamSpec("P")
Arguments = Mapping[str, Mapping[str, Any]]
"""Name -> options of an argument of the command line, as `ArgumentParser.add_argument` takes them."""
logger = logging.getLogger(__name__)

RUN: Arguments = {"--run": {"required": True}}
_EXIT_CODES = {ConfigError: EXIT_CONFIG, Fenced: EXIT_FENCED}
# <linux/close_range.h>; beyond every descriptor: nothing is closed.
_CLOSE_RANGE_UNSHARE = 2
_NO_DESCRIPTOR = (1 << 32) - 1
# More would only make whatever walks through all possible descriptors slow.
_MAX_DESCRIPTORS = 1 << 16
# <malloc.h>, and the largest value that it takes for the second one.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MAX_MMAP_THRESHOLD = 32 << 20


def install_stop_signal() -> threading.Event:
    """An event that SIGTERM and SIGINT set. Call it on the main thread."""
    stop = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        # A handler runs between two bytecodes of the main thread, which may hold the event's lock: set it elsewhere.
        threading.Thread(target=stop.set, name=f"signal-{number}", daemon=True).start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    return stop


def raise_descriptor_limit() -> None:
    """As many open descriptors as the system allows this process without asking, 65,536 at most."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def own_descriptors() -> None:
    """From here on the calling thread has a table of descriptors of its own, a copy of the process's (Linux 5.9).

    What the thread opens afterwards does not count with what others open, and is unknown to them: the thread must
    close it again itself. The limit holds for each table.
    """
    close_range = getattr(ctypes.CDLL(None), "close_range", None)
    nothing = ctypes.c_uint(_NO_DESCRIPTOR)
    if close_range is None or close_range(nothing, nothing, _CLOSE_RANGE_UNSHARE) != 0:
        logger.info("this system gives no thread descriptors of its own: connections can use up all there are")


def limit_threads(count: int) -> None:
    """Compute threads of this process; OpenMP's own limits must be in the environment before any import."""
    pa.set_cpu_count(count)
    torch = sys.modules.get("torch")  # only roles that use it have loaded it
    if torch is not None:
        torch.set_num_threads(count)


def keep_freed_memory(max_bytes: int = 0) -> None:
    """Arrow's buffers come from the C library, which keeps what is freed for the next one; glibc up to `max_bytes`.

    Arrow's own pool gives it back to the system and gets it again page by page: a quarter of the CPU time of an actor
    that sends. glibc does the same with what is free at the end of a heap, beyond a limit that starts low.
    """
    pa.set_memory_pool(pa.system_memory_pool())
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and max_bytes:
        mallopt(_M_TRIM_THRESHOLD, max_bytes)
        mallopt(_M_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD)


def give_back_freed_memory() -> None:
    """All of what the C library keeps goes back to the system; takes milliseconds, more with gigabytes (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_to_cores(cores: Sequence[int] | None) -> None:
    """Run all threads of this process, and whatever it starts later, on these cores; None: wherever (Linux)."""
    if cores is None:
        return
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread), cores)
    logger.info("keeps to cores %s", ", ".join(map(str, cores)))


def freeze_startup_objects() -> None:
    """Call when a role is built: what exists now lives as long as the process and need not be looked through again.

    A full garbage collection over the 460,000 objects that torch and transformers leave behind takes 0.22 s, in the
    middle of a decode step, a swap or an optimizer step; over what is made afterwards it takes under a millisecond.
    """
    gc.collect()
    gc.freeze()


def configure_logging(level: int = logging.INFO) -> None:
    """One line per event to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(RoleFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)


def exit_codes(main: Callable[P, int]) -> Callable[P, int]:
    """A role's main whose errors are lines on stderr and exit codes.

    2: bad input. 3: another process has taken over. 1: any other failure that is expected now and then; what is not
    expected keeps its traceback.
    """

    @functools.wraps(main)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> int:
        code = 1
        try:
            return main(*args, **kwargs)
        except* PipelineRLError as group:
            failures = list(_flat(group))
            for failure in failures:
                kind = "" if isinstance(failure, ConfigError) else f"{type(failure).__name__}: "
                print(printable(redact_text(f"{kind}{failure}")), file=sys.stderr)  # noqa: T201
            code = max(_EXIT_CODES.get(type(failure), 1) for failure in failures)
        return code

    return guarded


def _flat(group: BaseExceptionGroup[PipelineRLError]) -> Iterator[PipelineRLError]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _flat(error)
        else:
            yield error


@exit_codes
def run_main(
    description: str | None,
    arguments: Arguments,
    body: Callable[[argparse.Namespace], int | None],
    *,
    logs: bool = True,
) -> int:
    """The main of a process: read its command line, end with the parent that --parent-pid names, log, then `body`.

    Returns the exit code: what `body` returns (None: 0), or that of its error (`exit_codes`).
    """
    parser = argparse.ArgumentParser(description=description)
    for name, options in arguments.items():
        parser.add_argument(name, **options)
    parsed = parser.parse_args()
    if getattr(parsed, "parent_pid", None) is not None:
        die_with_parent(parsed.parent_pid)
    if logs:
        configure_logging()
    return body(parsed) or 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleProcess:
    """What the body of a role works with."""

    context: RunContext
    monitor: RoleMonitor
    arguments: argparse.Namespace
    stop: threading.Event
    """Set by SIGTERM and SIGINT."""


def run_role(
    role: str,
    description: str,
    body: Callable[[RoleProcess], None],
    arguments: Arguments | None = None,
    *,
    name: str = "",
    heeds_stop: bool = True,
) -> int:
    """The main of a role of a run, which its supervisor starts; returns the exit code.

    name: of this process, with arguments in braces; "" for the name of the role. Without heeds_stop SIGTERM ends it.
    """

    def supervised(parsed: argparse.Namespace) -> None:
        raise_descriptor_limit()
        stop = install_stop_signal() if heeds_stop else threading.Event()
        context = open_run(parsed.run)
        limit_threads(context.config.placement.threads)
        with monitored(context, role, (name or role).format(**vars(parsed))) as (timed, monitor):
            body(RoleProcess(context=timed, monitor=monitor, arguments=parsed, stop=stop))

    parent: Arguments = {"--parent-pid": {"type": int, "required": True}}
    return run_main(description, {**RUN, **parent, **(arguments or {})}, supervised)


def leave(code: int) -> None:
    """End at once: threads of Flight's open streams would hold up the interpreter's exit without a deadline."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
