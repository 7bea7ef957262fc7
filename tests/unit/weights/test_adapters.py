"""weights.content=adapters: what is published is small, what an engine gets is what merged versions hold."""

import asyncio
import json
import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipelinerl_core.algo.adapters import AdapterNote, Adapters, merge
from pipelinerl_core.errors import ChecksumMismatch, ConfigError
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.roles.runtime.inference import base_weights
from pipelinerl_core.roles.trainer.adopt import _load_committed_weights
from pipelinerl_core.roles.trainer.committer import Committer, ComputedStep
from pipelinerl_core.roles.trainer.learners import build_alone
from pipelinerl_core.roles.trainer.retrain import restore
from pipelinerl_core.run.records import ADAPTERS_FILE, CheckpointRef, commit_key, holds_adapters
from pipelinerl_core.training.lora import trained_parameters
from pipelinerl_core.weights.base import BaseWeights
from pipelinerl_core.weights.checkpoint import save_checkpoint
from pipelinerl_core.weights.files import parse, take_snapshot
from pipelinerl_core.weights.publish import WeightPublisher
from pipelinerl_core.weights.subscribe import WeightSubscriber
from tests.builders import commit_record, put_epoch
from tests.models import file_of, published_by, snapshot_of, tiny_model
from tests.synthetic_run import put_record
from tests.unit.roles.actor.actor_case import Engine, Link, actor, turns
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("shm")

LORA = ("learner.lora_rank=4", "learner.lora_alpha=6")


@pytest.fixture
def model(tmp_path):
    tiny_model("qwen2", 0).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def config_of(model, *overrides, content="adapters"):
    return load_config("quickstart", [f"model.path={model}", *LORA, f"weights.content={content}", *overrides])


def learner_of(config):
    """As after some steps: B is 0 at first, which would hide A."""
    learner = build_alone(config)
    torch.manual_seed(7)  # the model is private: a step would change A too
    with torch.no_grad():
        for name, parameter in trained_parameters(learner._model).items():
            if ".lora_B." in name:
                parameter.normal_(std=0.1)
    return learner


def publish(store, weights, *, use_shm=False, version=3, durable=True):
    publisher = WeightPublisher(store, run_id="run", epoch=1, use_shm=use_shm)
    return publisher.publish(version, snapshot_of(weights, publisher.memory), durable=durable)


@pytest.mark.parametrize("use_shm", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("targets", ["[]", '["q_proj","down_proj"]'])
def test_the_receiver_merges_to_the_weights_that_the_trainer_would_have_published(
    store, model, dtype, targets, use_shm
):
    changes = (f"model.dtype={dtype}", f"learner.lora_targets={targets}")
    config = config_of(model, *changes)
    adapters, merged = (
        published_by(learner_of(config)),
        published_by(learner_of(config_of(model, *changes, content="merged"))),
    )
    manifest = publish(store, adapters, use_shm=use_shm, durable=not use_shm)
    assert holds_adapters(manifest)
    subscriber = WeightSubscriber(store, base_weights(config))

    update = subscriber.fetch(manifest)

    assert update.is_partial
    assert update.path is None  # a file that holds no weights is not for an engine
    assert update.num_bytes == manifest.num_bytes < len(file_of(merged))
    assert len(update.tensors) == (4 if "q_proj" in targets else 14)
    for name, tensor in update.tensors.items():
        assert tensor.dtype == getattr(torch, dtype)
        assert torch.equal(tensor, merged[name]), name
        assert not torch.equal(tensor, load_file(model / "model.safetensors")[name].to(tensor.dtype))
    whole = BaseWeights(model).whole(subscriber.read(manifest), "here")
    assert file_of(whole) == file_of(merged)


def test_the_bits_do_not_depend_on_threads_or_on_where_the_factors_are():
    base, a, b = torch.randn(96, 80), torch.randn(8, 80), torch.randn(96, 8)
    shifted = torch.zeros(a.numel() + 1)[1:].view_as(a).copy_(a)
    threads = torch.get_num_threads()
    merged = [merge(base, a, b, 2.0), merge(base, shifted, b, 2.0)]
    try:
        torch.set_num_threads(2)
        merged.append(merge(base, a, b, 2.0))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(weights, merged[0]) for weights in merged)


