"""Commands that are a role of the core: one child process, whose result is the result of the command."""

import subprocess
from collections.abc import Mapping, Sequence

import typer

from pipelinerl.flows.cli.console import EXIT_BAD_INPUT, EXIT_FAILURE, EXIT_OK


def run_role(role: str, arguments: Mapping[str, str], flags: Sequence[str]) -> None:
    """Run a role as a child that writes the result to our stdout, and take over its exit code."""
    from pipelinerl_core.supervision.role_commands import guarded, role_command, role_environment
    from pipelinerl_core.supervision.temporary_directories import own_temporary

    command = guarded([*role_command(role, arguments), *flags])
    with own_temporary(role_environment(1, "")) as environment:
        code = subprocess.run(command, env=environment, check=False).returncode
    raise take_over(code)


def take_over(code: int) -> typer.Exit:
    """The end of the command after a child that ended with this code."""
    return typer.Exit(code if code in (EXIT_OK, EXIT_BAD_INPUT) else EXIT_FAILURE)
