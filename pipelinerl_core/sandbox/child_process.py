"""The environment variables of a child process with a user's code, and text that such a process sends."""

import os
import sys
from collections.abc import Sequence

from pipelinerl_core.errors import ConfigError

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
    """The text of an error without the values of the environment variables that only the child gets."""
    for name in names:
        if len(value := os.environ.get(name, "")) >= SECRET_LETTERS:
            text = text.replace(value, f"${name}")
    return text


def printable(text: str) -> str:
    """The printable characters of a text."""
    return "".join(letter for letter in text if letter.isprintable())


def claim_stdout() -> int:
    """In the child: a private descriptor for the answers; afterwards, prints of the user's code go to stderr."""
    answers = os.dup(1)
    os.dup2(2, 1)
    return answers


def claim_stdin() -> int:
    """In the child: a private descriptor for the requests; afterwards, the user's code reads an empty input."""
    requests = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return requests


def write_all(descriptor: int, data: bytes) -> None:
    """Write all bytes, also if the kernel accepts fewer bytes per call."""
    while data:
        data = data[os.write(descriptor, data) :]
