"""`pipelinerl config`: prints the resolved configuration, or every setting with its default and meaning."""

import json
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from pipelinerl.flows.cli.arguments import Json, Overrides
from pipelinerl.flows.cli.console import answer


def config(
    source: Annotated[
        str, typer.Argument(metavar="[PRESET|FILE.toml]", help="A shipped preset or a TOML file.")
    ] = "quickstart",
    overrides: Overrides = None,
    keys: Annotated[bool, typer.Option("--keys", help="List every setting with its default and meaning.")] = False,
    as_json: Json = False,
) -> None:
    """Print the resolved configuration as TOML that `train` reads, with the limits of its schedule as comments.

    Examples: `pipelinerl config quickstart trainer.steps=50 > mine.toml`, `pipelinerl config --keys`
    """
    from pipelinerl_core.config import as_toml
    from pipelinerl_core.config.rules import explain_schedule
    from pipelinerl_core.models.resolve import load_config

    if keys:
        listed = every_key()
        answer(listed, _key_lines(listed), as_json=as_json)
        return
    resolved = load_config(source, overrides or ())
    if resolved.tracking.alarm_query and find_spec("duckdb"):
        from pipelinerl_core.report.query.database import check_alarm_query

        check_alarm_query(resolved)
    schedule = [f"# {line}" for line in explain_schedule(resolved)]
    answer(resolved.model_dump(mode="json"), [*schedule, as_toml(resolved).rstrip()], as_json=as_json)


def every_key() -> list[dict[str, Any]]:
    """{key, default, meaning, values, bounds, kinds}; keys that need a kind of their section follow the other keys.

    default: JSON text, or `(required)`; values: the allowed values, empty for any; bounds: of a number or a length,
    for example "at least 1"; kinds: the kinds of its section that accept the key, empty for all.
    """
    from typing import Literal, get_args, get_origin

    from pydantic_core import PydanticUndefined, to_jsonable_python

    from pipelinerl_core.config.load import fields, kinds_of, variants

    listed: list[dict[str, Any]] = []
    for key, field in fields():
        section, _, name = key.partition(".")
        is_required = field.default is PydanticUndefined
        values = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
        listed.append(
            {
                "key": key,
                "default": "(required)" if is_required else json.dumps(to_jsonable_python(field.default)),
                "meaning": " ".join((field.description or "").split()),
                "values": list(variants(section) if name == "kind" and variants(section) else values),
                "bounds": _bounds(field.metadata),
                "kinds": kinds_of(key),
            }
        )
    sections = list(dict.fromkeys(entry["key"].partition(".")[0] for entry in listed))
    groups = list(dict.fromkeys(tuple(entry["kinds"]) for entry in listed))
    groups.sort(key=bool)
    return sorted(
        listed,
        key=lambda entry: (sections.index(entry["key"].partition(".")[0]), groups.index(tuple(entry["kinds"]))),
    )


_BOUNDS = {
    "ge": "at least {}",
    "gt": "above {}",
    "le": "at most {}",
    "lt": "below {}",
    "min_length": "not empty",
    "max_length": "at most {} entries or letters",
}


def _bounds(metadata: list[Any]) -> str:
    """The bounds of a field in words. Example: at least 0, below 1."""
    bounds = ((name, getattr(constraint, name, None)) for constraint in metadata for name in _BOUNDS)
    return ", ".join(_BOUNDS[name].format(value) for name, value in bounds if value is not None)


def _key_lines(listed: list[dict[str, Any]]) -> list[str]:
    """The keys as text, with a heading where a section's keys need a kind."""
    lines: list[str] = []
    heading = previous = ""
    for entry in listed:
        section = entry["key"].partition(".")[0]
        before, heading = heading, f"# with {section}.kind={' or '.join(entry['kinds'])}:" if entry["kinds"] else ""
        if lines and section != previous:
            lines.append("")
        previous = section
        if heading and heading != before:
            lines.append(heading)
        lines.append(f"{entry['key']} = {entry['default']}")
        if entry["values"]:
            values = [str(value).lower() if isinstance(value, bool) else str(value) for value in entry["values"]]
            lines.append(f"    one of {', '.join(values)}")
        bounds = f" ({entry['bounds']})" if entry["bounds"] else ""
        lines.append(f"    {entry['meaning']}{bounds}")
    return lines
