"""Settings that are guessed from rows, and rows and functions of a program as files."""

import re
import runpy
import subprocess
import sys

import pandas as pd
import pyarrow as pa
import pytest

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.prompts.records import read_file
from pipelinerl_core.tools.own_objects import function_location, rows_file
from pipelinerl_core.tools.own_rows import PRESET, guess

ROWS = [{"question": f"{number}+1=?", "answer": str(number + 1)} for number in range(20)]
VERL = [{"prompt": [{"role": "user", "content": "1+1=?"}], "reward_model": {"ground_truth": "2"}}] * 9


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PIPELINERL_CACHE", str(tmp_path / "cache"))


def config_of(rows, *overrides):
    return load_config(PRESET, [*guess(str(rows_file(rows)), "", overrides), *overrides])


def test_columns_and_lengths_are_guessed():
    config = config_of(ROWS)
    assert (config.prompts.prompt_column, config.prompts.answer_column) == ("question", "answer")
    assert (config.rollouts.max_tokens, config.rollouts.max_prompt_tokens) == (16 + 2, 32 + 6)
    assert config_of(VERL).prompts.answer_column == "reward_model.ground_truth"
    assert config_of(ROWS, "rollouts.max_tokens=9").rollouts.max_tokens == 9


def test_the_rate_of_the_preset_is_for_its_own_model():
    rows = str(rows_file(ROWS))
    assert "learner.lr=auto" in guess(rows, "", ["model.path=org/name"])
    assert not [setting for setting in guess(rows) if setting.startswith("learner.lr")]


def test_a_model_without_a_chat_template_gets_the_plain_prompt(tmp_path):
    rows = str(rows_file(ROWS))
    assert "model.chat_template=false" not in guess(rows, "", ["model.path=org/name"])
    assert "model.chat_template=false" in guess(rows, "", ["model.path=builtin:sums"])
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "tokenizer_config.json").write_text("{}")
    assert "model.chat_template=false" in guess(rows, "", [f"model.path={plain}"])
    (plain / "chat_template.jinja").write_text("{{ messages }}")
    assert "model.chat_template=false" not in guess(rows, "", [f"model.path={plain}"])


def test_a_prompt_column_of_another_name_must_be_named():
    rows = [{"riddle": "2+2", "answer": "4"}] * 9
    with pytest.raises(ConfigError, match=r"its columns are riddle, answer\. Add prompts\.prompt_column=COLUMN"):
        config_of(rows)
    assert config_of(rows, "prompts.prompt_column=riddle").prompts.prompt_column == "riddle"


@pytest.mark.parametrize("form", [list, pa.Table.from_pylist, pd.DataFrame])
def test_rows_of_a_program_are_the_rows_of_its_file(form):
    path = rows_file(form(ROWS))
    assert list(read_file(path, "rows")) == ROWS
    assert rows_file(form(ROWS)) == path


@pytest.mark.parametrize("data", [5, [1, 2], [{"prompt": object()}]])
def test_other_data_is_refused(data):
    with pytest.raises(ConfigError, match=r"^data"):
        rows_file(data)


def test_a_function_of_a_module_is_named_and_other_objects_are_refused():
    assert function_location(guess).endswith("own_rows.py:guess")
    assert function_location("mine.py:score") == "mine.py:score"
    with pytest.raises(ConfigError, match="no function that `def` defines"):
        function_location(lambda text: 1.0)


PROGRAM = """
import json, random, re
import xml.etree.ElementTree
from math import sqrt as root
from pipelinerl_core.tools.own_objects import function_location
from typing import Optional
LIMIT, WORDS = 3, {"a": 1.0}
LETTER = re.compile("A", re.IGNORECASE)
lower = open("/dev/null")  # of the name of an attribute that the function uses
class Parser:
    def __call__(self, text): return LETTER.findall(text.lower())[:LIMIT]
def even(n): return n == 0 or odd(n - 1)
def odd(n): return n != 0 and even(n - 1)
def score(text) -> Optional[float]: return root(len(Parser()(text))) * WORDS["a"] + even(2)
print(function_location(score))
def tree(text): return float(xml.etree.ElementTree.fromstring(text).tag == "a")
print(function_location(tree))
def draw(text): return random.choice([1.0])
print(function_location(draw))
handle, choice, find = open("/dev/null"), random.Random(7).choice, re.compile("a").findall
def bad(text): return handle
def seeded(text): return choice([1.0])
def found(text): return len(find(text))
for function in (bad, seeded, found):
    try:
        function_location(function)
    except Exception as error:
        print(error)
"""


def test_a_function_of_a_program_takes_along_what_it_uses(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    location, tree, draw, refusal, *others = done.stdout.splitlines()
    names = runpy.run_path(location.rpartition(":")[0])
    assert names["score"]("aaaaa") == 3**0.5 + 1
    assert names.keys().isdisjoint({"json", "lower"})
    assert names["LETTER"].flags & re.IGNORECASE
    assert refusal.startswith("the reward function uses handle, a TextIOWrapper")
    assert location.endswith(".py:score")
    assert runpy.run_path(tree.rpartition(":")[0])["tree"]("<a/>") == 1.0
    assert runpy.run_path(draw.rpartition(":")[0])["draw"]("") == 1.0
    assert [other.split(",")[0] for other in others] == [
        f"the reward function uses {name}" for name in ("choice", "find")
    ]
