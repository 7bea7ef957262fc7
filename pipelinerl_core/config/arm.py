"""One arm of a comparison (a name and overrides), read from the command line, from a TOML file or from a grid.

On the command line: "conventional-4: schedule.kind=conventional schedule.steps_per_phase=4". In a TOML file a table:

    [conventional-4]
    schedule.kind = "conventional"
    schedule.steps_per_phase = 4

A grid "learner.lr=1e-6,3e-6 loss.kind=grpo,dapo" has an arm for each combination of values.
"""

import itertools
import json
import math
import re
import shlex
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelinerl_core.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*")
_MOST_SETTINGS = 500


@dataclass(frozen=True, slots=True)
class Arm:
    """An arm of a comparison: a name, which is part of the names of the arm's runs, and overrides."""

    name: str
    overrides: tuple[str, ...]
    """Texts "section.key=value", applied after the overrides that all arms share."""


def parse_arm(text: str) -> Arm:
    """Parse an arm of the command line; values with spaces are quoted. Raises ConfigError."""
    name, separator, settings = text.partition(":")
    if not separator:
        raise ConfigError(f'--arm {text}: not an arm. Write "name: section.key=value section.key=value"')
    try:
        overrides = shlex.split(settings)
    except ValueError as error:
        raise ConfigError(f"--arm {text}: {error}") from None
    return Arm(_checked_name(name.strip()), tuple(overrides))


def read_arms(path: str) -> list[Arm]:
    """The arms of a TOML file, in the order of the file; raises ConfigError."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"--arms {path}: no such file")
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--arms {path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # also not UTF-8
        raise ConfigError(f"--arms {path}: not valid TOML: {error}") from None
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f"--arms {path}: {name} is not a table. Write [{name}] and its settings below")
    return [Arm(_checked_name(name), tuple(_overrides(table))) for name, table in tables.items()]


def parse_grid(texts: Sequence[str]) -> list[tuple[str, list[str]]]:
    """(key, values) of each `section.key=1,2,4`. Raises ConfigError.

    A comma inside of quotes, brackets or braces belongs to a value.
    """
    keys: list[tuple[str, list[str]]] = []
    for text in texts:
        key, separator, given = text.partition("=")
        values = _split_values(given)
        if not key or not separator or not all(values) or key in dict(keys):
            raise ConfigError(f"{text}: write section.key=1,2,4, each key once, and no empty value")
        keys.append((key, values))
    num = math.prod(len(values) for _, values in keys)
    if num > _MOST_SETTINGS:
        raise ConfigError(f"{num} combinations are more than {_MOST_SETTINGS}. Give fewer values")
    return keys


def _split_values(text: str) -> list[str]:
    values, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        else:
            depth += (character in "[{") - (character in "]}")
        if character == "," and not quote and depth == 0:
            values.append("")
        else:
            values[-1] += character
    return values


def grid_arms(keys: Iterable[tuple[str, Sequence[str]]]) -> tuple[Arm, ...]:
    """An arm for each combination. Example: the arm "learner.lr=1e-6,loss.kind=grpo" with these two overrides."""
    combinations = itertools.product(*([f"{key}={value}" for value in values] for key, values in keys))
    return tuple(Arm(",".join(overrides), overrides) for overrides in combinations)


def distinct(arms: Iterable[Arm], least: int = 2) -> tuple[Arm, ...]:
    """The arms of a comparison. Raises ConfigError for fewer than `least` arms, or for two arms of the same name."""
    known: dict[str, Arm] = {}
    for arm in arms:
        if arm.name in known:
            raise ConfigError(f"two arms are named {arm.name}. Rename one of them")
        known[arm.name] = arm
    if len(known) < least:
        raise ConfigError(
            'nothing to compare: give at least two arms, --arm "name: section.key=value", or --arms FILE.toml'
        )
    return tuple(known.values())


def _overrides(table: Mapping[str, Any], prefix: str = "") -> Iterable[str]:
    """Nested tables as overrides; the JSON text of a plain TOML value is valid TOML."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _overrides(value, f"{prefix}{key}.")
        else:
            try:
                yield f"{prefix}{key}={json.dumps(value)}"
            except TypeError:
                raise ConfigError(f"{prefix}{key}={value}: a {type(value).__name__}. Write it as text") from None


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r}: not a name of an arm. Use letters, digits, dots and dashes")
    return name
