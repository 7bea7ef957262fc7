"""A user's reward function: loading, parameters by name, and what counts as a reward."""

from dataclasses import asdict

import numpy as np
import pytest

from pipelinerl_core.rewards.function import FunctionSpec, RewardFunction, RewardFunctions
from pipelinerl_core.rewards.verifiers import Components
from pipelinerl_core.sandbox.user_code import Invalid

ROW = {"answer": "4", "number": 4, "level": "hard", "prompt": "2+2=", "token_ids": [7, 8], "finish_reason": "stop"}


def load(code, name="score", has_network=False, **weights):
    spec = FunctionSpec(function=f"mine.py:{name}", code=code, weights=weights, has_network=has_network)
    return RewardFunction(asdict(spec))


def score(signature, expression="0", **options):
    return load(f"import math\ndef score({signature}):\n    return {expression}\n", **options)("four: 4", ROW)


@pytest.mark.parametrize(
    ("signature", "expression", "reward"),
    [
        ("text, answer", "answer in text", 1.0),
        ("level, prompt", "len(level + prompt)", 8.0),
        ("token_ids, finish_reason", "len(token_ids) * (finish_reason == 'stop')", 2.0),
        ("*, text", "len(text)", 7.0),
        ("text, other=3", "other", 3.0),
        ("text, level='easy'", "level == 'hard'", 1.0),
        ("**row", "len(row)", 7.0),
        ("text, *rest", "len(rest)", 0.0),
        ("", "-2", -2.0),
    ],
)
def test_a_function_is_called_with_the_parameters_of_its_signature(signature, expression, reward):
    assert score(signature, expression) == reward


@pytest.mark.parametrize("value", [np.float32(0.5), np.float64(0.5), np.array(0.5), 0.5])
def test_numbers_of_numpy_are_rewards(value):
    function = load("def score(value):\n    return value\n")
    assert function("", {"value": value}) == 0.5


def test_an_async_function_is_awaited_with_network():
    code = "import asyncio\nasync def score(text):\n    await asyncio.sleep(0)\n    return 1\n"
    assert load(code, has_network=True)("", {}) == 1.0
    with pytest.raises(Invalid, match=r"reward\.network=true"):
        load(code)


SHARED = """
import asyncio

FREE = asyncio.Lock()


async def use():
    async with FREE:
        await asyncio.sleep(0)


async def score(text):
    await asyncio.gather(use(), use())
    return 1
"""


def test_calls_of_async_functions_share_an_event_loop_as_a_client_of_the_module_needs():
    function = load(SHARED, has_network=True)
    assert [function(text, {}) for text in ("a", "b")] == [1.0, 1.0]


LEFT = """
import asyncio

seen = []


async def later(text):
    await asyncio.sleep(0.01)
    seen.append(text)


async def score(text):
    asyncio.create_task(later(text))
    await asyncio.sleep(0.03 if text == "b" else 0)
    return len(seen)
"""


def test_a_task_that_a_call_leaves_ends_with_the_call():
    function = load(LEFT, has_network=True)
    assert [function(text, {}) for text in ("a", "b", "c")] == [0.0, 1.0, 1.0]  # "b" alone waits for its task


def test_an_async_function_that_exits_leaves_the_event_loop_to_the_next_call():
    function = load("import sys\nasync def score(text): return 1 if text else sys.exit(3)\n", has_network=True)
    with pytest.raises(SystemExit):
        function("", {})
    assert function("a", {}) == 1.0


def test_components_are_weighted_and_kept():
    verdict = score("", "{'correct': True, 'short': 0.5, 'calm': 2}", correct=2.0, calm=-1.0)
    assert verdict == Components(reward=2.0 + 0.5 - 2.0, values={"correct": 1.0, "short": 0.5, "calm": 2.0})


