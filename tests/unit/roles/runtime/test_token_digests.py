"""Which part of a model directory differs between two hosts."""

import json
import shutil

import pytest

from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.roles.runtime.token_digests import token_digests


def vocabulary(path):
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    (first, first_id), (second, second_id) = list(words.items())[3:5]
    words[first], words[second] = second_id, first_id
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))


def end_tokens(path):
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))


CHANGES = {
    vocabulary: {"vocabulary", "encoded texts"},
    (lambda path: (path / "chat_template.jinja").write_text("{{ messages[0].content }}")): {"chat template"},
    end_tokens: {"end tokens"},
    (lambda path: None): set(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_difference_between_models_is_named(prepared_model, tmp_path, change):
    copy = tmp_path / "model"
    shutil.copytree(prepared_model, copy)
    change(copy)
    own = token_digests(load_config("quickstart"))
    other = token_digests(load_config("quickstart", [f"model.path={copy}"]))
    assert own.keys() == other.keys()
    assert {name for name, digest in own.items() if other[name] != digest} == CHANGES[change]
