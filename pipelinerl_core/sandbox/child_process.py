"""A child process with a user's code: its environment variables, its first steps, and the lines that it sends."""

import json
import os
import resource
import signal
import sys
from collections.abc import Sequence
from typing import Any

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.parent_death import die_with_parent

PASSED_ON = ("HOME", "TMPDIR", "PYTHONHASHSEED")
"""Variables of the actor's environment that a child gets: directories of libraries' caches, and the seed of Python's
hashes. The child processes a model's text and must not get tokens or credentials."""
SINGLE_THREADED = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pyarrow, which pandas, scikit-learn and nltk import
}
"""Imports must start no threads, because the process could not be sealed (isolation.py)."""
SECRET_LETTERS = 8
"""Least length of a variable's value that is removed from errors; shorter values would match by chance."""


def child_environment(further: Sequence[str]) -> dict[str, str]:
    """The child's environment: the actor's module path and the variables in PASSED_ON, `further`, SINGLE_THREADED."""
    modules = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    passed_on = {name: os.environ[name] for name in (*further, *PASSED_ON) if name in os.environ}
    return {**passed_on, "PYTHONPATH": modules, **SINGLE_THREADED}


def check_variables(key: str, names: Sequence[str]) -> None:
    """Raises ConfigError if a variable that the configuration's `key` names is not set in this process."""
    if missing := [variable for variable in names if variable not in os.environ]:
        raise ConfigError(
            f"{key}={', '.join(names)}: {missing[0]} is not set in the environment of this process. Set the variable "
            "on every host that scores, or remove the name"
        )


def without_secrets(text: str, names: Sequence[str]) -> str:
    """The text of an error without the values of the environment variables that only the child gets.

    A limit of the text's length may have cut a value, and line breaks of a value may have become spaces.
    """
    for name in names:
        value = os.environ.get(name, "")
        for secret in (printable(value), *value.splitlines()):
            for length in range(len(secret), SECRET_LETTERS - 1, -1):
                text = text.replace(secret[:length], f"${name}").replace(secret[-length:], f"${name}")
    return text


def printable(text: str) -> str:
    """The printable characters of a text."""
    return "".join(letter for letter in text if letter.isprintable())


def begin_child() -> tuple[int, int, dict[str, Any]]:
    """In the child, before anything else: descriptors of its requests and its answers, and the first line.

    The child ends with its parent, and gets the limit `memory_bytes` of the first line. Afterwards, the user's code
    reads an empty input, and its prints go to stderr.
    """
    die_with_parent(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends Ctrl-C to all processes; the parent handles it
    requests, answers = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    with open(requests, "rb", closefd=False) as stream:  # the parent sends nothing else before the child is ready
        prepare = json.loads(stream.readline())
    resource.setrlimit(resource.RLIMIT_AS, (prepare["memory_bytes"], prepare["memory_bytes"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return requests, answers, prepare


def as_line(value: Any) -> bytes:
    """A value as a line of JSON."""
    return json.dumps(value).encode() + b"\n"


def write_all(descriptor: int, data: bytes) -> None:
    """Write all bytes, also if the kernel accepts fewer bytes per call."""
    while data:
        data = data[os.write(descriptor, data) :]
