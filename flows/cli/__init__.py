"""The command line. Each command imports its heavy modules when the command runs, so that --help is fast."""

import sys
from importlib import import_module
from typing import Annotated

import typer

from pipelinerl.flows.cli.console import answer, exit_codes
from pipelinerl.flows.environment import set_defaults
from pipelinerl_core.errors import ConfigError

NAMES = (
    "train",
    "trial",
    "play",
    "resume",
    "drain",
    "runs",
    "status",
    "serve",
    "logs",
    "sql",
    "report",
    "trace",
    "replay",
    "actor",
    "audit",
    "gc",
    "rm",
    "archive",
    "accept_loss",
    "evaluate",
    "export",
    "sweep",
    "promote",
    "compare",
    "prepare",
    "init",
    "config",
    "simulate",
    "doctor",
    "deploy",
    "notify",
)
"""Modules with the command of the same name, in the order of --help."""
COMMANDS = tuple(getattr(import_module(f"{__name__}.{name}"), name) for name in NAMES)

app = typer.Typer(
    name="pipelinerl",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="""Asynchronous reinforcement learning of language models.

    Generation and training run side by side; new weights are swapped in the middle of sequences.

    First steps:

    - `pipelinerl doctor` checks this machine
    - `pipelinerl train quickstart` trains a small model on two cores
    - `pipelinerl try rows.jsonl rewards.py:score` trains on your rows with your reward
    - `pipelinerl status latest` shows the progress of a run, `pipelinerl serve` pages of all runs
    - `pipelinerl resume latest` continues a run after a stop or a crash
    - `pipelinerl sweep` trains with several values of settings, `pipelinerl compare` measures which settings reach an
      accuracy sooner

    Results go to stdout (`--json`: one JSON document), logs to stderr. Exit codes: 0 success, 1 failure, 2 bad input,
    4 the store does not answer, 5 training diverged.
    """,
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from pipelinerl_core.run.locate import code_version

        answer(code_version(), [f"pipelinerl {code_version()}"], as_json=False)
        raise typer.Exit


@app.callback(help=app.info.help)
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """No text of its own: the help of `app` is the text of the command line."""


for command in COMMANDS:
    app.command("try" if command.__name__ == "trial" else None)(command)


def main() -> None:
    """Entry point of the console script `pipelinerl`."""
    set_defaults()
    with exit_codes():
        if sys.platform != "linux":
            raise ConfigError(f"PipelineRL runs on Linux only; this system is {sys.platform}")
        app()
