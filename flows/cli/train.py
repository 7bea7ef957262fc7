"""`pipelinerl train`: starts a new run."""

from typing import Annotated

import typer

from pipelinerl.flows.cli.arguments import Json, Overrides, Root, complete_preset


def train(
    source: Annotated[
        str,
        typer.Argument(
            metavar="PRESET|FILE.toml",
            help="A shipped preset or a TOML file; may be left out with --from.",
            autocompletion=complete_preset,
            show_default=False,
        ),
    ] = "",
    overrides: Overrides = None,
    parent: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="RUN[@VERSION]",
            help="Start from the weights of another run: its newest durable version, or a number. Without a preset "
            "the configuration of that run is the start, with your overrides. Moments of the optimizer start at 0.",
        ),
    ] = "",
    name: Annotated[str, typer.Option(help="Name of the run; the run id begins with it.")] = "",
    tags: Annotated[
        str, typer.Option(metavar="A,B", help="Labels to find runs by, for example exp42,team:alice.")
    ] = "",
    notes: Annotated[str, typer.Option(help="Why the run exists; the description of the run in MLflow.")] = "",
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
    - `pipelinerl train --from latest@20 learner.lr=1e-6` continues from version 20 with another rate
    - `pipelinerl train mine.toml --name lr-sweep --tags exp42,team:alice` names the run
    - `pipelinerl train mine.toml --root s3://bucket/runs --json > report.json`

    `pipelinerl config --keys` lists every setting. Ctrl-C stops all processes; `pipelinerl resume` continues the run.
    """
    from dataclasses import replace

    from pipelinerl.flows.cli.console import say
    from pipelinerl.flows.cli.training import carry_out
    from pipelinerl_core.errors import ConfigError
    from pipelinerl_core.run.jobs import new_job

    labels = {"name": name, "tags": tags, "notes": notes}
    changes = (*(overrides or ()), *(f"tracking.{key}={value}" for key, value in labels.items() if value))
    if parent:
        from pipelinerl_core.tools.start_from import start_from

        if "=" in source:
            source, changes = "", (source, *changes)
        source, changes = start_from(parent, source, changes, root, say)
    elif not source:
        raise ConfigError("train: name a preset or a TOML file, or a run with --from")
    job = new_job(source, changes, root)
    if tiny:
        from pipelinerl_core.tools import tiny as tools

        small = tools.tiny(job.config, job.overrides)
        say(tools.replaced(job.config, small))
        job = replace(job, config=small)
    carry_out(job, as_json=as_json)