@pytest.mark.parametrize(
    ("signature", "expression", "weights", "message"),
    [
        ("text, answr", "0", {}, "has the parameter answr, .* Available: answer, finish_reason, level"),
        ("text, /", "0", {}, "positional-only"),
        ("", "None", {}, r"returned None \(no `return`\?\), not a number"),
        ("", "'1'", {}, "returned str '1', not a number"),
        ("", "[1.0]", {}, "returned list"),
        ("", "math.nan", {}, "returned nan"),
        ("", "-math.inf", {}, "returned -inf"),
        ("", "10**5000", {}, "returned a number beyond float; rewards are finite"),
        ("", "1e10", {}, "within 1e[+]09"),
        ("", "{'a': None}", {}, "returned None .* for a, not a number"),
        ("", "{}", {}, "returned 0 components"),
        ("", "{'mean': 1}", {}, "named 'mean'"),
        ("", "{'a b': 1}", {}, "named 'a b'"),
        ("", "{'a': 1}", {"b": 1.0}, r"reward\.weights\.b: score returned no such component \(returned: a\)"),
        ("", "1", {"b": 1.0}, "returned one number, but reward.weights names components"),
        ("", "{'a': 1e9}", {"a": 2.0}, "as weighted sum"),
    ],
)
def test_a_result_that_is_not_a_reward_is_refused(signature, expression, weights, message):
    with pytest.raises(Invalid, match=message):
        score(signature, expression, **weights)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def other(): pass", "no function score there. Functions: other"),
        ("score = 3", "not callable, but has the type int"),
        ("import no_such_module", "mine.py imports no_such_module, which is not installed"),
    ],
)
def test_code_without_the_function_is_refused(code, message):
    with pytest.raises(Invalid, match=message):
        load(code)


def test_a_module_that_is_not_installed_is_refused():
    with pytest.raises(Invalid, match="Install the module on every host of the run"):
        RewardFunction({"function": "no_such.module:score", "code": None, "weights": {}, "has_network": False})


def test_a_function_of_an_installed_module_is_called():
    dedented = RewardFunction({"function": "bisect:bisect", "code": None, "weights": {}, "has_network": False})
    assert dedented("", {"a": [1, 2, 3], "x": 2}) == 2.0


TRL = [
    # what the documentation of TRL shows: lengths, a column, messages, None for rows that do not apply
    ("completions, **kwargs", "[len(text) / 10 for text in completions]", 0.7),
    ("completions, level, **kwargs", "[float(hard == 'hard') for hard in level]", 1.0),
    ("prompts, completions, answer", "[float(a in c) for p, c, a in zip(prompts, completions, answer)]", 1.0),
    ("prompts, completions, number, answer", "[float(a == 4) for a in number]", 1.0),
    ("completion_ids, **kwargs", "[len(ids) for ids in completion_ids]", 2.0),
    ("completion_ids, completions", "[len(ids) for ids in completion_ids]", 2.0),
    ("completions, trainer_state=None", "[None]", 0.0),
    ("completions", "np.array([0.5])", 0.5),
]  # fmt: skip


@pytest.mark.parametrize(("signature", "expression", "reward"), TRL)
def test_a_function_of_trl_is_called_with_a_batch_of_one_completion(signature, expression, reward):
    code = f"import numpy as np\ndef score({signature}):\n    return {expression}\n"
    assert load(code)("four: 4", ROW) == reward


def test_an_answer_that_is_a_number_is_text_in_the_own_form_and_a_number_in_the_others():
    row = {**ROW, "answer": 4}
    assert load("def score(text, answer): return answer in text")("four: 4", row) == 1.0
    assert load("def score(completions, answer): return [float(answer[0] == 4)]")("four: 4", row) == 1.0
    assert load("def score(solution_str, ground_truth): return float(ground_truth == 4)")("four: 4", row) == 1.0


def test_a_function_of_trl_gets_messages_if_the_prompt_of_the_row_is_messages():
    code = "def score(prompts, completions, **_): return [len(prompts[0]) + len(completions[0][0]['content'])]"
    messages = [{"role": "user", "content": "2+2="}]
    assert load(code)("four", {**ROW, "prompt_messages": messages}) == 5.0


