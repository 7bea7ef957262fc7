"""`pipelinerl config`: prints the resolved configuration, or every setting with its default and meaning."""

import json
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
    from pipelinerl_core.config import as_toml, load_config
    from pipelinerl_core.config.rules import explain_schedule

    if keys:
        listed = every_key()
        lines = [f"{entry['key']} = {entry['default']}\n    {entry['meaning']}" for entry in listed]
        answer(listed, lines, as_json=as_json)
        return
    resolved = load_config(source, overrides or ())
    schedule = [f"# {line}" for line in explain_schedule(resolved)]
    answer(resolved.model_dump(mode="json"), [*schedule, as_toml(resolved).rstrip()], as_json=as_json)


def every_key() -> list[dict[str, Any]]:
    """{key, default, meaning} in order of declaration; `default` is JSON text, or `(required)`."""
    from pydantic_core import PydanticUndefined, to_jsonable_python

    from pipelinerl_core.config.load import fields

    listed = []
    for key, field in fields():
        is_required = field.default is PydanticUndefined
        default = "(required)" if is_required else json.dumps(to_jsonable_python(field.default))
        listed.append({"key": key, "default": default, "meaning": " ".join((field.description or "").split())})
    return listed