def test_the_note_travels_in_the_file_and_counts_for_its_checksum():
    factors = {"l.lora_A.weight": torch.ones(1, 2), "l.lora_B.weight": torch.ones(3, 1)}
    notes = [
        AdapterNote(scale=s, dtype="float32", base_digest=base) for s, base in ((2.0, "a"), (2.5, "a"), (2.0, "b"))
    ]
    data = [file_of(Adapters(factors, note)) for note in notes]
    assert len(set(data)) == 3
    assert file_of(Adapters(dict(reversed(factors.items())), notes[0])) == data[0]
    read = parse(bytearray(data[1]), "here")
    assert isinstance(read, Adapters)
    assert read.note == notes[1]
    assert [(name, a.shape, b.shape) for name, a, b in read.pairs()] == [("l.weight", (1, 2), (3, 1))]
    assert not isinstance(parse(bytearray(file_of(factors)), "here"), Adapters)


def test_the_base_model_is_known_by_its_weights_not_by_its_files(model, tmp_path):
    tensors = load_file(model / "model.safetensors")
    names = sorted(tensors)
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, sharded / file)
    save_file({"x": torch.zeros(1)}, sharded / "optimizer.safetensors")  # transformers does not read it
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    assert BaseWeights(sharded).digest == BaseWeights(model).digest
    tensors[names[0]].view(-1)[0] += 1e-6
    save_file(tensors, tmp_path / "model.safetensors")
    assert BaseWeights(tmp_path).digest != BaseWeights(model).digest


@pytest.mark.parametrize("is_read_by", ["subscriber", "actor"])
async def test_adapters_of_another_model_are_refused_by_name_and_counted(store, model, tmp_path, caplog, is_read_by):
    other = tmp_path / "other"
    tiny_model("qwen2", 1).save_pretrained(other)
    manifest = publish(store, published_by(learner_of(config_of(model))))
    subscriber = WeightSubscriber(store, BaseWeights(other))
    digest, wanted = BaseWeights(other).digest[:12], BaseWeights(model).digest[:12]
    says = (
        f"weights of version 3: adapters of a base model with the digest {wanted}, but the model in {other} has "
        f"{digest}"
    )
    if is_read_by == "subscriber":
        with pytest.raises(ChecksumMismatch, match=says):
            subscriber.fetch(manifest)
        return
    caplog.set_level(logging.WARNING)
    engine = Engine(0)
    tested_actor = actor(Link(), engine)
    # The loop of swaps runs alone: the test sets the private attributes that other loops of the actor set otherwise.
    tested_actor._subscriber, tested_actor._newest = subscriber, manifest
    loop = asyncio.create_task(tested_actor._swap_loop())
    tested_actor._newer.set()
    await until(lambda: tested_actor._unreadable == 3, "three refusals")
    for _ in range(3):
        tested_actor._newer.set()
        await turns(40)
    loop.cancel()
    assert (engine.num_swaps, tested_actor._unreadable) == (0, 3)
    (line,) = caplog.messages  # once, not with every sync
    assert says in line
    assert "\n" not in line


