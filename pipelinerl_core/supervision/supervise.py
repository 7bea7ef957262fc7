"""One role as a child process: start, watch, restart, stop. Knows nothing of Prefect.

The kernel kills a guarded child when the *thread* that started it ends, so the thread that calls `supervise_role`
starts the child itself and stays with it to its end.
"""

import logging
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from pipelinerl_core.errors import EXIT_CONFIG, EXIT_FENCED, ConfigError, Fenced, PipelineRLError
from pipelinerl_core.restart_budget import RestartBudget
from pipelinerl_core.run.context import RESTARTS_VARIABLE
from pipelinerl_core.supervision.process_groups import kill_group
from pipelinerl_core.supervision.role_commands import guarded
from pipelinerl_core.supervision.role_logs import RoleLog
from pipelinerl_core.supervision.temporary_directories import own_temporary

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
"""How soon an exit is noticed."""
STOP_SECONDS = 8.0
"""Between SIGTERM and SIGKILL: a role seals its segments and flushes in it."""
READY_SECONDS = 120.0
"""How long a start may take until the role is ready."""
FIRST_BACKOFF_SECONDS = 0.5
LAST_BACKOFF_SECONDS = 5.0
SETTLED_SECONDS = 600.0
"""A process that has lived for so long was started well: failures before it are not counted any more."""
_KILL_WAIT_SECONDS = 5.0  # a killed process is gone at once, unless the kernel holds it in a system call
_TAIL_LINES = 15


class RoleFailed(PipelineRLError):
    """A role ended by itself and its restarts are used up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleReport:
    """How the life of one role went."""

    name: str
    exit_code: int
    """Of its last process; negative for a signal."""
    restarts: int
    seconds: float
    stopped: bool
    """It was told to stop, rather than ending by itself."""
    log_path: Path
    num_warnings: int
    """In its log, all its lives together."""
    num_errors: int


def supervise_role(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    log_path: Path,
    max_restarts: int,
    stop: Event,
    name: str,
    max_log_bytes: int,
    ready_check: Callable[[], bool] | None = None,
    ready_seconds: float = READY_SECONDS,
    stop_seconds: float = STOP_SECONDS,
    is_done: Callable[[], bool] = lambda: True,
    is_replaced: Callable[[], bool] | None = None,
    settled_seconds: float = SETTLED_SECONDS,
) -> RoleReport:
    """Keep a role running until it ends with 0 or `stop` is set; blocks for the whole life of the role.

    A role that somebody else has asked to leave ends with 0 as well: it is started again unless `is_done()`.
    One whose place another process has taken (exit code 3) ends the supervision quietly if `is_replaced()`, and is
    started again if that one is gone; without `is_replaced` it ends it with Fenced.
    Raises ConfigError (exit code 2, with the role's own line), Fenced, or RoleFailed, with the last lines of its log,
    once it has failed more than `max_restarts` times in a row, each within `settled_seconds`.
    """
    log = RoleLog(log_path, max_log_bytes)
    begun = time.monotonic()
    restarts = 0
    budget = RestartBudget(
        max_restarts, restart_rule(max_restarts), clock=time.monotonic, settled_seconds=settled_seconds
    )
    is_over = False
    while not is_over:
        with own_temporary(env) as environment:
            life = _Life(command, {**environment, RESTARTS_VARIABLE: str(restarts)}, log, name)
            try:
                failure = life.watch(stop, ready_check, ready_seconds)
            finally:
                life.end(stop_seconds)
        if stop.is_set() or (failure is None and life.exit_code == 0 and is_done()):
            break
        reason = failure or describe_exit(life.exit_code)
        if is_replaced is not None and life.exit_code == EXIT_FENCED:
            logger.warning("%s: another process has taken its place", name)
            if is_replaced():
                break
            reason = "its place is free again"
        _raise_if_final(name, life, reason, budget, may_return=is_replaced is not None)
        restarts += 1
        backoff = min(FIRST_BACKOFF_SECONDS * 2 ** (budget.count - 1), LAST_BACKOFF_SECONDS)
        logger.warning("%s: %s; %s in %.1f s", name, reason, budget.restart_text, backoff)
        is_over = stop.wait(backoff)
    digest = log.count()
    logger.log(
        logging.WARNING if digest.num_errors else logging.INFO,
        "%s: ended after %.0f s and %d restarts; its log has %d warnings and %d errors",
        name, time.monotonic() - begun, restarts, digest.num_warnings, digest.num_errors,
    )  # fmt: skip
    return RoleReport(
        name=name,
        exit_code=life.exit_code,
        restarts=restarts,
        seconds=time.monotonic() - begun,
        stopped=stop.is_set(),
        log_path=log_path,
        num_warnings=digest.num_warnings,
        num_errors=digest.num_errors,
    )


def restart_rule(max_restarts: int) -> str:
    """The words of the limit of a role's restarts."""
    return f"placement.max_restarts={max_restarts}"


def describe_exit(exit_code: int) -> str:
    """An exit code in words."""
    if exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    if exit_code == 0:
        return "left before its work was done"
    return f"exited with code {exit_code}"


class _Life:
    """One process of a role, from its start to its end."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: RoleLog, name: str) -> None:
        self.log = log
        with log.open() as stream:
            # Its own process group: the terminal's Ctrl-C reaches only us, and what it starts ends with it.
            self.process = subprocess.Popen(
                guarded(command),
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        self.exit_code = 0
        logger.info("%s: started, pid %d, log %s", name, self.process.pid, log.path)

    def watch(self, stop: Event, ready_check: Callable[[], bool] | None, ready_seconds: float) -> str | None:
        """Wait until it ends or is to end. Returns why it must be given up although it runs, if so."""
        deadline = time.monotonic() + ready_seconds
        is_ready = ready_check is None
        while not stop.is_set() and self.process.poll() is None:
            if not is_ready and ready_check is not None:
                is_ready = ready_check()
                if not is_ready and time.monotonic() > deadline:
                    return f"not ready within {ready_seconds:.0f} s"
            self.log.rotate_if_large()
            stop.wait(POLL_SECONDS)
        return None

    def end(self, stop_seconds: float) -> None:
        """SIGTERM, then SIGKILL for it and all that it started; returns when it is gone."""
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(stop_seconds)
        kill_group(self.process.pid)
        self.exit_code = self.process.wait(_KILL_WAIT_SECONDS)


def _raise_if_final(name: str, life: _Life, reason: str, budget: RestartBudget, *, may_return: bool) -> None:
    """Raise unless a restart may help, which is counted then."""
    lines = life.log.last_lines(_TAIL_LINES)
    if life.exit_code == EXIT_CONFIG:
        raise ConfigError(lines[-1] if lines else f"{name}: refused its configuration, see {life.log.path}")
    if life.exit_code == EXIT_FENCED and not may_return:
        raise Fenced(f"{name}: another process has taken over this run ({lines[-1] if lines else 'no message'})")
    if not budget.take():
        tail = "\n".join(f"  | {line}" for line in lines) or "  | (nothing)"
        raise RoleFailed(f"{name}: {reason}, {budget.spent_text}. Last lines of {life.log.path}:\n{tail}")
