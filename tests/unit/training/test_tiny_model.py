"""The small model of `train --tiny`: transformers loads it, and its tokenizer encodes any text."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipelinerl_core.models.paths import builtin_recipe
from pipelinerl_core.prompts.chat import conversation_text
from pipelinerl_core.training.tiny_model import build_tiny_model, byte_tokenizer

PROMPT = [{"role": "user", "content": "4 + 5?"}]


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-7B", "Qwen/Qwen3-8B", "builtin:smollm2"])
def test_model_and_tokenizer_load_and_fit_together(tmp_path, monkeypatch, name):
    monkeypatch.setenv("PIPELINERL_CACHE", str(tmp_path / "empty"))
    recipe = builtin_recipe(f"builtin:tiny?of={name}")
    build_tiny_model(recipe, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["architectures"] == recipe.settings["architectures"]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert sum(parameter.numel() for parameter in model.parameters()) < 2_000_000
    ids = tokenizer("3 + 4 = \u00fc", return_tensors="pt").input_ids
    assert model(ids).logits.shape[-1] == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_the_same_recipe_gives_the_same_weights(tmp_path):
    weights = []
    for number in range(2):
        torch.manual_seed(number)
        build_tiny_model(builtin_recipe("builtin:tiny?of=Qwen/Qwen2.5-0.5B"), tmp_path / str(number))
        weights.append((tmp_path / str(number) / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_a_small_tokenizer_is_copied(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["\u2603"])
    tokenizer.save_pretrained(tmp_path / "own")
    recipe = builtin_recipe("builtin:tiny?of=Qwen/Qwen3-8B").model_copy(update={"tokenizer": str(tmp_path / "own")})
    build_tiny_model(recipe, tmp_path / "built")
    assert "\u2603" in AutoTokenizer.from_pretrained(tmp_path / "built").get_vocab()


def test_any_text_survives_the_tokenizer_and_the_chat_template_writes_turns():
    tokenizer = byte_tokenizer()
    text = "\u00fcber 3,5\n\t\u2603 <x>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    rendered = conversation_text(tokenizer, PROMPT, system="Count.")
    assert rendered == (
        "<|im_start|>system\nCount.<|im_end|>\n<|im_start|>user\n4 + 5?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert conversation_text(tokenizer, PROMPT, system="none") == rendered.partition("<|im_end|>\n")[2]
