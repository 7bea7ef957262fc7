"""`make chaos`: many faults at random moments, over local disk and S3; Markdown on stdout, progress on stderr."""

import argparse
import random
import signal
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from tests.chaos.campaign import Outcome, run_campaign
from tests.chaos.faults import AWAY_SECONDS, catalogue

PER_RUN = 20


def main() -> int:
    """1 if anything was lost, trained twice, left behind, or hung."""
    parser = argparse.ArgumentParser(prog="make chaos", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=200, help="how many, over all runs (default 200)")
    parser.add_argument("--store", choices=["file", "s3", "both"], default="both")
    parser.add_argument("--seed", type=int, default=random.randrange(10_000))
    parser.add_argument("--away-seconds", type=float, default=AWAY_SECONDS, help="of Prefect and MLflow servers")
    parser.add_argument("--engine", default="embedded", choices=["embedded", "vllm"])
    parser.add_argument("--ranks", type=int, default=1, help="of the trainer")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # unwind, so that nothing is left; a shell may have ignored them
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    say(f"seed {options.seed}")
    kinds = ["file", "s3"] if options.store == "both" else [options.store]
    outcomes = []
    settings = [f"engine.kind={options.engine}", f"trainer.ranks={options.ranks}"]
    for number, names in enumerate(plan(options.faults, kinds, options.seed, settings)):
        kind = kinds[number % len(kinds)]
        home = Path(tempfile.mkdtemp(prefix=f"pipelinerl-chaos-{kind}-"))
        say(f"run {number + 1} on {kind}: {home}")
        seed = options.seed + number
        outcome = run_campaign(
            home, kind, names, seed=seed, away_seconds=options.away_seconds, settings=settings, say=say
        )
        for complaint in outcome.complaints:
            say(f"COMPLAINT: {complaint}")
        outcomes.append(outcome)
    sys.stdout.write(table(outcomes))
    return int(any(outcome.complaints for outcome in outcomes))


def plan(num_faults: int, kinds: list[str], seed: int, settings: list[str]) -> list[list[str]]:
    """Names of the faults of each run: every kind of fault as often as any other, in random order."""
    dice = random.Random(seed)
    runs: list[list[str]] = []
    decks: dict[str, list[str]] = {kind: [] for kind in kinds}
    while num_faults > 0:
        kind = kinds[len(runs) % len(kinds)]
        names: list[str] = []
        while len(names) < min(PER_RUN, num_faults):
            if not decks[kind]:
                decks[kind] = list(catalogue(kind, settings=settings))
                dice.shuffle(decks[kind])
            names.append(decks[kind].pop())
        runs.append(names)
        num_faults -= len(names)
    return runs


def table(outcomes: list[Outcome]) -> str:
    """One row per kind of fault."""
    by_name = defaultdict(list)
    for outcome in outcomes:
        for fault in outcome.injected:
            by_name[outcome.store, fault.name].append(fault.recovered_seconds)
    lines = ["| store | fault | times | two steps later after, median (max) |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {store} | {name} | {len(seconds)} | {statistics.median(seconds):.1f} s ({max(seconds):.1f} s) |"
        for (store, name), seconds in sorted(by_name.items())
    ]
    number = sum(map(len, by_name.values()))
    steps, minutes = (
        sum(run_outcome.steps for run_outcome in outcomes),
        sum(run_outcome.seconds for run_outcome in outcomes) / 60,
    )
    lost = sum(outcome.audit.get("lost", 0) for outcome in outcomes)
    twice = sum(outcome.audit.get("trained_twice", 0) for outcome in outcomes)
    taken = sum(outcome.audit.get("taken_over_tokens", 0) for outcome in outcomes)
    failed = sum(bool(outcome.complaints) for outcome in outcomes)
    lines += [
        "",
        f"{number} faults in {len(outcomes)} runs of {steps} steps, {minutes:.0f} minutes: "
        f"{lost} groups lost, {twice} trained twice, "
        f"{taken:,} trained tokens were taken over from dead actors; {failed} runs with a complaint.",
    ]
    return "\n".join(lines) + "\n"


def say(text: str) -> None:
    """To stderr, at once."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
