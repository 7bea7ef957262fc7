"""Held-out prompts are in no training rows: those of every set, of every part of a mixture, of a set of one's own."""

import json
from itertools import product

import pyarrow as pa
import pyarrow.parquet
import pytest

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.resolve import build_config
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


def test_rows_of_a_held_out_file_that_differ_only_beside_the_prompt_are_all_evaluated(tmp_path, train):
    rows = [{"prompt": "Sum up.", "answer": "", "max_words": number} for number in (1, 2, 3, 3)]
    own = write(tmp_path / "own.jsonl", rows)
    source = build_source(configured({"path": train, "held_out_path": own}))
    assert [prompt.task["max_words"] for prompt in source.held_out(99)] == [1, 2, 3]


def test_a_set_that_cannot_be_read_is_named(train):
    config = configured({"path": train}, eval={"sets": {"hard": {"path": "none.jsonl"}}})
    with pytest.raises(ConfigError, match=r"^eval\.sets\.hard: prompts\..*path=none\.jsonl: no such file"):
        build_source(config)


def test_the_held_out_prompts_do_not_depend_on_the_sets(tmp_path, train):
    hard = write(tmp_path / "hard.jsonl", ROWS[100:150])
    with_sets = configured({"path": train}, eval={"sets": {"hard": {"path": hard}}})
    assert build_source(with_sets).held_out(400) == build_source(configured({"path": train})).held_out(400)


def test_the_same_text_of_one_column_under_two_templates_is_left_out(tmp_path):
    """The template of the one side is part of the rows of the other side."""
    plain = [{"prompt": f"What is {number}?", "answer": "1"} for number in range(60)]
    finished = [{"prompt": f"Question: What is {number}?", "answer": "1"} for number in range(20)]
    files = write(tmp_path / "plain.jsonl", plain), write(tmp_path / "finished.jsonl", finished)
    template = "Question: {prompt}"
    for training, own, other, theirs in ((files[0], template, files[1], ""), (files[1], "", files[0], template)):
        sets = {"hard": {"path": other, "template": theirs}}
        if training == files[0]:
            parts, eval_sources = build_all(configured({"path": training, "template": own}, eval={"sets": sets}))
            texts = {prompt.text for prompt in eval_sources["hard"].held_out(99)}
            assert not texts & {parts[""].prompt(index).text for index in range(60)}
        else:
            with pytest.raises(ConfigError, match="none is left to train on"):
                build_source(configured({"path": training, "template": own}, eval={"sets": sets})).prompt(0)


@pytest.mark.parametrize("share", [0.5, 0.7, 0.8])
def test_rows_with_the_text_of_a_held_out_prompt_of_other_columns_are_not_trained(tmp_path, share):
    rows = [{"a": a, "b": b, "answer": "1"} for a in ("1", "12", "123") for b in ("23", "3", "4", "34")]
    path = write(tmp_path / "rows.jsonl", rows)
    source = build_source(configured({"path": path, "template": "{a}{b}", "held_out_share": share}))
    held_out = {prompt.text for prompt in source.held_out(99)}
    assert not held_out & {source.prompt(index).text for index in range(len(rows))}


@pytest.mark.parametrize(
    ("template", "theirs"), [("{q} {ctx}", "{ctx} {q}"), ("{q}\nRead again: {q}", "{q}"), ("{q}", "{q} {q}")]
)
def test_the_same_columns_in_another_order_or_number_are_the_same_problem(tmp_path, template, theirs):
    rows = [{"q": f"Question {number}", "ctx": f"Text {number}", "answer": "1"} for number in range(60)]
    training = write(tmp_path / "rows.jsonl", rows)
    other = write(tmp_path / "set.jsonl", [{**row, "extra": number} for number, row in enumerate(rows[:30])])
    sets = {"hard": {"path": other, "template": theirs}}
    source = build_source(configured({"path": training, "template": template}, eval={"sets": sets}))
    trained = {source.prompt(index).task["q"] for index in range(60)}
    assert not trained & {row["q"] for row in rows[:30]}


