"""`pipelinerl status`: shows the progress of a run, once or as a page."""

from typing import Annotated

import typer

from pipelinerl.flows.cli.arguments import Json, Root, Run
from pipelinerl.flows.cli.console import answer


def status(
    run: Run = "latest",
    web: Annotated[bool, typer.Option("--web", help="Serve a page that follows the run, until Ctrl-C.")] = False,
    host: Annotated[str, typer.Option(help="Address for --web. The page has no password.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port for --web; 0: any free port.", min=0, max=65535)] = 0,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Name under which a browser may open --web, besides this host's name and IP addresses; repeatable."
        ),
    ] = None,
    root: Root = "",
    as_json: Json = False,
) -> None:
    """Show the progress of a run, whether the run is live, and the totals of its hub. Reads only stored objects.

    `--web` serves the report of the run, /status.json, and /metrics for Prometheus. With `latest` the page changes to
    a new run when one starts.

    Examples: `pipelinerl status`, `pipelinerl status --web`, `pipelinerl status quickstart-1a2b3c4d --json`
    """
    if web:
        from pipelinerl.flows.cli.live_page import serve

        serve(run, root, host, port, allowed_host or ())
        return
    from pipelinerl_core.report.live_view import format_status, run_status
    from pipelinerl_core.run.locate import locate_run
    from pipelinerl_core.storage.object_store import open_store

    store = open_store(locate_run(run, root))
    document = {**run_status(store), "url": store.url}
    answer(document, [] if as_json else [format_status(store), f"at: {store.url}"], as_json=as_json)
