"""A run continues with the rows and models that it started with, or not at all."""

import json
import os
import shutil

import pytest

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.run.context import open_run
from pipelinerl_core.run.local_files import check_local_files, weights_digest
from pipelinerl_core.run.locate import create_run, run_url

ROWS = "".join(json.dumps({"prompt": f"p{n}", "answer": f"{n}"}) + "\n" for n in range(100))


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("rows.jsonl", "test.jsonl", "other.jsonl"):
        (tmp_path / name).write_text(ROWS)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(3 << 20))
    config = load_config("quickstart", [
        "model.path=model", "prompts.kind=file", "prompts.path=rows.jsonl", "prompts.held_out_path=test.jsonl",
        "eval.sets.other.path=other.jsonl",
    ])  # fmt: skip
    return create_run(run_url(str(tmp_path), "r"), config, flow_run_id="f", mlflow=None)


def test_the_same_contents_with_other_times_are_the_same(run, tmp_path):
    assert set(run.record.files) == {
        "model.path", "prompts.path", "prompts.held_out_path", "eval.sets.other.path",
        "eval.sets.other.held_out_path",
    }  # fmt: skip
    os.utime(tmp_path / "rows.jsonl", (1, 1))
    shutil.copytree(tmp_path / "model", tmp_path / "copy")
    shutil.rmtree(tmp_path / "model")
    (tmp_path / "copy" / "README.md").write_text("read by nobody")
    (tmp_path / "copy").rename(tmp_path / "model")
    check_local_files(open_run(run.store.url))


@pytest.mark.parametrize(("key", "name"), [
    ("prompts.path", "rows.jsonl"), ("prompts.held_out_path", "test.jsonl"), ("eval.sets.other.path", "other.jsonl"),
    ("model.path", "model/config.json"), ("model.path", "model/model.safetensors"),
    ("model.path", "model/tokenizer.json"),
])  # fmt: skip
def test_a_change_is_refused(run, tmp_path, key, name):
    with (tmp_path / name).open("ab") as file:
        file.write(b"\n")
    with pytest.raises(ConfigError, match=f"{key}: .* is not what the run started with"):
        check_local_files(run)


def test_files_that_nobody_reads_may_come_and_go(run, tmp_path):
    (tmp_path / "model" / ".DS_Store").write_text("x")
    (tmp_path / "model" / "notes.txt").write_text("x")
    (tmp_path / "model" / "checkpoint").mkdir()
    (tmp_path / "model" / "checkpoint" / "model.safetensors").write_bytes(b"x")
    check_local_files(run)


def test_the_caches_of_a_data_set_are_no_rows(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "data-00000-of-00001.arrow").write_bytes(b"rows")
    config = load_config("quickstart", ["prompts.kind=huggingface", f"prompts.path={tmp_path}/data"])
    run = create_run(run_url(str(tmp_path), "h"), config, flow_run_id="f", mlflow=None)
    (tmp_path / "data" / "cache-1234.arrow").write_bytes(b"x")
    (tmp_path / "data" / "README.md").write_text("x")
    check_local_files(run)
    (tmp_path / "data" / "data-00001-of-00002.arrow").write_bytes(b"more rows")
    with pytest.raises(ConfigError, match=r"prompts\.path: .* is not what the run started with"):
        check_local_files(run)


def test_another_working_directory_is_named(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path.parent)
    with pytest.raises(ConfigError, match=f"in the working directory {tmp_path.parent} is not there"):
        check_local_files(run)


def test_built_in_models_and_generated_prompts_have_no_files(tmp_path):
    run = create_run(run_url(str(tmp_path), "q"), load_config("quickstart"), flow_run_id="f", mlflow=None)
    assert run.record.files == {}


def test_a_model_is_the_same_for_ranks_if_configuration_and_weights_are(tmp_path):
    settings = {"hidden_size": 8, "transformers_version": "5.0"}
    digests = []
    for name, changed in (("a", {}), ("b", {"transformers_version": "5.1"}), ("c", {"hidden_size": 9})):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps({**settings, **changed}))
        (directory / "model.safetensors").write_bytes(b"weights")
        (directory / "tokenizer_config.json").write_text(name)
        digests.append(weights_digest(directory))
    (tmp_path / "b" / "model.safetensors").write_bytes(b"others!")
    assert digests[0] == digests[1]
    assert len({digests[0], digests[2], weights_digest(tmp_path / "b")}) == 3
