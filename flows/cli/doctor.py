"""`pipelinerl doctor`: whether this machine is ready."""

import typer

from pipelinerl.flows.cli.arguments import Json, Root
from pipelinerl.flows.cli.console import EXIT_FAILURE, EXIT_OK, answer


def doctor(root: Root = "", as_json: Json = False) -> None:
    """Say whether this machine is ready: versions, cores, thread settings, memory, disk, servers; exit 1 if not."""
    from pipelinerl.flows.cli.examination import examine

    examination = examine(root)
    answer(examination.document, examination.lines, as_json=as_json)
    raise typer.Exit(EXIT_FAILURE if examination.problems else EXIT_OK)
