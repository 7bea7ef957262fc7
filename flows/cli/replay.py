"""`pipelinerl replay`: recorded batches trained again."""

from typing import Annotated

import typer

from pipelinerl.flows.cli.arguments import Json, Root, Run
from pipelinerl.flows.cli.child import run_module


def replay(
    run: Run,
    from_step: Annotated[int | None, typer.Option(help="First step; default the first of the run.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Another loss or learner: a study.")
    ] = None,
    to_step: Annotated[int | None, typer.Option(help="Last step; default the last of the run.")] = None,
    root: Root = "",
    as_json: Json = False,
) -> None:
    """Train recorded batches again and compare losses and weights with the commits; exit 1 if any differs.

    With settings it is a study: what another loss or learner would have made of the recorded stream.

    Examples: `pipelinerl replay latest --from-step 10 --to-step 20`, `pipelinerl replay latest loss.ratio_max=2`
    """
    from pipelinerl_core.run.locate import locate_run

    arguments = {"run": locate_run(run, root)}
    arguments |= {
        key: str(step) for key, step in (("from-step", from_step), ("to-step", to_step)) if step is not None
    }
    run_module("tools.replay", arguments, [*(["--json"] if as_json else []), *(overrides or [])])
