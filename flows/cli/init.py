"""`pipelinerl init`: writes a commented configuration to start from."""

import shlex
from typing import Annotated

import typer

from pipelinerl.flows.cli.arguments import Json, Overrides, complete_preset
from pipelinerl.flows.cli.console import answer


def init(
    file: Annotated[str, typer.Argument(metavar="FILE.toml", help="The file to write; an existing file is refused.")],
    source: Annotated[
        str,
        typer.Argument(
            metavar="[PRESET|FILE.toml]", help="Where the settings start.", autocompletion=complete_preset
        ),
    ] = "quickstart",
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Write a configuration to edit: the settings of a preset, and every other key as a comment with its meaning.

    Then `pipelinerl train FILE.toml --tiny` tries the file in about a minute.

    Examples:

    - `pipelinerl init mine.toml`
    - `pipelinerl init mine.toml smollm2 prompts.kind=file prompts.path=rows.jsonl reward.function=rewards.py:score`
    """
    from pathlib import Path

    from pipelinerl_core.config.commented import commented_toml
    from pipelinerl_core.errors import ConfigError
    from pipelinerl_core.models.resolve import load_config

    if "=" in source:  # no preset was given
        source, overrides = "quickstart", [source, *(overrides or ())]
    path = Path(file)
    if path.suffix != ".toml":
        raise ConfigError(f"{file}: must end in .toml, because `pipelinerl train` reads other names as presets")
    trial = f"`pipelinerl train {shlex.quote(file)} --tiny`"
    title = f"From the preset {source}. {trial} tries this file; delete a # to set a key."
    text = commented_toml(load_config(source, overrides or ()), title)
    try:
        with path.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise ConfigError(f"{file} exists already. Remove the file, or give another name") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from None
    answer(
        {"file": str(path), "source": source},
        [f"{file}: edit, then {trial}"],
        as_json=as_json,
    )
