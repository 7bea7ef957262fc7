"""Model directories whose files are damaged, missing, or of another model: one line before the start."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.tools.check_model import _small
from pipelinerl_core.training.model import load_model
from pipelinerl_core.training.model_files import check_model_files
from pipelinerl_core.training.tiny_model import random_model
from tests.families import entries_of

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def saved(tmp_path):
    """A small llama in a directory."""
    random_model({**_small(entries_of("llama")), "tie_word_embeddings": False}).save_pretrained(tmp_path)
    return tmp_path


def change(directory: Path, file: str, **entries: object) -> None:
    values = json.loads((directory / file).read_text())
    (directory / file).write_text(json.dumps({**values, **entries}))


def tensors(directory: Path, edit) -> None:
    file = directory / "model.safetensors"
    save_file(edit(load_file(file)), file, metadata={"format": "pt"})


def in_shards(directory: Path) -> None:
    all_tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(all_tensors)}
    for file in set(names.values()):
        part = {name: all_tensors[name] for name in names if names[name] == file}
        save_file(part, directory / file, metadata={"format": "pt"})
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": names})
    )


# Families with tied heads, with experts that the library merges, and with other names of tensors than Llama has.
SAVED = "llama gemma3_text qwen2_moe mixtral olmoe deepseek_v3 phi3 gpt2 gpt_neox opt"


@pytest.mark.parametrize("family", SAVED.split())
def test_a_model_of_each_family_that_was_saved_by_the_library_is_complete(family, tmp_path):
    model = random_model(_small(entries_of(family)))
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    check_model_files(tmp_path)
    tensors(tmp_path, lambda all_tensors: dict(sorted(all_tensors.items())[1:]))
    with pytest.raises(ConfigError, match=r"its files lack \d+ tensors"):
        check_model_files(tmp_path)


def test_files_of_several_shards_are_complete_or_the_missing_file_is_named(saved):
    in_shards(saved)
    check_model_files(saved)
    (saved / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"1 of 2 files are missing, first model-00002-of-00002.safetensors"):
        check_model_files(saved)


def cut(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def adapter(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "adapter_config.json").write_text("{}")


BROKEN = {
    "empty": (lambda d: (d / "model.safetensors").write_bytes(b""), "model.safetensors is not complete"),
    "cut": (cut, "model.safetensors is not complete"),
    "lfs": (
        lambda d: (d / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:a\n"),
        "is a pointer of Git LFS. Run `git lfs pull`",
    ),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "has no weights"),
    "adapter": (adapter, "an adapter without its base model"),
    "no index": (
        lambda d: [in_shards(d), (d / "model.safetensors.index.json").write_text("[]")],
        "its model.safetensors.index.json is damaged",
    ),
    "no metadata": (
        lambda d: [
            in_shards(d),
            change(d, "model.safetensors.index.json", metadata=None),
            (d / "model.safetensors.index.json").write_text('{"weight_map": {}}'),
        ],
        r"index.json is damaged \(KeyError: 'metadata'\)",
    ),
    "empty bin": (
        lambda d: [(d / "model.safetensors").unlink(), (d / "pytorch_model.bin").write_bytes(b"")],
        r"pytorch_model.bin is not complete \(no bytes\)",
    ),
    "shard of bin": (
        lambda d: (d / "model.safetensors").rename(d / "pytorch_model-00001-of-00002.bin"),
        "has no weights",
    ),
    "int8": (
        lambda d: tensors(d, lambda named: {**named, UP: named[UP].to(torch.int8)}),
        r"weights are quantized \(I8\)",
    ),
    "fewer layers": (
        lambda d: change(d, "config.json", num_hidden_layers=1),
        "its files have 9 tensors that config.json leaves out, for example model.layers.1.input_layernorm.weight",
    ),
    "no layers": (lambda d: change(d, "config.json", num_hidden_layers=0), "have 18 tensors that config.json leaves"),
    "text as end": (
        lambda d: (d / "generation_config.json").write_text('{"eos_token_id": "abc"}'),
        "is no number of a token",
    ),
    "missing": (
        lambda d: tensors(d, lambda named: {name: own for name, own in named.items() if name != UP}),
        f"its files lack 1 tensors, for example {UP}",
    ),
    "prefix": (
        lambda d: tensors(d, lambda named: {f"base.{name}": own for name, own in named.items()}),
        "of no use, for example base.lm_head.weight",
    ),
    "layers": (lambda d: change(d, "config.json", num_hidden_layers=3), "its files lack 9 tensors"),
    "shape": (
        lambda d: tensors(d, lambda named: {**named, UP: torch.zeros(3, 5)}),
        rf"tensor {UP} has the shape \[3, 5\]",
    ),
    "quantized": (
        lambda d: change(d, "config.json", quantization_config={"quant_method": "gptq"}),
        r"its weights are quantized \(gptq\)",
    ),
    "heads": (lambda d: change(d, "config.json", num_attention_heads=3), "its config.json is wrong"),
    "layers as text": (lambda d: change(d, "config.json", num_hidden_layers="2"), "its config.json is wrong"),
    "generation": (lambda d: (d / "generation_config.json").write_text("{"), "its generation_config.json is wrong"),
    "list": (lambda d: (d / "generation_config.json").write_text("[]"), "its generation_config.json is wrong"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_damaged_model_is_one_line(name, saved):
    damage, message = BROKEN[name]
    damage(saved)
    with pytest.raises(ConfigError, match=message) as caught:
        check_model_files(saved, "loss.teacher")
    assert str(caught.value).startswith(f"loss.teacher={saved}: ")
    assert "\n" not in str(caught.value)


def test_the_learner_refuses_missing_tensors_and_values_that_are_not_finite(saved):
    tensors(saved, lambda named: {**named, UP: torch.full_like(named[UP], float("nan"))})
    with pytest.raises(ConfigError, match=f"tensor {UP} has values that are not finite"):
        load_model(saved, "float32")
    tensors(saved, lambda named: {name: own for name, own in named.items() if name != UP})
    with pytest.raises(ConfigError, match="its files lack 1 tensors"):
        load_model(saved, "float32")


def test_extra_tensors_of_other_programs_are_left_out(saved):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "v_head.summary.weight": torch.ones(1, 8)}
    tensors(saved, lambda named: {**named, **extra})
    check_model_files(saved)
    load_model(saved, "float32")


def test_the_head_of_a_tied_model_may_be_in_the_file(tmp_path):
    random_model({**_small(entries_of("llama")), "tie_word_embeddings": True}).save_pretrained(tmp_path)
    tensors(tmp_path, lambda named: {**named, "lm_head.weight": named["model.embed_tokens.weight"].clone()})
    check_model_files(tmp_path)
    load_model(tmp_path, "float32")


def test_a_model_without_an_end_token_is_told(saved):
    assert check_model_files(saved) == []
    (saved / "generation_config.json").write_text("{}")
    change(saved, "config.json", eos_token_id=None)
    assert "has no end token (eos_token_id=None)" in check_model_files(saved)[0]
    (saved / "generation_config.json").write_text('{"eos_token_id": [99999]}')
    assert "has no end token (eos_token_id=[99999])" in check_model_files(saved)[0]


def test_damaged_weights_of_torch_are_one_line_of_the_learner(saved):
    (saved / "model.safetensors").unlink()
    (saved / "pytorch_model.bin").write_bytes(b"no pickle")
    check_model_files(saved)
    with pytest.raises(ConfigError, match="cannot be loaded: UnpicklingError"):
        load_model(saved, "float32")
