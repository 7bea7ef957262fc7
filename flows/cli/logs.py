"""`pipelinerl logs`: prints the logs of the roles of a run on this host."""

from typing import Annotated, Any

import typer

from pipelinerl.flows.cli.arguments import Json, Root, Run
from pipelinerl.flows.cli.console import answer, say
from pipelinerl_core.errors import ConfigError


def logs(
    run: Run = "latest",
    role: Annotated[
        str, typer.Option(help="Only this role: hub, trainer, actor (all actors), actor-1, evaluator, ...")
    ] = "",
    lines: Annotated[int, typer.Option("--lines", "-n", help="Number of last lines of each log.", min=0)] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until Ctrl-C.")] = False,
    root: Root = "",
    as_json: Json = False,
) -> None:
    """Show the logs of the roles of a run on this host; with --json also the number of warnings and errors.

    Examples: `pipelinerl logs`, `pipelinerl logs latest --role actor --follow`
    """
    from pipelinerl_core.run.locate import locate_run

    show(locate_run(run, root), role, lines, keeps_on=follow, as_json=as_json)


def show(url: str, role: str, num_lines: int, *, keeps_on: bool, as_json: bool) -> None:
    """Print the last lines of each log; with `keeps_on` also new lines until Ctrl-C.

    Raises ConfigError for a missing run or role, and for `keeps_on` with `as_json`.
    """
    from pipelinerl_core.run.context import log_directory, open_run
    from pipelinerl_core.supervision.role_logs import digest_rows, follow, log_files, tail

    if keeps_on and as_json:
        raise ConfigError(
            "--follow does not end, so --json cannot print one document. Leave out --json; for JSON lines, set "
            "tracking.log_format=json for the run"
        )
    run = open_run(url)
    directory = log_directory(run.store.url, run.run_id)
    files = log_files(directory, role)
    last = {name: tail(path, num_lines) for name, path in files.items()}
    digests = {row["role"]: row for row in digest_rows(directory)}
    document: dict[str, Any] = {
        "run_id": run.run_id,
        "directory": str(directory),
        "roles": {name: {**digests[name], "last_lines": lines} for name, lines in last.items()},
    }
    answer(document, [shown(name, line) for name, lines in last.items() for line in lines], as_json=as_json)
    if not keeps_on:
        return
    try:
        for name, line in follow(directory, role):
            answer(None, [shown(name, line)], as_json=False)
    except KeyboardInterrupt:
        say("the run continues")


def shown(name: str, line: str) -> str:
    """A line after the name of its role; a JSON line contains the name and stays as it is."""
    return line if line.startswith('{"time": ') else f"{name} | {line}"
