"""What passes the gate of a scorer that evaluates, and what counts as a wrong answer instead."""

import re

import pytest
from reasoning_gym.factory import DATASETS, create_dataset

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.gym.tasks import COMPOSITE, EVALUATING, GATES, check_task, scored_tasks
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.prompts import build_source
from pipelinerl_core.rewards.gate import passes
from pipelinerl_core.rewards.gym import reasoning_gym, tagged_answer
from pipelinerl_core.rewards.pool import build_scorer
from pipelinerl_core.rewards.verifiers import Evaluation
from pipelinerl_core.sandbox import isolation

NUM_REFERENCES = 20
MANY_REFERENCES = 300

ENTRY = {"answer": "x**3/3 + C", "metadata": {"variable": "x"}}

REFUSED = [
    "__import__('os').system('true')",
    "[__import__('os').system('true')]",
    "().__class__.__bases__[0].__subclasses__()",
    "open('/etc/passwd').read()",
    "eval('1')",
    "[eval('1')]",
    "print(1)",
    "oracle_answer",
    "[oracle_answer]",
    "oracle_answer.split()",
    "entry['answer']",
    "[*oracle_answer]",
    "f'{oracle_answer}'",
    "[f'{oracle_answer}']",
    "'%s' % oracle_answer",
    "'x' * 10**9",
    "[c for c in oracle_answer]",
    "(lambda: 1)()",
    "lambda: 1",
    "lambda x: x",
    "x.func",
    "x.__class__",
    "x[0]",
    "x(2)",
    "(y := 1)",
    "1 if 1 else 2",
    "await x",
    "yield",
    "not x",
    "x < 1",
    "x and x",
    "{1: 2}",
    "{1}",
    "{**x}",
    "b'a'",
    "1j",
    "...",
    "True",
    "None",
    "S('1')",
    "Symbol('x')",
    "N(1)",
    "O(x)",
    "factorial(99999999)",
    "3!",
    "exp.__class__(1)",
    "exp(*[1])",
    "exp(x=1)",
    "exp()",
    "1 << 99",
    "1 // 2",
    "1 % 2",
    "~1",
    "1 @ 2",
    "9**9**9**9",
    "(9**9)**9**9",
    "9**(9*9*9*9)",
    "9**99",
    "x**1000",
    "2**(x - x + 99999999)",
    "2**(x/(x/99999999))",
    "2**exp(99)",
    "exp(99999999*log(9))",
    "exp(64*log(exp(64*log(9))))",
    "exp(9**9*log(2))",
    "((((2**64)**64)**64)**64)",
    "*".join(["(x + 1)**64"] * 20),
    "*".join(["999999999"] * 99),
    "99999999999999999999 + x",
    "x + 1e999",
    "1" * 5000 + " + x",
    "Integral(exp(x), x)",
    "x +",
    "x x",
    "2x",
    "x; x",
    "import os",
    "del x",
    "(" * 10_000,
    "(" * 10_000 + "1" + ")" * 10_000,
    "[" * 10_000 + "]" * 10_000,
    "(" * 40 + "1" + ")" * 40,
    "-" * 20_000 + "1",
    "not " * 900 + "x",
    "+".join(["x"] * 10_000),
    "\x00",
    "x\x00",
    "\ud800",
    "२",
    "\U0001d431",  # a bold x, which Python reads as x
    "\uff45val(x)",
    "",
    " ",
]  # fmt: skip
OF_A_LIST_ONLY = ["'a' 'b'", "['A', 'B']", "[[0, 1], [1, 0]]", "(1, 2)", "[-1, 0.5]", "'ABC'", "[1e9]", "[0x18]"]
OF_NUMBERS = ["(3 + 5)*2 - 7/14", "-3 + 4", "((1))", "(3\n* 8)"]
OF_FORMULAS = [
    "x**3/3 + C",
    "-x**2*exp(-3*x + 2)/2 + sqrt(2)*atan(x)/4 + log(x + 1)",
    "x**(3/2) + x**0.5",
    "exp(x**2)*sin(10*x) + pi*E",
    "log(x, 2)",
]
NOT_COUNTED_AS_NUMBERS = ["0x18", "2_4", "24 # 3 5", "1e1", "2.0", "24 + 0j"]


def references(task, count):
    dataset = create_dataset(task, seed=5, size=count)
    return [dataset[index] for index in range(count)]


def test_the_table_names_every_task_of_the_library_and_no_other():
    assert set(GATES) | {COMPOSITE} == set(DATASETS)


def test_a_task_that_nobody_has_looked_at_is_refused_by_name(monkeypatch):
    monkeypatch.setitem(DATASETS, "brand_new", DATASETS["chain_sum"])
    config = build_config({"prompts": {"kind": "reasoning_gym", "tasks": ["chain_sum", "brand_new"]}})
    with pytest.raises(ConfigError, match=r"prompts\.tasks=brand_new: the scorer .* was not reviewed"):
        build_source(config)
    with pytest.raises(ConfigError, match="brand_new"):
        build_scorer(config)
    with pytest.raises(ConfigError, match="brand_new"):
        check_task("brand_new")


@pytest.mark.parametrize(
    "count", [NUM_REFERENCES, pytest.param(MANY_REFERENCES, marks=[pytest.mark.slow, pytest.mark.campaign])]
)
@pytest.mark.parametrize("task", sorted(task for task, gate in GATES.items() if gate != "none"))
def test_every_reference_answer_passes(task, count):
    for entry in references(task, count):
        if GATES[task] == "list":
            assert reasoning_gym(f"Hm. <answer>{entry['answer']}</answer>", {"task": task, **entry}) == 1.0
        elif entry["answer"] is not None:
            assert passes(GATES[task], entry["answer"].strip(), entry), entry["answer"]


