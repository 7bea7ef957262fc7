"""`pipelinerl doctor`: checks whether this machine can run PipelineRL, and whether a configuration fits its GPUs."""

from typing import Annotated

import typer

from pipelinerl.flows.cli.arguments import Json, Overrides, Root
from pipelinerl.flows.cli.console import EXIT_FAILURE, EXIT_OK, answer


def doctor(
    source: Annotated[
        str, typer.Argument(metavar="[PRESET|FILE.toml]", help="Also show the memory that this configuration needs.")
    ] = "",
    overrides: Overrides = None,
    root: Root = "",
    as_json: Json = False,
) -> None:
    """Check this machine: versions, cores, thread settings, memory, disk, servers. Exit 1 if there is a problem.

    With a configuration: the memory of GPU, host and /dev/shm that each role needs, and whether they fit.

    Examples:

    - `pipelinerl doctor`
    - `pipelinerl doctor mine.toml`
    - `pipelinerl doctor mine.toml placement.gpu=H100 trainer.ranks=4`
    """
    from pipelinerl.flows.cli.examination import examine, examine_fit
    from pipelinerl_core.models.resolve import load_config

    config = load_config(source, overrides or ()) if source else None
    examination = examine(root)
    if config is not None:
        examine_fit(examination, config)
    answer(examination.document, examination.lines, as_json=as_json)
    raise typer.Exit(EXIT_FAILURE if examination.problems else EXIT_OK)
