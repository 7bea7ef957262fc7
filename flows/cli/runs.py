"""`pipelinerl runs`: lists the runs below a root."""

from typing import Annotated

import typer

from pipelinerl.flows.cli.arguments import Json, OlderThan, Root, State, Tag
from pipelinerl.flows.cli.console import answer


def runs(
    root: Root = "",
    limit: Annotated[int, typer.Option("--limit", "-n", help="Show the newest N runs; 0: all.", min=0)] = 20,
    owner: Annotated[str, typer.Option(help="Only runs whose owner contains this text.")] = "",
    tag: Tag = None,
    state: State = None,
    older_than: OlderThan = None,
    sort: Annotated[
        str, typer.Option(help="Order: started, owner, state, step, reward, held_out, tokens, hours or gpu_hours.")
    ] = "started",
    as_json: Json = False,
) -> None:
    """List the runs below a root, newest first: owner, state, step, reward, held-out accuracy, model, tags.

    Reads only stored objects. `pipelinerl status RUN` has the details of one run.

    Examples: `pipelinerl runs`, `pipelinerl runs --tag exp42 --sort held_out`, `pipelinerl runs --root
    s3://bucket/runs --limit 5`, `pipelinerl runs --json`
    """
    from pipelinerl_core.errors import ConfigError
    from pipelinerl_core.report.run_list import SORTS, Wanted, list_runs, run_table, sorted_runs
    from pipelinerl_core.run.locate import root_url
    from pipelinerl_core.storage.object_store import open_store

    wanted = Wanted(owner=owner, tag=tag or "", state=state or "", older_than=older_than or "")
    store = open_store(root_url(root))
    if sort not in SORTS:
        raise ConfigError(f"--sort {sort}: must be {', '.join(SORTS)}")
    listed = list_runs(store, limit if sort == "started" else 0, wanted)
    listed = sorted_runs(listed, sort)[: limit or None]
    document = {"root": store.url, "runs": [run.document() for run in listed]}
    lines = run_table(listed) if listed or not wanted else ["no run matches"]
    unreadable = [f"{run.run_id}: {run.problem}" for run in listed if run.problem]
    answer(document, [*lines, *unreadable, f"at: {store.url}"], as_json=as_json)
