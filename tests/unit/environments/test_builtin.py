"""Environments that ship, played by hand."""

import asyncio
import re

import pytest

from pipelinerl_core.environments.api import Reply
from pipelinerl_core.environments.builtin.calculator import Calculator
from pipelinerl_core.environments.builtin.guess import Guess
from pipelinerl_core.environments.builtin.math import Math
from tests.unit.environments.episode_case import ScriptedHost, played

TOWER = "It is $9^{9^{9^{9}}}$."
"""A number that is too large to be computed."""


def play(environment, task, texts):
    """(contents of the messages, transcript, components) of an episode in which the model says these texts."""
    contents = []

    async def ask(messages):
        contents.append(messages[-1]["content"])
        return Reply(text=texts[len(contents) - 1], content=texts[len(contents) - 1])

    transcript = asyncio.run(environment.play(task, ask, 0))
    assert len(contents) == len(texts)
    return contents, transcript, environment.score(task, transcript)


def test_each_guess_narrows_the_range():
    contents, transcript, score = play(Guess(plain=True), {"secret": 7}, ["4", "8.", "7"])
    assert (contents, transcript) == (["0,9=", "5,9=", "5,7="], [4, 8, 7])
    assert score == {"solved": 1.0, "guesses": 3, "legal": 1.0}


def test_a_reply_without_a_number_or_outside_of_the_range_uses_a_guess_up():
    contents, _, score = play(Guess(), {"secret": 0}, ["no", "99", "5"])
    assert [text.split(".")[0] for text in contents] == ["I think of a number from 0 to 9"] * 3
    assert score == {"solved": 0.0, "guesses": 3, "legal": pytest.approx(2 / 3)}


@pytest.mark.parametrize(
    ("texts", "correct", "called"),
    [
        (["It is 347 + 585 = 1", "So it is 932."], 1.0, 1.0),
        (["347+585=", "347"], 0.0, 1.0),
        (["1+1=", "932"], 1.0, 1.0),
        (["932"], 1.0, 0.0),
        (["0,932"], 1.0, 0.0),
        (["no idea"], 0.0, 0.0),
    ],
)
def test_the_calculator_answers_the_sum_that_the_model_writes(texts, correct, called):
    contents, _, score = play(Calculator(), {"first": 347, "second": 585}, texts)
    assert score == {"correct": correct, "called": called}
    if called:
        wanted = "932" if "347" in texts[0] else "2"
        assert contents[1] == f"The calculator answers {wanted}. What is 347 + 585?"


@pytest.mark.parametrize("environment", [Guess(highest=99), Calculator(digits=2)])
def test_tasks_are_the_same_at_every_call_and_held_out_tasks_are_as_many_as_asked(environment):
    assert [environment.task(index) for index in range(50)] == [environment.task(index) for index in range(50)]
    assert len({str(environment.task(index)) for index in range(50)}) > 30
    assert environment.held_out(7) == environment.held_out(7)[:7]
    assert len(environment.held_out(7)) == 7


def test_no_held_out_sum_is_trained():
    calculator = Calculator(digits=1)
    trained = {tuple(calculator.task(index).values()) for index in range(500)}
    assert not trained & {tuple(task.values()) for task in calculator.held_out(100)}


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [
        (r"2\pi", "2"), (r"\sqrt{2}", "2"), (r"\frac{3}{4}x^2", r"\frac{3}{4}"), ("(1,2)", "1"), ("x^2", "x"),
        ("1/2", "2"), (r"10,\!000", "10"), (r"\boxed{7}", "8"), ("$\\frac12$", "2"),
        ("6 * 7 = 42\n#### 42", "6"), ("about 42 apples", "41"),
    ],
)  # fmt: skip
def test_an_answer_in_bare_latex_is_read_whole(answer, wrong):
    environment = Math()
    texts = {r"10,\!000": "10000", r"\boxed{7}": "7", "$\\frac12$": "1/2"}
    right = texts.get(answer, "42" if "42" in answer else answer)
    for reply, correct in ((right, 1.0), (wrong, 0.0)):
        assert environment.score({"answer": answer}, rf"So \boxed{{{reply}}}")["correct"] == correct


def test_an_answer_without_an_expression_is_an_error_and_no_zero():
    with pytest.raises(ValueError, match="has no expression"):
        Math().score({"answer": ""}, "1")
    assert Math().score({"answer": "no solution"}, "1")["correct"] == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        "1 000",
        "12 345",
        "12 in",
        "16 cm^2",
        "25 km/h",
        "25km/h",
        "9.8 m/s^2",
        "3 L",
        "90°",
        "€5",
        "C: 12",
        "12 (twelve)",
    ],
)
def test_the_number_of_an_answer_with_a_unit_or_in_prose_is_read(answer):
    number = {"1 000": "1000", "12 345": "12345", "90°": "90", "€5": "5", "C: 12": "12"}
    reply = number.get(answer, re.match(r"[\d.]*", answer)[0])
    assert Math().score({"answer": answer}, rf"\boxed{{{reply}}}")["correct"] == 1.0
    assert Math().score({"answer": answer}, r"\boxed{0}")["correct"] == 0.0


def test_mathematics_is_compared_by_value_and_a_hostile_reply_is_interrupted():
    task, right = {"prompt": "What is 6/8 in lowest terms?", "answer": "3/4"}, ScriptedHost("It is $\\frac{6}{8}$.")
    hosts = (right, ScriptedHost("It is 0.75"), ScriptedHost("4/3"), ScriptedHost("no idea"), ScriptedHost(TOWER))
    *results, hostile = played(None, *hosts, task=task, path="builtin:math", overrides=["environment.call_seconds=3"])
    assert right.asked == [([{"role": "user", "content": task["prompt"]}], [])]
    assert [float(result.score) for result in results] == [1.0, 1.0, 0.0, 0.0]
    assert [dict(result.score.components)["parsed"] for result in results] == [1.0, 1.0, 1.0, 0.0]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "And 6/8?"}]
    conversation = ScriptedHost("3/4")
    played(None, conversation, task={**task, "prompt_messages": messages}, path="builtin:math")
    assert conversation.asked == [(messages, [])]
    assert hostile.startswith("environment builtin:math: the environment took more than environment.call_seconds=3 (")
