"""`pipelinerl doctor`: checks whether this machine can run PipelineRL."""

import typer

from pipelinerl.flows.cli.arguments import Json, Root
from pipelinerl.flows.cli.console import EXIT_FAILURE, EXIT_OK, answer


def doctor(root: Root = "", as_json: Json = False) -> None:
    """Check this machine: versions, cores, thread settings, memory, disk, servers. Exit 1 if there is a problem."""
    from pipelinerl.flows.cli.examination import examine

    examination = examine(root)
    answer(examination.document, examination.lines, as_json=as_json)
    raise typer.Exit(EXIT_FAILURE if examination.problems else EXIT_OK)
