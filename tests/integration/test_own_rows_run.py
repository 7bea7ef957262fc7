"""`pipelinerl try`: rows and a reward function of a user, and nothing else."""

import json
import os
import subprocess
import sys

import pytest

import pipelinerl
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.tiny import shrunk
from pipelinerl_core.training.tiny_model import byte_tokenizer, random_model
from tests.families import entries_of
from tests.integration.pipeline import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROWS = [{"question": f"What is {number} + 1?", "answer": str(number + 1), "digits": [number]} for number in range(80)]
SMALL = ("trainer.steps=2", "trainer.groups_per_step=2", "rollouts.group_size=4", "rollouts.max_tokens=8",
         "engine.concurrency=8", "eval.num_prompts=4", "tracking.mlflow_uri=none")  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A directory with rows, a reward function with TRL's signature, and a small chat model."""
    home = tmp_path_factory.mktemp("own")
    tokenizer = byte_tokenizer()
    tokens = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    model = random_model({**shrunk(entries_of("qwen2")), **tokens, "vocab_size": len(tokenizer)})
    model.save_pretrained(home / "model")
    tokenizer.save_pretrained(home / "model")
    (home / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    (home / "mine.py").write_text(
        "def score(completions, digits, **kwargs):\n"
        "    return [len(text) / 100 + own[0] / 1000 for text, own in zip(completions, digits)]\n"
    )
    return home


def test_try_trains_on_rows_and_prints_curve_completions_and_the_command_that_changes_it(home):
    command = [sys.executable, "-m", "pipelinerl.flows.cli", "try", "rows.jsonl", "mine.py:score", "model.path=model"]
    ended = subprocess.run(
        [*command, *SMALL], cwd=home, capture_output=True, text=True, timeout=380, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "  reward by step     0." in ended.stdout
    assert "completions of version 0:" in ended.stdout
    assert "completions of version 2:" in ended.stdout
    assert "; reference '" in ended.stdout
    assert "  change             pipelinerl init mine.toml " in ended.stdout


def test_a_program_is_told_which_column_its_function_lacks(home, monkeypatch):
    """test_grpo_scripts.py trains on objects."""
    monkeypatch.chdir(home)

    def wants_more(text, missing):
        return 1.0

    with pytest.raises(ConfigError, match="no such column"):
        pipelinerl.train(ROWS, wants_more, model=str(home / "model"), root=str(home / "runs"))
