"""`pipelinerl runs`: lists the runs below a root."""

from typing import Annotated

import typer

from pipelinerl.flows.cli.arguments import Json, Root
from pipelinerl.flows.cli.console import answer


def runs(
    root: Root = "",
    limit: Annotated[int, typer.Option("--limit", "-n", help="Show the newest N runs; 0: all.", min=0)] = 20,
    as_json: Json = False,
) -> None:
    """List the runs below a root, newest first: state, step, reward, held-out accuracy, model.

    Reads only stored objects. `pipelinerl status RUN` has the details of one run.

    Examples: `pipelinerl runs`, `pipelinerl runs --root s3://bucket/runs --limit 5`, `pipelinerl runs --json`
    """
    from pipelinerl_core.report.run_list import list_runs, run_table
    from pipelinerl_core.run.locate import root_url
    from pipelinerl_core.storage.object_store import open_store

    store = open_store(root_url(root))
    listed = list_runs(store, limit)
    document = {"root": store.url, "runs": [run.document() for run in listed]}
    lines = run_table(listed)
    unreadable = [f"{run.run_id}: {run.problem}" for run in listed if run.problem]
    answer(document, [*lines, *unreadable, f"at: {store.url}"], as_json=as_json)
