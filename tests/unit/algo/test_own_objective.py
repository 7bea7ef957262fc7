"""A loss and advantages of the user's own: the same numbers as the built-in ones, and every mistake is one line."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from pipelinerl_core.algo.losses import compute_loss
from pipelinerl_core.algo.own import OWN
from pipelinerl_core.batching.assemble import assemble_rows
from pipelinerl_core.check_process import result_of
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.resolve import build_config, load_config
from pipelinerl_core.tools.check_loss import check, random_tokens
from pipelinerl_core.training.own_functions import load_own_functions, loaded_texts
from tests.rollout_rows import build_rollout

REINFORCE = """
def loss(tokens, bound):
    ratio_M = tokens.log_ratio_M.detach().exp()
    terms_M = -(ratio_M.clamp(max=bound) * tokens.advantages_M * tokens.trainer_logprobs_M)
    return terms_M, ratio_M > bound


def advantages(group, scale=1.0):
    total = sum(rollout.reward for rollout in group)
    return [scale * (one.reward - (total - one.reward) / (len(group) - 1)) for one in group]


def by_turn(group):
    return [[one.reward + turn for turn in range(one.num_turns)] for one in group]
"""


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch):
    for location in list(OWN):
        monkeypatch.delitem(OWN, location)


def loaded(code, *settings, function="mine.py:loss"):
    """The section `loss`, whose functions this process has loaded."""
    config = load_config("quickstart", ["loss.kind=custom", f"loss.function={function}", *settings])
    load_own_functions(config.loss, dict.fromkeys(config.loss.own_functions, code))
    return config


def test_the_own_loss_has_the_numbers_of_the_built_in_loss():
    own, built_in = loaded(REINFORCE, "loss.options.bound=1.2"), load_config("quickstart", ["loss.ratio_max=1.2"])
    outcomes = []
    for config in (own, built_in):
        tokens = random_tokens()
        sums = compute_loss(tokens, config.loss)
        (gradient,) = torch.autograd.grad(sums.loss, tokens.trainer_logprobs_M)
        outcomes.append((sums.loss.item(), sums.clipped.item(), gradient))
    assert outcomes[0][:2] == outcomes[1][:2]
    assert torch.equal(outcomes[0][2], outcomes[1][2])
    assert loaded_texts() == {"loss.function": REINFORCE}


def test_own_advantages_are_those_of_the_rows():
    rng = np.random.default_rng(0)
    group = [build_rollout(rng, rollout_index=index, reward=reward) for index, reward in enumerate((1.0, 0.0, 0.5))]
    settings = ("loss.options.bound=5", "loss.advantage=custom", "loss.advantage_options.scale=2")
    config = loaded(REINFORCE, *settings, "loss.advantage_function=mine.py:advantages")
    own = [row.advantage for row in assemble_rows(1, [group], config).rows]
    built_in = [row.advantage for row in assemble_rows(1, [group], load_config("quickstart")).rows]
    assert own == pytest.approx([2 * advantage for advantage in built_in])


MISTAKES = {
    "no such function": ("x = 1", "no function loss there"),
    "no Python": ("def loss(:", "SyntaxError"),
    "raises": ("def loss(tokens): return 1 / 0", r"ZeroDivisionError.*mine\.py:1"),
    "no tensor": ("def loss(tokens): return 1.0", "returned float"),
    "one number": ("def loss(tokens): return tokens.advantages_M.sum()", r"returned a tensor \[\] of float32"),
    "no gradient": ("def loss(tokens): return tokens.advantages_M", "no gradient reaches the tokens"),
    "not finite": ("def loss(tokens): return tokens.trainer_logprobs_M * float('nan')", "not finite"),
    "random": (
        "import torch\ndef loss(tokens): return tokens.trainer_logprobs_M * torch.rand(())",
        "two calls with the same tokens",
    ),
    "unknown option": ("def loss(tokens, *, beta): return tokens.trainer_logprobs_M", "missing 1 required keyword"),
}


@pytest.mark.parametrize(("code", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_wrong_loss_is_one_line_before_the_start(code, message):
    with pytest.raises(ConfigError, match=f"^loss.function=mine.py:loss: .*{message}") as caught:
        check(loaded(code).loss)
    assert "\n" not in str(caught.value)


def test_the_trial_has_what_training_has():
    loss = "def loss(tokens): return -tokens.trainer_logprobs_M + tokens.ref_logprobs_M"
    check(loaded(loss, "loss.kl_coefficient=0.01").loss)
    code = "def advantages(group): return [one.components['correct'] - 0.5 for one in group]"
    settings = ["loss.advantage=custom", "loss.advantage_function=mine.py:advantages"]
    config = load_config("quickstart", settings)
    load_own_functions(config.loss, {"loss.advantage_function": code})
    check(config.loss)
    turns = "def advantages(group): return [one.turn_rewards for one in group]"
    load_own_functions(config.loss, {"loss.advantage_function": turns})
    check(config.loss, has_turns=True)
    with pytest.raises(ConfigError, match=r"max\(\).*; with no token"):
        check(loaded("def loss(tokens): return -tokens.trainer_logprobs_M / tokens.log_ratio_M.exp().max()").loss)


def test_a_declared_zero_is_checked():
    code = "def loss(tokens): return -tokens.trainer_logprobs_M"
    check(loaded(code).loss)
    with pytest.raises(ConfigError, match=r"advantage 0 have a gradient.*loss\.skips_zero_advantage=false"):
        check(loaded(code, "loss.skips_zero_advantage=true").loss)
    exact = loaded(REINFORCE, "loss.options.bound=5", "loss.skips_zero_advantage=true")
    check(exact.loss)
    assert exact.skips_backward
    assert not loaded(REINFORCE, "loss.options.bound=5").skips_backward


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def advantages(group): return [1.0]", "returned 1 values for a group of 4"),
        ("def advantages(group): return 1.0", "not a number or numbers per rollout"),
        ("def advantages(group): return dict(enumerate([9.0] * len(group)))", "not a number or numbers per rollout"),
        ("def advantages(group): return '0000'", "not a number or numbers per rollout"),
        ("def advantages(group): return [float('inf')] * len(group)", "not finite"),
        ("def advantages(group): return [(1.0, 2.0)] * len(group)", "2 advantages for 1 turns"),
        ("import random\ndef advantages(group): return [random.random() for _ in group]", "two calls"),
    ],
)
def test_wrong_advantages_are_one_line_before_the_start(code, message):
    config = load_config("quickstart", ["loss.advantage=custom", "loss.advantage_function=mine.py:advantages"])
    load_own_functions(config.loss, {"loss.advantage_function": code})
    with pytest.raises(ConfigError, match=f"^loss.advantage_function=mine.py:advantages: .*{message}"):
        check(config.loss)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["loss.kind=custom"], "loss.function: not set"),
        (["loss.kind=custom", "loss.function=mine"], "names no function"),
        (["loss.advantage=custom"], "loss.advantage_function is not set"),
        (["loss.advantage_function=mine.py:advantages"], "not used with loss.advantage=leave_one_out"),
        (["loss.function=mine.py:loss"], "needs loss.kind=custom"),
        (["loss.kind=custom", "loss.function=a.py:f", "rollouts.filter_zero_variance=true"], "discards groups"),
    ],
)
def test_contradictory_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        load_config("quickstart", settings)


def test_a_function_of_an_installed_module_is_loaded_without_a_file():
    config = load_config("quickstart", ["loss.kind=custom", "loss.function=math:prod"])
    load_own_functions(config.loss, {})
    assert OWN["math:prod"]([2, 3]) == 6


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise SystemExit(0)", "SystemExit: 0 (mine.py:4)"),
        ("import os; os._exit(0)", "the check ended with code 0"),
        ("print('x'); raise KeyError('y')", "KeyError: 'y' (mine.py:4)"),
        ("tokens.loss_weights_M.mul_(2); return -tokens.trainer_logprobs_M", "changes loss_weights_M"),
        ("terms = -tokens.trainer_logprobs_M; terms.sum().backward(); return terms * torch.inf", "not finite"),
        ("terms = tokens.trainer_logprobs_M.exp(); terms.sum().backward(); return terms", "RuntimeError: Trying to"),
        ("import atexit; atexit.register(print, 'bye'); return None", "returned NoneType"),
    ],
)
def test_whatever_a_loss_does_the_check_tells_it(body, message):
    given = {
        "config": load_config("quickstart", ["loss.kind=custom", "loss.function=mine.py:loss"]).model_dump(
            mode="json"
        ),
        "code": {"loss.function": f"import torch\n\ndef loss(tokens):\n    {body}\n"},
    }
    command = [sys.executable, "-m", "pipelinerl_core.tools.check_loss"]
    ended = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, timeout=120, check=False)
    with pytest.raises(ConfigError, match=rf"^loss\.function.*{re.escape(message)}"):
        result_of("loss.function", ended.returncode, ended.stdout, ended.stderr)


def test_a_line_after_the_end_of_a_check_changes_nothing():
    assert result_of("loss.function", 0, "a fact\nchecked\ngoodbye\n", "") == ["a fact"]


def test_the_check_ends_with_code_2_and_one_line():
    config = load_config("quickstart", ["loss.kind=custom", "loss.function=mine.py:loss"])
    given = {"config": config.model_dump(mode="json"), "code": {"loss.function": "def other(): pass"}}
    command = [sys.executable, "-m", "pipelinerl_core.tools.check_loss"]
    ended = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    with pytest.raises(
        ConfigError, match=r"^loss\.function=mine\.py:loss: no function loss there\. Functions: other$"
    ):
        result_of("loss.function", ended.returncode, ended.stdout, ended.stderr)
    assert build_config(given["config"]) == config
