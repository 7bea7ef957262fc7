"""Evaluations during training on an actor's engine: which versions, one at a time, and errors that end no actor."""

import asyncio
from types import SimpleNamespace

import pytest

from pipelinerl_core.errors import StoreError
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.roles.actor import evaluating
from pipelinerl_core.roles.actor.evaluating import ActorEvaluation
from pipelinerl_core.roles.actor.loop import Actor
from pipelinerl_core.run.records import eval_key
from tests.fakes import MemoryStore


class Evaluation:
    """Writes the record of the engine's version when `go` is set."""

    def __init__(self, context, engine, *, slots, newest_step) -> None:
        self.context, self.engine, self.slots = context, engine, slots
        self.go = asyncio.Event()
        self.begun = []
        context.built.append(self)

    async def run(self, num_prompts):
        version = self.engine.weight_version
        self.begun.append((version, num_prompts))
        await self.go.wait()
        self.go.clear()
        self.context.store.put(eval_key(version), b"{}")


@pytest.fixture
def actor(monkeypatch):
    monkeypatch.setattr(evaluating, "Evaluation", Evaluation)
    config = load_config("quickstart", ["trainer.steps=40", "eval.every_steps=10", "eval.subset=16"])
    engine = SimpleNamespace(weight_version=0, stats=lambda: SimpleNamespace(slots=64))
    context = SimpleNamespace(config=config, store=MemoryStore(), built=[])
    return SimpleNamespace(engine=engine, context=context, evaluation=ActorEvaluation(context, engine))


async def settle():
    for _ in range(20):
        await asyncio.sleep(0.005)


async def test_each_due_version_is_evaluated_once_by_an_engine_with_that_or_a_later_version(actor):
    async with asyncio.TaskGroup() as tasks:
        for version in (0, 5, 9, 12):
            actor.engine.weight_version = version
            actor.evaluation.consider(tasks)
        await settle()
        (built,) = actor.context.built
        assert (built.begun, built.slots) == ([(12, 16)], 8), "an eighth of the slots"
        actor.engine.weight_version = 20
        actor.evaluation.consider(tasks)
        await settle()
        assert built.begun == [(12, 16)], "one at a time"
        built.go.set()
        await settle()
        for version in (20, 21, 22):
            actor.engine.weight_version = version
            actor.evaluation.consider(tasks)
            await settle()
        assert built.begun == [(12, 16), (20, 16)]
        built.go.set()
        await settle()
        actor.engine.weight_version = 40
        actor.evaluation.consider(tasks)
        await settle()
        assert built.begun[2:] == [(40, 16)], "version 30 is due, and the engine has version 40"
        actor.evaluation.cancel()


async def test_tokens_that_an_evaluation_samples_are_counted_apart(actor, monkeypatch):
    """The actor does not report them: the ledger would count them as in flight, and after its end as superseded."""

    class Sampling(Evaluation):
        async def run(self, num_prompts):
            async for _ in self.engine.generate(None):
                pass

    async def generate(request):
        for num in (3, 4):
            yield SimpleNamespace(token_ids=[1] * num)

    monkeypatch.setattr(evaluating, "Evaluation", Sampling)
    actor.engine.generate, actor.engine.weight_version = generate, 10
    async with asyncio.TaskGroup() as tasks:
        actor.evaluation.consider(tasks)
    assert actor.evaluation.num_tokens == 7
    actor.engine.stats = lambda: SimpleNamespace(num_tokens=100)
    loop = SimpleNamespace(_engine=actor.engine, _evaluation=actor.evaluation, _most_sampled=90)
    assert Actor._num_sampled(loop) == 93
    actor.engine.stats = lambda: SimpleNamespace(num_tokens=99)  # tokens of the evaluation arrive in chunks
    assert Actor._num_sampled(loop) == 93


async def test_a_version_that_another_actor_has_evaluated_is_left_out(actor):
    actor.context.store.put(eval_key(11), b"{}")
    actor.engine.weight_version = 12
    async with asyncio.TaskGroup() as tasks:
        actor.evaluation.consider(tasks)
    assert actor.context.built == []


async def test_an_error_is_logged_and_the_next_due_version_is_tried(actor, caplog, monkeypatch):
    def away(prefix):
        raise StoreError("the store is away")

    with monkeypatch.context() as patch:
        patch.setattr(actor.context.store, "list", away)
        actor.engine.weight_version = 10
        async with asyncio.TaskGroup() as tasks:
            actor.evaluation.consider(tasks)
    assert "version 10 was not evaluated: the store is away" in caplog.text
    async with asyncio.TaskGroup() as tasks:
        actor.engine.weight_version = 20
        actor.evaluation.consider(tasks)
        await settle()
        actor.context.built[0].go.set()
    assert actor.context.store.exists(eval_key(20))


async def test_a_version_is_evaluated_again_if_an_actor_has_ended_between_two_sets(actor):
    actor.context.store.put(eval_key(11, "hard"), b"{}")
    actor.engine.weight_version = 12
    async with asyncio.TaskGroup() as tasks:
        actor.evaluation.consider(tasks)
        await settle()
        actor.context.built[0].go.set()
    assert actor.context.store.exists(eval_key(12))
