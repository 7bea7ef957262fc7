"""`python -m tests.simulation --seeds 100`: simulated runs with faults; `--seed 7` shows the trace of one of them."""

import argparse
import logging
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tests.simulation.run import errors_of, simulate


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="number of runs")
    parser.add_argument("--first", type=int, default=0, help="seed of the first run")
    parser.add_argument("--seed", type=int, help="run only this seed, and print its trace")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of a run")
    parser.add_argument("--faults", type=int, default=10, help="faults of a run")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    chosen = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets must be the same in every process
        os.execve(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]],
                  {**os.environ, "PYTHONHASHSEED": "0"})  # fmt: skip
    logging.disable(logging.CRITICAL)
    if chosen.seed is not None:
        run = simulate(chosen.seed, chosen.steps, chosen.faults)
        sys.stdout.write("\n".join([*run.trace, *run.errors, ""]))
        return 1 if run.errors else 0
    begun, bad = time.monotonic(), []
    seeds = range(chosen.first, chosen.first + chosen.seeds)
    with ProcessPoolExecutor(chosen.jobs, mp_context=get_context("spawn")) as pool:
        settings = ([chosen.steps] * chosen.seeds, [chosen.faults] * chosen.seeds)
        for seed, errors in zip(seeds, pool.map(errors_of, seeds, *settings, chunksize=4), strict=True):
            if errors:
                bad.append(seed)
                sys.stdout.write(f"seed {seed}: {errors[0].strip().splitlines()[-1]}\n")
    seconds = time.monotonic() - begun
    counts = f"{len(seeds)} runs, {len(seeds) * chosen.faults} faults, {len(bad)} failed {bad[:20]}"
    sys.stdout.write(f"{counts}, {seconds:.0f} s\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
