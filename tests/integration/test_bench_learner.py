"""TRL's step in `bench learner` is the step of our learner: the same gradient on the same rollouts."""

import os
import subprocess
import sys

import pytest
import torch

from tests.integration.pipeline import ROOT

PACKAGES = ROOT / ".bench-packages"


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_trl_takes_the_step_of_our_learner():
    subprocess.run(["make", "bench-peers"], check=True, timeout=300, cwd=ROOT)
    # In a process of its own, which looks for packages where `make bench-peers` puts them.
    command = [sys.executable, "-W", "ignore", "-c", f"from {__name__} import compare; compare()"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{PACKAGES}", "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, check=True, timeout=400, env=environment, cwd=ROOT)


def compare():
    from benchmarks import learner_trl
    from benchmarks.engine_load import random_model
    from pipelinerl_core.batching.assemble import assemble_rows
    from pipelinerl_core.batching.collate import PackBatcher
    from pipelinerl_core.training.learner import TorchLearner
    from pipelinerl_core.training.model import prepare_model
    from tests.unit.benchmarks.learner_case import MINI

    learner_trl.ROWS_PER_PASS = 4
    rows = assemble_rows(1, MINI.groups(), MINI.config()).rows
    ours, theirs = prepare_model(random_model(MINI.model)), random_model(MINI.model)
    TorchLearner(ours, MINI.config(), batcher=PackBatcher(64)).step(rows)
    step = learner_trl.TRLStep(theirs, rows, MINI.config())
    step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert mine.grad.norm() > 0
        torch.testing.assert_close(other.grad, mine.grad, rtol=1e-3, atol=1e-5 * mine.grad.abs().max().item())
