"""Shared by `gc`, `rm` and `archive`: arguments, the question before a removal, progress, errors of single runs."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipelinerl.flows.cli.arguments import complete_run
from pipelinerl.flows.cli.console import EXIT_FAILURE, EXIT_INTERRUPTED, answer, exit_code_of, say
from pipelinerl_core.errors import ConfigError, PipelineRLError

if TYPE_CHECKING:
    from pipelinerl_core.report.run_list import Wanted

Runs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN]...", help="Runs: ids under the root, `latest`, paths or URLs.", autocompletion=complete_run
    ),
]
Owner = Annotated[str | None, typer.Option(help="Only runs of this owner, as a whole: user, or user@host.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask before the removal; required without a terminal.")]


def require_yes(*, yes: bool, dry_run: bool) -> None:
    """Raise ConfigError if nobody can be asked."""
    if not (yes or dry_run or sys.stdin.isatty()):
        raise ConfigError("nobody can be asked, because the standard input is no terminal: give --yes or --dry-run")


def ask(lines: list[str], question: str, *, yes: bool) -> None:
    """Show what will be removed, and ask without --yes; ends the command if the answer is not yes."""
    for line in lines:
        say(line)
    if yes:
        return
    try:
        is_wanted = typer.confirm(question, err=True)
    except typer.Abort:  # Ctrl-C
        raise KeyboardInterrupt from None
    if not is_wanted:
        raise typer.Abort


def conditions(
    runs: list[str],
    owner: str | None,
    tag: str | None,
    state: str | None,
    older_than: str | None,
    *,
    may_be_all: bool = False,
) -> "Wanted":
    """The conditions that are given.

    Raises ConfigError for an empty text, which would select every run, for runs with conditions, and unless
    `may_be_all` for neither.
    """
    from pipelinerl_core.report.run_list import Wanted

    given = {"owner": owner, "tag": tag, "state": state, "older_than": older_than}
    for name, text in given.items():
        if text is not None and not text.strip():
            raise ConfigError(f"--{name.replace('_', '-')} is empty: give a text, or leave the option out")
    wanted = Wanted(**{name: text for name, text in given.items() if text is not None}, is_exact=True)
    options = "--owner, --tag, --state or --older-than"
    if runs and wanted:
        raise ConfigError(f"give either runs or {options}, not both")
    if not (runs or wanted or may_be_all):
        raise ConfigError(f"give runs, or {options}")
    return wanted


def refuse_removal(wanted: "Wanted") -> None:
    """Raise ConfigError for the states of runs that no condition removes."""
    if wanted.state == "running":
        raise ConfigError("--state running: a live run is not removed. Stop it first, for example with `drain`")
    if wanted.state == "unreadable":
        raise ConfigError(
            "--state unreadable: the store may have refused to read these runs; an unreadable run is removed only by "
            "its name"
        )


def size_text(num_bytes: int) -> str:
    """Example: 1.2 GB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes} bytes"


def objects_text(num_objects: int, num_bytes: int) -> str:
    """Example: 12 objects, 1.2 GB."""
    return f"{num_objects:,} object{'s' * (num_objects != 1)}, {size_text(num_bytes)}"


def run_lines(documents: Iterable[Mapping[str, Any]]) -> list[str]:
    """A line for each run; of a removal also whose it is, and what stays."""
    return [_run_line(run) for run in documents]


def _run_line(run: Mapping[str, Any]) -> str:
    from pipelinerl_core.report.run_list import age

    line = f"{run['run_id']}: {objects_text(run['num_objects'], run['num_bytes'])}"
    if "state" in run:
        facts = (run["owner"], run["state"], age(run["active_at"]), run["url"].rpartition("/")[0])
        line += f" ({', '.join(filter(None, facts))})"
    if kept := run.get("kept"):
        line += f"; {len(kept)} objects that are not the run's stay, such as {kept[0]}"
    return line


def total_text(documents: Iterable[Mapping[str, Any]]) -> str:
    """Example: 3 runs, 120 objects, 1.2 GB."""
    runs = [*documents]
    total = objects_text(*(sum(run[name] for run in runs) for name in ("num_objects", "num_bytes")))
    return f"{len(runs)} run{'s' * (len(runs) != 1)}, {total}"


@contextmanager
def progress(total: int, *, is_bytes: bool = False) -> Iterator[Callable[[str, int], None]]:
    """A bar on a terminal; yields a function that takes what is done now and the progress since the last call."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    counted = DownloadColumn() if is_bytes else MofNCompleteColumn()
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), counted, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda text, done: bar.update(task, description=text, advance=done)


@contextmanager
def repeatable(command: str) -> Iterator[None]:
    """After Ctrl-C, say that the command can be repeated."""
    try:
        yield
    except KeyboardInterrupt:
        say(f"pipelinerl: interrupted; the same `pipelinerl {command}` does the rest")
        raise typer.Exit(EXIT_INTERRUPTED) from None


def result(
    documents: Iterable[Mapping[str, Any]], errors: Mapping[str, PipelineRLError], *, dry_run: bool
) -> dict[str, Any]:
    """The JSON document of a command over several runs."""
    runs = [*documents]
    sums = {name: sum(run[name] for run in runs) for name in ("num_objects", "num_bytes")}
    return {"dry_run": dry_run, "runs": runs, **sums, "errors": {url: _line(error) for url, error in errors.items()}}


def finish(
    document: dict[str, Any], lines: list[str], verb: str, errors: Mapping[str, PipelineRLError], *, as_json: bool
) -> None:
    """Print the result, at its end what the runs have in all and the `verb`; name the runs that failed on stderr.

    The exit code is that of the errors if they are of one kind, else 1.
    """
    if as_json or document["runs"] or not errors:
        total = f"{total_text(document['runs'])} {verb}" if document["runs"] else "no run matches"
        answer(document, [*lines, total], as_json=as_json)
    for url, error in errors.items():
        name = url.rpartition("/")[2]
        say(f"pipelinerl: {name}: {_line(error).removeprefix(f'{name}: ')}")
    codes = {exit_code_of(error) for error in errors.values()}
    if codes:
        raise typer.Exit(codes.pop() if len(codes) == 1 else EXIT_FAILURE)


def _line(error: PipelineRLError) -> str:
    return " ".join(str(error).split())
