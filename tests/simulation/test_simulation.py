"""A few seeds of the simulation; `make simulate-protocol SEEDS=1000` runs more."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


CAMPAIGN = """
from tests.simulation.preemption import install
install()
from tests.simulation.run import quiet, simulate
with quiet():
    print(*[simulate(seed, 20, 10).digest for seed in (8, 10)])
"""


def simulation(*arguments):
    return python("-m", "tests.simulation", *arguments)


def python(*arguments):
    """In a process of its own: modules have simulated time and threads, and sets have a fixed order."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False
    )


def test_runs_with_faults_lose_nothing_train_nothing_twice_and_end():
    done = simulation("--first", "4", "--seeds", "48", "--jobs", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("48 runs, 480 faults, 0 failed")


def test_the_trace_of_a_seed_is_the_run_of_the_campaign():
    """Threads of these seeds are interrupted between statements, and process caches are warm in the campaign."""
    campaign = python("-c", CAMPAIGN).stdout.split()
    for seed, digest in zip(("8", "10"), campaign, strict=True):
        trace = simulation("--seed", seed).stdout
        assert "fault" in trace
        assert trace.endswith(f"end of the run {digest}\n")
