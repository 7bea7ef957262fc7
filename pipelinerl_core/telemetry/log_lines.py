"""Lines of a role's log: as text for people or as JSON for machines, without secrets; and how bad a line is.

A JSON line is one object: time, level, logger, run, role, name, what is known of epoch, weight_version and step,
message, and exception where there is one. What libraries and child processes write past `logging` stays as it is.
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
    re.compile(r"\d{4}-\d\d-\d\d [\d:,.]+ (?P<level>[A-Z]+) "),  # ours, as text
    re.compile(r'\{"time": "[^"]*", "level": "(?P<level>[A-Z]+)"'),  # ours, as JSON
    re.compile(r"(?:\([^)]*\) )?(?P<level>[A-Z]+) \d\d-\d\d [\d:]+ "),  # vLLM's
)
_ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
_MIN_SECRET = 8  # characters
_TRACEBACK = "Traceback (most recent call last):"


class RoleFormatter(logging.Formatter):
    """Formats the log lines of a role. Named secrets are removed, and what looks like one (telemetry/redact.py)."""

    def __init__(
        self,
        *,
        as_json: bool = False,
        identity: Mapping[str, str] | None = None,
        facts: Mapping[str, int] | None = None,
        secrets: tuple[str, ...] = (),
    ) -> None:
        """`facts` is read anew for each line. Secrets of less than 8 characters are in any word: they are left."""
        super().__init__(_TEXT)
        self._as_json = as_json
        self._identity = identity or {}
        self._facts = facts if facts is not None else {}
        self._secrets = tuple(secret for secret in secrets if len(secret) >= _MIN_SECRET)

    def format(self, record: logging.LogRecord) -> str:
        """One line; as text with the traceback below it, each of its lines indented, if there is one."""
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

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name that logging calls
        """One line, whatever the message holds."""
        return printable(super().formatMessage(record))

    def formatException(self, ei: _ExceptionInfo) -> str:  # noqa: N802 - likewise
        """A line that begins at the margin is an event of the log: no line of a traceback does."""
        return "\n".join(f"  {printable(line)}" for line in super().formatException(ei).split("\n"))

    def _clean(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, REDACTED)
        return redact_text(text)


def printable(text: str) -> str:
    """The text with what is no visible character as Python writes it: ESC as \\x1b, a line feed as \\n.

    A terminal obeys some of these, and others look like the next line of the log. They come from models and peers.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def level_of(line: str) -> str:
    """WARNING, ERROR, INFO, ... of a line of a role's log; empty for one without. A traceback is an error."""
    if line.startswith(_TRACEBACK):
        return "ERROR"
    for form in _LEVELS:
        found = form.match(line)
        if found:
            return found["level"]
    return ""