@pytest.mark.parametrize("gate", sorted(EVALUATING))
@pytest.mark.parametrize("text", REFUSED, ids=lambda text: ascii(text[:40]))
def test_answers_that_are_not_on_the_list_do_not_pass(gate, text):
    assert not passes(gate, text, ENTRY)


@pytest.mark.parametrize(
    ("gate", "texts"), [("list", OF_A_LIST_ONLY), ("arithmetic", OF_NUMBERS), ("formula", OF_NUMBERS + OF_FORMULAS)]
)
def test_the_elements_of_answers_pass(gate, texts):
    assert [text for text in texts if not passes(gate, text, ENTRY)] == []


def test_numbers_that_a_scorer_would_not_count_do_not_pass():
    assert [text for text in NOT_COUNTED_AS_NUMBERS if passes("arithmetic", text, ENTRY)] == []


def test_lists_and_symbols_of_others_are_no_formula():
    for text in ["[1]", "(1, 2)", "'a'", "y", "os", "x + C + y"]:
        assert not passes("formula", text, ENTRY)


def test_an_unsolved_integral_passes_where_the_reference_has_an_unsolved_integral():
    solved, unsolved = ENTRY, {**ENTRY, "answer": "Integral(exp(x**2)*sin(x), x)"}
    assert not passes("formula", "Integral(exp(x), x)", solved)
    assert passes("formula", "Integral(exp(x), x) + x", unsolved)


@pytest.mark.parametrize(
    ("gate", "text"),
    [
        ("fraction", "1e99999999"),
        ("fraction", "1E-99999999"),
        ("fraction", "1" * 5000),
        ("moves", "U9999999 R9999999"),
        ("moves", "F+999999999"),
        ("moves", "F+1 " * 5000),
        ("short", "¬" * 20_000),
        ("number", "nan"),
        ("number", "nan+nanj"),
        ("number", "inf"),
    ],
)
def test_answers_that_a_comparing_scorer_evaluates_for_minutes_or_rewards_wrongly_do_not_pass(gate, text):
    assert not passes(gate, text, ENTRY)


def test_a_refused_answer_scores_zero_and_an_answer_that_passes_is_left_to_the_evaluation():
    task = {"task": "simple_integration", **ENTRY}
    assert reasoning_gym("__import__('os')._exit(9)", task) == 0.0
    assert isinstance(reasoning_gym("x + C", task), Evaluation)


def test_a_composite_entry_has_the_gate_of_its_source_task():
    metadata = {"source_dataset": "countdown", "numbers": [1, 2], "target": 3}
    task = {"task": COMPOSITE, "answer": "1 + 2", "metadata": metadata}
    assert reasoning_gym("__import__('os')._exit(9)", task) == 0.0
    assert isinstance(reasoning_gym("1 + 2", task), Evaluation)
    with pytest.raises(KeyError):
        reasoning_gym("1 + 2", {**task, "metadata": {**metadata, "source_dataset": "brand_new"}})


def test_an_answer_at_which_the_scorer_raises_is_wrong_and_an_unusable_task_is_an_error():
    entry = create_dataset("prime_factorization", seed=0)[0]
    task = {"task": "prime_factorization", **entry}
    assert reasoning_gym(entry["answer"], task) == 1.0
    assert reasoning_gym("two", task) == 0.0
    with pytest.raises(ValueError, match="invalid literal"):
        reasoning_gym("two", {**task, "answer": "two"})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7",
        " 7 ",
        "<answer>7</answer>",
        "<answer> 7\n</answer> <answer>8</answer>.",
        "<answer>7</answer> <answer>8",
        "<answer>7<answer>8</answer>",
        "</answer><answer>7</answer></answer>",
        "<answer><answer></answer></answer>",
        "<answer></answer>",
        "<answer>7</answer",
    ],
)
def test_the_answer_is_the_content_of_the_last_closed_tag(text):
    contents = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    assert tagged_answer(text) == (contents[-1] if contents else text).strip()


def gym_config(isolation_value="auto", *tasks):
    return build_config(
        {"prompts": {"kind": "reasoning_gym", "tasks": list(tasks)}, "reward": {"isolation": isolation_value}}
    )


def test_tasks_that_evaluate_are_refused_without_isolation():
    with pytest.raises(ConfigError, match=r"prompts\.tasks=countdown: .* reward.isolation=none") as refusal:
        build_source(gym_config("none", "countdown", "chain_sum"))
    assert "\n" not in str(refusal.value)
    assert scored_tasks(gym_config("none", "chain_sum")) == ["chain_sum"]


def test_tasks_that_evaluate_are_refused_on_a_host_that_cannot_isolate_them(monkeypatch, caplog):
    monkeypatch.setattr(isolation, "missing", lambda: ("Landlock", "seccomp"))
    with pytest.raises(ConfigError, match=r"prompts\.tasks=countdown: .* no Landlock and seccomp") as refusal:
        build_scorer(gym_config("auto", "countdown", "chain_sum"))
    assert "\n" not in str(refusal.value)
    assert caplog.messages == []
    build_scorer(gym_config("auto", "chain_sum"))
    assert len(caplog.messages) == 1
    assert "this host has no Landlock and seccomp" in caplog.messages[0]
    build_scorer(gym_config("none", "chain_sum"))
    assert len(caplog.messages) == 1
