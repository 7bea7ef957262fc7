"""Weights staged for vLLM: checked against the model, linked where they can be, gone when they are not needed."""

import os
import stat
from dataclasses import replace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from pipelinerl_core.engine.vllm.names import FileNames
from pipelinerl_core.engine.vllm.weights import StagedWeights
from pipelinerl_core.errors import EngineError, SwapError
from pipelinerl_core.interfaces import WeightUpdate
from pipelinerl_core.training.tiny_model import random_model
from pipelinerl_core.weights import staging
from pipelinerl_core.weights.publish import WeightPublisher
from pipelinerl_core.weights.subscribe import WeightSubscriber
from tests.models import publish, tiny_model


@pytest.fixture
def model(tmp_path):
    """Directory of a model with tied weights."""
    tiny_model("qwen2", 0).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def weights(seed=1):
    """By parameter name, as a learner publishes them."""
    return {name: tensor.detach().clone() for name, tensor in tiny_model("qwen2", seed).named_parameters()}


def update(tensors, version=1, path=None):
    return WeightUpdate(version=version, tensors=tensors, num_bytes=1, path=path)


def test_a_published_file_is_linked_and_outlives_its_publisher(store, model, shm):
    manifest = publish(WeightPublisher(store, run_id="run", epoch=1, use_shm=True), 1, weights(), durable=False)
    staged = StagedWeights(model, staging.staging_directory("run", "actor-0"))
    fetched = WeightSubscriber(store).fetch(manifest)
    path = staged.stage(fetched)
    assert path.is_relative_to(shm / "pipelinerl-run")
    assert os.path.samefile(path, fetched.path)
    os.unlink(fetched.path)
    torch.testing.assert_close(load_file(path), weights(), rtol=0, atol=0)


def test_an_engine_that_stages_before_anything_is_published_leaves_shared_memory_to_this_user_alone(model, shm):
    before = os.umask(0)
    try:
        StagedWeights(model, staging.staging_directory("run", "actor-0"))
    finally:
        os.umask(before)
    assert stat.S_IMODE((shm / "pipelinerl-run").stat().st_mode) == 0o700


def test_full_shared_memory_is_a_failed_swap_that_names_the_memory_to_enlarge(model, tmp_path, monkeypatch):
    """As safetensors reports a full tmpfs."""
    staged = StagedWeights(model, tmp_path / "staged")

    def full(tensors, path):
        path.write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("pipelinerl_core.engine.vllm.weights.safetensors.save_file", full)
    with pytest.raises(SwapError, match=r"No space left.* GB wanted, .* GB free\. Enlarge /dev/shm"):
        staged.stage(update(weights()))
    assert list((tmp_path / "staged").iterdir()) == []
    monkeypatch.undo()
    assert staged.stage(update(weights())).is_file()


@pytest.mark.parametrize("published", ["gone", None])
def test_without_a_file_the_tensors_are_written(model, tmp_path, published):
    staged = StagedWeights(model, tmp_path / "staged")
    path = staged.stage(update(weights(), path=published and str(tmp_path / published)))
    torch.testing.assert_close(load_file(path), weights(), rtol=0, atol=0)


def test_tied_weights_named_as_the_head_are_written_under_the_name_that_vllm_reads(model, tmp_path):
    tensors = weights()
    head = {"lm_head.weight": tensors.pop("model.embed_tokens.weight")}
    from safetensors.torch import save_file

    save_file(tensors | head, tmp_path / "published")
    staged = StagedWeights(model, tmp_path / "staged")
    given = update(tensors | head, path=str(tmp_path / "published"))
    staged.check(given.tensors)
    torch.testing.assert_close(load_file(staged.stage(given)), weights(), rtol=0, atol=0)


def test_files_may_have_a_copy_of_a_tied_head_and_angles_that_no_update_has(model, tmp_path):
    from safetensors.torch import save_file

    tensors = load_file(f"{model}/model.safetensors")
    copied = {
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    save_file(tensors | copied, f"{model}/model.safetensors")
    staged = StagedWeights(model, tmp_path / "staged")
    staged.check(weights())
    torch.testing.assert_close(load_file(staged.stage(update(weights()))), weights(), rtol=0, atol=0)


def test_only_the_loaded_version_is_kept_and_nothing_after_the_end(model, tmp_path):
    staged = StagedWeights(model, tmp_path / "run" / "staged" / "actor-0")
    paths = [staged.stage(update(weights(), version)) for version in (1, 2)]
    staged.set_current(paths[1])
    assert staged.current == paths[1]
    assert [path.exists() for path in paths] == [False, True]
    assert staged.stage(update(weights(2), 2)) == paths[1]  # the same version once more replaces the file
    torch.testing.assert_close(load_file(paths[1]), weights(2), rtol=0, atol=0)
    staged.close()
    assert not (tmp_path / "run").exists()


def test_closing_leaves_directories_of_others_beside_the_staged_weights(model, tmp_path):
    staged = StagedWeights(model, tmp_path / "run" / "staged" / "actor-0")
    (tmp_path / "run" / "00000001.1").mkdir()
    staged.close()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["00000001.1"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w | {"x": torch.zeros(1)}, "names 'x'"),
        (
            lambda w: w | {"model.norm.weight": torch.zeros(3)},
            r"model.norm.weight: the update is torch.float32 \(3,\)",
        ),
        (lambda w: w | {"model.norm.weight": w["model.norm.weight"].long()}, "torch.int64"),
        (lambda w: {name: t for name, t in w.items() if name != "model.norm.weight"}, "lacks 'model.norm.weight'"),
        (lambda w: w | {"lm_head.weight": w["model.embed_tokens.weight"] + 1}, "differ in the update"),
    ],
)
def test_an_update_that_is_not_of_this_model_is_refused(model, tmp_path, change, message):
    staged = StagedWeights(model, tmp_path / "staged")
    with pytest.raises(SwapError, match=message):
        staged.check(change(weights()))


