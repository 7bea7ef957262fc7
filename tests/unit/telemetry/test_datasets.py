"""Datasets of a run: the digest changes with the problems and with nothing else."""

import json

from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.telemetry.datasets import run_datasets


def digests(*overrides):
    return [note.digest for note in run_datasets(load_config("quickstart", overrides))]


def test_generated_problems_have_a_digest_of_their_settings():
    train, held_out = run_datasets(load_config("quickstart"))
    assert (train.name, train.context, train.num_prompts) == ("sums", "train", None)
    assert (held_out.name, held_out.context, held_out.num_prompts) == ("sums-held-out", "eval", 1000)
    assert train.digest != held_out.digest
    assert digests("seed=5", "trainer.steps=7") == digests(), "the same problems in another order"
    assert digests("prompts.lengths=[2,3]")[0] != train.digest
    assert digests("eval.num_prompts=100")[0] == train.digest
    assert digests("eval.num_prompts=100")[1] != held_out.digest
    assert len(digests("eval.num_prompts=0")) == 1


def test_a_file_has_a_digest_of_its_bytes(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps({"prompt": "1+1=", "answer": "2"}))
    overrides = ("prompts.kind=file", f"prompts.path={path}", "model.path=/m")
    train, held_out = run_datasets(load_config("quickstart", overrides))
    assert (train.name, held_out.name) == ("problems", "problems-held-out")
    assert (train.source_type, train.source["uri"]) == ("local", str(path))
    assert train.columns == ("prompt", "answer")
    path.write_text(json.dumps({"prompt": "1+1=", "answer": "3"}))
    assert digests(*overrides)[0] != train.digest


def test_a_held_out_file_is_part_of_the_digest_of_the_held_out_prompts(tmp_path):
    for name in ("problems", "own"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}))
    overrides = (
        "prompts.kind=file", f"prompts.path={tmp_path / 'problems.jsonl'}",
        f"prompts.held_out_path={tmp_path / 'own.jsonl'}", "model.path=/m",
    )  # fmt: skip
    before = digests(*overrides)
    (tmp_path / "own.jsonl").write_text(json.dumps({"prompt": "1+2=", "answer": "3"}))
    assert digests(*overrides)[0] == before[0]
    assert digests(*overrides)[1] != before[1]


def test_a_system_message_does_not_change_the_digest():
    assert digests("prompts.system=none") == digests()
