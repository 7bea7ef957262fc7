"""`pipelinerl gc`: deletes objects that a run does not need any more."""

from typing import Annotated

import typer

from pipelinerl.flows.cli.arguments import Json, Root, Run
from pipelinerl.flows.cli.child import run_module


def gc(
    run: Run,
    rollouts: Annotated[
        bool,
        typer.Option("--rollouts", help="Also delete segments of decided groups; batches keep the trained rollouts."),
    ] = False,
    now: Annotated[bool, typer.Option("--now", help="Delete at once, also what no earlier call has noted.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be deleted; delete nothing.")] = False,
    root: Root = "",
    as_json: Json = False,
) -> None:
    """Delete what a run does not need: orphans of crashes, old weights, logs of decided groups, unfinished files.

    The first call notes what a run does not need, and a later call deletes what it still does not need: one wrong
    answer of a store deletes nothing.

    On a live run, only objects that were decided ten steps ago or earlier.

    Example: `pipelinerl gc latest --rollouts --dry-run`
    """
    from pipelinerl_core.run.locate import locate_run

    url = locate_run(run, root)
    flags = {"--rollouts": rollouts, "--now": now, "--dry-run": dry_run, "--json": as_json}
    run_module("tools.gc", {"run": url}, [flag for flag, is_set in flags.items() if is_set])
