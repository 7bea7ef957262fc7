"""The actor's log of open groups: when it is written, and what a store that fails costs."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from pipelinerl_core.errors import StoreError
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.roles.actor.log import GroupLog
from pipelinerl_core.types import PreviousHolder
from tests.builders import partial_row as row
from tests.fakes import MemoryStore
from tests.waiting import until


class Runner:
    """Has the rows it is given, once."""

    def __init__(self, *rows):
        self.rows = list(rows)
        self.forgotten = []

    def growth(self):
        rows, self.rows = self.rows, []
        return rows

    def forget(self, keys):
        self.forgotten += keys


def log_of(store, runner, events=None, **settings):
    said = [] if events is None else events
    engine = SimpleNamespace(flush=lambda: said.append("flush"))

    async def seal():
        said.append("seal")

    config = build_config({"store": settings})
    return GroupLog(config, store, engine, runner, actor="a", epoch=1, seal=seal)


def lease(*holders):
    return SimpleNamespace(group_id=5, attempt=1, holders=holders)


async def test_finished_groups_are_sealed_before_the_rest_is_written(store):
    events = []
    log = log_of(store, Runner(row()), events, partial_seconds=0.01)
    task = asyncio.create_task(log.run())
    await until(lambda: store.list("partials"), "a part of the log")
    assert not task.done()
    task.cancel()
    assert events[:2] == ["seal", "flush"]


async def test_an_actor_takes_over_the_log_of_another_actor(store):
    await log_of(store, Runner(row(num=4))).flush()
    taken = await log_of(store, Runner()).restore(lease(PreviousHolder("a", 1, 0)))
    assert {index: len(known.token_ids) for index, known in taken.items()} == {0: 4}


async def test_a_log_that_is_switched_off_writes_nothing_and_still_takes_over():
    store, runner, events = MemoryStore(), Runner(row()), []
    await log_of(store, Runner(row(num=2))).flush()
    before = store.list("partials")
    log = log_of(store, runner, events, partial_log=False)
    await asyncio.wait_for(log.run(), 1)
    await log.flush()
    await log.forget([(5, 0)])
    assert (store.list("partials"), events, runner.forgotten) == (before, [], [(5, 0)])
    assert len((await log.restore(lease(PreviousHolder("a", 1, 0))))[0].token_ids) == 2


def test_a_lease_without_previous_holders_reads_no_store():
    assert asyncio.run(log_of(SimpleNamespace(url="memory://"), Runner()).restore(lease())) == {}


def test_a_log_that_cannot_be_read_means_a_new_beginning(store, monkeypatch, caplog):

    def fail(_prefix):
        raise StoreError("503")

    monkeypatch.setattr(store, "list", fail)
    assert asyncio.run(log_of(store, Runner()).restore(lease(PreviousHolder("a", 1, 0)))) == {}
    assert "group 5 is sampled from the start" in caplog.text


async def test_logs_that_do_not_come_occupy_few_threads_and_none_of_those_of_other_work(store, monkeypatch):
    is_there, waiting = threading.Event(), []

    def wait(_prefix):
        waiting.append(threading.current_thread().name)
        assert is_there.wait(60)
        return []

    monkeypatch.setattr(store, "list", wait)
    log = log_of(store, Runner())
    leases = [asyncio.create_task(log.restore(lease(PreviousHolder(f"a{number}", 1, 0)))) for number in range(64)]
    try:
        await until(lambda: waiting, "a reading")
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "sealed"), 60) == "sealed"
        assert len(waiting) <= 4
    finally:
        is_there.set()
    assert await asyncio.gather(*leases) == [{}] * 64
    assert len(set(waiting)) <= 4


@pytest.mark.parametrize(
    ("url", "settings", "seconds"),
    [
        ("file:///tmp/x", {}, 1.0),
        ("s3://bucket/x", {}, 5.0),
        ("s3://bucket/x", {"partial_seconds": 2.0}, 2.0),
        ("file:///tmp/x", {"partial_log": False, "partial_seconds": 2.0}, 0.0),
    ],
)
def test_the_interval_of_the_log_follows_the_store(url, settings, seconds):
    assert build_config({"store": settings}).store.log_seconds(url) == seconds
