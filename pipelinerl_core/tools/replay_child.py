"""Run a replay in a child process for a flow; the child ends with the flow."""

import json
import logging
from typing import Any

from pipelinerl_core.errors import PipelineRLError
from pipelinerl_core.run.context import RunContext, log_directory
from pipelinerl_core.supervision.tool_process import run_tool

logger = logging.getLogger(__name__)


def replay_run(run: RunContext, from_step: int, to_step: int) -> dict[str, Any]:
    """Replay steps of a run with its recorded settings in a child process and return its JSON document.

    from_step, to_step: 0 for the first and the last step. Raises ConfigError, or PipelineRLError if a step differs.
    """
    steps = {"from-step": from_step, "to-step": to_step}
    arguments = {"run": run.store.url} | {name: str(step) for name, step in steps.items() if step}
    log_path = log_directory(run.store.url, run.run_id) / "replay.log"
    code, output = run_tool(run, "replay", arguments, ["--json"], log_path=log_path)
    document: dict[str, Any] = json.loads(output)
    logger.info("%d steps replayed, all equal: %s", len(document["steps"]), document["all_equal"])
    if code != 0:
        differing = [step["step"] for step in document["steps"] if step["verdict"] == "DIFFERS"]
        raise PipelineRLError(f"steps {differing[:8]} differ from what the run recorded; see {log_path}")
    return document
