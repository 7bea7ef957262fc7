"""The roles' log files: rotate (by the supervisor only), count warnings and errors, read the last lines, follow."""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.telemetry.log_lines import level_of
from pipelinerl_core.telemetry.redact import redact_text

TAIL_BYTES = 1 << 18
"""Read at most from the end of a file to find its last lines."""
FOLLOW_SECONDS = 0.5
_CHUNK_BYTES = 1 << 20
_SHOWN_CHARACTERS = 300


@dataclass(slots=True)
class LogDigest:
    """Numbers of lines, warnings and errors of a log."""

    num_lines: int = 0
    num_warnings: int = 0
    num_errors: int = 0
    last_problem: str = ""
    """Newest warning or error, truncated."""

    def add(self, line: str) -> None:
        """Count a line."""
        self.num_lines += 1
        level = level_of(line)
        if level == "WARNING":
            self.num_warnings += 1
        elif level in ("ERROR", "CRITICAL"):
            self.num_errors += 1
        else:
            return
        self.last_problem = redact_text(line.strip())[:_SHOWN_CHARACTERS]


class RoleLog:
    """The log file of a supervised child; the child writes with O_APPEND, so that the supervisor can truncate."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """The file and the rotated file (.1) have at most half of `max_bytes` each."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.digest = LogDigest()
        self._half_bytes = max(1, max_bytes // 2)
        self._counted = self._process_start = path.stat().st_size if path.exists() else 0

    def open(self) -> BinaryIO:
        """Open the log for the next process of the role; `last_lines` starts here."""
        stream = self.path.open("ab")
        self._process_start = stream.tell()
        return stream

    def rotate_if_large(self) -> None:
        """Copy the log to `<path>.1` and truncate; lines written between copy and truncation are lost."""
        if self.path.stat().st_size <= self._half_bytes:
            return
        self.count()
        older, making = self.path.with_name(f"{self.path.name}.1"), self.path.with_name(f"{self.path.name}.new")
        with self.path.open("rb") as source, making.open("wb") as copy:
            while chunk := source.read(_CHUNK_BYTES):
                copy.write(chunk)
            os.truncate(self.path, 0)
        making.replace(older)
        self._counted = self._process_start = 0

    def count(self) -> LogDigest:
        """The digest, including the lines written since the previous call."""
        with self.path.open("rb") as log:
            log.seek(self._counted)
            for line in log:
                self.digest.add(line.decode(errors="replace"))
            self._counted = log.tell()
        return self.digest

    def last_lines(self, number: int) -> list[str]:
        """The last lines that the role's current process has written, without secrets."""
        return [redact_text(line) for line in tail(self.path, number, self._process_start)]


def tail(path: Path, number: int, start: int = 0) -> list[str]:
    """The last lines of a file that are not blank, from `start` on."""
    with path.open("rb") as log:
        size = log.seek(0, os.SEEK_END)
        log.seek(max(start, size - TAIL_BYTES))
        text = log.read().decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-number:] if number else []


def log_files(directory: Path, role: str = "") -> dict[str, Path]:
    """Role name -> log, for names equal to `role` or starting with `role-`; ConfigError if there is no such log."""
    logs = {path.stem: path for path in sorted(directory.glob("*.log"))}
    if not logs:
        raise ConfigError(f"no logs at {directory}: each role writes its log on its own host; run the command there")
    chosen = {path.stem: path for path in _matching(directory, role)}
    if not chosen:
        raise ConfigError(f"--role {role}: no log of this role at {directory}. Set one of: {', '.join(logs)}")
    return chosen


def log_of_failure(directory: Path, message: str) -> Path | None:
    """The log of the role whose name begins the message of its failure, else the log that was written last."""
    logs = sorted(directory.glob("*.log"), key=lambda path: path.stat().st_mtime)
    named = [path for path in logs if message.startswith((f"{path.stem}:", f"{path.stem} "))]
    return next(iter([*named, *reversed(logs)]), None)


def digest_rows(directory: Path) -> list[dict[str, Any]]:
    """One table row per log of a run, over all starts of the role."""
    rows = []
    for path in sorted(directory.glob("*.log")):
        digest, size = LogDigest(), 0
        for part in (path.with_name(f"{path.name}.1"), path):
            if part.exists():
                size += part.stat().st_size
                with part.open(errors="replace") as log:
                    for line in log:
                        digest.add(line)
        rows.append(
            {
                "role": path.stem,
                "lines": digest.num_lines,
                "warnings": digest.num_warnings,
                "errors": digest.num_errors,
                "kilobytes": round(size / 1e3, 1),
                "last_problem": digest.last_problem,
            }
        )
    return rows


def follow(directory: Path, role: str = "", *, pause_seconds: float = FOLLOW_SECONDS) -> Iterator[tuple[str, str]]:
    """Yield (role, line) for each line written from now on, also to new logs; never ends."""
    offsets = {path: path.stat().st_size for path in _matching(directory, role)}
    while True:
        for path in _matching(directory, role):
            lines, offsets[path] = _read_from(path, offsets.get(path, 0))
            yield from ((path.stem, line) for line in lines)
        time.sleep(pause_seconds)


def _matching(directory: Path, role: str) -> Sequence[Path]:
    return [path for path in sorted(directory.glob("*.log")) if not role or f"{path.stem}-".startswith(f"{role}-")]


def _read_from(path: Path, offset: int) -> tuple[list[str], int]:
    """Complete lines from an offset, and the next offset; reads from the start if the file was truncated."""
    if path.stat().st_size < offset:
        offset = 0
    with path.open("rb") as log:
        log.seek(offset)
        data = log.read(_CHUNK_BYTES)
    whole = data[: data.rfind(b"\n") + 1]
    return whole.decode(errors="replace").splitlines(), offset + len(whole)
