"""The roles' log files: rotate (by the supervisor only), count warnings and errors, read the last lines, follow."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pipelinerl_core.errors import StoreError
from pipelinerl_core.telemetry.log_lines import level_of
from pipelinerl_core.telemetry.redact import redact_text

TAIL_BYTES = 1 << 18
"""Read at most from the end of a file to find its last lines."""
FOLLOW_SECONDS = 0.5
_CHUNK_BYTES = 1 << 20
_SHOWN_CHARACTERS = 300
_READ_CHARACTERS = 20_000


@dataclass(slots=True)
class LogDigest:
    """Numbers of lines, warnings and errors of a log."""

    num_lines: int = 0
    num_warnings: int = 0
    num_errors: int = 0
    last_problem: str = ""
    """Newest warning or error, truncated."""

    def add(self, line: str) -> None:
        self.num_lines += 1
        level = level_of(line)
        if level == "WARNING":
            self.num_warnings += 1
        elif level in ("ERROR", "CRITICAL"):
            self.num_errors += 1
        else:
            return
        self.last_problem = redact_text(line.strip()[:_READ_CHARACTERS])[:_SHOWN_CHARACTERS]


class RoleLog:
    """The log file of a supervised child; the child writes with O_APPEND, so that the supervisor can truncate."""

    def __init__(self, path: Path, max_bytes: int, on_line: Callable[[str], None] = lambda line: None) -> None:
        """The file and the rotated file (.1) have at most half of `max_bytes` each. on_line: gets each new line."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.digest = LogDigest()
        self._on_line = on_line
        self._half_bytes = max(1, max_bytes // 2)
        self._counted = self._process_start = path.stat().st_size if path.exists() else 0

    def open(self) -> BinaryIO:
        """Open the log for the next process of the role; `last_lines` starts here."""
        try:
            stream = self.path.open("ab")
        except PermissionError as error:
            raise StoreError(
                f"cannot write {self.path}: {error.strerror}. Of another user's run, work on a copy: "
                "`pipelinerl archive RUN --to DIRECTORY`"
            ) from None
        self._process_start = stream.tell()
        return stream

    def look(self) -> None:
        """Count the new complete lines; if the log is large, copy the log to `<path>.1` and truncate.

        Lines written between copy and truncation are lost.
        """
        size = self.path.stat().st_size
        if size > self._counted:
            self._count(complete_only=size <= self._half_bytes)
        if size <= self._half_bytes:
            return
        older, making = rotated(self.path), self.path.with_name(f"{self.path.name}.new")
        with self.path.open("rb") as source, making.open("wb") as copy:
            while chunk := source.read(_CHUNK_BYTES):
                copy.write(chunk)
            os.truncate(self.path, 0)
        making.replace(older)
        self._counted = self._process_start = 0

    def count(self) -> LogDigest:
        """The digest, including the lines written since the previous call."""
        self._count(complete_only=False)
        return self.digest

    def _count(self, *, complete_only: bool) -> None:
        with self.path.open("rb") as log:
            log.seek(self._counted)
            for data in log:
                if complete_only and not data.endswith(b"\n"):
                    break
                self._counted += len(data)
                line = data.decode(errors="replace")
                self.digest.add(line)
                self._on_line(line)

    def last_lines(self, number: int) -> list[str]:
        """The last lines that the role's current process has written, without secrets."""
        return [redact_text(line) for line in tail(self.path, number, self._process_start)]


def rotated(path: Path) -> Path:
    """The file with the lines of a log before its truncation."""
    return path.with_name(f"{path.name}.1")


def tail(path: Path, number: int, start: int = 0) -> list[str]:
    """The last lines of a file that are not blank, from `start` on; none of a file that somebody has removed."""
    try:
        log = path.open("rb")
    except FileNotFoundError:
        return []
    with log:
        size = log.seek(0, os.SEEK_END)
        log.seek(max(start, size - TAIL_BYTES))
        text = log.read().decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-number:] if number else []


def is_of(name: str, role: str) -> bool:
    """Whether a role has this name, or is of this kind: actor-1 is an actor. Every role is of the kind ""."""
    return not role or f"{name}-".startswith(f"{role}-")


def digest_rows(directory: Path) -> list[dict[str, Any]]:
    """One table row per log of a run, over all starts of the role."""
    rows = []
    for path in sorted(directory.glob("*.log")):
        digest, size = LogDigest(), 0
        for part in (rotated(path), path):
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
    return [path for path in sorted(directory.glob("*.log")) if is_of(path.stem, role)]


def _read_from(path: Path, offset: int) -> tuple[list[str], int]:
    """Complete lines from an offset, and the next offset; reads from the start if the file was truncated."""
    if path.stat().st_size < offset:
        offset = 0
    with path.open("rb") as log:
        log.seek(offset)
        data = log.read(_CHUNK_BYTES)
    whole = data[: data.rfind(b"\n") + 1]
    return whole.decode(errors="replace").splitlines(), offset + len(whole)
