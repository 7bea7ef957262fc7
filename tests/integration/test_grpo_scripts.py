"""The rows and reward functions of published GRPO scripts train with other trainer lines."""

import json

import pytest

import pipelinerl
from pipelinerl_core.models.tiny import shrunk
from pipelinerl_core.training.tiny_model import byte_tokenizer, random_model
from tests.families import entries_of
from tests.integration.grpo_scripts import SCRIPTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SMALL = ("trainer.steps=1", "trainer.groups_per_step=2", "rollouts.group_size=4", "rollouts.max_tokens=12",
         "rollouts.max_prompt_tokens=400", "engine.concurrency=8", "eval.num_prompts=0",
         "tracking.mlflow_uri=none")  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    tokenizer = byte_tokenizer()
    tokens = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    random_model({**shrunk(entries_of("qwen2")), **tokens, "vocab_size": len(tokenizer)}).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


IN_CI = ("gsm8k", "trl")
"""`make campaigns` has all; tests/unit/rewards/test_function.py has the signatures."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in IN_CI else [pytest.mark.campaign]) for name in SCRIPTS]
)
def test_a_published_script_trains_with_other_trainer_lines(name, model, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    reward, row = SCRIPTS[name]
    run = pipelinerl.train([row(at) for at in range(1, 41)], reward, model=model, overrides=SMALL)
    assert run.status()["state"] == "finished"
    rows = run.rollouts().to_pylist()
    assert len(rows) == 2 * 4
    assert {row["outcome"] for row in rows} == {"scored"}
    functions = reward if isinstance(reward, list) else []
    for trained in rows:
        components = {part["name"]: part["value"] for part in trained["reward_components"] or ()}
        assert components.keys() == {function.__name__ for function in functions}
        if functions:
            assert trained["reward"] == pytest.approx(sum(components.values()))
        assert json.loads(trained["task"]).keys() >= row(1).keys() - {"prompt"}
    if name == "trl":
        assert all(trained["reward"] > 0 for trained in rows)
