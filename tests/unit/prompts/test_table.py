"""Files and data sets: passes, the split, and one line for every mistake."""

import json
import math
from decimal import Decimal
from unittest.mock import ANY

import pyarrow as pa
import pyarrow.parquet
import pytest

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.prompts import build_source
from pipelinerl_core.prompts.split import is_held_out, prompt_id

ROWS = [{"prompt": f"What is {number} + 1?", "answer": number + 1} for number in range(400)]

QUESTION = '{"q": "1", "answer": 1}\n'
MESSAGES = (
    '{"prompt": [{"role": "user", "content": "1"}], "answer": 1}\n'
    '{"prompt": [{"role": "user", "content": "2"}, {"role": "user", "content": "3"}], "answer": 1}\n'
)


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


def test_the_held_out_rows_are_those_with_the_smallest_hashes_for_every_seed(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl")
    held_out = source(path).held_out(400)
    assert 16 <= len(held_out) <= 36  # 5 % of 400 is 20, standard deviation 4.4
    assert source(path, seed=4).held_out(400) == held_out
    training = {source(path, seed=4).prompt(index).prompt_id for index in range(2 * len(ROWS))}
    assert len(training) == len(ROWS) - len(held_out)
    assert max(prompt.prompt_id for prompt in held_out) < min(training)


@pytest.mark.parametrize(("size", "expected"), [(2, 1), (9, 2), (50, 10), (80, 16), (200, 16)])
def test_a_small_table_holds_out_sixteen_prompts_or_a_fifth(tmp_path, size, expected):
    assert len(source(write_jsonl(tmp_path / "rows.jsonl", ROWS[:size])).held_out(400)) == expected


def test_a_share_holds_out_the_prompts_whose_hash_is_below_and_at_least_one(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl")
    for share in (0.05, 0.5):
        chosen = {prompt.prompt_id for prompt in source(path, held_out_share=share).held_out(400)}
        ids = {prompt_id("rows.jsonl", row["prompt"]) for row in ROWS}
        assert chosen == {identity for identity in ids if is_held_out(identity, share)}
    assert len(source(path, held_out_share=1e-9).held_out(400)) == 1


def test_a_held_out_file_is_evaluated_and_its_prompts_are_not_trained_on(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [*ROWS[:20], {"prompt": "what is  30 + 1?", "answer": 31}])
    own = write_jsonl(tmp_path / "own.jsonl", [*ROWS[10:12], *ROWS[30:40], ROWS[30]])
    rows = source(path, held_out_path=str(own))
    assert [prompt.text for prompt in rows.held_out(400)] == [row["prompt"] for row in (*ROWS[10:12], *ROWS[30:40])]
    assert len({rows.prompt(index).text for index in range(19)} - {row["prompt"] for row in ROWS[10:12]}) == 19
    assert rows.summary() == [
        "19 different prompts to train on (19 rows), 12 held out (38.7%)",
        "2 training rows are also held-out prompts and are left out of training; the first is 'What is 10 + 1?'",
        "1 training prompts equal a held-out prompt but for case and spaces; the first is 'what is  30 + 1?'",
    ]


def test_a_template_is_filled_with_columns_and_the_task_has_the_whole_row(tmp_path):
    extra = {"date": "2026-01-02", "tags": ["a", "b"], "meta": {"level": 3.5}, "none": None}
    rows = [{"question": f"{number}?", "answer": number, "unit {x}": "km", **extra} for number in range(5)]
    template = "{question}\\boxed{{}} in {answer}\n"
    prompt = source(write_jsonl(tmp_path / "rows.jsonl", rows), template=template).prompt(0)
    number = prompt.task["answer"]
    assert prompt.text == f"{number}?\\boxed{{}} in {number}\n"
    assert prompt.task == {"question": f"{number}?", "unit {x}": "km", "answer": number, **extra, "date": ANY}
    assert prompt.task["date"].startswith("2026-01-02")
    json.dumps(prompt.task, allow_nan=False)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_message_of_the_user_and_a_field_of_a_struct_are_columns(tmp_path, suffix):
    rows = [
        {"prompt": [{"content": f"{number}?", "role": "user"}], "reward": {"style": "rule", "truth": {"is": number}}}
        for number in range(5)
    ]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    if suffix == "parquet":
        path = tmp_path / "rows.parquet"
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    prompt = source(path, answer_column="reward.truth.is", template="Q: {prompt}").prompt(0)
    assert prompt.text == f"Q: {prompt.task['answer']}?"
    assert {name: prompt.task[name] for name in ("prompt", "reward")} in rows


def test_values_without_json_form_are_text_or_null_in_the_task(tmp_path):
    values = {"price": Decimal("1.50"), "image": b"\x00\xff", "score": math.nan}
    table = pa.Table.from_pylist([{"prompt": str(number), "answer": "1", **values} for number in range(3)])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    task = source(tmp_path / "rows.parquet").prompt(0).task
    assert task == {"prompt": ANY, "answer": "1", "price": "1.50", "image": None, "score": None}


def test_the_same_position_gives_the_same_prompt_and_another_seed_another_order(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl")
    first = [source(path).prompt(index) for index in (0, 5, 10**6)]
    assert [source(path).prompt(index) for index in (0, 5, 10**6)] == first
    assert [source(path, seed=1).prompt(index) for index in (0, 5, 10**6)] != first


def test_answers_are_text_and_the_verifier_is_exact_match(tmp_path):
    prompt = source(write_jsonl(tmp_path / "rows.jsonl")).prompt(3)
    number = int(prompt.text.split()[2])
    assert prompt.task == {"prompt": prompt.text, "answer": str(number + 1)}
    assert prompt.env == "exact_match"
    assert prompt.source == "rows.jsonl"


def test_each_held_out_prompt_is_given_once(tmp_path):
    rows = source(write_jsonl(tmp_path / "rows.jsonl", ROWS[:3]))
    assert len({rows.prompt(index).text for index in range(9)}) == 2
    assert len(rows.held_out(5)) == 1
    assert rows.held_out(0) == []


def test_rows_that_repeat_a_held_out_prompt_are_counted(tmp_path):
    rows = source(write_jsonl(tmp_path / "rows.jsonl", [*ROWS[:30], *ROWS[:30]]))
    held_out = [prompt.text for prompt in rows.held_out(400)]
    num, first = len(held_out), min(held_out, key=_number)
    assert rows.summary() == [
        f"{30 - num} different prompts to train on ({60 - 2 * num} rows), {num} held out ({num / 30:.1%})",
        f"{num} rows repeat a held-out prompt and are left out; the first is {first!r}",
    ]


def _number(text):
    return int(text.split()[2])


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
        ("missing.jsonl", None, {}, "no such file in /.* Set"),
        ("rows.jsonl.gz", "", {}, "the name must end in .* Unpack the file"),
        ("rows.csv", "prompt|answer\n1|1\n", {}, "has one column, 'prompt|answer'. Separate columns by commas"),
        ("rows.txt", "a,b\n", {}, r"must end in \.jsonl, \.json, \.csv, \.tsv, \.parquet"),
        ("rows.csv", "prompt,answer\n1\n", {}, "line 2 has 1 fields, but the first line 2"),
        ("rows.csv", "prompt,prompt\n1,2\n", {}, "two columns have the same name"),
        (
            "rows.json",
            '{"rows": [\n',
            {},
            "cannot be read as JSON: row 0: Expecting value.* one JSON object per line",
        ),
        ("bad.jsonl", '{"prompt": \n', {}, "cannot be read as JSON: row 0: Expecting value"),
        ("large.jsonl", '{"prompt": "1", "answer": 1e999}\n', {}, "row 0: the number 1e999 is beyond the range"),
        (
            "deep.jsonl",
            '{"prompt": "1", "answer": ' + "[" * 150 + "]" * 150 + "}\n",
            {},
            "row 0: .* more than 100 deep",
        ),
        ("half.jsonl", '{"prompt": "\\ud800", "answer": 1}\n', {}, "row 0: 'utf-8' codec can't encode .* surrogates"),
        (
            "array.jsonl",
            '[{"prompt": "1", "answer": 1}]\n',
            {},
            "row 0: an object is expected, not list. Write one JSON object per line",
        ),
        ("bad.parquet", "not parquet", {}, "cannot be read as parquet"),
        ("rows.jsonl", '{"promt": "1", "answer": 1}\n', {}, r"prompt_column=prompt: no such column.*mean promt\?"),
        (
            "rows.jsonl",
            '{"question": "1", "solution": 1}\n',
            {},
            r"prompt_column=prompt: no such column in .*rows.jsonl \(question, solution\). Name one",
        ),
        ("rows.jsonl", '{"prompt": "1", "reply": 1}\n', {}, r"answer_column=answer: no such column.*prompt, reply"),
        (
            "rows.jsonl",
            '{"prompt": "1", "answer": {"a": 1}}\n',
            {},
            "row 0 of .* has a dict, but must have text",
        ),
        ("rows.jsonl", '{"prompt": "1", "answer": 1}\n{"prompt": "2"}\n', {}, "row 1 of .* has no value"),
        ("rows.jsonl", '{"prompt": "1", "answer": 1}\n', {}, "one prompt more that is not held out"),
        (
            "rows.jsonl",
            '{"prompt": [{"role": "user"}], "answer": 1}\n',
            {},
            "row 0 of .* has a list, but must have text or a number",
        ),
        ("rows.jsonl", MESSAGES, {}, r"row 1 of .* has messages of \['user', 'user'\], but must have"),
        ("rows.jsonl", QUESTION, {"template": "{q.x}"}, r"column=q\.x: no such column in .* in prompts\.template$"),
        ("rows.jsonl", QUESTION, {"template": "{q!r}"}, r"template: braces hold 'q' with a format"),
        ("rows.jsonl", QUESTION, {"template": "{}"}, "template: braces hold '' with a format or no"),
        ("rows.jsonl", QUESTION, {"template": "{q"}, "template: expected '}' before end of string"),
        ("rows.jsonl", QUESTION, {"template": "Count."}, "template: names no column"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, name, content, options, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        source(tmp_path / name, **options)
    assert "\n" not in str(caught.value)


def test_text_that_is_not_utf_8_is_refused_in_one_line(tmp_path):
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "größe", "answer": "1"}\n'.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin\.jsonl: cannot be read .*: row 0: .*utf-8.* in UTF-8") as caught:
        source(tmp_path / "latin.jsonl")
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
    assert both["a"] == {
        "prompt": "a",
        "level": 3,
        "tags": ["x"],
        "chance": None,
        "picture": None,
        "day": "1970-01-01",
    }
    assert both["b"] == {
        "prompt": "b",
        "level": None,
        "tags": [],
        "chance": 0.5,
        "picture": None,
        "day": "1970-01-02",
    }
    assert rows.prompt(0).env == "mine.py:score"
    with pytest.raises(ConfigError, match=r"prompts\.answer_column=solution: no such column"):
        with_function(tmp_path / "rows.parquet", answer_column="solution")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_reward_function_gets_a_null_answer_as_none(tmp_path, suffix):
    rows = [{"prompt": "a", "answer": None}, {"prompt": "b", "answer": "4"}]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    if suffix == "parquet":
        path = tmp_path / "rows.parquet"
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    own = with_function(path)
    assert {prompt.text: prompt.task["answer"] for prompt in [own.prompt(0), *own.held_out(1)]} == {
        "a": None,
        "b": "4",
    }
    prompts = {"kind": "file", "path": str(path)}
    for sections in ({}, {"environment": {"path": "builtin:math"}}):
        with pytest.raises(ConfigError, match=r"prompts\.answer_column=answer: row 0 of .* has no value"):
            build_source(build_config({"prompts": prompts, **sections}))


def test_the_reference_answer_is_text_beside_its_column_and_a_number_for_functions_of_the_user(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": str(number), "sum": number} for number in range(40)])
    prompt = with_function(path, answer_column="sum").prompt(0)
    assert prompt.task == {"prompt": prompt.text, "sum": int(prompt.text), "answer": int(prompt.text)}
    prompts = {"kind": "file", "path": str(path), "answer_column": "sum"}
    prompt = build_source(build_config({"prompts": prompts})).prompt(0)
    assert prompt.task == {"prompt": prompt.text, "sum": int(prompt.text), "answer": prompt.text}


@pytest.mark.parametrize("value", [["assert f(1) == 2", "assert f(2) == 3"], {"name": "get_weather"}, []])
def test_code_of_the_user_gets_a_structured_answer_as_it_is(tmp_path, value):
    path = write_jsonl(tmp_path / "rows.jsonl", [{**row, "tests": value} for row in ROWS])
    values = {"prompts": {"kind": "file", "path": str(path), "answer_column": "tests"}}
    own = build_source(build_config({**values, "reward": {"function": "mine.py:score"}}))
    assert own.prompt(0).task["answer"] == value
    with pytest.raises(ConfigError, match=r"prompts\.answer_column=tests: row 0 of .* must have text or a number"):
        build_source(build_config(values))


TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "And 2+2?"},
]


@pytest.mark.parametrize("start", [0, 1, 3])
def test_a_conversation_is_a_prompt(tmp_path, start):
    talk = TALK[start:]
    rows = [{"prompt": talk, "answer": "4"}, {"prompt": "2+3?", "answer": "5"}]
    both = source(write_jsonl(tmp_path / "rows.jsonl", rows), held_out_share=0.5)
    prompts = {prompt.task["answer"]: prompt for prompt in (both.prompt(0), *both.held_out(1))}
    assert prompts["4"].messages == tuple(talk)
    assert prompts["4"].text == "\n\n".join(message["content"] for message in talk)
    assert prompts["5"].messages == ()


@pytest.mark.parametrize(
    ("template", "are_messages"), [("{prompt}", True), ("Think. {prompt}", False), ("{prompt} Think.", False)]
)
def test_messages_are_the_prompt_unless_the_template_adds_text(tmp_path, template, are_messages):
    rows = [{"prompt": [{"role": "user", "content": f"{number}?"}], "answer": 1} for number in range(5)]
    prompt = source(write_jsonl(tmp_path / "rows.jsonl", rows), template=template).prompt(0)
    message = prompt.task["prompt"][0]
    assert prompt.text == template.format(prompt=message["content"])
    assert prompt.messages == ((message,) if are_messages else ())


@pytest.mark.parametrize("talk", [TALK[:3], TALK[1:3], [*TALK[1:], TALK[1]], [{"role": "user", "content": [1]}]])
def test_messages_that_do_not_end_with_a_question_of_the_user_are_refused(tmp_path, talk):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": talk, "answer": "4"}])
    with pytest.raises(ConfigError, match="must have texts of user and assistant in turn"):
        source(path)
