"""The architectures of transformers: which the learner and the embedded engine compute, tried with small models."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.models.shapes import shape_of
from pipelinerl_core.tools.check_model import check, problems, rope_problem
from tests.families import FAMILIES, entries_of


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_runs_or_is_refused_with_a_reason(family):
    results = problems(entries_of(family), "embedded")
    expected = FAMILIES[family]
    assert {role for role, problem in results.items() if problem} == set(expected), results
    assert all(problem and "\n" not in problem for role, problem in results.items() if role in expected)


@pytest.mark.parametrize("family", [family for family, refused in FAMILIES.items() if not refused])
def test_the_number_of_parameters_is_that_of_the_model(family):
    entries = entries_of(family)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**entries))
    actual = sum(parameter.numel() for parameter in model.parameters())
    assert shape_of(entries).num_parameters == pytest.approx(actual, rel=0.02)


def test_longrope_and_dynamic_rope_are_refused_for_sequences_beyond_their_original_length():
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
    assert "more than 4096 tokens, and sequences may have 8192" in rope_problem({"rope_parameters": rope}, 8192)
    assert not rope_problem({"rope_parameters": rope}, 4096)
    assert not rope_problem({"rope_parameters": {"rope_type": "yarn"}}, 10**6)
    old = {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 4096}
    assert rope_problem(old, 5000)
    dynamic = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 2048}
    assert "with rope_type=dynamic" in rope_problem(dynamic, 2049)
    assert not rope_problem(dynamic, 2048)


def test_the_reason_is_one_line_that_names_the_model_and_the_role(tmp_path):
    for family, message in (
        ("gpt_oss", "gpt_oss cannot be trained: ValueError: GptOssForCausalLM does not support"),
        ("gemma2", "gemma2 cannot be sampled: the model sets final_logit_softcapping=30.0"),
        ("mamba", "mamba cannot be loaded: its config.json has not the sizes of a decoder"),
        ("nonsense", "nonsense cannot be loaded: ValueError: Unrecognized model identifier: nonsense"),
    ):
        entries = entries_of(family) if family in FAMILIES else {**entries_of("llama"), "model_type": family}
        (tmp_path / "config.json").write_text(json.dumps(entries))
        with pytest.raises(ConfigError) as caught:
            check(load_config("quickstart", [f"model.path={tmp_path}"]))
        assert str(caught.value).startswith(f"model.path={tmp_path}: {message}")


def test_a_window_that_is_ignored_is_found(monkeypatch):
    from pipelinerl_core.engine.embedded import attention

    monkeypatch.setattr(attention.Layout, "mask_of", lambda layout, window: layout.mask_RK)
    assert "with slots the logits differ" in problems(entries_of("mistral"), "embedded")["sampled"]


def test_a_layer_of_another_kind_in_the_middle_is_tried():
    kinds = ["full_attention", "linear_attention", "full_attention", "full_attention"]
    entries = {**AutoConfig.for_model("qwen3_next").to_dict(), "layer_types": kinds, "num_hidden_layers": 4}
    assert "linear_attention" in problems(entries, "embedded")["sampled"]