def test_a_damaged_file_reaches_no_engine(store, model):
    manifest = publish(store, published_by(learner_of(config_of(model))))
    key = f"{manifest.key}/{ADAPTERS_FILE}"
    data = store.get(key)
    store.put(key, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ChecksumMismatch, match="digest"):
        WeightSubscriber(store, BaseWeights(model)).fetch(manifest)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda a: a.pop(next(name for name in a if "lora_B" in name)), "not the two factors of an adapter"),
        (lambda a: a.update(x=torch.ones(1)), "not the two factors"),
        (lambda a: a.update({"y.lora_A.weight": torch.ones(1, 2), "y.lora_B.weight": torch.ones(3, 1)}), "y.weight"),
        (
            lambda a: a.update({name: t[:, :-1] for name, t in a.items() if "lora_A" in name}),
            "no adapters of the model",
        ),
        (lambda a: setattr(a, "note", replace(a.note, dtype="load")), "'load', which torch does not have"),
        (lambda a: setattr(a, "note", replace(a.note, dtype="float33")), "'float33', which torch does not have"),
    ],
)
def test_adapters_that_do_not_fit_the_model_are_one_line(model, change, says):
    adapters = published_by(learner_of(config_of(model)))
    change(adapters)
    with pytest.raises(ChecksumMismatch, match=says):
        BaseWeights(model).merged(adapters, "version 3")


def test_a_subscriber_that_expects_merged_weights_refuses_adapters(store, model):
    manifest = publish(store, published_by(learner_of(config_of(model))))
    with pytest.raises(ChecksumMismatch, match=r"adapters, in a run with weights.content=merged"):
        WeightSubscriber(store).fetch(manifest)


def test_a_model_whose_files_do_not_have_the_weights_is_refused_at_the_start(model, tmp_path):
    config = config_of(model)
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({other: tensor for other, tensor in tensors.items() if other != name}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"{name} \[48, 32\] is not there. Set weights.content=merged"):
        BaseWeights(tmp_path).check({name: (48, 32)})
    with pytest.raises(ConfigError, match=r"is \[48, 32\] there"):
        BaseWeights(model).check({name: (32, 48)})
    (model / "model.safetensors").rename(tmp_path / "elsewhere")
    torch.save(tensors, model / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"it has none. Convert them, or set weights.content=merged"):
        build_alone(config)
    with pytest.raises(ConfigError, match="it has none"):
        base_weights(config)
    assert base_weights(config_of(model, content="merged")) is None


# ---- roles ---------------------------------------------------------------------------------------------------------


def commit_with(manifest, step=0):
    return commit_record(step, manifest=manifest, checkpoint=CheckpointRef(step=0, epoch=1))


def test_the_committer_names_the_file_of_adapters_by_its_content(store, model):
    config = config_of(model, "weights.transport=object_store")
    epoch = put_epoch(store, 1)
    committer = Committer(store, config, run_id="run", epoch=epoch, link=None)
    weights = take_snapshot(learner_of(config))
    committer.submit(
        ComputedStep(step=0, weights=weights, state=None, batch=None, reserved=None, reserved_at=0.0, computed_at=0.0)
    )
    committer.flush()
    committer.close()
    manifest = committer.newest.manifest
    assert [entry.name for entry in manifest.files] == [ADAPTERS_FILE]
    assert manifest.files[0].digest == committer.newest.weights_digest
    assert WeightSubscriber(store, BaseWeights(model)).fetch(manifest).version == 0


def test_a_run_does_not_go_on_beside_another_model(store, model, tmp_path):
    learner = learner_of(config_of(model))
    save_checkpoint(store, 0, 1, learner.state())
    manifest = publish(store, published_by(learner), version=0)
    put_record(store, commit_key(0, 1), commit_with(manifest))
    commits = {0: commit_key(0, 1)}
    restore(store, learner, commits, 0)
    tiny_model("qwen2", 1).save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"model.path: the model there has the digest .* trained beside"):
        restore(store, learner_of(config_of(tmp_path / "other")), commits, 0)
    store.delete([f"{manifest.key}/{ADAPTERS_FILE}"])  # an old version that is lost keeps nobody from going on
    restore(store, learner, commits, 0)


def test_after_other_hardware_trained_again_the_committed_adapters_are_taken(store, model):
    config = config_of(model)
    committed = published_by(learner_of(config))
    learner = build_alone(config)
    manifest = publish(store, committed)
    sha256 = manifest.files[0].digest
    commit = SimpleNamespace(step=3, manifest=manifest, weights_digest=sha256)
    _load_committed_weights(store, learner, commit, config)
    assert file_of(published_by(learner)) == file_of(committed)
