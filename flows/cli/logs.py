"""`pipelinerl logs`: prints the logs of the roles of a run: those of this host, and the last lines of other hosts."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
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
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new lines of the roles of this host until Ctrl-C.")
    ] = False,
    root: Root = "",
    as_json: Json = False,
) -> None:
    """Show the logs of the roles of a run; with --json also the number of warnings and errors.

    Of a run on S3, the roles of other hosts are shown too, with at most 500 last lines: each host copies them to the
    store every minute and at the end of a role. Of a role that several hosts have run, the newest is shown, and with
    --role NAME each of them.

    Examples: `pipelinerl logs`, `pipelinerl logs latest --role actor --follow`
    """
    from pipelinerl_core.run.context import log_directory, open_run
    from pipelinerl_core.run.locate import locate_run
    from pipelinerl_core.supervision.log_copies import all_logs
    from pipelinerl_core.supervision.role_logs import follow as new_lines
    from pipelinerl_core.supervision.role_logs import is_of

    url = locate_run(run, root)
    if follow and as_json:
        raise ConfigError(
            "--follow does not end, so --json cannot print one document. Leave out --json; for JSON lines, set "
            "tracking.log_format=json for the run"
        )
    context = open_run(url)
    directory = log_directory(context.store.url, context.run_id)
    by_role: dict[str, list[dict[str, Any]]] = {}
    for log in all_logs(directory, context.store, lines):
        by_role.setdefault(log["role"], []).append(log)
    chosen = {name: by_role[name] for name in sorted(by_role) if is_of(name, role)}
    _refuse_missing(directory, role, by_role, chosen)
    if follow and not any(log["is_here"] for logs in chosen.values() for log in logs):
        raise ConfigError("--follow: no such role has run on this host. Run the command there, or without --follow")
    document: dict[str, Any] = {
        "run_id": context.run_id,
        "directory": str(directory),
        "roles": {name: {**logs[0], "older": logs[1:]} for name, logs in chosen.items()},
    }
    texts = [line for name, logs in chosen.items() for line in _text(name, logs, with_older=name == role)]
    answer(document, texts, as_json=as_json)
    if not follow:
        return
    try:
        for name, line in new_lines(directory, role):
            answer(None, [shown(name, line)], as_json=False)
    except KeyboardInterrupt:
        say("the run continues")


def _refuse_missing(directory: Path, role: str, known: Mapping[str, Any], chosen: Mapping[str, Any]) -> None:
    if not known:
        raise ConfigError(
            f"no logs at {directory}, and none from other hosts in the store. A role of a run on S3 copies its last "
            "lines there after a minute, and at its end; of a run in a directory, run the command on its host"
        )
    if not chosen:
        raise ConfigError(f"--role {role}: no log of this role. Set one of: {', '.join(sorted(known))}")


def _text(name: str, logs: Sequence[Mapping[str, Any]], *, with_older: bool) -> list[str]:
    """The newest log of a role, after a line with the host and the time if the log is a copy."""
    lines = []
    for log in reversed(logs if with_older else logs[:1]):
        if not log["is_here"] or len(logs) > 1:
            lines.append(_place(name, log, 0 if with_older else len(logs) - 1))
        lines += [shown(name, line) for line in log["last_lines"]]
    return lines


def _place(name: str, log: Mapping[str, Any], num_older: int) -> str:
    when = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(log['at']))}"
    where = "this host, last written" if log["is_here"] else f"host {log['host']}, copied"
    older = f"; {num_older} older: --role {name}" if num_older else ""
    return f"--- {name}: {where} {when}{older}"


def shown(name: str, line: str) -> str:
    """A line after the name of its role; a JSON line contains the name and stays as it is."""
    return line if line.startswith('{"time": ') else f"{name} | {line}"
