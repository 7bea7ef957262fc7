"""One role as a child process: start, watch, restart, stop. Independent of Prefect.

The kernel kills the child when the *thread* that started the child ends (parent_death.py). Therefore the thread that
calls `supervise_role` starts the child itself and blocks until the child has ended.
"""

import builtins
import logging
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from pipelinerl_core.errors import (
    EXIT_CONFIG,
    EXIT_DIVERGED,
    EXIT_EXPELLED,
    EXIT_FENCED,
    EXIT_STORE,
    ConfigError,
    Fenced,
    PipelineRLError,
    StoreUnavailable,
    TrainingDiverged,
)
from pipelinerl_core.restart_budget import RestartBudget
from pipelinerl_core.run.context import RESTARTS_VARIABLE
from pipelinerl_core.supervision.process_groups import kill_group
from pipelinerl_core.supervision.role_commands import ending_with_parent
from pipelinerl_core.supervision.role_logs import RoleLog
from pipelinerl_core.supervision.temporary_directories import own_temporary

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
"""Between two checks of the child."""
STOP_SECONDS = 6.0
"""Between SIGTERM and SIGKILL: time for a role to seal its segments and to flush."""
LAST_LINES = ". Last lines"
"""What follows in the message of an error is the end of a log."""
READY_SECONDS = 1800.0
"""Deadline for a started role to become ready: the hub reads all prompts before."""
FIRST_BACKOFF_SECONDS = 0.5
LAST_BACKOFF_SECONDS = 5.0
STABLE_SECONDS = 600.0
"""A process that has run for this long is stable: earlier failures no longer count."""
_KILL_WAIT_SECONDS = 5.0  # a killed process ends at once, unless a system call blocks in the kernel
_TAIL_LINES = 15
_TRACEBACK_LINES = 200
_LOCATION = re.compile(r'\s+File ".*", line \d+, in ')
_EXCEPTION = re.compile(r"([A-Za-z_][\w.]*)(: .*)?")


class RoleFailed(PipelineRLError):
    """A role ended without being stopped, and no restart is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleReport:
    """Result of the supervision of one role."""

    exit_code: int
    """Exit code of the role's last process; negative for a signal."""
    restarts: int
    stopped: bool
    """The supervisor stopped the role; otherwise the role ended by itself."""


def supervise_role(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    log: RoleLog,
    max_restarts: int,
    stop: Event,
    name: str,
    ready_check: Callable[[], bool] | None = None,
    ready_seconds: float = READY_SECONDS,
    stop_seconds: float = STOP_SECONDS,
    is_done: Callable[[], bool] = lambda: True,
    is_replaced: Callable[[], bool] | None = None,
    stable_seconds: float = STABLE_SECONDS,
) -> RoleReport:
    """Keep a role running until the role ends with exit code 0 or `stop` is set; blocks until then.

    Exit code 0: if `is_done()`, the supervision ends, else the role restarts (another process sent it SIGTERM).
    Exit code 3 (fenced): if `is_replaced()`, the supervision ends, else the role restarts; without `is_replaced` the
    supervision raises Fenced.
    Exit code 6 (expelled): the supervision ends, with an error in the log.
    Raises ConfigError (exit code 2, with the role's own error line), TrainingDiverged (exit code 5, the same) or
    Fenced. Two processes in a row that end with the same exception at the same line of code raise ConfigError, too:
    another start would end there again. After more than `max_restarts`
    failures in a row, each within `stable_seconds`, raises RoleFailed with the last lines of the log; if the last
    process ended because the store did not answer (exit code 4), StoreUnavailable with these lines.
    """
    begun = time.monotonic()
    restarts = 0
    budget = RestartBudget(
        max_restarts, restart_rule(max_restarts), clock=time.monotonic, stable_seconds=stable_seconds
    )
    is_over, last_exception = False, ""
    while not is_over:
        with own_temporary(env) as environment:
            process = _RoleProcess(command, {**environment, RESTARTS_VARIABLE: str(restarts)}, log, name)
            try:
                failure = process.watch(stop, ready_check, ready_seconds)
            finally:
                process.end(stop_seconds)
        if stop.is_set() or (failure is None and process.exit_code == 0 and is_done()):
            break
        if process.exit_code == EXIT_EXPELLED:
            lines = log.last_lines(1)
            logger.error("%s: ended for good: %s", name, lines[-1] if lines else f"see {log.path}")
            break
        reason = failure or describe_exit(process.exit_code, memory_kills=memory_kills() - process.memory_kills)
        if is_replaced is not None and process.exit_code == EXIT_FENCED:
            logger.warning("%s: another process has replaced this role", name)
            if is_replaced():
                break
            reason = "the process that replaced the role has ended"
        _raise_if_final(name, process, reason, budget, may_return=is_replaced is not None)
        exception = repeatable_exception(log.last_lines(_TRACEBACK_LINES)) if process.exit_code == 1 else ""
        if exception and exception == last_exception:
            line = exception.splitlines()[-1]
            raise ConfigError(f"{name}: ended twice at the same place with {line}. Its log is {log.path}")
        last_exception = exception
        restarts += 1
        backoff = min(FIRST_BACKOFF_SECONDS * 2 ** (budget.count - 1), LAST_BACKOFF_SECONDS)
        logger.warning("%s: %s; %s in %.1f s", name, reason, budget.restart_text, backoff)
        is_over = stop.wait(backoff)
    digest = log.digest
    logger.log(
        logging.WARNING if digest.num_errors else logging.INFO,
        "%s: ended after %.0f s and %d restarts; its log has %d warnings and %d errors",
        name, time.monotonic() - begun, restarts, digest.num_warnings, digest.num_errors,
    )  # fmt: skip
    return RoleReport(exit_code=process.exit_code, restarts=restarts, stopped=stop.is_set())


