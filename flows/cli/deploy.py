"""`pipelinerl deploy`: creates or updates work pools, deployments and automations on a Prefect server."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from pipelinerl.flows.cli.arguments import Json
from pipelinerl.flows.cli.console import answer


def deploy(
    pools: Annotated[str, typer.Option(help="Type of the work pools: process, docker or kubernetes.")] = "process",
    notify: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            envvar="PIPELINERL_NOTIFY",
            help="Webhook for messages about ends of runs and alarms: of Slack, Discord or Teams, or any http(s) URL "
            "for a POST of JSON; or TYPE/NAME of a notification block in Prefect. Can be repeated. In the variable "
            "PIPELINERL_NOTIFY the URL is not in the list of processes.",
        ),
    ] = None,
    max_resumes: Annotated[
        int | None, typer.Option(help="How often a crashed run is scheduled again without becoming Running.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="An edited copy of the shipped prefect.yaml; see --show."),
    ] = None,
    registry: Annotated[
        str,
        typer.Option(
            envvar="PIPELINERL_REGISTRY",
            help="Registry of the images, for --pools docker and kubernetes, for example ghcr.io/team.",
        ),
    ] = "",
    reset: Annotated[
        bool,
        typer.Option(
            "--reset", help="Overwrite what is left to operators, too; for a prefect.yaml under version control."
        ),
    ] = False,
    show: Annotated[bool, typer.Option("--show", help="Print the shipped prefect.yaml and change nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Create or update work pools, deployments and automations on the Prefect server at PREFECT_API_URL.

    Schedules, pauses, tags and limits of deployments that are on the server already stay as they are there, and
    actions that operators have added to automations stay, too. A field that differs from prefect.yaml is listed.
    Without --notify, messages go where they went before; `pipelinerl notify --test` sends a message.

    Example: `pipelinerl deploy`, then `prefect worker start --pool control`, then "Run" in the Prefect UI. To change
    images, schedules or resources: `pipelinerl deploy --show > prefect.yaml`, edit the file, then
    `pipelinerl deploy --file prefect.yaml` (`--reset` for schedules).
    """
    from pipelinerl.flows.cli import deployment
    from pipelinerl.tasks.automations import DEFAULT_MAX_RESUMES

    if show:
        text = deployment.SHIPPED.read_text()
        answer(text, [text.rstrip()], as_json=as_json)
        return
    most = DEFAULT_MAX_RESUMES if max_resumes is None else max_resumes
    deployed = deployment.deploy(
        pools, notify or (), file or deployment.SHIPPED, most, registry=registry, reset=reset
    )
    answer(dataclasses.asdict(deployed), deployed.lines, as_json=as_json)
