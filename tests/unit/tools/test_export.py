"""A weight version as a directory that transformers reads.

Each export loads torch in a child process; the tests that need more than one are slow.
"""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from pipelinerl_core.algo.adapters import AdapterNote, Adapters, factor_names
from pipelinerl_core.errors import ConfigError, PipelineRLError
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.run.history import take_epoch
from pipelinerl_core.run.records import ADAPTERS_FILE, Commit, RunRecord
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.tools.export import export
from pipelinerl_core.weights.base import BaseWeights
from pipelinerl_core.weights.files import entry_of, serialize
from pipelinerl_core.weights.publish import WeightPublisher
from tests.builders import put_commit, put_run
from tests.synthetic_run import put_record


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
                    num_key_value_heads=1, tie_word_embeddings=True, pad_token_id=0)
    )  # fmt: skip


@pytest.fixture
def run(tmp_path, model):
    """Steps 0 to 2 of a run; 0 and 2 are durable, with other weights than the starting model."""
    start = tmp_path / "start"
    model.save_pretrained(start)
    (start / "tokenizer.json").write_text("{}")
    url = f"file://{tmp_path}/runs/one"
    store = open_store(url)
    config = load_config("quickstart", [f"model.path={start}"])
    put_run(store, run_id="one", config=config)
    epoch = take_epoch(store, "trainer", -1)
    publisher = WeightPublisher(store, run_id="one", epoch=epoch.epoch, use_shm=False)
    for step in range(3):
        weights = {name: torch.full_like(tensor, float(step)) for name, tensor in model.named_parameters()}
        manifest = publisher.publish(step, weights, durable=True) if step != 1 else None
        sha256 = entry_of("x", serialize(weights)).sha256
        put_commit(store, step, epoch.epoch, run_id="one", manifest=manifest, weights_sha256=sha256)
    return url


@pytest.mark.parametrize(("version", "value"), [("last", 2.0), pytest.param("0", 0.0, marks=pytest.mark.slow)])
def test_transformers_loads_the_weights_of_the_version(run, tmp_path, version, value):
    document = export(run, tmp_path / "out", version)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all((parameter == value).all() for parameter in loaded.parameters())
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert (tmp_path / "out" / "tokenizer.json").exists()
    origin = json.loads((tmp_path / "out" / "pipelinerl.json").read_text())
    assert (origin["run_id"], origin["version"]) == ("one", int(value))
    assert document["weights_sha256"] == origin["weights_sha256"]
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as exported:
        assert exported.metadata() == {"format": "pt"}


@pytest.mark.slow
def test_a_version_that_cannot_be_exported_is_refused_in_one_line(run, tmp_path):
    with pytest.raises(ConfigError, match=r"--version 1: not durable \(the newest step is 2, weights.durable_every"):
        export(run, tmp_path / "out", "1")
    with pytest.raises(ConfigError, match="not an empty directory"):
        export(run, tmp_path)
    assert not (tmp_path / "out").exists()
    (weights,) = (tmp_path / "runs/one/weights").glob("00000002.*/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(PipelineRLError, match="3655 bytes, the manifest says 3656"):
        export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_adapters_are_merged_into_the_starting_model(run, tmp_path):
    start, store = tmp_path / "start", open_store(run)
    base = load_file(start / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    factors = dict(zip(factor_names(name), (torch.ones(1, 8), torch.full((8, 1), 0.5)), strict=True))
    record = RunRecord.model_validate_json(store.get("run.json"))
    config = load_config("quickstart", [f"model.path={start}", "learner.lora_rank=1", "weights.content=adapters"])
    store.put(
        "run.json", record.model_copy(update={"config": config.model_dump(mode="json")}).model_dump_json().encode()
    )
    note = AdapterNote(scale=2.0, dtype="float32", base_sha256=BaseWeights(start).sha256)
    weights = Adapters(factors, note)
    (key,) = (key for key in store.list("commits") if key.startswith("commits/00000002"))
    commit = Commit.model_validate_json(store.get(key))
    publisher = WeightPublisher(store, run_id="one", epoch=commit.epoch, use_shm=False, file_name=ADAPTERS_FILE)
    sha256 = entry_of("x", serialize(weights)).sha256
    commit = commit.model_copy(
        update={"manifest": publisher.publish(2, weights, durable=True), "weights_sha256": sha256}
    )
    put_record(store, key, commit)

    document = export(run, tmp_path / "out")

    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters())
    assert all(torch.equal(parameter, base[other] + (other == name)) for other, parameter in loaded.items())
    assert document["num_bytes"] == (tmp_path / "out" / "model.safetensors").stat().st_size
    base[name][0] += 1.0
    save_file(base, start / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PipelineRLError, match="version 2: adapters of a base model with sha256"):
        export(run, tmp_path / "again")
    assert not (tmp_path / "again").exists()
