"""Turns on one GPU: who may compute when."""

import asyncio
import os
import shutil
import threading
import time
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from pipelinerl_core.errors import DeadlineExceeded
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.roles.runtime import gpu_turns
from pipelinerl_core.roles.runtime.gpu_turns import ActorTurns, trainer_turn
from pipelinerl_core.weights.memory import shm_directory
from tests.waiting import until

TURNS = load_config("quickstart", ["placement.share_gpu=turns", "eval.on=actors"])


@pytest.fixture
def context():
    run_id = f"test-turns-{os.getpid()}-{time.monotonic_ns()}"
    yield SimpleNamespace(run_id=run_id, config=TURNS)
    shutil.rmtree(shm_directory(run_id), ignore_errors=True)


class Engine:
    def __init__(self, events):
        self._events = events

    @asynccontextmanager
    async def resting(self):
        self._events.append("engine rests")
        yield
        self._events.append("engine computes")


def test_the_trainer_computes_while_the_engine_rests(context):
    events, has_turn, may_end = [], threading.Event(), threading.Event()

    def train():
        for step in (1, 2):
            with trainer_turn(context, print):
                events.append(f"step {step} begins")
                has_turn.set()
                assert may_end.wait(10)
                events.append(f"step {step} ends")
            has_turn.clear()
            may_end.clear()
            time.sleep(0.1)

    async def act():
        turns = ActorTurns(context, lambda phase: None)
        await turns.take()
        task = asyncio.create_task(turns.run(Engine(events)))
        trainer = asyncio.create_task(asyncio.to_thread(train))
        for _ in (1, 2):
            await until(has_turn.is_set, "the trainer's turn")
            await asyncio.sleep(0.05)
            may_end.set()
            await until(lambda: events[-1] == "engine computes", "the engine's turn")
        await trainer
        task.cancel()
        turns.close()

    asyncio.run(asyncio.wait_for(act(), 30))
    expected = [["engine rests", f"step {step} begins", f"step {step} ends", "engine computes"] for step in (1, 2)]
    assert events == [event for turn in expected for event in turn]


def test_each_wait_has_a_deadline(context, monkeypatch):
    monkeypatch.setattr(gpu_turns, "TURN_SECONDS", 0.1)
    turns = ActorTurns(context, lambda phase: None)
    with (
        trainer_turn(context, print),
        pytest.raises(DeadlineExceeded, match="the trainer has computed on the GPU for"),
    ):
        asyncio.run(turns.take())
    asyncio.run(turns.take())
    with pytest.raises(DeadlineExceeded, match="the actor has computed on the GPU for"), trainer_turn(context, print):
        pass
    turns.close()


def test_without_turns_there_is_no_lock():
    with trainer_turn(SimpleNamespace(run_id="never-created", config=load_config("quickstart")), print):
        assert not shm_directory("never-created").exists()
