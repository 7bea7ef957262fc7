"""learner.lr=auto: the rate by size of the model and LoRA, and where the choice is stored."""

import json

import pytest

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.resolve import build_config, load_config, override_config
from pipelinerl_core.models.shapes import KNOWN_MODELS


@pytest.mark.parametrize(
    ("path", "full", "lora"),
    [
        ("builtin:sums?seed=3", 1e-4, 1e-3),
        ("builtin:smollm2", 1e-6, 1e-5),  # 0.135 billion parameters
        ("Qwen/Qwen2.5-7B", 1e-6, 1e-5),
        ("Qwen/Qwen3-8B@main", 1e-6, 1e-5),
        ("somebody/not-on-this-host", 1e-6, 1e-5),
        ("/no/such/directory", 1e-6, 1e-5),
    ],
)
def test_the_rate_follows_from_the_size_of_the_model_and_from_lora(monkeypatch, tmp_path, path, full, lora):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for rank, rate in ((0, full), (8, lora)):
        config = build_config({"model": {"path": path}, "learner": {"lora_rank": rank}})
        assert config.learner.lr == config.learner.peak_lr == rate


def test_a_model_on_this_host_is_measured(tmp_path):
    for name, expected in (("builtin:sums", 1e-4), ("Qwen/Qwen2.5-0.5B", 1e-6)):
        (tmp_path / "config.json").write_text(json.dumps(KNOWN_MODELS[name]))
        assert build_config({"model": {"path": str(tmp_path)}}).learner.lr == expected


def test_a_rate_of_ones_own_and_the_rates_of_presets_stay():
    assert build_config({"model": {"path": "Qwen/Qwen2.5-7B"}, "learner": {"lr": 1e-4}}).learner.lr == 1e-4
    rates = {"quickstart": 2e-4, "smollm2": 5e-5, "gsm8k-0.5b-1gpu": 1e-6, "lora-7b-1gpu": 2e-5}
    assert {preset: load_config(preset).learner.lr for preset in rates} == rates


def test_a_stored_run_keeps_the_choice_also_with_another_model():
    stored = build_config({"model": {"path": "Qwen/Qwen2.5-7B"}}).model_dump(mode="json")
    assert stored["learner"]["lr"] == 1e-6
    assert build_config(stored).learner.lr == 1e-6
    assert override_config(build_config(stored), ["model.path=builtin:sums"]).learner.lr == 1e-6
    again = override_config(build_config(stored), ["model.path=builtin:sums", "learner.lr=auto", "model.dtype=auto"])
    assert (again.learner.lr, again.model.dtype != "auto") == (1e-4, True)


@pytest.mark.parametrize("wrong", ["0", "-1", "fast"])
def test_a_wrong_rate_is_one_line(wrong):
    with pytest.raises(ConfigError, match=r"^learner\.lr=[^\n;]*$"):
        load_config("quickstart", [f"learner.lr={wrong}"])
