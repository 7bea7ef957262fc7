"""Minimal examples of CONTRIBUTING's "How to add": each is registered as described there and used the public way.

A metric: tests/unit/telemetry/test_metrics.py. A configuration key: tests/unit/config/test_load.py.
"""

import asyncio
import json
from typing import Literal

import pytest
import torch
from typer.testing import CliRunner

from pipelinerl.flows import cli
from pipelinerl.flows.cli.arguments import Json
from pipelinerl.flows.cli.console import answer
from pipelinerl_core.algo import losses
from pipelinerl_core.config import build_config
from pipelinerl_core.config.losses import ReinforceLoss
from pipelinerl_core.rewards import pool
from pipelinerl_core.types import Prompt


class SquaredLoss(ReinforceLoss):
    """Section `loss` of the example."""

    kind: Literal["squared"] = "squared"
    factor: float = 0.5


def squared(tokens, config):
    """factor * (logprob - advantage)^2."""
    terms_M = config.factor * (tokens.trainer_logprobs_M - tokens.advantages_M) ** 2
    return tokens.sums(terms_M, torch.zeros_like(terms_M, dtype=torch.bool))


def test_a_registered_loss_is_computed_with_its_own_options_and_those_of_all_losses(monkeypatch):
    monkeypatch.setattr(losses, "LOSSES", {**losses.LOSSES, "squared": squared})
    logprobs_N = torch.tensor([-1.0, -9.0, -2.0], requires_grad=True)
    tokens = losses.select(
        logprobs_N,
        torch.tensor([-1.0, -9.0, -2.0]),
        torch.tensor([1.0, 1.0, -1.0]),
        torch.tensor([0.5, 0.5, 0.5]),
        torch.tensor([0, 2]),
        entropy_N=torch.ones(3),
        sequence_N=torch.tensor([0, 0, 1]),
        num_sequences=2,
        lags_N=torch.tensor([0, 0, 1]),
    )
    sums = losses.compute_loss(tokens, SquaredLoss(factor=2.0, entropy_bonus=0.1))
    # 0.5 * 2 * (-1 - 1)^2 + 0.5 * 2 * (-2 + 1)^2 = 5, less 0.1 * (0.5 * 1 + 0.5 * 1)
    assert sums.loss.item() == pytest.approx(5.0 - 0.1)
    sums.loss.backward()
    # 0.5 * 2 * 2 * (-1 - 1), none for the token that is not trained, 0.5 * 2 * 2 * (-2 + 1)
    assert logprobs_N.grad.tolist() == pytest.approx([-4.0, 0.0, -2.0])


def test_a_registered_verifier_scores_in_a_child_process(monkeypatch, tmp_path):
    (tmp_path / "brief_answers.py").write_text(
        "def brief(text, task):\n    return 1.0 if len(text) <= task['most'] else 0.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(pool, "VERIFIERS", {**pool.VERIFIERS, "brief": ("brief_answers:brief", 2 << 30)})
    config = build_config({})
    config = config.model_copy(update={"reward": config.reward.model_copy(update={"kind": "brief"})})
    prompt = Prompt(prompt_id="00", source="example", env="brief", text="Be brief.", task={"most": 3})

    async def rewards():
        scorer = pool.build_scorer(config)
        try:
            return [await scorer.score(prompt, text) for text in ("yes", "certainly")]
        finally:
            await scorer.close()

    assert asyncio.run(rewards()) == [1.0, 0.0]


def greet(name: str, as_json: Json = False) -> None:
    """Greet somebody."""
    answer({"greeting": f"hello {name}"}, [f"hello {name}"], as_json=as_json)


def test_a_registered_command_answers_in_lines_and_json_and_has_its_docstring_as_help(monkeypatch):
    monkeypatch.setattr(cli.app, "registered_commands", list(cli.app.registered_commands))
    cli.app.command()(greet)  # what flows/cli/__init__.py does with each of COMMANDS
    runner = CliRunner()
    assert runner.invoke(cli.app, ["greet", "Ada"]).stdout == "hello Ada\n"
    assert json.loads(runner.invoke(cli.app, ["greet", "Ada", "--json"]).stdout) == {"greeting": "hello Ada"}
    assert "Greet somebody." in runner.invoke(cli.app, ["--help"]).stdout


@pytest.mark.parametrize("command", cli.COMMANDS, ids=lambda command: command.__name__)
def test_a_command_is_a_function_with_help_in_a_module_of_its_own(command):
    assert command.__module__ == f"pipelinerl.flows.cli.{command.__name__}"
    assert command.__doc__
