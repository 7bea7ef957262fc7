"""`pipelinerl train`: starts a new run."""

from typing import Annotated

import typer

from pipelinerl.flows.cli.arguments import Json, Overrides, Root, complete_preset


def train(
    source: Annotated[
        str,
        typer.Argument(
            metavar="PRESET|FILE.toml", help="A shipped preset or a TOML file.", autocompletion=complete_preset
        ),
    ],
    overrides: Overrides = None,
    tiny: Annotated[
        bool,
        typer.Option(
            "--tiny",
            help="Check the configuration before GPU time is paid: three steps in about a minute, without a GPU or a "
            "download, with a small model of the same architecture and small data in place of a data set of the hub. "
            "Engine, learner, loss, schedule, transport, LoRA, reward and environment stay. Overrides win.",
        ),
    ] = False,
    root: Root = "",
    as_json: Json = False,
) -> None:
    """Train a model; at the end print the accuracy before and after, and the location of the report.

    Examples:

    - `pipelinerl train quickstart`
    - `pipelinerl train quickstart trainer.steps=50 placement.actors=2`
    - `pipelinerl train mine.toml --tiny` runs your own reward and environment on a CPU
    - `pipelinerl train mine.toml --root s3://bucket/runs --json > report.json`

    `pipelinerl config --keys` lists every setting. Ctrl-C stops all processes; `pipelinerl resume` continues the run.
    """
    from dataclasses import replace

    from pipelinerl.flows.cli.console import say
    from pipelinerl.flows.cli.training import carry_out
    from pipelinerl_core.run.jobs import new_job

    job = new_job(source, overrides or (), root)
    if tiny:
        from pipelinerl_core.tools import tiny as tools

        small = tools.tiny(job.config, job.overrides)
        say(tools.replaced(job.config, small))
        job = replace(job, config=small)
    carry_out(job, as_json=as_json)
