"""Lines of a role's log: as text for people or as JSON for machines, without secrets; and how bad a line is.

A JSON line is one object: time, level, logger, run, role, name, what is known of epoch, weight_version and step,
message, and exception where there is one. What libraries and child processes write past `logging` stays as it is.
"""

import json
import logging
import re
import time
from collections.abc import Mapping

from pipelinerl_core.tracking.redact import REDACTED, redact_text

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_LEVELS = (
    re.compile(r"\d{4}-\d\d-\d\d [\d:,.]+ (?P<level>[A-Z]+) "),  # ours, as text
    re.compile(r'\{"time": "[^"]*", "level": "(?P<level>[A-Z]+)"'),  # ours, as JSON
    re.compile(r"(?:\([^)]*\) )?(?P<level>[A-Z]+) \d\d-\d\d [\d:]+ "),  # vLLM's
)
_MIN_SECRET = 8  # characters
_TRACEBACK = "Traceback (most recent call last):"


class RoleFormatter(logging.Formatter):
    """Formats what a role logs; long-lived secrets are named, others are known by their look (redact.py)."""

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
        """One line; as text with the traceback below it, if there is one."""
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
            line["exception"] = self._clean(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False)

    def _clean(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, REDACTED)
        return redact_text(text)


def level_of(line: str) -> str:
    """WARNING, ERROR, INFO, ... of a line of a role's log; empty for one without. A traceback is an error."""
    if line.startswith(_TRACEBACK):
        return "ERROR"
    for form in _LEVELS:
        found = form.match(line)
        if found:
            return found["level"]
    return ""
