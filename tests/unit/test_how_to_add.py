"""Minimal examples of CONTRIBUTING's "How to add": each is registered as described there and used the public way.

A metric: tests/unit/telemetry/test_metrics.py. A configuration key: tests/unit/config/test_load.py.
"""

import asyncio
import json
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from pipelinerl.flows import cli
from pipelinerl.flows.cli.arguments import Json
from pipelinerl.flows.cli.console import answer
from pipelinerl_core.algo import losses
from pipelinerl_core.config.losses import ReinforceLoss
from pipelinerl_core.engine import load
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.prompts import source
from pipelinerl_core.rewards import pool
from pipelinerl_core.storage import object_store
from pipelinerl_core.storage.local import MemoryStore
from pipelinerl_core.types import Chunk, Completion, EngineRequest, FinishReason, Prompt, Sampler, WeightSpan


def with_kind(section, kind):
    """A configuration with a kind that config/ does not list."""
    config = build_config({})
    return config.model_copy(update={section: getattr(config, section).model_copy(update={"kind": kind})})


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
    config = with_kind("reward", "brief")
    prompt = Prompt(prompt_id="00", source="example", env="brief", text="Be brief.", task={"most": 3})

    async def rewards():
        scorer = pool.build_scorer(config)
        try:
            return [await scorer.score(prompt, text) for text in ("yes", "certainly")]
        finally:
            await scorer.close()

    assert asyncio.run(rewards()) == [1.0, 0.0]


class Counting:
    """A prompt source: "1 + 1 =", "2 + 1 =", ..."""

    name = "counting"

    def prompt(self, index):
        text = f"{index} + 1 ="
        return Prompt(
            prompt_id=f"{index:016x}", source=self.name, env="sums", text=text, task={"answer": str(index + 1)}
        )

    def held_out(self, count):
        return [self.prompt(-1 - number) for number in range(count)]


def test_a_registered_prompt_source_is_built_by_its_kind(monkeypatch):
    monkeypatch.setattr(source, "SOURCES", {**source.SOURCES, "counting": lambda config: Counting()})
    built = source.build_source(with_kind("prompts", "counting"))
    assert built.prompt(4).text == "4 + 1 ="
    assert [prompt.task["answer"] for prompt in built.held_out(2)] == ["0", "-1"]


def test_a_registered_store_is_opened_by_its_scheme(monkeypatch):
    monkeypatch.setattr(
        object_store, "STORES", {**object_store.STORES, "example": lambda rest: MemoryStore(f"example-{rest}")}
    )
    store = object_store.open_store("example://bucket/runs")
    object_store.check_writable(store)
    store.put("run.json", b"{}")
    assert object_store.open_store("example://bucket/runs").get("run.json") == b"{}"
    assert not object_store.open_store("memory://bucket/runs").exists("run.json")


class ConstantEngine:
    """An engine that samples token 7 only; tests/contract/test_engine_contract.py tests a whole engine."""

    weight_version = 0

    async def generate(self, request):
        tokens = np.full(request.max_tokens, 7, dtype=np.int32)
        logprobs = np.zeros(request.max_tokens, dtype=np.float32)
        completion = Completion(
            token_ids=tokens,
            rollout_logprobs=logprobs,
            weight_spans=(WeightSpan(0, 0, request.max_tokens),),
            finish_reason=FinishReason.LENGTH,
        )
        yield Chunk(
            request_id=request.request_id,
            token_ids=tokens,
            rollout_logprobs=logprobs,
            weight_version=0,
            completion=completion,
        )


def test_a_registered_engine_is_started_by_its_kind(monkeypatch):
    async def start_constant(config, start):
        return ConstantEngine()

    async def sampled():
        start = load.EngineStart(
            directory=Path("model"), name="actor-0/1", staging=None, device=lambda: torch.device("cpu"), clock=None
        )
        engine = await load.start_engine(with_kind("engine", "constant"), start)
        prompt = np.array([1, 2], dtype=np.int32)
        request = EngineRequest(request_id="a", prompt_token_ids=prompt, max_tokens=3, sampler=Sampler())
        return [chunk.token_ids.tolist() async for chunk in engine.generate(request)]

    monkeypatch.setattr(load, "ENGINES", {**load.ENGINES, "constant": start_constant})
    assert asyncio.run(sampled()) == [[7, 7, 7]]


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
