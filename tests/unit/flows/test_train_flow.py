"""What the train flow starts, and when it does not; roles that are only names."""

import logging
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from pipelinerl.flows import environment, train_flow
from pipelinerl.tasks import preflight
from pipelinerl_core.config import load_config
from pipelinerl_core.run.drain import ask_to_drain
from pipelinerl_core.supervision import supervise
from pipelinerl_core.testing.fakes import MemoryStore


class RunRoles:
    """Takes note of who is started; a trainer that drains ends, as it does within seconds."""

    during_evaluation = staticmethod(lambda: None)
    newest: "RunRoles"

    def __init__(self, run, on_wait) -> None:
        self.started: list[str] = []
        self.ended: set[str] = set()
        self.is_stopped = False
        RunRoles.newest = self

    def start(self, name: str) -> None:
        self.started.append(name)

    def wait_until(self, what, condition, seconds) -> None: ...

    def wait(self, seconds: float) -> None:
        self.ended.add("trainer")

    def evaluate(self, version: str) -> None:
        self.started.append(version)
        if version == "first":
            self.during_evaluation()

    def has_ended(self, name: str) -> bool:
        return name in self.ended

    def stop(self, *, keep_evaluator: bool = False) -> None:
        self.is_stopped = not keep_evaluator


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(train_flow, "RunRoles", RunRoles)
    config = load_config("quickstart", ["placement.actors=2", "eval.num_prompts=10"])
    return SimpleNamespace(store=MemoryStore(), config=config, run_id="a-run-of-this-test")


def started(run) -> list[str]:
    train_flow.run_roles(run, MagicMock(committed_step=0))
    assert RunRoles.newest.is_stopped
    return RunRoles.newest.started


def test_a_run_starts_everybody_and_is_evaluated_twice(run):
    assert started(run) == ["hub", "trainer", "evaluator", "first", "actor-0", "actor-1", "last"]


@pytest.mark.parametrize(
    "settings", [["eval.on=actors"], ["eval.subset=0"], ["trainer.steps=19"], ["engine.kind=vllm"]], ids=str
)
def test_no_evaluator_is_started_beside_training(run, settings):
    run.config = load_config("quickstart", ["placement.actors=1", "eval.num_prompts=10", *settings])
    assert started(run) == ["hub", "trainer", "first", "actor-0", "last"]


def test_no_actor_is_started_for_a_trainer_that_has_ended_during_the_first_evaluation(run, monkeypatch):
    monkeypatch.setattr(RunRoles, "during_evaluation", lambda self: self.ended.add("trainer"))
    assert started(run) == ["hub", "trainer", "evaluator", "first", "last"]


def test_no_actor_is_started_after_a_drain_during_the_first_evaluation(run, monkeypatch):
    monkeypatch.setattr(RunRoles, "during_evaluation", lambda self: ask_to_drain(run.store, by="this test"))
    assert started(run) == ["hub", "trainer", "evaluator", "first"]


def test_a_drain_that_a_resume_has_kept_is_not_evaluated_first(run):
    ask_to_drain(run.store, by="this test")
    assert started(run) == ["hub", "trainer", "evaluator"]


def test_log_lines_of_flows_and_tasks_reach_the_flow_run():
    shown = environment._DEFAULTS["PREFECT_LOGGING_EXTRA_LOGGERS"].split(",")
    train_flow.show_supervision()
    for module in (preflight, train_flow, supervise):
        assert any(module.logger.name.startswith(f"{name}.") for name in shown)
        assert module.logger.isEnabledFor(logging.INFO)
