"""`pipelinerl gc`: deletes objects that runs do not need any more."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipelinerl.flows.cli.arguments import Json, Root, complete_run
from pipelinerl.flows.cli.console import answer
from pipelinerl.flows.cli.retention import (
    OlderThan,
    Owner,
    State,
    Tag,
    Yes,
    ask,
    conditions,
    finish,
    objects_text,
    repeatable,
    require_selection,
    require_yes,
    result,
    run_lines,
    size_text,
    total_text,
)

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
    owner: Owner = None,
    tag: Tag = None,
    state: State = None,
    older_than: OlderThan = None,
    rollouts: Annotated[
        bool,
        typer.Option("--rollouts", help="Also delete segments of decided groups; batches keep the trained rollouts."),
    ] = False,
    now: Annotated[bool, typer.Option("--now", help="Delete at once, also what no earlier call has noted.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be deleted; delete nothing.")] = False,
    yes: Yes = False,
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

    wanted = conditions(owner, tag, state, older_than)
    require_selection([run] if run is not None else [], wanted, may_be_all=True)
    find = partial(find_garbage, with_rollouts=rollouts, now=now or dry_run)
    if run is not None:
        _collect_run(find(locate_run(run, root)), dry_run=dry_run, as_json=as_json)
        return
    require_yes(yes=yes, dry_run=dry_run)
    with repeatable("gc"):
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
    lines = [f"{name}: {objects_text(len(document[name]), size)} {verb}" for name, size in document["bytes"].items()]
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
    lines = run_lines(doomed.values())
    lines += [_memory_line(memory, "of killed runs")] * bool(memory)
    if not dry_run:
        question = f"Remove this garbage of {total_text(documents.values())} under {root}?"
        ask(lines, question, yes=yes or not (memory or doomed))
        _, failed = attempt_each(lambda url: garbage[url].remove(), garbage)
        memory = delete_shared_memory(root, memory)
        errors |= failed
        documents = {url: run for url, run in documents.items() if url not in failed}
        lines = [_memory_line(memory, "removed")] * bool(memory)
    verb = "would be removed" if dry_run else "removed"
    runs = [*documents.values()]
    document = {"root": root, **result(runs, errors, dry_run=dry_run), "shared_memory": [*memory]}
    finish(document, [*lines, *_noted(runs)], f"{total_text(runs)} {verb}", errors, as_json=as_json)


def _memory_line(memory: Mapping[str, int], verb: str) -> str:
    return f"shared_memory: {len(memory)} directories, {size_text(sum(memory.values()))} {verb}"


def _noted(documents: Iterable[Mapping[str, Any]]) -> list[str]:
    num_noted = sum(len(run["noted"]) for run in documents)
    return [f"{num_noted:,} objects are noted; the next `pipelinerl gc` removes them (--now: at once)"] * bool(
        num_noted
    )
