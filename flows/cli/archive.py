"""`pipelinerl archive`: copies whole runs to another root."""

from functools import partial
from typing import Annotated

import typer

from pipelinerl.flows.cli import retention
from pipelinerl.flows.cli.arguments import Json, OlderThan, Root, State, Tag


def archive(
    to: Annotated[str, typer.Option("--to", metavar="ROOT", help="The other root: a path or s3://bucket/prefix.")],
    runs: retention.Runs = None,
    owner: retention.Owner = None,
    tag: Tag = None,
    state: State = None,
    older_than: OlderThan = None,
    remove: Annotated[
        bool, typer.Option("--remove", help="Then remove the original, as `rm` does; refused for a live run.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be copied; copy nothing.")] = False,
    yes: retention.Yes = False,
    root: Root = "",
    as_json: Json = False,
) -> None:
    """Copy whole runs to another root, also live runs: those that are named, or all that match every condition.

    Every object is read back and compared. Objects that are there already are compared only, so that the command can
    be repeated, also to check a copy. run.json is copied last: an incomplete copy is not listed as a run. The largest
    object must fit into memory. The same command in the other direction restores a run. The records of MLflow and
    Prefect are not copied.

    Examples: `pipelinerl archive latest --to s3://backup/runs`, `pipelinerl archive --state finished --older-than 30d
    --to /archive/runs --remove`
    """
    from pipelinerl_core.run.locate import root_url
    from pipelinerl_core.storage.object_store import check_writable, open_store
    from pipelinerl_core.tools.archive import Archive, archive_runs
    from pipelinerl_core.tools.retention import attempt_each, select_runs

    wanted = retention.conditions(runs or [], owner, tag, state, older_than)
    if remove:
        retention.refuse_removal(wanted)
    retention.require_yes(yes=yes, dry_run=dry_run or not remove)
    other = open_store(to)
    with retention.repeatable("archive"):
        urls, errors = select_runs(root_url(root), runs or [], wanted, only_own=remove)
        archives, refused = attempt_each(partial(Archive, to=other.url, removes=remove, wanted=wanted), urls)
        errors |= refused
        documents = {url: archive.document() for url, archive in archives.items()}
        if archives and not dry_run:
            check_writable(other, "--to")
            if remove:
                doomed = [archive.removal.document() for archive in archives.values() if archive.removal]
                question = f"Copy to {other.url}, then remove {retention.total_text(doomed)}?"
                retention.ask(retention.run_lines(doomed), question, yes=yes)
            with retention.progress(sum(run["num_bytes"] for run in documents.values()), is_bytes=True) as advance:
                failed = archive_runs(archives.values(), advance)
            errors |= failed
            documents = {url: archive.document() for url, archive in archives.items() if url not in failed}
    copied = [*documents.values()]
    verb = f"{'would be ' * dry_run}copied to {other.url}{' and removed here' * remove}"
    if not dry_run:
        verb += f"; {sum(run['num_written'] for run in copied):,} written, all compared"
    document = {"to": other.url, **retention.result(copied, errors, dry_run=dry_run)}
    retention.finish(document, retention.run_lines(copied), verb, errors, as_json=as_json)
