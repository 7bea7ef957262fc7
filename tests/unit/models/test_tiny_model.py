"""The shape of a small model of the same architecture."""

import json

import pytest

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.paths import builtin_recipe
from pipelinerl_core.models.shapes import KNOWN_MODELS
from pipelinerl_core.models.tiny import shrunk

QWEN3 = KNOWN_MODELS["Qwen/Qwen3-8B"]


@pytest.fixture(autouse=True)
def no_models_on_this_host(tmp_path, monkeypatch):
    monkeypatch.setenv("PIPELINERL_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_the_layout_of_the_heads_and_the_kind_stay(name):
    large, small = KNOWN_MODELS[name], builtin_recipe(f"builtin:tiny?of={name}").settings
    assert {small[key] == large[key] for key in ("model_type", "architectures", "tie_word_embeddings")} == {True}
    ratios = [config["num_attention_heads"] // config["num_key_value_heads"] for config in (large, small)]
    assert ratios[0] == ratios[1]
    assert small["num_key_value_heads"] == 2
    assert small["hidden_size"] == 32 * small["num_attention_heads"]
    assert (small["num_hidden_layers"], small["intermediate_size"]) == (2, 128)
    assert small["max_position_embeddings"] == 4 * large["max_position_embeddings"]  # a token is a byte
    assert ("head_dim" in small) == ("head_dim" in large)


def test_experts_and_kinds_of_layers_stay_and_quantization_goes():
    kinds = ["sliding_attention"] * 35 + ["full_attention"]
    extra = {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "layer_types": kinds}
    small = shrunk({**QWEN3, **extra, "quantization_config": {"quant_method": "fp8"}, "torch_dtype": "bfloat16"})
    assert (small["num_experts"], small["num_experts_per_tok"], small["moe_intermediate_size"]) == (4, 2, 32)
    assert small["layer_types"] == ["sliding_attention", "full_attention"]
    assert not {"quantization_config", "torch_dtype"} & set(small)


def test_a_tokenizer_on_this_host_is_used(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    assert builtin_recipe(f"builtin:tiny?of={tmp_path}").tokenizer == ""
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert builtin_recipe(f"builtin:tiny?of={tmp_path}").tokenizer == str(tmp_path)


def test_names_with_revision_or_seed_are_known():
    assert builtin_recipe("builtin:tiny?of=Qwen/Qwen3-8B@main") == builtin_recipe("builtin:tiny?of=Qwen/Qwen3-8B")
    assert builtin_recipe("builtin:tiny?of=builtin:sums?seed=1").settings["model_type"] == "qwen2"


def test_a_model_without_the_sizes_of_a_decoder_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip"}))
    with pytest.raises(ConfigError, match="cannot shrink the model"):
        builtin_recipe(f"builtin:tiny?of={tmp_path}")
