"""Runs that an earlier version recorded (tests/golden/runs) are audited, replayed and resumed by this one.

tests/golden/runs/README.md has their settings. A replay on the processor that recorded them is equal to the last bit.
Elsewhere kernels may add in another order: then the losses are close.
"""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.integration.pipeline import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RUNS = ROOT / "tests" / "golden" / "runs"
LAST_STEP = {"embedded": 40, "ranks": 24, "adapters": 24, "vllm": 24}
CLOSE = 1e-3
"""Of a loss on another processor: relative to its size, or to this where the loss is nearly 0."""


def answer(place: Path, *arguments: str) -> dict[str, Any]:
    """JSON of a `pipelinerl` command in `place`, where the run and its model lie."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pipelinerl.flows.cli", *arguments, "--json"]
    with (place / "log").open("ab") as log:
        done = subprocess.run(
            command, cwd=place, env=environment, stdout=subprocess.PIPE, stderr=log, timeout=600, check=False
        )
    assert done.returncode == 0, (arguments, (place / "log").read_text()[-3000:], done.stdout[-3000:])
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def assert_replays(place: Path, num_steps: int) -> None:
    steps = answer(place, "replay", "./run")["steps"]
    assert len(steps) == num_steps
    for step in steps:
        difference = abs(step["loss"] - step["recorded_loss"])
        assert step["verdict"] == "equal" or difference <= CLOSE * max(abs(step["recorded_loss"]), CLOSE), step


def assert_closes(place: Path) -> int:
    """The audit closes; the number of steps it read."""
    audit = answer(place, "audit", "./run")
    assert audit["closes"], audit["problems"]
    assert (audit["lost"], audit["trained_twice"]) == (0, 0)
    return int(audit["commits"]) - 1


@pytest.mark.parametrize(
    "name",
    # The learner of the other runs is the same; `make campaigns` has them.
    [pytest.param(name, marks=[] if name == "embedded" else [pytest.mark.campaign]) for name in LAST_STEP],
)
def test_a_recorded_run_is_audited_replayed_and_resumed(name, tmp_path):
    for archive in ("model", name):
        with tarfile.open(RUNS / f"{archive}.tar.xz") as file:
            file.extractall(tmp_path, filter="data")
    recorded = assert_closes(tmp_path)
    last = recorded + 4
    assert 8 <= recorded < last <= LAST_STEP[name]
    assert answer(tmp_path, "resume", "./run", f"trainer.steps={last}")["steps"] == last
    assert assert_closes(tmp_path) == last
    assert_replays(tmp_path, last)  # the recorded steps and those of the resume
