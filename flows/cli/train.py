"""`pipelinerl train`: starts a new run."""

from typing import Annotated

import typer

from pipelinerl.flows.cli.arguments import Json, Overrides, Root


def train(
    source: Annotated[str, typer.Argument(metavar="PRESET|FILE.toml", help="A shipped preset or a TOML file.")],
    overrides: Overrides = None,
    root: Root = "",
    as_json: Json = False,
) -> None:
    """Train a model; at the end print the accuracy before and after, and the location of the report.

    Examples:

    - `pipelinerl train quickstart`
    - `pipelinerl train quickstart trainer.steps=50 placement.actors=2`
    - `pipelinerl train mine.toml --root s3://bucket/runs --json > report.json`

    `pipelinerl config --keys` lists every setting. Ctrl-C stops all processes; `pipelinerl resume` continues the run.
    """
    from pipelinerl.flows.cli.training import carry_out
    from pipelinerl_core.run.jobs import new_job

    carry_out(new_job(source, overrides or (), root), as_json=as_json)
