"""`pipelinerl gc`: removes what a run does not need any more."""

from typing import Annotated

import typer

from pipelinerl.flows.cli.arguments import Json, Root, Run
from pipelinerl.flows.cli.child import run_module


def gc(
    run: Run,
    rollouts: Annotated[
        bool,
        typer.Option("--rollouts", help="Decided segments too; batches keep what was trained."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, remove nothing.")] = False,
    root: Root = "",
    as_json: Json = False,
) -> None:
    """Remove what a run does not need any more: orphans of crashes, logs of decided groups. Never of a live run.

    Example: `pipelinerl gc latest --rollouts --dry-run`
    """
    from pipelinerl_core.run.locate import locate_run, refuse_if_live

    url = locate_run(run, root)
    refuse_if_live(url)
    flags = {"--rollouts": rollouts, "--dry-run": dry_run, "--json": as_json}
    run_module("tools.gc", {"run": url}, [flag for flag, is_set in flags.items() if is_set])
