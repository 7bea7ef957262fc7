"""Import the modules of all roles and tools that the other stages use.

Run: python -m benchmarks.gpu_day.imports
"""

import importlib
import sys
import time
from typing import Any

from benchmarks.gpu_day.part import emit

MODULES = (
    "pipelinerl_core.roles.hub.main",
    "pipelinerl_core.roles.trainer.main",
    "pipelinerl_core.roles.actor.main",
    "pipelinerl_core.roles.evaluator.main",
    "pipelinerl_core.tools.audit",
    "pipelinerl_core.tools.replay",
    "pipelinerl_core.training.lora",
    "peft",
)


def main() -> int:
    """The seconds of each import; the exit code is 1 if one fails."""
    rows = [imported(module) for module in MODULES]
    problems = [f"{row['module']}: {row['result']}" for row in rows if row["result"] != "imported"]
    return emit(rows, problems=problems)


def imported(module: str) -> dict[str, Any]:
    """Import a module; what an earlier module has imported takes no time."""
    started = time.monotonic()
    result = "imported"
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - the other modules are tried too
        result = f"{type(error).__name__}: {error}"
    return {"module": module, "result": result, "seconds": time.monotonic() - started}


if __name__ == "__main__":
    sys.exit(main())
