"""Files and data sets: passes, the split, and one line for every mistake."""

import json

import pyarrow as pa
import pyarrow.parquet
import pytest

from pipelinerl_core.config import build_config
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.prompts import build_source
from pipelinerl_core.prompts.split import is_held_out

ROWS = [{"prompt": f"What is {number} + 1?", "answer": number + 1} for number in range(400)]


def write_jsonl(path, rows=ROWS):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def source(path, kind="file", seed=0, **prompts):
    return build_source(build_config({"seed": seed, "prompts": {"kind": kind, "path": str(path), **prompts}}))


def test_a_pass_holds_every_training_row_once_and_the_next_pass_another_order(tmp_path):
    rows = source(write_jsonl(tmp_path / "rows.jsonl"))
    held_out = {prompt.text for prompt in rows.held_out(40)}
    size = len(ROWS) - len(held_out)
    first, second = ([rows.prompt(number * size + i).text for i in range(size)] for number in (0, 1))
    assert len(set(first)) == size
    assert set(first) == set(second) == {row["prompt"] for row in ROWS} - held_out
    assert first != second


def test_held_out_rows_are_those_whose_hash_says_so_for_every_seed(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl")
    count = len({prompt.text for prompt in source(path).held_out(400)})
    assert 8 <= count <= 36  # 5 % of 400 is 20, standard deviation 4.4
    held_out = source(path).held_out(count)
    assert all(is_held_out(prompt.prompt_id, 0.05) for prompt in held_out)
    assert source(path, seed=4).held_out(count) == held_out
    training = {source(path, seed=4).prompt(index).prompt_id for index in range(2 * len(ROWS))}
    assert len(training) == len(ROWS) - count
    assert not training & {prompt.prompt_id for prompt in held_out}


def test_the_same_position_gives_the_same_prompt_and_another_seed_another_order(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl")
    first = [source(path).prompt(index) for index in (0, 5, 10**6)]
    assert [source(path).prompt(index) for index in (0, 5, 10**6)] == first
    assert [source(path, seed=1).prompt(index) for index in (0, 5, 10**6)] != first


def test_answers_are_text_and_the_verifier_is_exact_match(tmp_path):
    prompt = source(write_jsonl(tmp_path / "rows.jsonl")).prompt(3)
    number = int(prompt.text.split()[2])
    assert prompt.task == {"answer": str(number + 1)}
    assert prompt.env == "exact_match"
    assert prompt.source == "rows.jsonl"


def test_more_held_out_prompts_than_there_are_begin_again(tmp_path):
    rows = source(write_jsonl(tmp_path / "rows.jsonl", ROWS[:3]))
    assert len({rows.prompt(index).text for index in range(9)}) == 2
    assert len({prompt.text for prompt in rows.held_out(5)}) == 1
    assert len(rows.held_out(5)) == 5
    assert rows.held_out(0) == []


def test_equal_prompts_are_on_the_same_side(tmp_path):
    rows = source(write_jsonl(tmp_path / "rows.jsonl", [ROWS[0], ROWS[1]] * 4))
    training = {rows.prompt(index).text for index in range(8)}
    assert training | {prompt.text for prompt in rows.held_out(1)} == {ROWS[0]["prompt"], ROWS[1]["prompt"]}
    assert len(training) == 1


def test_parquet_gives_the_same_prompts_as_json_lines_but_for_its_name(tmp_path):
    pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    rows = source(tmp_path / "rows.parquet", prompt_column="prompt")
    assert rows.name == "rows.parquet"
    assert {"prompt": rows.prompt(0).text, "answer": int(rows.prompt(0).task["answer"])} in ROWS


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("missing.jsonl", None, {}, "no such file"),
        ("rows.csv", "a,b\n", {}, r"must end in \.jsonl or \.parquet"),
        ("bad.jsonl", '{"prompt": \n', {}, "cannot be read as jsonl"),
        ("bad.parquet", "not parquet", {}, "cannot be read as parquet"),
        ("rows.jsonl", '{"promt": "1", "answer": 1}\n', {}, r"prompt_column=prompt: no such column.*mean promt\?"),
        ("rows.jsonl", '{"prompt": "1", "reply": 1}\n', {}, r"answer_column=answer: no such column.*prompt, reply"),
        ("rows.jsonl", '{"prompt": "1", "answer": {"a": 1}}\n', {}, "must be text or numbers"),
        ("rows.jsonl", '{"prompt": "1", "answer": 1}\n{"prompt": "2"}\n', {}, "row 1 of .* has no value"),
        ("rows.jsonl", '{"prompt": "1", "answer": 1}\n', {}, "at least two different"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, name, content, options, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        source(tmp_path / name, **options)
    assert "\n" not in str(caught.value)


def test_a_verifier_of_other_prompts_is_refused(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl")
    with pytest.raises(ConfigError, match=r"reward\.kind=reasoning_gym scores only reasoning-gym tasks"):
        build_source(
            build_config({"prompts": {"kind": "file", "path": str(path)}, "reward": {"kind": "reasoning_gym"}})
        )


def with_function(path, **prompts):
    values = {"prompts": {"kind": "file", "path": str(path), **prompts}, "reward": {"function": "mine.py:score"}}
    return build_source(build_config(values))


def test_a_reward_function_gets_all_columns_and_needs_no_answer(tmp_path):
    table = pa.table(
        {
            "prompt": ["a", "b"],
            "level": [3, None],
            "tags": [["x"], []],
            "chance": [float("nan"), 0.5],
            "picture": [b"\x89", b""],
            "day": pa.array([0, 1], pa.date32()),
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    rows = with_function(tmp_path / "rows.parquet")
    both = {prompt.text: prompt.task for prompt in [rows.prompt(0), *rows.held_out(1)]}
    assert both["a"] == {"prompt": "a", "level": 3, "tags": ["x"], "chance": None, "day": "1970-01-01"}
    assert both["b"] == {"prompt": "b", "level": None, "tags": [], "chance": 0.5, "day": "1970-01-02"}
    assert rows.prompt(0).env == "mine.py:score"
    with pytest.raises(ConfigError, match=r"prompts\.answer_column=solution: no such column"):
        with_function(tmp_path / "rows.parquet", answer_column="solution")


def test_the_reference_answer_is_text_beside_its_column(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": str(number), "sum": number} for number in range(40)])
    prompt = with_function(path, answer_column="sum").prompt(0)
    assert prompt.task == {"prompt": prompt.text, "sum": int(prompt.text), "answer": prompt.text}