@pytest.mark.parametrize("expression", ["1.0", "[1.0, 2.0]", "[]", "'1'", "{'score': [1.0]}"])
def test_a_function_of_trl_returns_one_reward_per_completion(expression):
    with pytest.raises(Invalid, match="TRL's signature, but returned no list with one reward"):
        load(f"def score(completions):\n    return {expression}\n")("four", ROW)


def test_a_function_that_names_the_text_gets_a_column_of_the_name_that_trl_and_verl_use():
    code = "def score(text, completions, solution_str): return len(completions + solution_str)"
    assert load(code)("four", {**ROW, "completions": "abc", "solution_str": "de"}) == 5.0


def test_functions_of_one_file_share_its_module():
    code = "seen = {}\ndef a(text): return seen.setdefault('a', 1.0)\ndef b(text): return seen.get('a', 0.0)\n"
    spec = FunctionSpec(function="shared.py:a,b", code=code, weights={}, has_network=False)
    assert RewardFunctions(asdict(spec))("4", ROW).values == {"a": 1.0, "b": 1.0}


def test_a_function_of_verl_gets_the_reference_of_the_row():
    code = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(data_source == "gsm8k" and ground_truth in solution_str and (extra_info or {}).get("index", 0) == 0)
"""
    row = {**ROW, "answer": "none", "data_source": "gsm8k", "reward_model": {"style": "rule", "ground_truth": "4"}}
    score = load(code, "compute_score")
    assert score("four: 4", {**row, "extra_info": {"index": 0}}) == 1.0
    assert score("four: 4", {**row, "extra_info": {"index": 1}}) == 0.0
    assert score("it is none", {**row, "reward_model": {"ground_truth": None}}) == 1.0
    del row["reward_model"]
    assert score("it is none", row) == 1.0


def test_the_score_of_a_function_of_verl_is_the_reward_and_its_other_numbers_are_recorded():
    code = "def score(solution_str, **kwargs):\n    return {'score': 0.5, 'acc': True, 'pred': solution_str}\n"
    assert load(code)("4", ROW) == Components(reward=0.5, values={"score": 0.5, "acc": 1.0})
    assert load(code, acc=2.0)
    more = "{'score': numpy.bool_(True), 'a b': 1, 'mean': 2, 'nan': float('nan'), **{f'n{i}': i for i in range(20)}}"
    result = load(f"import numpy\ndef score(solution_str, **kwargs):\n    return {more}\n")("4", ROW)
    assert result == Components(reward=1.0, values={"score": 1.0, **{f"n{i}": float(i) for i in range(15)}})


def test_a_function_with_another_signature_is_told_the_three_forms():
    with pytest.raises(Invalid, match=r"parameter response, .* Signatures: \(text, .* TRL's .* verl's"):
        load("def score(response):\n    return 1\n")("4", ROW)


SEVERAL = """
def right(text, answer):
    return answer in text


def short(completions, **kwargs):
    return [-len(text) / 100 for text in completions]


def compute_score(solution_str, ground_truth):
    return {"score": 0.5, "found": ground_truth in solution_str}


def both(text):
    return {"a": 1, "right": 2}
"""


def several(names, **weights):
    spec = FunctionSpec(function=f"mine.py:{names}", code=SEVERAL, weights=weights, has_network=False)
    return RewardFunctions(asdict(spec))("four: 4", ROW)


def test_several_functions_are_components_of_their_names_with_weights_whatever_their_signatures():
    result = several("right,short", short=2.0)
    assert result.values == {"right": 1.0, "short": -0.07}
    assert result.reward == pytest.approx(0.86)
    assert several("right,compute_score").values == {"right": 1.0, "compute_score": 0.5}


@pytest.mark.parametrize(
    ("names", "weights", "says"),
    [
        ("right,both", {}, "two reward functions return the component right"),
        ("right,short", {"other": 1.0}, "reward.weights.other: right, short returned no such component"),
        ("right,missing", {}, "no function missing there. Functions: both, compute_score, right, short"),
    ],
)
def test_several_functions_that_do_not_fit_together_are_refused(names, weights, says):
    with pytest.raises(Invalid, match=says):
        several(names, **weights)
