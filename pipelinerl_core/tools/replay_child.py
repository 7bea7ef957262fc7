"""Run a replay in a child process for a flow; the child ends with the flow."""

import json
import logging
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelinerl_core.errors import EXIT_CONFIG, EXIT_STORE, ConfigError, PipelineRLError, StoreUnavailable
from pipelinerl_core.run.context import RunContext, log_directory
from pipelinerl_core.supervision.role_commands import ending_with_parent, module_command, role_environment
from pipelinerl_core.supervision.temporary_directories import own_temporary

logger = logging.getLogger(__name__)

_POLL_SECONDS = 1.0
_TAIL_CHARS = 2000


def replay_run(run: RunContext, from_step: int, to_step: int) -> dict[str, Any]:
    """Replay steps of a run with its recorded settings in a child process and return its JSON document.

    from_step, to_step: 0 for the first and the last step. Raises ConfigError or StoreUnavailable if the child ended
    with such an error, PipelineRLError if a step differs.
    """
    steps = {"from-step": from_step, "to-step": to_step}
    arguments = {"run": run.store.url} | {name: str(step) for name, step in steps.items() if step}
    log_path = log_directory(run.store.url, run.run_id) / "replay.log"
    code, output = _run_replay(run, arguments, log_path)
    last = log_path.read_text(errors="replace")[-_TAIL_CHARS:].strip()
    if code == EXIT_CONFIG:
        raise ConfigError(last.splitlines()[-1] if last else "the replay refused its arguments")
    if code == EXIT_STORE:
        raise StoreUnavailable(last.splitlines()[-1] if last else "replay: the store did not answer")
    if code != 0 and not output:
        raise PipelineRLError(f"the replay ended with code {code}:\n{last}")
    document: dict[str, Any] = json.loads(output)
    logger.info("%d steps replayed, all equal: %s", len(document["steps"]), document["all_equal"])
    if code != 0:
        differing = [step["step"] for step in document["steps"] if step["verdict"] == "DIFFERS"]
        raise PipelineRLError(f"steps {differing[:8]} differ from what the run recorded; see {log_path}")
    return document


def _run_replay(run: RunContext, arguments: Mapping[str, str], log_path: Path) -> tuple[int, str]:
    """(Exit code, stdout) of the tool `replay` with the environment of a role. log_path: gets stderr."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    environment = role_environment(run.config.placement.threads, run.token)
    with log_path.open("wb") as log, own_temporary(environment) as own:
        process = subprocess.Popen(
            ending_with_parent([*module_command("pipelinerl_core.tools.replay", arguments), "--json"]),
            env=own,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            process_group=0,
        )
        try:
            while True:
                try:  # short waits, so that the caller handles signals at once
                    output = process.communicate(timeout=_POLL_SECONDS)[0]
                    return process.returncode, output
                except subprocess.TimeoutExpired:
                    continue
        finally:  # a cancelled flow run must not leave the child running
            process.kill()
            process.wait()
