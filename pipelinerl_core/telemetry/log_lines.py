"""Formats the lines of a role's log as text or JSON, without secrets, and reads the level of a line.

A JSON line is one object: time, level, logger, run, role, name, the known ones of epoch, weight_version and step,
message, and exception if there is one. Output of libraries and child processes outside of `logging` is not changed.
"""

import json
import logging
import re
import time
from collections.abc import Mapping
from types import TracebackType

from pipelinerl_core.telemetry.redact import REDACTED, redact_text

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_LEVELS = (
    re.compile(r"\d{4}-\d\d-\d\d [\d:,.]+ (?P<level>[A-Z]+) "),  # RoleFormatter, text
    re.compile(r'\{"time": "[^"]*", "level": "(?P<level>[A-Z]+)"'),  # RoleFormatter, JSON
    re.compile(r"(?:\([^)]*\) )?(?P<level>[A-Z]+) \d\d-\d\d [\d:]+ "),  # vLLM
)
_JSON_START = '{"time": "'
_ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
_MIN_SECRET = 8  # characters
TRACEBACK = "Traceback (most recent call last):"


class RoleFormatter(logging.Formatter):
    """Formats the log lines of a role. Replaces the given secrets, and text with the form of a secret (redact.py)."""

    def __init__(
        self,
        *,
        as_json: bool = False,
        identity: Mapping[str, str] | None = None,
        facts: Mapping[str, int] | None = None,
        secrets: tuple[str, ...] = (),
    ) -> None:
        """facts: read for each line. secrets: those under 8 characters are ignored: other words contain them."""
        super().__init__(_TEXT)
        self._as_json = as_json
        self._identity = identity or {}
        self._facts = facts if facts is not None else {}
        self._secrets = tuple(secret for secret in secrets if len(secret) >= _MIN_SECRET)

    def format(self, record: logging.LogRecord) -> str:
        """One line; in text format, an exception follows with its traceback, indented."""
        if not self._as_json:
            return self._clean(super().format(record))
        seconds, fraction = divmod(record.created, 1.0)
        line: dict[str, object] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{int(fraction * 1000):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            **self._identity,
            **self._facts,
            "message": self._clean(record.getMessage()),
        }
        if record.exc_info:
            line["exception"] = self._clean(super().formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - overrides logging.Formatter
        """The message as one line of printable characters."""
        return printable(super().formatMessage(record))

    def formatException(self, ei: _ExceptionInfo) -> str:  # noqa: N802 - overrides logging.Formatter
        """The traceback, indented: an unindented line is always an event of the log."""
        return "\n".join(f"  {printable(line)}" for line in super().formatException(ei).split("\n"))

    def _clean(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, REDACTED)
        return redact_text(text)


def printable(text: str) -> str:
    """The text with non-printable characters escaped as in Python: ESC as \\x1b, a line feed as \\n.

    Text of models and peers may hold control sequences of a terminal, or line feeds that imitate a line of the log.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def message_of(line: str) -> str:
    """The text of a line of a role's log without time and level; of a JSON line, its message and exception."""
    if line.startswith(_JSON_START):
        try:
            event = json.loads(line)
            exception = str(event.get("exception", "")).strip().rpartition("\n")[2]
            return f"{event['logger']}: {event['message']}{f': {exception}' if exception else ''}"
        except (ValueError, KeyError, AttributeError):  # a line that is cut
            return line
    matches = (form.match(line) for form in _LEVELS)
    return next((line[match.end() :] for match in matches if match), line)


def level_of(line: str) -> str:
    """WARNING, ERROR, INFO, ... of a line of a role's log; empty without a level. A traceback is ERROR."""
    if line.startswith(TRACEBACK):
        return "ERROR"
    for form in _LEVELS:
        match = form.match(line)
        if match:
            return match["level"]
    return ""
