"""A few seeds of the simulation; `make simulate-protocol SEEDS=1000` runs more."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def simulation(*arguments):
    """In a process of its own: modules have simulated time and threads, and sets have a fixed order."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False
    )


def test_runs_with_faults_lose_nothing_train_nothing_twice_and_end():
    done = simulation("--first", "4", "--seeds", "48", "--jobs", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("48 runs, 480 faults, 0 failed")


def test_a_seed_has_one_trace():
    first, again = simulation("--seed", "4"), simulation("--seed", "4")
    assert first.stdout == again.stdout
    assert "fault" in first.stdout
