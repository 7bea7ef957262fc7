"""`python -m tests.simulation --seeds 100`: simulated runs with faults; `--seed 7` shows the trace of one of them.

`--seed 7 --shrink` leaves out every fault without which the run fails all the same.
"""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context

from tests.simulation.preemption import install

_AT_ONCE = 64
_ENOUGH = 300
"""Of so many runs, some have done each of REACHED."""
REACHED = (
    "a token is masked", "an actor continued tokens of another",
    "an evaluation between the first and the last version", "a step waits for old groups",
    *(f"a group is {fate}" for fate in ("trained", "failed", "filtered", "dropped_stale", "quarantined")),
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="number of runs")
    parser.add_argument("--first", type=int, default=0, help="seed of the first run")
    parser.add_argument("--seed", type=int, help="run only this seed, and print its trace")
    parser.add_argument("--shrink", action="store_true", help="with --seed: leave out faults that are not needed")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of a run")
    parser.add_argument("--faults", type=int, default=10, help="faults of a run")
    parser.add_argument("--until-failure", action="store_true", help="end with the first run that fails")
    parser.add_argument("--jobs", type=int, default=2, help="processes; 0: this process runs them")
    chosen = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets must be the same in every process
        os.execve(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]],
                  {**os.environ, "PYTHONHASHSEED": "0"})  # fmt: skip
    install()
    from tests.simulation.run import quiet, simulate

    if chosen.seed is not None:
        kept = shrunk(chosen.seed, chosen.steps, chosen.faults) if chosen.shrink else None
        with quiet():
            run = simulate(chosen.seed, chosen.steps, chosen.faults, kept, has_logs=True)
        sys.stdout.write("\n".join([*run.trace, *run.errors, f"end of the run {run.digest}", ""]))
        return 1 if run.errors else 0
    begun, num_runs, bad = time.monotonic(), 0, []
    reached: Counter[str] = Counter()
    seeds = range(chosen.first, chosen.first + chosen.seeds)
    for seed, errors, done in results(seeds, chosen.steps, chosen.faults, chosen.jobs):
        num_runs += 1
        reached += done
        if errors:
            bad.append(seed)
            sys.stdout.write(f"seed {seed}: {errors[0].strip().splitlines()[-1]}\n")
            if chosen.until_failure:
                break
        if num_runs % 100 == 0:
            sys.stdout.write(f"{num_runs} runs, {len(bad)} failed, {time.monotonic() - begun:.0f} s\n")
            sys.stdout.flush()
    seconds = time.monotonic() - begun
    counts = f"{num_runs} runs, {num_runs * chosen.faults} faults, {len(bad)} failed {bad[:20]}"
    sys.stdout.write(f"{counts}, {seconds:.0f} s\n")
    if num_runs >= _ENOUGH and (never := [event for event in REACHED if not reached[event]]):
        sys.stdout.write(f"never: {'; '.join(never)}\n")
        return 1
    return 1 if bad else 0


def results(
    seeds: Sequence[int], steps: int, num_faults: int, jobs: int
) -> Iterator[tuple[int, list[str], "Counter[str]"]]:
    """(seed, what is wrong with its run, what it has done), in order; a process serves a limited number of runs."""
    from tests.simulation.run import outcome_of

    if not jobs:
        yield from ((seed, *outcome_of(seed, steps, num_faults)) for seed in seeds)
        return
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), max_tasks_per_child=500, initializer=install)
    with pool:
        left = iter(seeds)
        begun = [(seed, pool.submit(outcome_of, seed, steps, num_faults)) for seed in islice(left, _AT_ONCE)]
        try:
            while begun:
                seed, future = begun.pop(0)
                yield seed, *future.result()
                begun += [(seed, pool.submit(outcome_of, seed, steps, num_faults)) for seed in islice(left, 1)]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def shrunk(seed: int, steps: int, num_faults: int) -> list[int]:
    """Indices of few faults with which a run still fails; all faults if it does not fail."""
    from tests.simulation.run import quiet, simulate

    def fails(kept: Sequence[int]) -> bool:
        with quiet():
            return bool(simulate(seed, steps, num_faults, kept).errors)

    kept = list(range(num_faults))
    size = num_faults if fails(kept) else 0
    while size:
        size = min(size // 2, len(kept)) if len(kept) > 1 else 0
        position = 0
        while size and position < len(kept):
            fewer = kept[:position] + kept[position + size :]
            if fails(fewer):
                kept = fewer
            else:
                position += size
    return kept


if __name__ == "__main__":
    sys.exit(main())
