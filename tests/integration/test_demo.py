"""The demonstration: packages of requirements-demo.lock, the real chat model, three steps of the preset smollm2."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.integration.pipeline import ROOT, assert_closes, trained_groups

pytestmark = [pytest.mark.slow, pytest.mark.campaign, pytest.mark.timeout(1500)]

STEPS, GROUPS = 3, 3
"""Steps of fewer groups than in the preset: a step then takes seconds beside another test."""


def train(root: Path, environment: dict[str, str], *overrides: str) -> dict[str, object]:
    """The report of a run of the preset."""
    sizes = [f"trainer.steps={STEPS}", f"trainer.groups_per_step={GROUPS}", f"engine.concurrency={GROUPS * 8}"]
    arguments = ["train", "smollm2", *sizes, "eval.num_prompts=8", *overrides]
    command = [sys.executable, "-m", "pipelinerl.flows.cli", *arguments, "--root", str(root), "--json"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("engine", ["embedded", "vllm"])
def test_the_chat_model_is_converted_and_trains(tmp_path, demo_environment, engine):
    report = train(tmp_path, demo_environment, f"engine.kind={engine}")
    assert report["steps"] == STEPS
    (record,) = tmp_path.glob("smollm2-*/run.json")
    dtype = json.loads(record.read_text())["config"]["model"]["dtype"]
    assert dtype in ("bfloat16", "float32")  # the choice, not auto
    assert len(trained_groups(str(record.parent))) == STEPS * GROUPS
    assert_closes(str(record.parent))
    (model,) = Path(demo_environment["PIPELINERL_CACHE"]).glob("models/*/model.safetensors")
    with safe_open(model, framework="pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118