def test_a_directory_without_weights_is_no_model(tmp_path):
    with pytest.raises(EngineError, match="no weights in safetensors files"):
        StagedWeights(str(tmp_path))


def test_staged_weights_of_a_killed_predecessor_are_removed(shm):
    staged = shm / "pipelinerl-run" / "staged"
    dead, alive, other = (
        staged / name for name in ("actor-0.999999999", f"actor-0.{os.getppid()}", "actor-1.999999999")
    )
    for directory in (dead, alive, other):
        directory.mkdir(parents=True)
    assert staging.staging_directory("run", "actor-0") == staged / f"actor-0.{os.getpid()}"
    assert [path.exists() for path in (dead, alive, other)] == [False, True, True]


def test_without_shared_memory_there_is_no_directory(monkeypatch, tmp_path):
    monkeypatch.setattr("pipelinerl_core.weights.staging.SHM_ROOT", tmp_path / "none")
    assert staging.staging_directory("run", "actor-0") is None


def test_a_partial_update_is_staged_with_the_weights_that_are_loaded(model, tmp_path):
    staged = StagedWeights(model, tmp_path / "staged")
    base, new, newest = weights(0), weights(1), weights(2)
    names = ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight")
    part, other = ({name: tensors[name] for name in names} for tensors in (new, newest))
    with pytest.raises(SwapError, match="the update lacks"):
        staged.check(part)
    staged.check(part, is_partial=True)
    for version, tensors in ((1, part), (2, other)):
        path = staged.stage(WeightUpdate(version=version, tensors=tensors, num_bytes=1, is_partial=True))
        torch.testing.assert_close(load_file(path), base | tensors, rtol=0, atol=0)
        staged.set_current(path)
    with pytest.raises(SwapError, match="names 'x'"):
        staged.check({"x": torch.zeros(1)}, is_partial=True)


def test_a_version_that_was_published_again_is_not_linked(store, model, shm):
    """The link would be of the file that has the name now, which the update does not keep."""
    publisher = WeightPublisher(store, run_id="run", epoch=1, use_shm=True)
    fetched = WeightSubscriber(store).fetch(publish(publisher, 5, weights(5), durable=False))
    publish(publisher, 5, weights(5), durable=False)
    path = StagedWeights(model, staging.staging_directory("run", "actor-0")).stage(fetched)
    for version in range(6, 12):
        publish(publisher, version, weights(version), durable=False)
    torch.testing.assert_close(load_file(path), weights(5), rtol=0, atol=0)


def test_a_linked_file_is_not_written_again_before_the_next_one_is_loaded(store, model, shm):
    publisher = WeightPublisher(store, run_id="run", epoch=1, use_shm=True)
    staged = StagedWeights(model, staging.staging_directory("run", "actor-0"))
    path = staged.stage(WeightSubscriber(store).fetch(publish(publisher, 5, weights(5), durable=False)))
    staged.set_current(path)
    staged.stage(WeightSubscriber(store).fetch(publish(publisher, 6, weights(6), durable=False)))
    for version in range(7, 12):
        publish(publisher, version, weights(version), durable=False)
    torch.testing.assert_close(load_file(path), weights(5), rtol=0, atol=0)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe", "qwen2_moe", "gpt_neox"])
def test_weights_with_the_names_of_the_learner_are_those_of_the_files(tmp_path, family):
    """Experts in one tensor, and renamed heads."""
    entries = {
        "model_type": family, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_local_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "pad_token_id": 2,
    }  # fmt: skip
    model = random_model(entries)
    model.save_pretrained(tmp_path / "model")
    saved = load_file(tmp_path / "model" / "model.safetensors")
    tensors = {name: tensor.detach() for name, tensor in model.named_parameters()}
    assert tensors.keys() != saved.keys()
    staged = StagedWeights(str(tmp_path / "model"), tmp_path / "staged")
    staged.check(tensors)
    path = staged.stage(update(tensors))
    converted = dict(FileNames(tmp_path / "model", saved.keys()).converted(load_file(path).items()))
    torch.testing.assert_close(converted, saved, rtol=0, atol=0)
    name = next(name for name in tensors if name not in saved)
    partial = staged.stage(replace(update({name: tensors[name] + 1}, version=2), is_partial=True))
    changed = FileNames(tmp_path / "model", saved.keys()).converted([(name, tensors[name] + 1)])
    torch.testing.assert_close(load_file(partial), saved | dict(changed), rtol=0, atol=0)
    with pytest.raises(SwapError, match="the update is torch"):
        staged.check(tensors | {name: tensors[name][..., :-1]})
    with pytest.raises(SwapError, match="the update lacks"):
        staged.check({other: tensor for other, tensor in tensors.items() if other != name})
