"""Export of a weight version to a directory that transformers can load.

Each export loads torch in a child process; the tests with several exports are slow.
"""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from pipelinerl_core.algo.adapters import AdapterNote, Adapters, factor_names
from pipelinerl_core.errors import ConfigError, PipelineRLError
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.models.tiny import shrunk
from pipelinerl_core.run.context import open_run
from pipelinerl_core.run.history import read_commit, take_epoch
from pipelinerl_core.run.records import RUN_KEY, RunRecord
from pipelinerl_core.run.user_code import local_code, read_local, store_code
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.tools.export import export
from pipelinerl_core.weights.base import BaseWeights
from pipelinerl_core.weights.files import entry_of
from pipelinerl_core.weights.publish import WeightPublisher
from tests.builders import put_commit, put_run
from tests.models import file_of, publish
from tests.synthetic_run import put_record


def digest_of(weights):
    return entry_of("any name", file_of(weights)).digest


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
                    num_key_value_heads=1, tie_word_embeddings=True, pad_token_id=0)
    )  # fmt: skip


@pytest.mark.slow
def test_an_export_has_the_type_of_the_run_and_the_buffers_of_the_starting_model(tmp_path):
    entries = {**shrunk(AutoConfig.for_model("deepseek_v3").to_dict()), "vocab_size": 64, "n_routed_experts": 4,
               "moe_intermediate_size": 16, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
               "first_k_dense_replace": 0}  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**entries)).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_()
    model = model.to(torch.bfloat16)
    model.save_pretrained(tmp_path / "start")
    url = f"file://{tmp_path}/runs/one"
    store = open_store(url)
    put_run(
        store, run_id="one", config=load_config("quickstart", [f"model.path={tmp_path}/start", "model.dtype=float32"])
    )
    epoch = take_epoch(store, "trainer", -1)
    weights = {name: tensor.detach().float() * 1.0001 for name, tensor in model.named_parameters()}
    manifest = publish(
        WeightPublisher(store, run_id="one", epoch=epoch.epoch, use_shm=False), 0, weights, durable=True
    )
    put_commit(store, 0, epoch.epoch, run_id="one", manifest=manifest, weights_digest=digest_of(weights), metrics={})
    export(url, tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, tensor in {**dict(model.named_buffers()), **weights}.items():
        if name in exported.state_dict():
            assert torch.equal(exported.state_dict()[name], tensor.float()), name
    assert any(name.endswith("e_score_correction_bias") for name in exported.state_dict())


@pytest.fixture
def run(tmp_path, model):
    """URL of a run with commits 0 to 2: every weight of version n has the value n; versions 0 and 2 are durable."""
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
        manifest = publish(publisher, step, weights, durable=True) if step != 1 else None
        put_commit(store, step, epoch.epoch, run_id="one", manifest=manifest, weights_digest=digest_of(weights),
                   metrics={"reward/mean": step / 10})  # fmt: skip
    return url


def test_transformers_loads_the_weights_and_the_card_says_where_they_come_from(run, tmp_path):
    (tmp_path / "start" / "README.md").write_text("---\nlicense: apache-2.0\ntags: [x]\n---\n# Start\nlicense: no\n")
    origin = export(run, tmp_path / "out", "last")
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert card.count("license: ") == card.count("license: apache-2.0") == 1
    assert "# start, 2 steps of reinforcement learning" in card
    assert "* **Rows**: `sums`; **reward**: `sums`" in card
    assert "| 2 | 0.200 |" in card
    assert load_config(str(tmp_path / "out" / "pipelinerl.toml")) == open_run(run).config
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all((parameter == 2.0).all() for parameter in loaded.parameters())
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert (tmp_path / "out" / "tokenizer.json").exists()
    written = json.loads((tmp_path / "out" / "pipelinerl.json").read_text())
    assert (written["run_id"], written["version"]) == ("one", 2)
    assert written.items() <= origin.items()
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as exported:
        assert exported.metadata() == {"format": "pt"}


def test_an_export_of_a_read_only_model_can_be_written(run, tmp_path):
    start = tmp_path / "start"
    (start / "more").mkdir(mode=0o555)
    (start / "tokenizer.json").chmod(0o444)
    start.chmod(0o555)
    export(run, tmp_path / "model", "last")
    paths = [tmp_path / "model", *(tmp_path / "model").rglob("*")]
    assert all(path.stat().st_mode & 0o200 for path in paths)


def test_an_export_has_the_files_of_the_user_and_settings_that_name_them(run, tmp_path, monkeypatch):
    reward, loss = tmp_path / 'my "own"' / "mine.py", tmp_path / "code" / "mine.py"
    for file, text in ((reward, "def score(text): return 1.0\n"), (loss, "def surrogate(batch): return 1\n")):
        file.parent.mkdir()
        file.write_text(text)
    own = [f"reward.function={reward}:score", f"loss.function={loss}:surrogate"]
    config = load_config("quickstart", [f"model.path={tmp_path / 'start'}", "loss.kind=custom", *own])
    store = open_store(run)
    put_run(store, run_id="one", config=config, code=store_code(store, config))
    texts = [reward.read_text(), loss.read_text()]
    reward.unlink()
    loss.unlink()
    export(run, tmp_path / "exported")
    monkeypatch.chdir(tmp_path / "exported")
    settings = load_config("pipelinerl.toml")
    assert [local_code(settings), read_local("loss.function", settings.loss.function)] == texts


@pytest.mark.slow
def test_a_version_that_cannot_be_exported_is_refused_and_leaves_no_directory(run, tmp_path):
    with pytest.raises(ConfigError, match="no intact checkpoint at or before step 1"):
        export(run, tmp_path / "out", "1")
    with pytest.raises(ConfigError, match="--version 3: no such step; the newest step is 2"):
        export(run, tmp_path / "out", "3")
    with pytest.raises(ConfigError, match="not an empty directory"):
        export(run, tmp_path)
    assert not (tmp_path / "out").exists()
    (weights,) = (tmp_path / "runs/one/weights").glob("00000002.*/model.safetensors")
    data = weights.read_bytes()
    weights.write_bytes(data[:-1])
    with pytest.raises(PipelineRLError, match=f"{len(data) - 1} bytes, its record says {len(data)}"):
        export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def publish_adapters(url, start, adapters):
    """Make the run's version 2 these adapters, of the starting model in the directory `start`."""
    store = open_store(url)
    config = load_config("quickstart", [f"model.path={start}", "learner.lora_rank=1", "weights.content=adapters"])
    record = RunRecord.model_validate_json(store.get(RUN_KEY))
    put_record(store, RUN_KEY, record.model_copy(update={"config": config.model_dump(mode="json")}))
    (key,) = (key for key in store.list("commits") if key.startswith("commits/00000002"))
    commit = read_commit(store, key)
    publisher = WeightPublisher(store, run_id="one", epoch=commit.epoch, use_shm=False)
    manifest = publish(publisher, 2, adapters, durable=True)
    put_record(store, key, commit.model_copy(update={"manifest": manifest, "weights_digest": digest_of(adapters)}))


@pytest.mark.slow
def test_adapters_are_merged_into_the_starting_model(run, tmp_path):
    start = tmp_path / "start"
    base = load_file(start / "model.safetensors")
    adapted = "model.layers.0.mlp.up_proj.weight"
    # Adds scale * B @ A = 2 * 0.5 * 1 = 1 to each element of the adapted weight.
    factors = dict(zip(factor_names(adapted), (torch.ones(1, 8), torch.full((8, 1), 0.5)), strict=True))
    note = AdapterNote(scale=2.0, dtype="float32", base_digest=BaseWeights(start).digest)
    publish_adapters(run, start, Adapters(factors, note))

    origin = export(run, tmp_path / "out")

    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters())
    assert torch.equal(loaded.pop(adapted), base[adapted] + 1.0)
    assert all(torch.equal(parameter, base[name]) for name, parameter in loaded.items())
    assert origin["num_bytes"] == (tmp_path / "out" / "model.safetensors").stat().st_size
    base[adapted][0] += 1.0
    save_file(base, start / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PipelineRLError, match="version 2: adapters of a base model with the digest"):
        export(run, tmp_path / "again")
    assert not (tmp_path / "again").exists()
