"""Measure a checkpoint with moments: how long training stops, CPU time, the interpreter lock, memory, and reading.

The files are written to shared memory: the speed of a disk is not measured. If the next step reaches its update
first, the rest of the state is copied: `stop` is that copy with nothing written yet. The model has random weights.
Figures as in `swap`.
"""

import shutil
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import torch

from benchmarks import report
from benchmarks.engine_load import random_model
from benchmarks.sizes import SIZES
from benchmarks.swap import Meter, milliseconds, plain_copy_seconds
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.roles.runtime.process import exit_codes, limit_threads
from pipelinerl_core.roles.trainer.learners import build_alone
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.weights import memory
from pipelinerl_core.weights.checkpoint import load_checkpoint, save_checkpoint

PARTS = ("write", "stop", "load")


def measure(directory: str, dtype: str, rounds: int) -> dict[str, Any]:
    """Figures of each part, over `rounds` checkpoints after one that warms up."""
    learner: Any = build_alone(load_config("quickstart", [f"model.path={directory}", f"model.dtype={dtype}"]))
    learner._optimizer.zero_grad()
    learner._optimizer.gradients()  # zeros
    learner._optimizer.step(torch.ones(()), learning_rate=0.0)  # makes the moments
    learner._optimizer.zero_grad()
    meter, wall = Meter(), list[float]()
    root = Path(mkdtemp(prefix="pipelinerl-bench-", dir=memory.SHM_ROOT))
    try:
        for step in range(rounds + 1):
            store = open_store(str(root / str(step)))
            with meter.part("write"):
                manifest = save_checkpoint(store, step, 1, learner.state())
            started = time.perf_counter()
            with meter.part("stop"):
                state = learner.state()
                state.detach()
            wall.append(time.perf_counter() - started)
            del state
            with meter.part("load"):
                learner.load_state(*load_checkpoint(store, step, 1))
            shutil.rmtree(root / str(step))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    num_bytes = sum(entry.size for entry in manifest.files)
    return {
        "bytes": num_bytes,
        "files": len(manifest.files),
        "largest_file_bytes": max(entry.size for entry in manifest.files),
        "plain_copy_seconds": plain_copy_seconds(num_bytes),
        "stop_wall_seconds": min(wall[1:]),
        "parts": {
            name: {
                "cpu_seconds": min(meter.cpu_seconds[name][1:]),
                "hold_seconds": meter.hold_seconds[name],
                "grown_share": meter.grown_bytes[name] / num_bytes,
            }
            for name in PARTS
        },
    }


def table(result: dict[str, Any]) -> str:
    """The measurement as Markdown."""
    header = ("part", "CPU ms", "over a plain copy", "longest hold of the lock, ms", "memory, in checkpoints")
    rows = [
        (name, milliseconds(part["cpu_seconds"]), f"{part['cpu_seconds'] / result['plain_copy_seconds']:.2f}",
         milliseconds(part["hold_seconds"]), f"{part['grown_share']:.2f}")
        for name, part in result["parts"].items()
    ]  # fmt: skip
    title = (
        f"{result['model']} {result['dtype']}: {result['bytes'] / 1e6:,.0f} MB in {result['files']} files, training "
        f"stops for at most {milliseconds(result['stop_wall_seconds'])} ms"
    )
    return "\n".join([title, "", *report.markdown(header, rows), ""])


@exit_codes
def main() -> int:
    """Command line of the benchmark."""
    parser = report.parser(__doc__)
    parser.add_argument("--model", default="135m", choices=tuple(SIZES), help="shapes of the random model")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    limit_threads(1)
    with TemporaryDirectory(prefix="pipelinerl-bench-") as directory:
        random_model(arguments.model, dtype=getattr(torch, arguments.dtype)).save_pretrained(directory)
        figures = measure(directory, arguments.dtype, arguments.rounds)
    report.write({"model": arguments.model, "dtype": arguments.dtype} | figures, table, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
