"""Both engines read the same end tokens from a model directory."""

import json

import pytest
from transformers import AutoModelForCausalLM

from pipelinerl_core.engine.embedded import load as embedded
from pipelinerl_core.engine.vllm import load as vllm
from tests.models import tiny_model


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [3, 4]}, 5, [3, 4]),
        ({"eos_token_id": 3}, 5, [3]),
        ({}, 5, [5]),
        (None, 5, [5]),
        (None, [5, 6], [5, 6]),
        (None, None, []),
    ],
)
def test_end_tokens_come_from_the_generation_configuration_else_from_the_models(
    tmp_path, generation, config, expected
):
    tiny_model().save_pretrained(tmp_path)
    file = tmp_path / "generation_config.json"
    file.unlink(missing_ok=True)
    if generation is not None:
        file.write_text(json.dumps(generation))
    values = {**json.loads((tmp_path / "config.json").read_text()), "eos_token_id": config}
    (tmp_path / "config.json").write_text(json.dumps(values))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    assert embedded.eos_of(model) == expected
    assert vllm._eos_of(tmp_path, vllm.read_model_config(tmp_path)) == expected
