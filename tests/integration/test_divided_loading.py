"""While transformers loads a model, ZeRO 3 divides the weights: the parts have the values that one process loads."""

import json
import os
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
def test_three_ranks_have_the_model_that_one_process_loads_and_a_part_of_its_weights_each(families, tmp_path):
    for family in families:
        with_biases(random_model(_small(entries_of(family)))).save_pretrained(tmp_path / family)
    directories = [str(tmp_path / family) for family in families]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.integration.divided_case", str(rank), "3", str(tmp_path / "meeting"),
             *directories],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_PERTURB_": "128"},  # memory that is not written is NaN
        )
        for rank in range(3)
    ]  # fmt: skip
    ended = [(*rank.communicate(timeout=500), rank.returncode) for rank in ranks]
    assert [code for _, _, code in ended] == [0, 0, 0], ended
    results = [json.loads(output.splitlines()[-1]) for output, _, _ in ended]
    for directory in directories:
        parts = [result[directory] for result in results]
        assert [part["differing"] for part in parts] == [[], [], []], directory
        sizes = [part["own_elements"] for part in parts]
        assert sum(sizes) == parts[0]["elements"], directory
        assert max(sizes) < 0.4 * parts[0]["elements"], directory
