"""`pipelinerl actor`: adds an actor to a live run."""

from typing import Annotated

import typer

from pipelinerl.flows.cli.arguments import Root, Run
from pipelinerl.flows.cli.child import exit_with


def actor(
    run: Run,
    name: Annotated[str, typer.Option(help="Name of the actor in the run. Default: host name and process id.")] = "",
    root: Root = "",
) -> None:
    """Add an actor to a live run, from any machine that reaches the hub and the store of the run.

    PIPELINERL_TOKEN must have the value with which the run was started. After Ctrl-C or SIGTERM, other actors
    continue the unfinished groups of this actor and keep their tokens.

    Example: `PIPELINERL_TOKEN=... pipelinerl actor latest`
    """
    from pipelinerl_core.run.locate import locate_run
    from pipelinerl_core.supervision.join import join_run

    raise exit_with(join_run(locate_run(run, root), name))
