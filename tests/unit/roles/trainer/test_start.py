"""A start of the trainer that has nothing left to do."""

import socket
import threading
import time

import pytest

from pipelinerl_core.channel.server import HubServer
from pipelinerl_core.errors import Fenced, MissingObject, RankLost, RunOver, StoreUnavailable, TrainingDiverged
from pipelinerl_core.messages import Register
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.roles.runtime.monitor import RoleMonitor
from pipelinerl_core.roles.trainer import already_done, main
from pipelinerl_core.run.context import RunContext
from pipelinerl_core.run.drain import ask_to_drain
from pipelinerl_core.run.history import read_epochs, take_epoch
from pipelinerl_core.run.records import HUB_KEY, commit_key
from tests.builders import hub_record, put_commit, run_record
from tests.fakes import MemoryStore
from tests.stream_hub import QueueHub
from tests.synthetic_run import put_record

STEPS = 3


class Opened(Exception):
    """The learners were to be loaded."""


@pytest.fixture
def context(monkeypatch) -> RunContext:
    def open_learners(*arguments):
        raise Opened

    monkeypatch.setattr(main, "open_learners", open_learners)
    record = run_record()
    config = load_config("quickstart", [f"trainer.steps={STEPS}"])
    return RunContext(store=MemoryStore(), record=record, config=config, token="token")


def start(context: RunContext) -> None:
    main.train(context, threading.Event(), RoleMonitor("trainer", "trainer"))


def commit_through(context: RunContext, last: int) -> None:
    for step in range(last + 1):
        context.store.put(commit_key(step, 1), b"{}")


def complete(context: RunContext, epoch: int) -> None:
    """The last step is committed; its trainer has died."""
    commit_through(context, STEPS)
    put_commit(context.store, STEPS, epoch)


def test_after_the_last_commit_a_trainer_takes_no_epoch_and_loads_nothing(context, monkeypatch):
    complete(context, 1)
    monkeypatch.setattr(already_done, "HUB_SECONDS", 0.0)
    start(context)
    assert read_epochs(context.store) == []


def test_a_hub_that_lacks_the_last_commit_receives_the_commit(context):
    """Else it would wait for ever, and every actor with it."""
    complete(context, take_epoch(context.store, "trainer", -1).epoch)
    hub = QueueHub()
    server = HubServer(hub, host="127.0.0.1", port=0, token=context.token)
    server.start()
    stored_hub = hub_record(url=server.url, host=socket.gethostname(), beat=time.time())
    put_record(context.store, HUB_KEY, stored_hub)
    start(context)
    assert server.shutdown(60.0)
    (message,) = (message for message in hub.received if isinstance(message, Register))
    assert (message.role, message.committed_step, message.epoch) == ("trainer", STEPS, 1)
    assert len(read_epochs(context.store)) == 1


def test_a_run_that_is_to_drain_is_not_gone_on_with(context):
    commit_through(context, 1)
    ask_to_drain(context.store, by="this test")
    start(context)
    assert read_epochs(context.store) == []


@pytest.mark.parametrize(("last", "drains"), [(STEPS - 1, False), (-1, True), (-1, False)])
def test_a_trainer_with_steps_or_a_first_commit_to_do_opens_the_run(context, last, drains):
    """A drain before the first commit still leaves a run to go on from."""
    commit_through(context, last)
    if drains:
        ask_to_drain(context.store, by="this test")
    with pytest.raises(Opened):
        start(context)
    assert len(read_epochs(context.store)) == 1


@pytest.mark.parametrize("newer", [True, False])
@pytest.mark.parametrize("error", [RankLost("a rank"), RunOver("the run"), MissingObject("batches/1.1")])
def test_a_trainer_whose_ranks_run_or_rows_a_newer_trainer_has_taken_is_fenced(context, monkeypatch, newer, error):
    """Two that are started again whenever they lose their ranks would take them from each other for ever."""

    def open_learners(*arguments):
        if newer:
            take_epoch(context.store, "trainer", -1)
        raise error

    monkeypatch.setattr(main, "open_learners", open_learners)
    with pytest.raises(Fenced if newer else type(error)):
        start(context)


def test_the_error_of_a_trainer_is_not_replaced_by_an_outage(context, monkeypatch):
    def fail(*arguments):
        raise TrainingDiverged("step 1: the loss is nan")

    def unavailable(*arguments):
        raise StoreUnavailable("no answer")

    monkeypatch.setattr(main, "open_learners", fail)
    monkeypatch.setattr(main, "check_not_fenced", unavailable)
    with pytest.raises(TrainingDiverged):
        start(context)
