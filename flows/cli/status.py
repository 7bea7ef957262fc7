"""`pipelinerl status`: shows the progress of a run."""

from pipelinerl.flows.cli.arguments import Json, Root, Run
from pipelinerl.flows.cli.console import answer


def status(run: Run = "latest", root: Root = "", as_json: Json = False) -> None:
    """Show the progress of a run, whether the run is live, and the totals of its hub. Reads only stored objects.

    `pipelinerl serve` shows the same as a page, with the report.

    Examples: `pipelinerl status`, `pipelinerl status quickstart-1a2b3c4d --json`
    """
    from pipelinerl_core.report.live_view import format_status, run_status
    from pipelinerl_core.run.locate import locate_run
    from pipelinerl_core.storage.object_store import open_store

    store = open_store(locate_run(run, root))
    document = {**run_status(store), "url": store.url}
    answer(document, [] if as_json else [format_status(store, document), f"at: {store.url}"], as_json=as_json)
