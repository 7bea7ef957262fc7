"""A check that runs in a child process: a JSON value on stdin, lines on stdout, or exit code 2 and the reason.

The process marks the reason and its end, because code of a user may write lines of its own, or end the process.
"""

import json
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from pipelinerl_core.errors import ConfigError

REFUSED = "refused: "
"""Before the reason, in a line of stderr."""
DONE = "checked"
"""The line after the lines of a check that has reached its end."""


def run_check(check: Callable[[Any], Iterable[str]]) -> int:
    """Call `check` with the value on stdin, and write the lines that it returns. Returns the exit code."""
    warnings.simplefilter("ignore")
    try:
        lines = list(check(json.load(sys.stdin)))
    except ConfigError as error:
        sys.stderr.write(f"\n{REFUSED}{' '.join(str(error).split())}\n")
        return 2
    sys.stdout.write("".join(f"{line}\n" for line in [*lines, DONE]))
    return 0


def result_of(subject: str, code: int, stdout: str, stderr: str) -> list[str]:
    """The lines of a check that has ended. Raises ConfigError with its reason, else with its last line.

    subject: what is checked, for the message.
    """
    lines = stdout.splitlines()
    if code == 0 and DONE in lines:  # exit handlers of libraries may write lines after it
        return lines[: lines.index(DONE)]
    errors = [line for line in stderr.splitlines() if line.strip()]
    reasons = [line.removeprefix(REFUSED) for line in errors if line.startswith(REFUSED)]
    if code == 2 and reasons:
        raise ConfigError(reasons[-1])
    raise ConfigError(f"{subject}: the check ended with code {code}{f': {errors[-1]}' if errors else ''}")
