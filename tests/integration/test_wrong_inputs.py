"""Commands with an input that a user got wrong: exit code 2 and one line, before anything starts.

A check of a model, rows, a reward function or an environment starts a process; `make campaigns` has all of them.
"""

import json
import os
import re
import shlex
import string
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from pipelinerl_core.models.tiny import shrunk
from pipelinerl_core.training.tiny_model import random_model
from pipelinerl_core.training.warm_start import build_tokenizer
from tests.families import entries_of
from tests.integration.pipeline import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CONFIG = """
[trainer]
steps = 2
[prompts]
kind = "file"
path = "rows.jsonl"
"""
CODE = """
import json, os, threading
def threads(text): threading.Thread(target=print).start()
def sealed(text): return 1.0
def text(text): return text
def missing(text, no_such_column): return 1.0
def loops(text):
    while True: pass
def leaves(text): os._exit(0)
def raises(text, **row): raise ValueError("two\\nlines")
class Adventure: pass
class Silent:
    def __init__(self, task): pass
    def reset(self): return ""
    def step(self, reply): return None
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A directory with the files of all commands."""
    home = tmp_path_factory.mktemp("inputs")
    rows = [{"prompt": f"{number}+{number + 1}=", "answer": str(2 * number + 1)} for number in range(60)]
    lines = [json.dumps(row) for row in rows]
    text = "\n".join(lines) + "\n"
    half = json.dumps({"prompt": "4+", "answer": "4"})
    files: dict[str, str | bytes] = {
        "mine.toml": CONFIG, "mine.py": CODE, "rows.jsonl": text,
        # settings
        "latin.toml": "# caf\xe9\n[trainer]\nsteps = 3\n".encode("latin-1"),
        "image.toml": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "zeros.toml": b"\0" * 64,
        "list.toml": "[[trainer]]\nsteps = 3\n",
        "notadb.db": b"this is no database\n" * 20, "cut.db": b"SQLite format 3\0" + b"\1" * 50,
        "file": "a file where a directory is due",
        # rows
        "trailing.jsonl": text.replace(lines[7], lines[7] + ","), "comment.jsonl": "// rows\n" + text,
        "array.jsonl": json.dumps(rows), "cut.jsonl": text[:-9], "empty.jsonl": "", "scalars.jsonl": "1\n2\n3\n",
        "latin.jsonl": text.replace("0+1", "caf\xe9").encode("latin-1"), "single.jsonl": half + "\n",
        "blank.jsonl": text + json.dumps({"prompt": "", "answer": "0"}) + "\n",
        "null.jsonl": text + json.dumps({"prompt": None, "answer": "0"}) + "\n",
        "list.jsonl": text.replace('"1+2="', '["1+2="]'), "rows.csv": "prompt,answer\n1+1=,2\n",
        "tools.jsonl": json.dumps({"messages": [{"role": "tool", "content": "5"}], "answer": "5"}) + "\n",
    }  # fmt: skip
    for name, content in files.items():
        (home / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    models = {name: json.dumps(entries_of(name)) for name in ("falcon", "bloom", "gpt_oss", "mamba", "gemma2")}
    models |= {"cut": '{"model_type": "lla', "list": "[]", "bare": "{}"}
    models |= {"code": '{"model_type": "mine", "auto_map": {"AutoModel": "mine.Model"}}', "none": ""}
    for name, config in models.items():
        build_tokenizer(string.printable).save_pretrained(home / name)
        (home / name / "config.json").write_text(config) if config else None
    for name in ("missing", "empty", "adapter", "strict"):
        model = random_model({**shrunk(entries_of("llama")), "vocab_size": len(string.printable) + 2})
        model.save_pretrained(home / name)
        build_tokenizer(string.printable).save_pretrained(home / name)
    weights = {name: home / name / "model.safetensors" for name in ("missing", "empty")}
    tensors = sorted(load_file(weights["missing"]).items())
    save_file(dict(tensors[1:]), weights["missing"], metadata={"format": "pt"})
    weights["empty"].write_bytes(b"")
    (home / "adapter" / "config.json").rename(home / "adapter" / "adapter_config.json")
    (home / "strict" / "generation_config.json").write_text("[]")
    return home


def run(home: Path, command: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "pipelinerl.flows.cli", *shlex.split(command)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    return subprocess.run(words, cwd=home, capture_output=True, text=True, timeout=200, env=environment, check=False)


MINE = "train mine.toml "
WRONG = [
    # settings
    ("config quickstart seed=-1", "seed"),
    ("simulate math-7b-16gpu seed=-1", "seed"),
    ("train quickstart seed=99999999999999999999", "seed"),
    ("config quickstart seed=1.5", "seed"),
    ("config quickstart learner.lr=inf", "learner.lr"),
    ("config quickstart learner.lr=-inf", "learner.lr"),
    ("config quickstart rollouts.temperature=1e999", "temperature"),
    ("config latin.toml", "latin.toml"),
    ("config image.toml", "image.toml"),
    ("config zeros.toml", "zeros.toml"),
    ("config list.toml", "trainer"),
    ("config file", "file"),
    ("config nothing.toml", "nothing.toml"),
    ("config quickstart trainer.steps", "section.key=value"),
    ("config quickstart trainer=3", "trainer"),
    ("runs --root file", "file"),
    ("train quickstart --root file", "file"),
    ("status latest --root file", "file"),
    ("train quickstart --root /proc/runs", "/proc/runs"),
    (MINE + "tracking.mlflow_uri=sqlite:///notadb.db", "notadb.db"),
    (MINE + "tracking.mlflow_uri=sqlite:///cut.db", "cut.db"),
    (MINE + "tracking.mlflow_uri=http://127.0.0.1:9", "127.0.0.1:9"),
    (MINE + "tracking.mlflow_uri=postgresql+nodriver://u:p@h/x", "nodriver"),
    ("runs --root ~nobody-of-this-name/x", "Give a path without ~"),
    ("train", "name a preset or a TOML file"),
    ("train --from nothing@3", "nothing"),
    ("export latest /proc/x --root ~/nothing", "nothing"),
    (MINE + "reward.function=mine.py:sealed reward.environment=NO_SUCH_VARIABLE", "NO_SUCH_VARIABLE"),
    (MINE + "model.path=none", "none"),
    (MINE + "model.path=file", "file"),
    # models
    (MINE + "model.path=code", "code"),
    (MINE + "model.path=cut", "cut"),
    (MINE + "loss.ref_model=none loss.kl_coefficient=0.1", "loss.ref_model"),
    # rows, rewards, environments
    (MINE + "prompts.path=comment.jsonl", "comment.jsonl"),
    (MINE + "prompts.path=single.jsonl", "single.jsonl"),
    (MINE + "prompts.path=tools.jsonl prompts.prompt_column=messages", "tool"),
    (MINE + "prompts.path=blank.jsonl", "row 6[01]"),
    (MINE + "reward.function=mine.py:text", "text"),
    (MINE + "reward.function=mine.py:leaves", "leaves"),
    ("train quickstart environment.path=mine.py:Adventure", "Adventure"),
]
ALIKE = [
    # models: tests/unit/models/test_families.py, tests/unit/training/test_model_files.py
    (MINE + "model.path=falcon", "falcon cannot be trained"),
    (MINE + "model.path=bloom", "bloom cannot be trained"),
    (MINE + "model.path=gpt_oss", "gpt_oss cannot be trained"),
    (MINE + "model.path=mamba", "mamba cannot be loaded"),
    (MINE + "model.path=gemma2", "gemma2 cannot be sampled"),
    (MINE + "model.path=list", "list"),
    (MINE + "model.path=bare", "models without a model_type cannot be loaded"),
    (MINE + "model.path=missing", "its files lack 1 tensors"),
    (MINE + "model.path=empty", "model.safetensors is not complete"),
    (MINE + "model.path=adapter", "an adapter without its base model"),
    (MINE + "model.path=strict", "generation_config.json"),
    # rows: tests/unit/prompts
    (MINE + "prompts.path=trailing.jsonl", "trailing.jsonl"),
    (MINE + "prompts.path=array.jsonl", "array.jsonl"),
    (MINE + "prompts.path=cut.jsonl", "cut.jsonl"),
    (MINE + "prompts.path=empty.jsonl", "empty.jsonl"),
    (MINE + "prompts.path=scalars.jsonl", "scalars.jsonl"),
    (MINE + "prompts.path=latin.jsonl", "latin.jsonl"),
    (MINE + "prompts.path=null.jsonl", "null.jsonl"),
    (MINE + "prompts.path=list.jsonl", "list.jsonl"),
    (MINE + "prompts.path=rows.csv", "rows.csv"),
    (MINE + "prompts.path=nothing.jsonl", "nothing.jsonl"),
    (MINE + "prompts.path=rows.jsonl prompts.held_out_path=rows.jsonl", "held"),
    # rewards: test_reward_function.py
    (MINE + "reward.function=mine.py:nothing", "nothing"),
    (MINE + "reward.function=mine.py:missing", "no_such_column"),
    (MINE + "reward.function=nothing.py:score", "nothing.py"),
    (MINE + "reward.function=rows.jsonl:score", "rows.jsonl"),
    (MINE + "reward.function=no_such_module:score", "no_such_module"),
    # environments: test_tutorial_environment.py
    ("train quickstart environment.path=mine.py:Silent", "Silent"),
    ("train quickstart environment.path=nothing.py:Silent", "nothing.py"),
]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("command", "names"),
    [*WRONG, *(pytest.param(*row, marks=pytest.mark.campaign) for row in ALIKE)],
    ids=[command for command, _ in WRONG + ALIKE],
)
def test_a_wrong_input_is_one_line_that_names_the_input(inputs, command, names, refusal, monkeypatch):
    monkeypatch.chdir(inputs)
    assert re.search(names, refusal(*shlex.split(command))[-1])
    assert not list(inputs.rglob("run.json"))


def test_a_url_of_prefect_that_is_none_is_one_line(inputs, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", "nonsense")
    ended = run(inputs, "train mine.toml")
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "PREFECT_API_URL=nonsense: no answer" in ended.stderr.strip().splitlines()[-1]


def test_a_reward_function_that_always_fails_ends_the_run_with_its_first_evaluation(inputs):
    ended = run(inputs, f"{MINE} reward.function=mine.py:raises eval.num_prompts=4 --root {inputs}/raises")
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "mine.py:raises: ValueError: two" in ended.stderr.strip().splitlines()[-1]
