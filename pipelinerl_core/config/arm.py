"""One arm of a comparison (a name and overrides), read from the command line or from a TOML file.

On the command line: "conventional-4: schedule.kind=conventional schedule.steps_per_phase=4". In a TOML file a table:

    [conventional-4]
    schedule.kind = "conventional"
    schedule.steps_per_phase = 4
"""

import json
import re
import shlex
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelinerl_core.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*")


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
    return _parse_tables(path, file.read_text(encoding="utf-8"))


def distinct(arms: Iterable[Arm]) -> tuple[Arm, ...]:
    """The arms of a comparison. Raises ConfigError for fewer than two arms, or for two arms of the same name."""
    known: dict[str, Arm] = {}
    for arm in arms:
        if arm.name in known:
            raise ConfigError(f"two arms are named {arm.name}. Rename one of them")
        known[arm.name] = arm
    if len(known) < 2:
        raise ConfigError(
            'nothing to compare: give at least two arms, --arm "name: section.key=value", or --arms FILE.toml'
        )
    return tuple(known.values())


def _parse_tables(source: str, text: str) -> list[Arm]:
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--arms {source}: not valid TOML: {error}") from None
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f"--arms {source}: {name} is not a table. Write [{name}] and its settings below")
    return [Arm(_checked_name(name), tuple(_overrides(table))) for name, table in tables.items()]


def _overrides(table: Mapping[str, Any], prefix: str = "") -> Iterable[str]:
    """Nested tables as overrides; the JSON text of a plain TOML value is valid TOML."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _overrides(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={json.dumps(value)}"


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r}: not a name of an arm. Use letters, digits, dots and dashes")
    return name
