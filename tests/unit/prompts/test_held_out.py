"""Held-out prompts are in no training rows: those of every set, of every part of a mixture, of a set of one's own."""

import json
from itertools import product

import pytest

from pipelinerl_core.config import build_config
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.prompts import build_source
from pipelinerl_core.prompts.check import check
from pipelinerl_core.prompts.source import build_all

ROWS = [{"prompt": f"What is {number}+{number}?", "answer": str(2 * number)} for number in range(400)]
TEMPLATE = "{prompt} Answer with a number."


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def configured(prompts, **sections):
    own = {"model": {"dtype": "float32", "path": "not-on-this-host"}, "prompts": {"kind": "file", **prompts}}
    return build_config({**own, **sections})


def numbers(prompts):
    return {int(prompt.text.split("+")[1].split("?")[0]) for prompt in prompts}


def trained(source):
    return numbers(source.prompt(index) for index in range(2 * len(ROWS)))


@pytest.fixture
def train(tmp_path):
    return write(tmp_path / "train.jsonl", ROWS)


def test_prompts_of_every_set_are_left_out_of_training(tmp_path, train):
    new = [{"prompt": "What is 0+999?", "answer": "9"}]
    files = {"hard": ROWS[100:150], "own": ROWS[140:180], "new": new}
    paths = [write(tmp_path / f"{name}.jsonl", rows) for name, rows in files.items()]
    sets = {"hard": {"path": paths[0]}, "own": {"path": paths[1], "template": TEMPLATE}, "new": {"path": paths[2]}}
    config = configured({"path": train}, eval={"sets": sets})
    held_out = numbers(build_source(config).held_out(400))
    assert trained(build_source(config)) == set(range(400)) - held_out - set(range(100, 180))
    lines = check(config)
    assert "eval.sets.hard: 50 prompts" in lines
    assert "eval.sets.hard and eval.sets.own share 10 prompts; the first is 'What is 140+140?'" in lines
    again = len(held_out & set(range(100, 150)))
    assert any(
        line.startswith(f"{50 - again} training rows are also prompts of eval.sets.hard and are left out of training")
        for line in lines
    )
    assert not any("eval.sets.new" in line and "share" in line for line in lines)


@pytest.mark.parametrize("other", [{"template": TEMPLATE}, {"prompt_column": "answer", "answer_column": "prompt"}])
def test_the_held_out_prompts_of_a_part_are_in_no_other_part(train, other):
    own = {"kind": "file", "path": train}
    config = configured({"path": train}, mixture={"a": {"prompts": own}, "b": {"prompts": {**own, **other}}})
    parts, _ = build_all(config)
    answers = {
        name: ({prompt.task["prompt"] for prompt in source.held_out(400)},
               {source.prompt(index).task["prompt"] for index in range(400)})
        for name, source in parts.items()
    }  # fmt: skip
    assert all(not answers[first][0] & answers[second][1] for first, second in product(answers, repeat=2))
    assert all(len(held_out) >= 16 and len(training) > 300 for held_out, training in answers.values())


def test_a_held_out_file_with_another_template_of_the_rows_is_left_out(tmp_path, train):
    own = write(tmp_path / "own.jsonl", [{"answer": row["answer"], "prompt": row["prompt"]} for row in ROWS[:40]])
    source = build_source(configured({"path": train, "held_out_path": own, "template": TEMPLATE}))
    assert trained(source) == set(range(40, 400))


def test_the_same_finished_prompt_of_other_columns_is_left_out(tmp_path):
    train = write(tmp_path / "train.jsonl", [{"a": f"What is {n}+", "b": f"{n}?", "answer": n} for n in range(400)])
    hard = write(tmp_path / "hard.jsonl", [{"q": f"What is {n}+{n}", "answer": n} for n in range(40)])
    sets = {"hard": {"path": hard, "template": "{q}?"}}
    source = build_source(configured({"path": train, "template": "{a}{b}"}, eval={"sets": sets}))
    assert not trained(source) & set(range(40))
    assert len(trained(source)) > 300


def test_rows_that_differ_in_the_prompt_but_not_in_the_answer_are_trained(tmp_path, train):
    hard = write(tmp_path / "hard.jsonl", [{"prompt": "What is 0+9999?", "answer": row["answer"]} for row in ROWS])
    config = configured({"path": train}, eval={"sets": {"hard": {"path": hard}}})
    assert len(trained(build_source(config))) == 400 - len(build_source(config).held_out(400))


def test_a_set_of_the_training_file_leaves_nothing_to_train_on_in_one_line(train):
    config = configured({"path": train}, eval={"sets": {"all": {"path": train}}})
    with pytest.raises(
        ConfigError, match=r"none is left to train on: .* training rows are also prompts of eval\.sets\.all"
    ):
        build_source(config).prompt(0)


def test_a_set_that_cannot_be_read_is_named(train):
    config = configured({"path": train}, eval={"sets": {"hard": {"path": "none.jsonl"}}})
    with pytest.raises(ConfigError, match=r"^eval\.sets\.hard: prompts\..*path=none\.jsonl: no such file"):
        build_source(config)


def test_the_held_out_prompts_do_not_depend_on_the_sets(tmp_path, train):
    hard = write(tmp_path / "hard.jsonl", ROWS[100:150])
    with_sets = configured({"path": train}, eval={"sets": {"hard": {"path": hard}}})
    assert build_source(with_sets).held_out(400) == build_source(configured({"path": train})).held_out(400)
