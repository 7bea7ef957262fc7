"""`pipelinerl rm`: removes whole runs."""

from functools import partial
from typing import Annotated

import typer

from pipelinerl.flows.cli import retention
from pipelinerl.flows.cli.arguments import Json, OlderThan, Root, State, Tag


def rm(
    runs: retention.Runs = None,
    owner: retention.Owner = None,
    tag: Tag = None,
    state: State = None,
    older_than: OlderThan = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed; remove nothing.")] = False,
    yes: retention.Yes = False,
    root: Root = "",
    as_json: Json = False,
) -> None:
    """Remove whole runs: those that are named, or all under the root that match every condition.

    Lists the runs with their objects and bytes first, and asks. A live run is refused, and a run for which the
    conditions do not hold right before its removal. An unreadable run is removed only by its name. An interrupted
    removal can be repeated. `latest` becomes the newest run that is left. A run that started from a removed run
    reads only the exported model in its `model.path`. The records of MLflow and Prefect stay.

    Examples: `pipelinerl rm quickstart-1a2b3c4d`, `pipelinerl rm --state finished --tag debug --older-than 30d`
    """
    from pipelinerl_core.run.locate import root_url
    from pipelinerl_core.tools.retention import Removal, attempt_each, remove_runs, select_runs

    wanted = retention.conditions(runs or [], owner, tag, state, older_than)
    retention.refuse_removal(wanted)
    retention.require_yes(yes=yes, dry_run=dry_run)
    with retention.repeatable("rm"):
        urls, errors = select_runs(root_url(root), runs or [], wanted, only_own=True)
        removals, refused = attempt_each(partial(Removal, wanted=wanted), urls)
        errors |= refused
        documents = {url: removal.document() for url, removal in removals.items()}
        if removals and not dry_run:
            question = f"Remove {retention.total_text(documents.values())}?"
            retention.ask(retention.run_lines(documents.values()), question, yes=yes)
            with retention.progress(sum(document["num_objects"] for document in documents.values())) as advance:
                failed = remove_runs(removals.values(), advance)
            errors |= failed
            documents = {url: document for url, document in documents.items() if url not in failed}
    removed = [*documents.values()]
    document = retention.result(removed, errors, dry_run=dry_run)
    lines = retention.run_lines(removed) if dry_run else []
    retention.finish(document, lines, f"{'would be ' * dry_run}removed", errors, as_json=as_json)
