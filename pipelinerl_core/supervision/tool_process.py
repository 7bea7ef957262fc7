"""Runs a tool of the core in a child process, which ends with this process; its errors become ours."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipelinerl_core.errors import EXIT_CONFIG, EXIT_STORE, ConfigError, PipelineRLError, StoreUnavailable
from pipelinerl_core.run.context import RunContext
from pipelinerl_core.supervision.role_commands import ending_with_parent, module_command, role_environment
from pipelinerl_core.supervision.temporary_directories import own_temporary

_POLL_SECONDS = 1.0
_TAIL_CHARS = 2000


def run_tool(
    run: RunContext,
    tool: str,
    arguments: Mapping[str, str],
    flags: Sequence[str] = (),
    *,
    log_path: Path,
) -> tuple[int, str]:
    """Run `python -m pipelinerl_core.tools.TOOL` with the environment of a role; returns (exit code, stdout).

    log_path: gets stderr.
    Raises ConfigError or StoreUnavailable if the child ended with such an error, PipelineRLError if the child failed
    without output.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    environment = role_environment(run.config.placement.threads, run.token)
    with log_path.open("wb") as log, own_temporary(environment) as own:
        process = subprocess.Popen(
            ending_with_parent([*module_command(f"pipelinerl_core.tools.{tool}", arguments), *flags]),
            env=own,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            process_group=0,
        )
        try:
            output = _wait(process)
        finally:  # a cancelled flow run must not leave the child running
            process.kill()
            process.wait()
    last = log_path.read_text(errors="replace")[-_TAIL_CHARS:].strip()
    if process.returncode == EXIT_CONFIG:
        raise ConfigError(last.splitlines()[-1] if last else f"the {tool} refused its arguments")
    if process.returncode == EXIT_STORE:
        raise StoreUnavailable(last.splitlines()[-1] if last else f"{tool}: the store did not answer")
    if process.returncode != 0 and not output:
        raise PipelineRLError(f"the {tool} ended with code {process.returncode}:\n{last}")
    return process.returncode, output


def _wait(process: "subprocess.Popen[str]") -> str:
    """The output of the process; short waits, so that the caller handles signals at once."""
    while True:
        try:
            return process.communicate(timeout=_POLL_SECONDS)[0]
        except subprocess.TimeoutExpired:
            continue