def restart_rule(max_restarts: int) -> str:
    """The name of the restart limit in messages: key and value."""
    return f"placement.max_restarts={max_restarts}"


def repeatable_exception(lines: Sequence[str]) -> str:
    """The last place in the code and the exception of a traceback at the end of a log; "" if there is none.

    "" also for errors of the system (OSError, MemoryError) and for exceptions of libraries (a server that does not
    answer), which may be gone at the next start.
    """
    places = [number for number, line in enumerate(lines) if _LOCATION.match(line)]
    exception = _EXCEPTION.fullmatch(lines[-1]) if lines else None
    if not places or exception is None:
        return ""
    kind = getattr(builtins, exception[1], OSError)
    if not isinstance(kind, type) or issubclass(kind, OSError | MemoryError):
        return ""
    return f"{lines[places[-1]].strip()}\n{lines[-1]}"


def describe_exit(exit_code: int, *, memory_kills: int = 0) -> str:
    """Text for an exit code. memory_kills: processes that the kernel has killed for lack of memory meanwhile."""
    if exit_code == -signal.SIGKILL and memory_kills:
        return (
            "killed by SIGKILL, as the kernel does to a process when memory is full, and has done since the start of "
            "this role (`pipelinerl doctor` shows what the run needs)"
        )
    if exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    if exit_code == 0:
        return "ended with code 0 before its work was done"
    if exit_code == EXIT_STORE:
        return "ended because the store did not answer"
    return f"exited with code {exit_code}"


def memory_kills(counters: Path = Path("/proc/vmstat")) -> int:
    """Processes that the kernel has killed for lack of memory since the boot; 0 where the kernel does not say."""
    try:
        lines = counters.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


class _RoleProcess:
    """One process of a role, from start to end."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: RoleLog, name: str) -> None:
        self.log = log
        self._has_log_failed = False
        with log.open() as stream:
            # Own process group: the terminal's Ctrl-C reaches only the supervisor, and the whole group can be killed.
            self.process = subprocess.Popen(
                ending_with_parent(command),
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        self.exit_code = 0
        self.memory_kills = memory_kills()
        logger.info("%s: started, pid %d, log %s", name, self.process.pid, log.path)

    def watch(self, stop: Event, ready_check: Callable[[], bool] | None, ready_seconds: float) -> str | None:
        """Wait until the process ends or `stop` is set. Returns the reason if a running process must be restarted."""
        deadline = time.monotonic() + ready_seconds
        is_ready = ready_check is None
        while not stop.is_set() and self.process.poll() is None:
            if not is_ready and ready_check is not None:
                is_ready = ready_check()
                if not is_ready and time.monotonic() > deadline:
                    return f"not ready within {ready_seconds:.0f} s"
            self._look(self.log.look)
            stop.wait(POLL_SECONDS)
        return None

    def end(self, stop_seconds: float) -> None:
        """Send SIGTERM, then SIGKILL to the whole process group; returns when the process has ended."""
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(stop_seconds)
        kill_group(self.process.pid)
        try:
            self.exit_code = self.process.wait(_KILL_WAIT_SECONDS)
        except subprocess.TimeoutExpired:  # in a call of the kernel, for example to a disk that does not answer
            self.exit_code = -signal.SIGKILL
            logger.warning("pid %d has not ended %g s after SIGKILL", self.process.pid, _KILL_WAIT_SECONDS)
        self._look(self.log.count)

    def _look(self, read: Callable[[], object]) -> None:
        """Read the log; a disk without space, or a log that somebody has removed, ends no role."""
        try:
            read()
        except OSError as error:
            if not self._has_log_failed:
                logger.warning("pid %d: its log cannot be read or rotated: %s", self.process.pid, error)
            self._has_log_failed = True


def _raise_if_final(
    name: str, process: _RoleProcess, reason: str, budget: RestartBudget, *, may_return: bool
) -> None:
    """Count a restart of the role; raise if a restart cannot help or the budget is spent."""
    lines = process.log.last_lines(_TAIL_LINES)
    if process.exit_code == EXIT_CONFIG:
        raise ConfigError(lines[-1] if lines else f"{name}: refused its configuration, see {process.log.path}")
    if process.exit_code == EXIT_DIVERGED:  # the same weights would fail again on the next groups
        line = lines[-1] if lines else f"{name}: see {process.log.path}"
        raise TrainingDiverged(line.removeprefix(f"{TrainingDiverged.__name__}: "))
    if process.exit_code == EXIT_FENCED and not may_return:
        raise Fenced(f"{name}: another process has taken over this run ({lines[-1] if lines else 'no message'})")
    if not budget.take():
        tail = "\n".join(f"  | {line}" for line in lines) or "  | (nothing)"
        error = StoreUnavailable if process.exit_code == EXIT_STORE else RoleFailed
        raise error(f"{name}: {reason}, {budget.spent_text}{LAST_LINES} of {process.log.path}:\n{tail}")
