"""ZeRO 3 divides the weights of a model while it is loaded: every family has the values that one process loads."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipelinerl_core.tools.check_model import _small
from pipelinerl_core.training.model import with_biases
from pipelinerl_core.training.tiny_model import random_model
from tests.families import FAMILIES, entries_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CAMPAIGN = [family for family, refused in FAMILIES.items() if not {"loaded", "trained"} & set(refused)]
# Positions in every layer, positions by kind of layer, fused experts, routers with a buffer, no rotary positions.
SOME = ["qwen2", "gemma3_text", "qwen3_moe", "deepseek_v3", "gpt2"]


@pytest.mark.parametrize("families", [SOME, pytest.param(CAMPAIGN, marks=pytest.mark.campaign)], ids=["some", "all"])
def test_two_ranks_have_the_model_that_one_process_loads_and_half_of_its_weights_each(families, tmp_path):
    for family in families:
        with_biases(random_model(_small(entries_of(family)))).save_pretrained(tmp_path / family)
    command = [sys.executable, "-m", "tests.integration.divided_case"]
    directories = [str(tmp_path / family) for family in families]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "meeting"), *directories],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    ended = [(*rank.communicate(timeout=500), rank.returncode) for rank in ranks]
    for output, errors, code in ended:
        assert code == 0, errors[-3000:]
        results = json.loads(output.splitlines()[-1])
        assert results.keys() == set(directories)
        for directory, result in results.items():
            assert result["differing"] == [], directory
            assert result["own_elements"] <= 0.51 * result["elements"], directory
