"""Engine against learner, and the learner's step with each kind of attention, by the parts of `make bench-gpu`.

Run: python -m benchmarks.gpu_day.parity --dtype bfloat16 [--toy]
"""

import argparse
import sys

from benchmarks import gpu
from benchmarks.gpu_day.part import emit

FULL = (
    "--size",
    "0.5b",
    "--slots",
    "64",
    "--max-tokens",
    "64",
    "--learner-sizes",
    "0.5b",
    "--learner-tokens",
    "4096",
)
TOY = ("--device", "cpu", "--slots", "2", "--max-tokens", "16", "--learner-tokens", "64")
MEAN_OFF = {"float32": 1e-3, "bfloat16": 3e-2}
"""Largest mean difference of log-probabilities between a kind of attention and padded attention."""


def main() -> int:
    """The tables of the benchmark; the exit code is 1 if a part fails or a difference is too large."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtype", choices=[*MEAN_OFF], required=True)
    parser.add_argument("--toy", action="store_true")
    given = parser.parse_args()
    options = gpu.parse(["--engines", "embedded", "--dtype", given.dtype, *(TOY if given.toy else FULL)])
    result = gpu.conditions_of(options)
    gpu.run(gpu.parts_of(options), result)
    problems = [f"{entry['part']}: {entry['result']}" for entry in result["parts"] if entry["status"] == gpu.FAILED]
    problems += [
        f"parity of {row['engine']}: mean {row['parity_mean']:.2g}" for row in result["rows"] if not row["parity_ok"]
    ]
    problems += [
        f"attention {row['attention']}: {row['difference_mean']:.2g} off padded attention"
        for row in result["attention"]
        if not row["difference_mean"] <= MEAN_OFF[given.dtype]
    ]
    return emit(result["rows"], result["learner"], result["attention"], problems=problems, text=gpu.table(result))


if __name__ == "__main__":
    sys.exit(main())
