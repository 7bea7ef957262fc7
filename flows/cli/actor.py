"""`pipelinerl actor`: one more actor of a live run."""

from typing import Annotated

import typer

from pipelinerl.flows.cli.arguments import Root, Run
from pipelinerl.flows.cli.child import take_over


def actor(
    run: Run,
    name: Annotated[str, typer.Option(help="Name in the run; default: of this host and process.")] = "",
    root: Root = "",
) -> None:
    """Join a run that is under way with one more actor, from anywhere that reaches its hub and store.

    PIPELINERL_TOKEN must have the value that it had when the run was started. Ctrl-C or SIGTERM: its unfinished
    groups go to the other actors, with the tokens they have. Example: `PIPELINERL_TOKEN=... pipelinerl actor latest`
    """
    from pipelinerl_core.run.locate import locate_run
    from pipelinerl_core.supervision.join import join_run

    raise take_over(join_run(locate_run(run, root), name))
