"""Run a replay in a child process for a flow; the child ends with the flow."""

import json
import logging
import subprocess
from collections.abc import Sequence
from typing import Any

from pipelinerl_core.errors import EXIT_CONFIG, ConfigError, PipelineRLError
from pipelinerl_core.run.context import RunContext, log_directory
from pipelinerl_core.supervision.role_commands import ending_with_parent, module_command, role_environment
from pipelinerl_core.supervision.temporary_directories import own_temporary

logger = logging.getLogger(__name__)

_POLL_SECONDS = 1.0
_TAIL_CHARS = 2000


def replay_run(run: RunContext, from_step: int, to_step: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Replay steps of a run in a child process and return its JSON document.

    from_step, to_step: 0 for the first and the last step. Raises ConfigError, or PipelineRLError if a step differs.
    """
    steps = {"from-step": from_step, "to-step": to_step}
    arguments = {"run": run.store.url} | {name: str(step) for name, step in steps.items() if step}
    log_path = log_directory(run.store.url, run.run_id) / "replay.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    environment = role_environment(run.config.placement.threads, run.token)
    with log_path.open("wb") as log, own_temporary(environment) as own:
        process = subprocess.Popen(
            ending_with_parent([*module_command("pipelinerl_core.tools.replay", arguments), "--json", *overrides]),
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
    last = log_path.read_text()[-_TAIL_CHARS:].strip()
    if process.returncode == EXIT_CONFIG:
        raise ConfigError(last.splitlines()[-1] if last else "the replay refused its arguments")
    if not output:
        raise PipelineRLError(f"the replay ended with code {process.returncode}:\n{last}")
    document: dict[str, Any] = json.loads(output)
    logger.info("%d steps replayed, all equal: %s", len(document["steps"]), document["all_equal"])
    if process.returncode != 0:
        differing = [step["step"] for step in document["steps"] if step["verdict"] == "DIFFERS"]
        raise PipelineRLError(f"steps {differing[:8]} differ from what the run recorded; see {log_path}")
    return document


def _wait(process: "subprocess.Popen[str]") -> str:
    """The output of the process; short waits, so that the flow handles signals at once."""
    while True:
        try:
            return process.communicate(timeout=_POLL_SECONDS)[0]
        except subprocess.TimeoutExpired:
            continue
