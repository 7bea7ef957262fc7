"""A weight version from the learner to the engine on one device, over a copy of all weights within the device.

Run: python -m benchmarks.gpu_day.swap --size 0.5b [--rank 16]

The program measures the stages of `python -m benchmarks swap` in seconds of a clock. With --rank the learner trains
adapters of a frozen model, and the engine still gets all weights: a model of 7 B parameters then fits a card.
"""

import argparse
import sys
import tempfile

from benchmarks import swap
from benchmarks.gpu_day.models import write_random
from benchmarks.gpu_day.part import device_name, emit
from benchmarks.sizes import SIZES
from pipelinerl_core.models.resolve import load_config

VERSIONS = 4


def main() -> int:
    """One row with milliseconds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=[*SIZES], required=True)
    parser.add_argument("--rank", type=int, default=0)
    options = parser.parse_args()
    device, dtype = device_name(), "bfloat16"
    with tempfile.TemporaryDirectory(prefix="gpu-day-") as directory:
        written = write_random(options.size, directory, dtype=dtype, device=device)
        config = load_config("quickstart", [
            f"model.path={directory}", f"model.dtype={dtype}", f"model.device={device}", "engine.concurrency=1",
            f"learner.lora_rank={options.rank}", "rollouts.max_tokens=8",
        ])  # fmt: skip
        measured = swap.measure(config, VERSIONS)
    row = {
        "model": options.size,
        "parameters, M": written.num_parameters / 1e6,
        "GB": measured["bytes"] / 1e9,
        "copy within the device, ms": 1e3 * written.copy_seconds,
        "copy from the learner, ms": 1e3 * measured["copy_wall_seconds"],
        "publish, ms": 1e3 * measured["publish_wall_seconds"],
        "fetch and stage, ms": 1e3 * measured["take_wall_seconds"],
        "pause, ms": 1e3 * measured["pause_seconds"],
        "pause over copy": measured["pause_seconds"] / written.copy_seconds,
        "longest hold of the interpreter lock, ms": 1e3 * measured["hold_seconds"],
    }
    return emit([row])


if __name__ == "__main__":
    sys.exit(main())
