"""Process setup of roles: end with the parent, stop on signals, logging, exit codes, limits of the system."""

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

from pipelinerl_core.errors import (
    EXIT_CONFIG,
    EXIT_DIVERGED,
    EXIT_EXPELLED,
    EXIT_FENCED,
    EXIT_STORE,
    ConfigError,
    Expelled,
    Fenced,
    ParityError,
    PipelineRLError,
    StoreUnavailable,
    TrainingDiverged,
)
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
_EXIT_CODES = {
    Fenced: EXIT_FENCED, Expelled: EXIT_EXPELLED, ConfigError: EXIT_CONFIG, ParityError: EXIT_CONFIG,
    StoreUnavailable: EXIT_STORE, TrainingDiverged: EXIT_DIVERGED,
}  # fmt: skip
"""In the order in which one of several errors chooses the code."""
# <linux/close_range.h>; beyond every descriptor: nothing is closed.
_CLOSE_RANGE_UNSHARE = 2
_NO_DESCRIPTOR = (1 << 32) - 1
# A higher limit slows down code that iterates over all possible descriptors.
_MAX_DESCRIPTORS = 1 << 16


def install_stop_signal() -> threading.Event:
    """An event that SIGTERM and SIGINT set. Call it on the main thread."""
    stop = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        # The handler interrupts the main thread, which may hold the event's lock: set the event on another thread.
        threading.Thread(target=stop.set, name=f"signal-{number}", daemon=True).start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    return stop


def raise_descriptor_limit() -> None:
    """Raise the limit of open descriptors to the hard limit, at most 65,536."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def own_descriptors() -> None:
    """Give the calling thread its own descriptor table, a copy of the process's table (Linux 5.9).

    The limit of open descriptors applies per table. Other threads cannot use descriptors that this thread opens
    afterwards; this thread must close them.
    """
    close_range = getattr(ctypes.CDLL(None), "close_range", None)
    nothing = ctypes.c_uint(_NO_DESCRIPTOR)
    if close_range is None or close_range(nothing, nothing, _CLOSE_RANGE_UNSHARE) != 0:
        logger.info("all threads of this system share one descriptor table: connections can exhaust it")


def limit_threads(count: int) -> None:
    """Limit the compute threads of this process. OpenMP reads its limits from the environment at import."""
    pa.set_cpu_count(count)
    torch = sys.modules.get("torch")  # not imported here: not every role uses torch
    if torch is not None:
        torch.set_num_threads(count)


def keep_freed_memory() -> None:
    """Allocate Arrow's buffers with the C library, which reuses freed memory (glibc: `role_commands.ALLOCATOR`).

    Arrow's default pool returns freed memory to the system and faults it in again page by page, which takes a
    quarter of the CPU time of a sending actor.
    """
    pa.set_memory_pool(pa.system_memory_pool())


def give_back_freed_memory() -> None:
    """Return all freed memory to the system (glibc); takes milliseconds, longer with gigabytes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_to_cores(cores: Sequence[int] | None) -> None:
    """Pin all threads of this process, and processes started later, to these cores; None: no pinning (Linux)."""
    if cores is None:
        return
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(int(thread), cores)
    logger.info("keeps to cores %s", ", ".join(map(str, cores)))


def freeze_startup_objects() -> None:
    """Exclude all existing objects from garbage collection. Call this once a role is built.

    A full collection over the 460,000 objects that torch and transformers create takes 0.22 s, in the middle of a
    decode step, a swap or an optimizer step. A collection over objects created later takes under a millisecond.
    """
    gc.collect()
    gc.freeze()


def configure_logging(level: int = logging.INFO) -> None:
    """Log one line per event to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(RoleFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)


def exit_codes(main: Callable[P, int]) -> Callable[P, int]:
    """Turn a main function's PipelineRLErrors into lines on stderr and an exit code.

    2: ConfigError. 3: Fenced, another process has replaced this one. 4: StoreUnavailable, another start may find the
    store. 5: TrainingDiverged. 6: Expelled, this actor must not start again. 1: any other PipelineRLError. Other
    exceptions pass with their traceback.
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
            kinds = {type(failure) for failure in failures}
            code = next((code for kind, code in _EXIT_CODES.items() if kind in kinds), 1)
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
    """The main of a process: parse its command line, end with --parent-pid, configure logging, call `body`.

    Returns the exit code: the result of `body` (None: 0), or the code of its error (`exit_codes`).
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
    """What `run_role` passes to the body of a role."""

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
    """The main of a role, started by its supervisor; returns the exit code.

    name: of this process, with arguments in braces; "" for the name of the role.
    heeds_stop: whether SIGTERM and SIGINT set `RoleProcess.stop`; otherwise SIGTERM ends the process.
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
    """End the process at once: threads of open Flight streams could block the interpreter's exit for ever."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
