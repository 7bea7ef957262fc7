"""Options and levels of difficulty of the tasks of reasoning-gym, checked against the installed library.

Importing the library takes seconds, so only its users import the library, inside of the functions here.
"""

import dataclasses
import difflib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple, get_type_hints

from pydantic import TypeAdapter, ValidationError

from pipelinerl_core.config.prompts import ReasoningGymPrompts
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.gym.tasks import COMPOSITE, check_task

_OWN = ("seed", "size")
"""Fields of every task that the project sets."""


class TaskOptions(NamedTuple):
    """What the configuration says about one task; JSON values only."""

    options: Mapping[str, Any]
    level: int | None = None
    """Level of the library's curriculum of the task; None: the task's own defaults."""


def options_of(prompts: ReasoningGymPrompts, task: str) -> TaskOptions:
    """Options and level of a task in [prompts]."""
    return TaskOptions(prompts.options.get(task, {}), prompts.levels.get(task))


def known_options(task: str) -> dict[str, tuple[Any, Any]]:
    """Option of a task -> (its type, its default); None as default if there is none."""
    from reasoning_gym.factory import DATASETS  # noqa: PLC0415

    config = DATASETS[task][1]
    types = get_type_hints(config)
    return {
        field.name: (types[field.name], _default(field))
        for field in dataclasses.fields(config)
        if field.name not in _OWN
    }


def max_level(task: str) -> int | None:
    """The highest level of a task's curriculum, from 0; None without a curriculum."""
    from reasoning_gym.factory import create_curriculum, has_curriculum  # noqa: PLC0415

    if not has_curriculum(task):
        return None
    return max((len(attribute.levels) for attribute in create_curriculum(task).attributes.values()), default=1) - 1


def dataset_options(task: str, given: TaskOptions) -> dict[str, Any]:
    """The keyword arguments of the task's data set: the values of the level, replaced by single options.

    Raises ConfigError, one line that lists the options, for an unknown option or a value of a wrong type.
    """
    return {**_level_options(task, given.level), **_checked(task, given.options)}


def _level_options(task: str, level: int | None) -> dict[str, Any]:
    from reasoning_gym.factory import create_curriculum  # noqa: PLC0415

    if level is None:
        return {}
    highest = max_level(task)
    if highest is None or not 0 <= level <= highest:
        allowed = f"levels 0 to {highest}" if highest is not None else f"no levels. Set prompts.options.{task}"
        raise ConfigError(f"prompts.levels.{task}={level}: the task has {allowed}")
    curriculum = create_curriculum(task)
    curriculum.set_global_level(level)  # an attribute with fewer levels stays at its last level
    config = curriculum.generate_configuration()
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.name not in _OWN}


def _checked(task: str, options: Mapping[str, Any]) -> dict[str, Any]:
    known = known_options(task)
    values: dict[str, Any] = {}
    for name, value in options.items():
        key = f"prompts.options.{task}.{name}"
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(
                f"{key}: no such option{f'; did you mean {near[0]}?' if near else '.'} {options_text(task)}"
            )
        try:
            values[name] = TypeAdapter(known[name][0]).validate_json(json.dumps(value), strict=True)
        except ValidationError as error:
            reason = error.errors()[0]["msg"].lower()
            raise ConfigError(f"{key}={json.dumps(value)}: {reason}. {options_text(task)}") from None
    if task == COMPOSITE:
        for part in values.get("datasets", ()):
            check_task(part.name)
    return values


def options_text(task: str) -> str:
    """Example: Options of gcd: min_numbers (int, 2), max_numbers (int, 2)."""
    texts = [f"{name} ({type_name(kind)}, {shown(default)})" for name, (kind, default) in known_options(task).items()]
    return f"Options of {task}: {', '.join(texts) or 'none'}"


def type_name(kind: Any) -> str:
    """Example: int, list[str], TaskType."""
    return str(kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else kind).replace(
        "typing.", ""
    )


def shown(default: Any) -> str:
    """A default as short text."""
    text = " ".join(json.dumps(default, default=str).split())
    return text if len(text) <= 40 else f"{text[:37]}..."


def _default(field: "dataclasses.Field[Any]") -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else None
