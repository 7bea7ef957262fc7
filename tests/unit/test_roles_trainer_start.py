"""A start of the trainer that has nothing left to do."""

import threading

import pytest

from pipelinerl_core.config import load_config
from pipelinerl_core.errors import Fenced, RankLost
from pipelinerl_core.records import RunRecord, commit_key
from pipelinerl_core.roles import trainer
from pipelinerl_core.roles.context import RunContext
from pipelinerl_core.roles.control import ask_to_drain
from pipelinerl_core.roles.history import read_epochs, take_epoch
from pipelinerl_core.roles.monitor import RoleMonitor
from pipelinerl_core.testing.fakes import MemoryStore

STEPS = 3


class Opened(Exception):
    """The learners were to be loaded."""


@pytest.fixture
def context(monkeypatch) -> RunContext:
    def open_learners(*arguments):
        raise Opened

    monkeypatch.setattr(trainer, "open_learners", open_learners)
    record = RunRecord(run_id="run-1", created_at=0.0, code_version="test", config={})
    config = load_config("quickstart", [f"trainer.steps={STEPS}"])
    return RunContext(store=MemoryStore(), record=record, config=config, token="token")


def start(context: RunContext) -> None:
    trainer.train(context, threading.Event(), RoleMonitor("trainer", "trainer"))


def commit_through(context: RunContext, last: int) -> None:
    for step in range(last + 1):
        context.store.put(commit_key(step, 1), b"{}")


def test_after_the_last_commit_it_takes_no_epoch_and_loads_nothing(context):
    commit_through(context, STEPS)
    start(context)
    assert read_epochs(context.store) == []


def test_a_run_that_is_to_drain_is_not_gone_on_with(context):
    commit_through(context, 1)
    ask_to_drain(context.store, by="this test")
    start(context)
    assert read_epochs(context.store) == []


@pytest.mark.parametrize(("last", "drains"), [(STEPS - 1, False), (-1, True), (-1, False)])
def test_what_is_left_to_do_is_done(context, last, drains):
    """A drain before the first commit still leaves a run to go on from."""
    commit_through(context, last)
    if drains:
        ask_to_drain(context.store, by="this test")
    with pytest.raises(Opened):
        start(context)
    assert len(read_epochs(context.store)) == 1


@pytest.mark.parametrize(("newer", "error"), [(True, Fenced), (False, RankLost)])
def test_ranks_that_have_gone_to_a_newer_trainer_are_not_taken_back(context, monkeypatch, newer, error):
    """Two that are started again whenever they lose their ranks would take them from each other for ever."""

    def open_learners(*arguments):
        if newer:
            take_epoch(context.store, "trainer", -1)
        raise RankLost("step 1: a rank of the trainer is gone or silent")

    monkeypatch.setattr(trainer, "open_learners", open_learners)
    with pytest.raises(error):
        start(context)
