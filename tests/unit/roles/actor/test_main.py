"""The epoch of an actor is newer than any that its name has had, whatever its clock says, and is its alone."""

import time

import pytest

from pipelinerl_core.roles.actor import main
from pipelinerl_core.run.records import LIVES_PREFIX, life_key
from tests.fakes import MemoryStore


def test_an_actor_whose_clock_is_behind_its_predecessors_has_a_newer_epoch_all_the_same(store, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1000.5)
    store.put(life_key("actor-1", 999), b"")
    store.put(life_key("actor-10", 5000), b"")
    assert [main.take_life(store, "actor-1") for _ in range(2)] == [1000, 1001]
    store.put(life_key("actor-1", 3600), b"")
    assert main.take_life(store, "actor-1") == 3601


class Late(MemoryStore):
    """A store whose listings lack what other processes have just written."""

    def list(self, prefix):
        return []


@pytest.mark.parametrize("kind", [MemoryStore, Late])
def test_two_starts_within_one_second_have_different_epochs(monkeypatch, kind):
    monkeypatch.setattr(time, "time", lambda: 1000.5)
    store = kind()
    assert [main.take_life(store, "actor-1") for _ in range(3)] == [1000, 1001, 1002]
    assert MemoryStore.list(store, LIVES_PREFIX) == [life_key("actor-1", epoch) for epoch in (1000, 1001, 1002)]
