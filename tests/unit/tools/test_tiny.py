"""`train --tiny`: what is kept, what is replaced, and data of the same form."""

import json

import pytest

from pipelinerl_core.config import preset_names
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.resolve import build_config, load_config
from pipelinerl_core.prompts import build_source
from pipelinerl_core.rewards.verifiers import exact_match
from pipelinerl_core.tools import tiny as tools

KEPT = {
    "engine": ("kind", "kv"),
    "learner": ("kind", "zero_stage", "lora_rank", "activation_checkpointing", "lr"),
    "loss": ("kind", "advantage"),
    "weights": ("transport", "content", "durable_every"),
    "prompts": ("kind", "template", "answer_column", "split", "held_out_split", "config_name", "system"),
    "model": ("dtype", "chat_template"),
    "placement": ("share_gpu", "hub_tls"),
}


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PIPELINERL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tools, "gpu_capability", lambda: None)
    monkeypatch.setattr(tools, "is_installed", lambda module: True)


@pytest.mark.parametrize("preset", preset_names())
def test_a_preset_keeps_its_kinds_and_fits_a_cpu(preset):
    config = load_config(preset)
    small = tools.tiny(config)
    before, after = config.model_dump(), small.model_dump()
    for section, keys in KEPT.items():
        assert [after[section].get(key) for key in keys] == [before[section].get(key) for key in keys]
    penalty = {"overlong_tokens": small.reward.overlong_tokens}  # scaled with the lengths
    assert (small.schedule, small.reward) == (config.schedule, config.reward.model_copy(update=penalty))
    assert small.model.path == f"builtin:tiny?of={config.model.path}"
    assert (small.model.device, small.placement.kind, small.trainer.steps) == ("cpu", "local", 3)
    assert small.trainer.ranks <= 2
    assert small.placement.actors <= 2
    assert tools.tiny(config) == small


def test_several_hosts_become_two_ranks_and_two_actors_here():
    small = tools.tiny(load_config("math-7b-16gpu"))
    assert (small.trainer.ranks, small.placement.actors, small.placement.trainer_nodes) == (2, 2, 1)
    assert (small.placement.hub_host, small.placement.gpu) == ("127.0.0.1", "")
    assert not small.rollouts.filter_zero_variance  # no group of a random model would be left


def test_overrides_win_but_those_of_the_parts_that_are_made_small():
    overrides = ["trainer.steps=5", "eval.num_prompts=4", "learner.lr=1e-3", "model.path=Qwen/Qwen3-8B"]
    overrides += ["prompts.template={question}", "engine.compile=always"]
    small = tools.tiny(load_config("gsm8k-0.5b-1gpu", overrides), overrides)
    assert (small.trainer.steps, small.eval.num_prompts, small.learner.lr) == (5, 4, 1e-3)
    assert small.engine.compile == "always"
    assert small.model.path == "builtin:tiny?of=Qwen/Qwen3-8B"
    assert small.prompts.template == "{question}"
    assert small.prompts.path != "openai/gsm8k"


def test_one_line_names_the_replaced_keys():
    config = load_config("quickstart")
    line = tools.replaced(config, tools.tiny(config, ["trainer.steps=9"]))
    assert "\n" not in line
    assert "model.path=builtin:tiny?of=builtin:sums" in line
    assert "trainer.steps=9" in line
    assert "learner.lr" not in line


@pytest.mark.parametrize("preset", ["gsm8k-0.5b-1gpu", "dapo-1.5b-1gpu", "math-7b-16gpu"])
def test_generated_data_has_the_splits_columns_and_answers_of_the_data_set(preset):
    config = load_config(preset)
    source = build_source(tools.tiny(config))
    prompt, held_out = source.prompt(0), source.held_out(8)
    assert prompt.text.startswith(config.prompts.template.partition("{")[0])
    assert prompt.text.endswith("\\boxed{}." + config.prompts.template.partition("{{}}.")[2])
    assert len(held_out) == 8
    assert {config.prompts.prompt_column, config.prompts.answer_column} <= set(prompt.task)
    number = next(digit for digit in "23456789" if exact_match(f"so \\boxed{{{digit}}}", prompt.task))
    assert prompt.task["answer"].count(number)


def test_data_of_the_user_and_the_reward_stay(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "answer": "b"}))
    overrides = ["prompts.kind=file", f"prompts.path={tmp_path / 'rows.jsonl'}", "reward.function=mine.py:score"]
    config = load_config("quickstart", [*overrides, "eval.sets.other.path=other.jsonl"])
    small = tools.tiny(config)
    assert (small.prompts, small.reward, small.eval.sets) == (config.prompts, config.reward, config.eval.sets)
    values = load_config("gsm8k-0.5b-1gpu").model_dump()
    values["prompts"]["path"] = str(tmp_path)  # a data set on this host
    config = build_config(values)
    assert tools.tiny(config).prompts == config.prompts


def test_an_environment_gets_tokens_for_several_turns():
    config = load_config("quickstart", ["environment.path=builtin:guess", "prompts.kind=environment"])
    small = tools.tiny(config)
    assert small.environment.path == "builtin:guess"
    assert small.rollouts.max_tokens == 4 * config.rollouts.max_tokens
    assert 0 < small.environment.turn_tokens <= 16


def test_a_reference_model_is_small_too():
    small = tools.tiny(load_config("quickstart", ["loss.kl_coefficient=0.1", "loss.ref_model=/models/large"]))
    assert small.loss.ref_model.startswith(str(tools.cache_directory()))
    assert small.loss.kl_coefficient == 0.1


def test_vllm_for_gpus_runs_on_the_gpu(monkeypatch):
    monkeypatch.setattr(tools, "gpu_capability", lambda: 9.0)
    assert tools.tiny(load_config("gsm8k-0.5b-1gpu")).model.device == "cuda"
    assert tools.tiny(load_config("quickstart")).model.device == "cpu"


def test_without_vllm_the_embedded_engine_takes_its_place(monkeypatch):
    monkeypatch.setattr(tools, "is_installed", lambda module: False)
    for preset in ("gsm8k-0.5b-1gpu", "math-7b-16gpu"):
        config = load_config(preset)
        small = tools.tiny(config)
        assert (config.engine.kind, small.engine.kind) == ("vllm", "embedded")
        assert (small.engine.tensor_parallel, small.weights.transport) in ((1, "shm"), (1, "stream"))
        assert "engine.kind=embedded" in tools.replaced(config, small)


def test_an_unknown_model_is_refused_with_one_line(tmp_path):
    with pytest.raises(
        ConfigError, match=r"model\.path=.*none: --tiny reads the config\.json of the model"
    ) as raised:
        tools.tiny(load_config("quickstart", [f"model.path={tmp_path / 'none'}"]))
    assert "\n" not in str(raised.value)