def test_the_same_values_under_other_names_of_columns_are_the_same_problem(tmp_path):
    rows = [{"premise": f"Text {number}", "hypothesis": f"Claim {number}", "answer": "1"} for number in range(60)]
    training = write(tmp_path / "rows.jsonl", rows)
    others = [{"one": row["premise"], "two": row["hypothesis"], "answer": "1"} for row in rows[:30]]
    sets = {"hard": {"path": write(tmp_path / "set.jsonl", others), "template": "{one} => {two}? Say yes or no."}}
    config = configured({"path": training, "template": "{premise} => {hypothesis}?"}, eval={"sets": sets})
    source = build_source(config)
    assert not {source.prompt(index).task["premise"] for index in range(60)} & {row["premise"] for row in rows[:30]}


def test_a_missing_column_counts_as_a_null_column(tmp_path):
    rows = [{"q": f"Question {number}", "ctx": f"Text {number} ", "answer": "1"} for number in range(40)]
    training = write(tmp_path / "rows.jsonl", rows)
    other = write(tmp_path / "set.jsonl", [{**row, "note": None} for row in rows[:20]])
    sets = {"hard": {"path": other, "template": "{ctx}{q}"}}
    source = build_source(configured({"path": training, "template": "{q}"}, eval={"sets": sets}))
    assert not {source.prompt(index).task["q"] for index in range(40)} & {row["q"] for row in rows[:20]}


def sums(share):
    """The sums of two numbers whose first summand is below share."""
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(share) for b in range(10)]


def test_generated_prompts_of_a_set_are_drawn_again(tmp_path):
    path = write(tmp_path / "sums.jsonl", sums(8))
    sets = {"mine": {"kind": "file", "path": path}}
    config = configured({"kind": "sums", "lengths": [2]}, eval={"sets": sets})
    source = build_source(config)
    texts = [source.prompt(index).text for index in range(200)]
    assert {text[0] for text in texts} == {"8", "9"}
    assert texts == [build_source(config).prompt(index).text for index in range(200)]
    everything = {"mine": {"kind": "file", "path": write(tmp_path / "all.jsonl", sums(10))}}
    with pytest.raises(ConfigError, match="draws in a row are prompts of"):
        build_source(configured({"kind": "sums", "lengths": [2]}, eval={"sets": everything})).prompt(0)


def test_rows_that_another_part_generates_as_held_out_prompts_are_left_out(tmp_path):
    path = write(tmp_path / "sums.jsonl", sums(10))
    mixture = {
        "made": {"weight": 1.0, "prompts": {"kind": "sums", "lengths": [2]}},
        "file": {"weight": 1.0, "prompts": {"kind": "file", "path": path}, "reward": {"kind": "exact_match"}},
    }
    parts, _ = build_all(configured({"kind": "sums"}, mixture=mixture, eval={"num_prompts": 64}))
    made = {prompt.text for prompt in parts["made"].held_out(64)}
    own = {prompt.text for prompt in parts["file"].held_out(99)}
    assert not made & {parts["file"].prompt(index).text for index in range(parts["file"].num_training)}
    assert not own & {parts["made"].prompt(index).text for index in range(300)}


def test_lost_values_and_empty_answers_of_a_set_are_reported(tmp_path, train):
    table = pa.table({"prompt": ["new 1", "new 2"], "answer": [3.0, 1.2e19]})
    pyarrow.parquet.write_table(table, tmp_path / "set.parquet")
    empty = write(tmp_path / "empty.jsonl", [{"prompt": "new 3", "answer": ""}])
    sets = {"lost": {"path": str(tmp_path / "set.parquet")}, "empty": {"path": empty}}
    lines = check(configured({"path": train}, eval={"sets": sets}))
    assert any(line.startswith("eval.sets.lost: column answer holds double") for line in lines)
    assert any(line.startswith("eval.sets.empty: 1 rows have an empty answer") for line in lines)


def test_prompts_that_differ_in_case_or_spaces_from_a_set_or_another_part_are_told(tmp_path, train):
    other = write(tmp_path / "set.jsonl", [{"prompt": " what is 7+7? ", "answer": "14"}])
    lines = check(configured({"path": train}, eval={"sets": {"hard": {"path": other}}}))
    assert any(
        line.startswith("1 training prompts equal a prompt of eval.sets.hard but for case and spaces")
        for line in lines
    )


def test_a_set_of_tasks_of_an_environment_needs_an_environment():
    with pytest.raises(ConfigError, match=r"^eval.sets.x: kind=environment .*Set environment\.path"):
        configured({"path": "rows.jsonl"}, eval={"sets": {"x": {"kind": "environment"}}})
