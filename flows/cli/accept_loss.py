"""`pipelinerl accept-loss`: continues a run whose newest commits are lost for good."""

from typing import Annotated

import typer

from pipelinerl.flows.cli.arguments import Json, Root, Run
from pipelinerl.flows.cli.console import answer, say

ROLES_END_SECONDS = 130.0
"""An actor without a hub ends after HUB_DEADLINE_SECONDS."""


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
    a moment. Use this command only if the commits are lost for good; the steps after them are trained again. If the
    hub was killed, --yes first waits two minutes: until then actors may sample with lost versions.

    Example: `pipelinerl accept-loss latest`
    """
    from pipelinerl_core.run.history import accept_lost_commits
    from pipelinerl_core.run.hub_status import HubWatch, wait_without_hub
    from pipelinerl_core.run.locate import locate_run
    from pipelinerl_core.storage.object_store import open_store

    store = open_store(locate_run(run, root))
    watch = HubWatch(store)
    wait_without_hub(store, 0.0, watch)
    document = accept_lost_commits(store, is_final=False)
    if yes:
        say(f"wait for up to {ROLES_END_SECONDS:.0f} s until the actors of a killed hub have ended")
        wait_without_hub(store, ROLES_END_SECONDS, watch)
        document = accept_lost_commits(store, is_final=True)
    line = f"steps after {document['step']} are given up: {document['reason']}"
    if not yes:
        line = f"{document['reason']}. With --yes the run continues after step {document['step']}"
    answer(document, [line], as_json=as_json)
