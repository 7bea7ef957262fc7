"""Output and exit codes of the commands: the result on stdout, as lines or JSON; messages on stderr."""

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from pipelinerl_core.errors import (
    EXIT_CONFIG,
    EXIT_DIVERGED,
    EXIT_STORE,
    ConfigError,
    PipelineRLError,
    StoreUnavailable,
    TrainingDiverged,
)

EXIT_OK, EXIT_FAILURE, EXIT_BAD_INPUT = 0, 1, EXIT_CONFIG
EXIT_INTERRUPTED, EXIT_TERMINATED = 130, 143


def say(text: str) -> None:
    """Write a message to stderr, unless the terminal is gone."""
    with suppress(OSError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def answer(document: Any, lines: list[str], *, as_json: bool) -> None:
    """Write the result of a command to stdout: `document` as JSON, or `lines`."""
    text = json.dumps(document, indent=2) if as_json else "\n".join(lines)
    write_parts([f"{text}\n"])


def write_parts(parts: Iterable[str]) -> None:
    """Write a result of several parts to stdout, each when it is made."""
    if sys.stdout is None:
        raise PipelineRLError("the result cannot be written: the standard output is closed")
    encoding = sys.stdout.encoding or "utf-8"
    for part in parts:
        try:
            sys.stdout.write(part.encode(encoding, "backslashreplace").decode(encoding))
            sys.stdout.flush()
        except BrokenPipeError:  # `pipelinerl runs | head -1`: the reader has what it wants
            _close_stdout()
            return
        except OSError as error:
            _close_stdout()
            raise PipelineRLError(f"the result cannot be written: {error.strerror}") from None


def _close_stdout() -> None:
    """The interpreter's exit must not write the rest, and fail again."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the exit


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn the project's errors into a message on stderr and an exit code."""
    try:
        yield
    except ConfigError as error:
        say(f"pipelinerl: {' '.join(str(error).split())}")
        raise SystemExit(EXIT_BAD_INPUT) from None
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None
    except PipelineRLError as error:
        say(f"pipelinerl: {type(error).__name__}: {error}")
        raise SystemExit(exit_code_of(error)) from None


def exit_code_of(error: PipelineRLError) -> int:
    """The exit code of a command that this error ends."""
    codes = (
        (ConfigError, EXIT_BAD_INPUT),
        (StoreUnavailable, EXIT_STORE),
        (TrainingDiverged, EXIT_DIVERGED),
        (PipelineRLError, EXIT_FAILURE),
    )
    return next(code for kind, code in codes if isinstance(error, kind))
