"""Shows the warnings and errors of a role in the log of its supervisor, and so on the page of its flow run.

A repeated line must not flood the Prefect server: lines that differ only in numbers are shown once in
REPEAT_SECONDS, and a role shows at most MAX_LINES lines in MAX_LINES_SECONDS. The next line that is shown says how
many were left out.
"""

import logging
import re
import time
from collections import deque

from pipelinerl_core.telemetry.log_lines import TRACEBACK, level_of, message_of, printable
from pipelinerl_core.telemetry.redact import REDACTED, redact_text

logger = logging.getLogger(__name__)

REPEAT_SECONDS = 600.0
MAX_LINES, MAX_LINES_SECONDS = 6, 60.0
_SHOWN_CHARACTERS = 500
_READ_CHARACTERS = 20_000
_LEVELS = {"WARNING": logging.WARNING, "ERROR": logging.ERROR, "CRITICAL": logging.ERROR}
_NUMBER = re.compile(r"[0-9a-f]*\d[0-9a-f]*")
"""Also of addresses and digests."""
_PLACE = re.compile(r"\[\w+\.py:\d+\] ")
"""Of a line of vLLM, after the level."""


class RoleProblems:
    """Warnings and errors of one role, over all its processes."""

    def __init__(self, name: str, token: str = "") -> None:
        """token: a secret that no line may have."""
        self._name, self._token = name, token
        self._traceback = ""
        """How the lines of the traceback begin that is read: `plain`, or `logged` with a level; empty: none."""
        self._shown_at: dict[str, float] = {}
        """Line without its numbers -> time of its last show."""
        self._recent: deque[float] = deque(maxlen=MAX_LINES)
        self._num_left_out = 0

    def add(self, line: str) -> None:
        """Show a line of the role's log if it is a warning or an error; of a traceback, its exception."""
        level = _LEVELS.get(level_of(line))
        text = line if level is None or line.startswith(TRACEBACK) else message_of(line)
        text = text[place.end() :] if (place := _PLACE.match(text)) else text
        if text.startswith(TRACEBACK):
            self._traceback = "plain" if line.startswith(TRACEBACK) else "logged"
        elif level is not None:
            is_logged = self._traceback == "logged"
            if not text.strip() or (is_logged and text.startswith(" ")):
                return
            self._traceback = "" if is_logged else self._traceback
            self._show(level, text)
        elif self._traceback == "plain" and line.strip() and not line.startswith(" "):
            self._traceback = ""
            self._show(logging.ERROR, line)

    def _show(self, level: int, text: str) -> None:
        text = text.strip()[:_READ_CHARACTERS]
        text = redact_text(text.replace(self._token, REDACTED) if self._token else text)
        text = printable(text[:_SHOWN_CHARACTERS])[:_SHOWN_CHARACTERS]
        now, form = time.monotonic(), _NUMBER.sub("0", text)
        self._shown_at = {form: at for form, at in self._shown_at.items() if now - at < REPEAT_SECONDS}
        is_full = len(self._recent) == MAX_LINES and now - self._recent[0] < MAX_LINES_SECONDS
        if form in self._shown_at or is_full:
            self._num_left_out += 1
            return
        self._shown_at[form] = now
        self._recent.append(now)
        left_out = f" ({self._num_left_out} more lines before are only in its log)" if self._num_left_out else ""
        self._num_left_out = 0
        logger.log(level, "%s: %s%s", self._name, text, left_out)
