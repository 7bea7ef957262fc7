"""`pipelinerl sql`: questions to a run, or to all runs of a root, in SQL."""

import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from pipelinerl.flows.cli.arguments import Json, Root, complete_run
from pipelinerl.flows.cli.console import answer, say, write_parts

_PROMPT, _CONTINUED = "sql> ", "...> "


def sql(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN|ROOT",
            help="A run: id under the root, `latest`, path or URL; or a root, for all its runs: path or URL.",
            autocompletion=complete_run,
        ),
    ],
    statement: Annotated[
        str, typer.Argument(metavar="[STATEMENT]", help="SQL of DuckDB. Without it: a shell, or statements on stdin.")
    ] = "",
    limit: Annotated[int, typer.Option("--limit", "-n", help="Rows of the table to print; 0: all.", min=0)] = 40,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print all rows as CSV.")] = False,
    root: Root = "",
    as_json: Json = False,
) -> None:
    """Ask a run, or all runs of a root, in SQL: rollouts, tokens, groups, steps, versions and others.

    Reads only stored objects, also of a run that goes on, and only those of the views that the statement names.
    docs/sql.md has the views and twenty queries. A statement can neither write nor read files. Needs the package
    duckdb: `pip install 'pipelinerl[sql]'`.

    In the shell a statement ends with `;`, `help` lists the views, `help VIEW` the columns of a view, and Ctrl-D ends
    the shell.

    Examples: `pipelinerl sql latest "select step, avg(reward) from rollouts group by step order by step"`,
    `pipelinerl sql ./runs "select run_id, state, reward from runs" --csv`
    """
    from pipelinerl_core.errors import ConfigError, PipelineRLError
    from pipelinerl_core.report.query.database import Database, stores_of

    if as_csv and as_json:
        raise ConfigError("--csv and --json: give one of the two")
    with Database(stores_of(run, root)) as database:
        for text in [statement] if statement else _statements():
            try:
                _show(database, text, limit, as_csv=as_csv, as_json=as_json)
            except (PipelineRLError, KeyboardInterrupt) as error:
                if statement or not sys.stdin.isatty():
                    raise
                say(str(error) or "interrupted")


def _show(database: Any, statement: str, limit: int, *, as_csv: bool, as_json: bool) -> None:
    from pipelinerl_core.report.query.output import csv_parts, document, table_lines

    result = database.sql(statement)
    with database.reading():
        if as_csv:
            write_parts(csv_parts(result))
        elif as_json:
            answer(document(result, 0), [], as_json=True)
        else:
            answer(None, table_lines(result, limit), as_json=False)
    for line in database.unknown_metrics(statement):
        say(f"note: {line}")


def _statements() -> Iterator[str]:
    """The statements of stdin, each up to a `;` at the end of a line; `help` is answered here."""
    is_shell = sys.stdin.isatty()
    if is_shell:
        import readline  # noqa: F401 - history and editing of `input`
    lines: list[str] = []
    while True:
        try:
            line = input((_CONTINUED if lines else _PROMPT) if is_shell else "")
        except EOFError:
            break
        first, *rest = line.split() or [""]
        if not lines and first.rstrip(";").lower() == "help":
            say("\n".join(_help(" ".join(rest).rstrip(";").lower())))
            continue
        lines += [line] if line.strip() or lines else []
        if line.rstrip().endswith(";"):
            yield "\n".join(lines)
            lines = []
    if "".join(lines).strip():
        yield "\n".join(lines)


def _help(name: str) -> list[str]:
    from pipelinerl_core.report.query.views import VIEWS

    if name not in VIEWS:
        return [f"{view}: {VIEWS[view].meaning}" for view in VIEWS]
    return [f"{column}: {entry.meaning}" for column, entry in VIEWS[name].columns.items()]
