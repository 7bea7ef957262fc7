"""`pipelinerl notify`: says who gets messages from a Prefect server, and sends a test message."""

from typing import Annotated

import typer

from pipelinerl.flows.cli.arguments import Json
from pipelinerl.flows.cli.console import answer


def notify(
    test: Annotated[
        bool, typer.Option("--test", help="Send a test message, and report whether it was sent.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show which messages the Prefect server at PREFECT_API_URL sends to whom; `deploy --notify URL` sets it.

    Example: `pipelinerl notify --test`. The Prefect server sends the test message, as it sends all messages.
    """
    from pipelinerl.flows.cli import notification

    notified = notification.read_deployed()
    lines = [each.line for each in notified]
    if test:
        lines += [
            f"the Prefect server has sent a test message to {slug}" for slug in notification.send_test(notified)
        ]
    document = {each.name: {"blocks": sorted(each.blocks.values()), "enabled": each.enabled} for each in notified}
    answer(document, lines, as_json=as_json)
