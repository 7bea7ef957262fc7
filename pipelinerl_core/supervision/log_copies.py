"""The last lines of the roles' logs in a remote store, for readers on other hosts.

In a run whose store is a directory, the logs themselves are in the store.
"""

import logging
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

from pipelinerl_core.errors import BrokenRecord, MissingObject, StoreError
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.run.context import RunContext
from pipelinerl_core.run.reading import read_record
from pipelinerl_core.run.records import LOGS_PREFIX, LogRecord, log_key
from pipelinerl_core.supervision.role_logs import RoleLog, digest_rows, rotated, tail
from pipelinerl_core.telemetry.redact import REDACTED, redact_text

logger = logging.getLogger(__name__)

COPY_SECONDS = 60.0
"""Between two copies of a log that grows."""
MAX_LINES, MAX_CHARACTERS = 500, 1 << 16
"""Of a copy."""
_COPY = re.compile(rf"{LOGS_PREFIX}/[^/]+@[^/]+\.json")
END_SECONDS = 1.0
"""The end of a role waits at most this long for its last copy, also if the store does not answer."""


@contextmanager
def copied_log(run: RunContext, name: str, log: RoleLog) -> Iterator[None]:
    """Copy the last lines of a role's log to the run's store while the block runs, and at its end."""
    if run.store.url.startswith("file://"):
        yield
        return
    ended = Event()
    thread = Thread(target=_copy_until, args=(run, name, log, ended), name=f"log of {name}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(END_SECONDS)


def _copy_until(run: RunContext, name: str, log: RoleLog, ended: Event) -> None:
    copied: tuple[str, ...] = ()
    has_failed = is_last = False
    while not is_last:
        is_last = ended.wait(COPY_SECONDS)
        try:
            lines = _last_lines(log, run.token)
            if lines != copied or is_last:
                _put(run.store, name, log, lines, run.token)
            copied, has_failed = lines, False
        except (StoreError, OSError) as error:
            if not has_failed:
                logger.warning("the log of %s could not be copied to the store, trying again: %s", name, error)
            has_failed = True


def _put(store: ObjectStore, name: str, log: RoleLog, lines: tuple[str, ...], token: str) -> None:
    record = LogRecord(
        name=name,
        host=socket.gethostname(),
        at=time.time(),
        num_lines=log.digest.num_lines,
        num_warnings=log.digest.num_warnings,
        num_errors=log.digest.num_errors,
        last_problem=log.digest.last_problem.replace(token, REDACTED) if token else log.digest.last_problem,
        last_lines=lines,
    )
    store.put(log_key(name, record.host), record.model_dump_json().encode())


def _last_lines(log: RoleLog, token: str) -> tuple[str, ...]:
    """Also of processes of the role that have ended; without secrets."""
    lines: list[str] = []
    for path in (log.path, rotated(log.path)):
        if path.exists() and len(lines) < MAX_LINES:
            lines = [*tail(path, MAX_LINES - len(lines)), *lines]
    size, kept = 0, []
    for line in reversed(lines):
        text = redact_text(line.replace(token, REDACTED) if token else line)[:MAX_CHARACTERS]
        size += len(text)
        if size > MAX_CHARACTERS:
            break
        kept.append(text)
    return tuple(reversed(kept))


def read_copies(store: ObjectStore) -> list[LogRecord]:
    """The copies of all roles and hosts, oldest first; a broken copy is logged and left out. Raises StoreError."""
    copies = []
    for key in (key for key in store.list(LOGS_PREFIX) if _COPY.fullmatch(key)):
        try:
            copies.append(read_record(store, key, LogRecord))
        except MissingObject:  # gc has removed the copy
            continue
        except BrokenRecord as error:
            logger.warning("%s", error)
    return sorted(copies, key=lambda copy: copy.at)


def all_logs(directory: Path, store: ObjectStore, num_lines: int = 0) -> list[dict[str, Any]]:
    """The logs in a directory of this host, and the copies of other logs: one row per role and host, newest first.

    num_lines: last lines of each. Raises StoreError if this host has no log and the copies cannot be read.
    """
    here = socket.gethostname()
    rows = []
    for row in digest_rows(directory):
        path = directory / f"{row['role']}.log"
        row |= {"host": here, "is_here": True, "at": path.stat().st_mtime, "last_lines": tail(path, num_lines)}
        rows.append(row)
    own = {(row["role"], here) for row in rows}
    try:
        copies = read_copies(store)
    except StoreError as error:
        if not rows:
            raise
        logger.warning("the logs of other hosts cannot be read: %s", error)
        copies = []
    for copy in copies:
        if (copy.name, copy.host) not in own:
            rows.append(
                {
                    "role": copy.name,
                    "lines": copy.num_lines,
                    "warnings": copy.num_warnings,
                    "errors": copy.num_errors,
                    "last_problem": copy.last_problem,
                    "host": copy.host,
                    "is_here": False,
                    "at": copy.at,
                    "last_lines": list(copy.last_lines[-num_lines:]) if num_lines else [],
                }
            )
    return sorted(rows, key=lambda row: -row["at"])


def lines_of_failure(directory: Path, store: ObjectStore, message: str, number: int) -> tuple[str, list[str]]:
    """Place and last lines of the log of the role whose name begins the message of its failure, of this or another
    host; else of the log of this host that was written last. The lines have no secrets.

    ("", []) without a log. Raises StoreError.
    """
    logs = all_logs(directory, store, number)
    named = [log for log in logs if message.startswith((f"{log['role']}:", f"{log['role']} "))]
    log = next(iter([*named, *(log for log in logs if log["is_here"])]), None)
    if log is None:
        return "", []
    name = directory / f"{log['role']}.log" if log["is_here"] else log["role"]
    return f"`{name}` on host {log['host']}", [redact_text(line) for line in log["last_lines"]]
