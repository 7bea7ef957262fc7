"""The environment of programs: the program of a reply, the tests of a row, what equals an expected result."""

import asyncio

import pytest
from pydantic import ValidationError

from pipelinerl_core.environments.builtin.code import _is_result, last_program, same_text, same_value
from pipelinerl_core.environments.builtin.code_exercises import ARGUMENTS, CodeExercises, _exercise
from pipelinerl_core.environments.builtin.code_tests import Call, StdinTest, parse_tests
from pipelinerl_core.environments.pool import _location
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.resolve import load_config


@pytest.mark.parametrize(
    ("reply", "program"),
    [
        ("print(1)", "print(1)"),
        ("1. Program:\n   ```python\n   def f():\n       return 1\n   ```", "def f():\n    return 1\n"),
        ("Here:\n```python\nprint(1)\n```\nDone.", "print(1)\n"),
        ("```\nwrong()\n```\nBetter:\n```py\nprint(2)\n```", "print(2)\n"),
        ("```python\nprint(1)", "print(1)"),
        ("```python\nprint(1)\n```\n```python\nprint(2)\n", "print(2)\n"),
        ("```python\nprint(1)\n```\nOutput:\n```\n1\n```", "print(1)\n"),
        ("```python\nprint('```')\n```", "print('```')\n"),
        ("```", ""),
        ("", ""),
    ],
)
def test_the_last_block_is_the_program(reply, program):
    assert last_program(reply) == program


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([{"stdin": "1", "stdout": "2"}], [StdinTest("1", "2")]),
        ('[{"input": "1", "output": "2"}]', [StdinTest("1", "2")]),
        ({"inputs": ["1", ""], "outputs": ["2", "3"]}, [StdinTest("1", "2"), StdinTest("", "3")]),
        ([{"call": "f", "arguments": [1, "x"], "result": None}], [Call([1, "x"], None)]),
        ('{"fn_name": "f", "inputs": [[1, 2]], "outputs": [3]}', [Call([1, 2], 3, is_wrapped=True)]),
        (["assert f((1, 2), -3) == {'a': (True,)}"], [Call([(1, 2), -3], {"a": [True]})]),
        ([{"stdin": "1", "stdout": "2", "call": None, "arguments": None}], [StdinTest("1", "2")]),
    ],
)
def test_the_forms_of_data_sets_are_read(value, expected):
    tests = parse_tests(value)
    assert list(tests.all) == expected
    assert tests.function == ("f" if isinstance(expected[0], Call) else "")


def test_a_result_of_apps_may_be_written_as_a_list_of_one():
    assert _is_result(3, Call([1, 2], [3], is_wrapped=True))
    assert _is_result([3], Call([1, 2], [3], is_wrapped=True))
    assert not _is_result(3, Call([1, 2], [3]))
    assert not _is_result([], Call([1, 2], [3], is_wrapped=True))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("assert f(1) == 1", "a text that is not JSON"),
        ([], "no tests"),
        (None, "no tests"),
        (["assert f(1) == open('/etc/passwd')"], "only `assert NAME"),
        (["assert f(g(1)) == 1"], "only `assert NAME"),
        (["assert f(1)"], "only `assert NAME"),
        (["import os"], "only `assert NAME"),
        (["assert f(1) == {1}"], "only `assert NAME"),
        ([{"stdin": "1"}], "write stdin and stdout"),
        ({"inputs": ["1"], "outputs": []}, "two equally long lists"),
        (["assert f(1) == 1", "assert g(1) == 1"], r"several functions \(f, g\)"),
        ([{"call": "os.system", "arguments": [], "result": 0}], "no name of a function"),
    ],
)
def test_other_tests_are_refused_in_one_line(value, says):
    with pytest.raises(ValueError, match=says) as refused:
        parse_tests(value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("actual", "expected", "is_same"),
    [
        (1, 1, True),
        (1.0, 1, True),
        (0.1 + 0.2, 0.3, True),
        (1, True, False),
        (True, 1, False),
        (None, False, False),
        ("1", 1, False),
        ([1, [2]], [1, [2]], True),
        ([1], [1, 1], False),
        ({"a": 1}, {"a": 1.0}, True),
        ({"a": 1}, {"b": 1}, False),
        (float("nan"), 1.0, False),
        (float("inf"), 1.0, False),
        (10**17 + 1, 10**17, False),
        ([10**400], [1.5], False),
        ([1.5], [10**400], False),
        ([10**400], [10**400], True),
    ],
)
def test_values_are_compared_as_json(actual, expected, is_same):
    assert same_value(actual, expected) is is_same


def test_texts_are_compared_without_the_ends_of_lines():
    assert same_text("1 \n2\r\n\n", "1\n2")
    assert not same_text("1\n2\n3", "1\n2")
    assert not same_text(" 1", "1")


def test_the_kind_chooses_the_class_and_prompts_choose_the_tasks():
    config = load_config("quickstart", ["environment.kind=code", "prompts.kind=environment"])
    assert config.environment.path == "builtin:code"
    assert load_config("quickstart").environment.path == ""
    assert _location("builtin:code", has_rows=True).endswith("code:Code")
    assert _location("builtin:code", has_rows=False).endswith("code_exercises:CodeExercises")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("environment.isolation=none", "runs programs of a model"),
        ("environment.path=my.py:Env", "must be builtin:code"),
    ],
)
def test_settings_that_contradict_the_kind_are_refused(override, says):
    with pytest.raises((ConfigError, ValidationError), match=says):
        load_config("quickstart", ["environment.kind=code", "prompts.kind=environment", override])


def test_exercises_are_stable_and_apart_from_the_held_out_ones():
    environment = CodeExercises.__new__(CodeExercises)  # without a sandbox
    training = [environment.task(index) for index in range(300)]
    held_out = environment.held_out(100)
    assert training[:3] == [environment.task(index) for index in range(3)]
    assert held_out[:20] == environment.held_out(20)
    assert not {task["prompt"] for task in training} & {task["prompt"] for task in held_out}
    for task in held_out:
        assert [call.arguments for call in parse_tests(task["tests"]).calls] == [[x] for x in ARGUMENTS]


def test_an_exercise_has_the_results_of_its_words():
    class First:
        def choice(self, options):
            return options[0]

    task = _exercise(First(), 7)
    assert "x plus 7" in task["prompt"]
    assert [test["result"] for test in task["tests"]] == [x + 7 for x in ARGUMENTS]


def test_time_in_a_queue_is_not_charged():
    from pipelinerl_core.environments.api import Ask
    from pipelinerl_core.environments.worker import Episode

    async def main():
        episode = Episode(0)
        episode.ask = Ask(None, {})
        assert episode.has_turn
        with episode.ask.waiting():
            assert not episode.has_turn
        assert episode.has_turn

    asyncio.run(main())
