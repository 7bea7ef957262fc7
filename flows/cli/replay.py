"""`pipelinerl replay`: trains recorded batches again, to verify a run."""

from typing import Annotated

import typer

from pipelinerl.flows.cli.arguments import Json, Root, Run
from pipelinerl.flows.cli.child import run_tool


def replay(
    run: Run,
    from_step: Annotated[int | None, typer.Option(help="First step. Default: the first step of the run.")] = None,
    to_step: Annotated[int | None, typer.Option(help="Last step. Default: the last step of the run.")] = None,
    root: Root = "",
    as_json: Json = False,
) -> None:
    """Train recorded batches again and compare losses and weights with the commits. Exit 1 if any differs.

    Example: `pipelinerl replay latest --from-step 10 --to-step 20`
    """
    from pipelinerl_core.run.locate import locate_run

    steps = {key: str(step) for key, step in (("from-step", from_step), ("to-step", to_step)) if step is not None}
    run_tool("replay", {"run": locate_run(run, root)} | steps, as_json=as_json)
