"""`pipelinerl accept-loss`: continues a run whose newest commits are lost for good."""

from typing import Annotated

import typer

from pipelinerl.flows.cli.arguments import Json, Root, Run
from pipelinerl.flows.cli.console import answer


def accept_loss(
    run: Run,
    yes: Annotated[
        bool, typer.Option("--yes", help="Give the commits up; without it, print what is missing.")
    ] = False,
    root: Root = "",
    as_json: Json = False,
) -> None:
    """Let a stopped run continue from the last step before missing commits, after a disk or a bucket lost them.

    A start refuses a run whose store lists fewer commits than were written, because the store may answer wrongly for
    a moment. Use this command only if the commits are lost for good; the steps after them are trained again. No role
    of the run may be left: actors end two minutes after their hub, and until then sample with lost versions.

    Example: `pipelinerl accept-loss latest`
    """
    from pipelinerl_core.run.history import accept_lost_commits
    from pipelinerl_core.run.locate import locate_run, refuse_if_live
    from pipelinerl_core.storage.object_store import open_store

    url = locate_run(run, root)
    refuse_if_live(url)
    document = accept_lost_commits(open_store(url), is_final=yes)
    line = f"steps after {document['step']} are given up: {document['reason']}"
    if not yes:
        line = f"{document['reason']}. With --yes the run continues after step {document['step']}"
    answer(document, [line], as_json=as_json)
