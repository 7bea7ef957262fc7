"""`pipelinerl gc`: deletes objects that runs do not need any more."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipelinerl.flows.cli import retention
from pipelinerl.flows.cli.arguments import Json, OlderThan, Root, State, Tag, complete_run
from pipelinerl.flows.cli.console import answer

if TYPE_CHECKING:
    from pipelinerl_core.report.run_list import Wanted
    from pipelinerl_core.tools.gc import Garbage


def gc(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="A run: id under the root, `latest`, path or URL. Without RUN: all runs under the root that match.",
            autocompletion=complete_run,
        ),
    ] = None,
    owner: retention.Owner = None,
    tag: Tag = None,
    state: State = None,
    older_than: OlderThan = None,
    rollouts: Annotated[
        bool,
        typer.Option(
            "--rollouts",
            help="Also delete segments of decided groups, of a finished run all; batches keep the trained rollouts.",
        ),
    ] = False,
    now: Annotated[bool, typer.Option("--now", help="Delete at once, also what no earlier call has noted.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be deleted; delete nothing.")] = False,
    yes: retention.Yes = False,
    root: Root = "",
    as_json: Json = False,
) -> None:
    """Delete what runs do not need: orphans of crashes, old weights, logs of decided groups, unfinished files.

    The first call notes what a run does not need, and a later call deletes what it still does not need: one wrong
    answer of a store deletes nothing.

    On a live run, only objects that were decided ten steps ago or earlier. Without RUN, lists what it will delete of
    each run first, and asks.

    Examples: `pipelinerl gc latest --rollouts --dry-run`, `pipelinerl gc --older-than 7d --yes`
    """
    from pipelinerl_core.run.locate import locate_run, root_url
    from pipelinerl_core.tools.gc import find_garbage

    named = [run] if run is not None else []
    wanted = retention.conditions(named, owner, tag, state, older_than, may_be_all=True)
    find = partial(find_garbage, with_rollouts=rollouts, now=now or dry_run)
    if run is not None:
        _collect_run(find(locate_run(run, root)), dry_run=dry_run, as_json=as_json)
        return
    retention.require_yes(yes=yes, dry_run=dry_run)
    with retention.repeatable("gc"):
        _collect_root(root_url(root), wanted, find, dry_run=dry_run, yes=yes, as_json=as_json)


def _collect_run(garbage: "Garbage", *, dry_run: bool, as_json: bool) -> None:
    from pipelinerl_core.tools.gc import delete_shared_memory, find_shared_memory

    document = garbage.document()
    root = document["url"].rpartition("/")[0]
    memory = find_shared_memory(root)
    if not dry_run:
        garbage.remove()
        memory = delete_shared_memory(root, memory)
    verb = "would be removed" if dry_run else "removed"
    lines = [
        f"{name}: {retention.objects_text(len(document[name]), num_bytes)} {verb}"
        for name, num_bytes in document["bytes"].items()
    ]
    lines.append(_memory_line(memory, verb))
    answer(
        {"dry_run": dry_run, **document, "shared_memory": [*memory]}, [*lines, *_noted([document])], as_json=as_json
    )


def _collect_root(
    root: str, wanted: "Wanted", find: "Callable[[str], Garbage]", *, dry_run: bool, yes: bool, as_json: bool
) -> None:
    from pipelinerl_core.storage.object_store import open_store
    from pipelinerl_core.tools.gc import delete_shared_memory, find_shared_memory
    from pipelinerl_core.tools.retention import attempt_each, origin_of, select_runs

    urls, errors = select_runs(root, [], wanted)
    garbage, failed = attempt_each(find, urls)
    errors |= failed
    memory = find_shared_memory(root)
    documents = {url: each.document() for url, each in garbage.items()}
    doomed = {url: run for url, run in documents.items() if run["num_objects"]}
    if not (yes or dry_run):
        doomed = {url: {**run, **origin_of(open_store(url))} for url, run in doomed.items()}
    lines = retention.run_lines(doomed.values())
    lines += [_memory_line(memory, "of killed runs")] * bool(memory)
    if not dry_run:
        question = f"Remove this garbage of {retention.total_text(documents.values())} under {root}?"
        retention.ask(lines, question, yes=yes or not (memory or doomed))
        _, failed = attempt_each(lambda url: garbage[url].remove(), garbage)
        memory = delete_shared_memory(root, memory)
        errors |= failed
        documents = {url: run for url, run in documents.items() if url not in failed}
        lines = [_memory_line(memory, "removed")] * bool(memory)
    verb = "would be removed" if dry_run else "removed"
    runs = [*documents.values()]
    document = {"root": root, **retention.result(runs, errors, dry_run=dry_run), "shared_memory": [*memory]}
    retention.finish(document, [*lines, *_noted(runs)], verb, errors, as_json=as_json)


def _memory_line(memory: Mapping[str, int], verb: str) -> str:
    return f"shared_memory: {len(memory)} directories, {retention.size_text(sum(memory.values()))} {verb}"


def _noted(documents: Iterable[Mapping[str, Any]]) -> list[str]:
    num_noted = sum(len(run["noted"]) for run in documents)
    return [f"{num_noted:,} objects are noted; the next `pipelinerl gc` removes them (--now: at once)"] * bool(
        num_noted
    )
