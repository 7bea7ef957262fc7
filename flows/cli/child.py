"""Runs a tool of the core as a child process; its exit code becomes the exit code of the command."""

import subprocess
from collections.abc import Mapping

import typer

from pipelinerl.flows.cli.console import EXIT_BAD_INPUT, EXIT_FAILURE, EXIT_OK
from pipelinerl_core.errors import EXIT_DIVERGED, EXIT_STORE


def run_tool(tool: str, arguments: Mapping[str, str], *, as_json: bool) -> None:
    """Run `python -m pipelinerl_core.tools.TOOL` as a child process; raises typer.Exit with its exit code."""
    from pipelinerl_core.supervision.role_commands import ending_with_parent, module_command, role_environment
    from pipelinerl_core.supervision.temporary_directories import own_temporary

    flags = ["--json"] if as_json else []
    command = ending_with_parent([*module_command(f"pipelinerl_core.tools.{tool}", arguments), *flags])
    with own_temporary(role_environment(1, "")) as environment:
        code = subprocess.run(command, env=environment, check=False).returncode
    raise exit_with(code)


def exit_with(code: int) -> typer.Exit:
    """The typer.Exit for a child process that ended with this exit code; other codes than 0, 2, 4 and 5 become 1."""
    return typer.Exit(code if code in (EXIT_OK, EXIT_BAD_INPUT, EXIT_STORE, EXIT_DIVERGED) else EXIT_FAILURE)
