"""The built-in model: its tokenizer, its training, its cache.

The parts of a training step are private functions; tests call these because a whole training takes a minute.
"""

import itertools

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipelinerl_core.models.recipes import SumsModel, model_directory
from pipelinerl_core.prompts.sums import demonstrations
from pipelinerl_core.tools.prepare import build, main
from pipelinerl_core.training import warm_start
from pipelinerl_core.training.attention import PACKED_ATTENTION

TINY = SumsModel(steps=3, rows=8, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1)


def quiet(line):
    del line


def fresh_model(recipe=TINY):
    torch.manual_seed(0)
    return warm_start.Qwen2ForCausalLM(warm_start._model_config(recipe))


def test_the_tokenizer_survives_the_disk_and_decodes_without_spaces(tmp_path):
    warm_start.build_tokenizer(TINY.alphabet).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("3+4=7,7.7")["input_ids"]
    assert tokenizer.decode(ids) == "3+4=7,7.7"
    assert tokenizer.decode([*ids, 1, 0, 0], skip_special_tokens=True) == "3+4=7,7.7"
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    row, num_prompt = warm_start._as_row(("3+4=", "7.7"), warm_start._vocabulary(TINY.alphabet))
    assert row == [*tokenizer("3+4=7.7")["input_ids"], 1]
    assert num_prompt == 4


def test_the_packed_loss_is_the_mean_over_completion_tokens_of_each_row_alone():
    vocabulary = warm_start._vocabulary(TINY.alphabet)
    rows = [warm_start._as_row(pair, vocabulary) for pair in itertools.islice(demonstrations(TINY), 8)]
    model = fresh_model()
    losses = []
    for ids, num_prompt in rows:
        logits = model(input_ids=torch.tensor([ids])).logits[0]
        losses.append(
            functional.cross_entropy(logits[num_prompt - 1 : -1], torch.tensor(ids[num_prompt:]), reduction="none")
        )
    expected = torch.cat(losses).mean()
    expected.backward()
    gradient = model.model.embed_tokens.weight.grad.clone()
    model.zero_grad()
    model.set_attn_implementation(PACKED_ATTENTION)
    assert warm_start._backward(model, rows) == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(model.model.embed_tokens.weight.grad, gradient, rtol=1e-4, atol=1e-6)


def test_the_learning_rate_rises_and_then_falls():
    recipe = SumsModel(steps=100, warmup_steps=10)
    assert warm_start._lr_share(0, recipe) == 0
    assert warm_start._lr_share(5, recipe) == pytest.approx(0.5 * 0.95)
    assert warm_start._lr_share(40, recipe) == pytest.approx(0.6)
    assert warm_start._lr_share(99, recipe) == pytest.approx(0.05)


def test_training_lowers_the_loss(tmp_path):
    lines = []
    recipe = TINY.model_copy(update={"steps": 200, "rows": 32, "warmup_steps": 10})
    warm_start.build_model(recipe, demonstrations(recipe), tmp_path, lines.append)
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in lines]
    assert len(losses) == 4  # every 50 steps
    assert losses[-1] < losses[0] - 0.2 < 2.83  # log(17) = 2.83 is the loss of knowing nothing


def test_a_built_model_is_the_same_bytes_again_and_loads(tmp_path, monkeypatch):
    built = []
    for name in ("a", "b"):
        monkeypatch.setenv("PIPELINERL_CACHE", str(tmp_path / name))
        torch.manual_seed(hash(name) % 1000)  # the global generator must not matter
        built.append(build(TINY, quiet))
    assert built[0] != built[1]
    first, second = ((path / "model.safetensors").read_bytes() for path in built)
    assert first == second
    model = AutoModelForCausalLM.from_pretrained(built[0])
    assert model.config.eos_token_id == 1
    embedding = load_file(built[1] / "model.safetensors")["model.embed_tokens.weight"]
    torch.testing.assert_close(model.get_input_embeddings().weight.data, embedding, rtol=0, atol=0)


def test_the_second_call_builds_nothing_and_a_killed_build_leaves_nothing_in_the_way(tmp_path, monkeypatch):
    monkeypatch.setenv("PIPELINERL_CACHE", str(tmp_path))
    partial = model_directory(TINY).with_suffix(".partial")
    partial.mkdir(parents=True)
    (partial / "half").write_text("written")
    directory = build(TINY, quiet)
    assert not partial.exists()
    assert not (directory / "half").exists()
    stamp = (directory / "model.safetensors").stat().st_mtime_ns
    lines = []
    assert build(TINY, lines.append) == directory
    assert lines == []
    assert (directory / "model.safetensors").stat().st_mtime_ns == stamp


def test_building_leaves_the_callers_generator_and_threads_alone(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    threads = torch.get_num_threads()
    warm_start.build_model(TINY, demonstrations(TINY), tmp_path, quiet)
    assert torch.rand(1) == expected
    assert torch.get_num_threads() == threads


def test_the_command_names_the_mistake_and_ends_with_status_2(tmp_path, capsys):
    assert main(["--model", str(tmp_path / "none")]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "no such directory" in output.err
    assert main(["--model", "builtin:product"]) == 2
