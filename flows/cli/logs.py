"""`pipelinerl logs`: what the roles of a run have written on this host."""

from typing import Annotated, Any

import typer

from pipelinerl.flows.cli.arguments import Json, Root, Run
from pipelinerl.flows.cli.console import answer, say
from pipelinerl_core.errors import ConfigError


def logs(
    run: Run = "latest",
    role: Annotated[str, typer.Option(help="Only hub, trainer, actor (all of them), actor-1, evaluator, ...")] = "",
    lines: Annotated[int, typer.Option("--lines", "-n", help="Last lines of each log.", min=0)] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is written, until Ctrl-C.")] = False,
    root: Root = "",
    as_json: Json = False,
) -> None:
    """Show what the roles of a run have written on this host, and (--json) how many warnings and errors.

    Examples: `pipelinerl logs`, `pipelinerl logs latest --role actor --follow`
    """
    from pipelinerl_core.run.locate import locate_run

    show(locate_run(run, root), role, lines, keeps_on=follow, as_json=as_json)


def show(url: str, role: str, num_lines: int, *, keeps_on: bool, as_json: bool) -> None:
    """Print the last lines of each log, then, if it keeps on, those that follow until Ctrl-C. Raises ConfigError."""
    from pipelinerl_core.run.context import log_directory, open_run
    from pipelinerl_core.supervision.role_logs import digest_rows, follow, log_files, tail

    if keeps_on and as_json:
        raise ConfigError(
            "--follow does not end, --json is one document. Set tracking.log_format=json for JSON lines"
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
        say("the run goes on")


def shown(name: str, line: str) -> str:
    """A line with the name of its role in front; a JSON line has that inside."""
    return line if line.startswith('{"time": ') else f"{name} | {line}"
