"""The epoch of an actor is newer than any that its name has had, whatever its clock says."""

import time

import pytest

from pipelinerl_core.roles.actor import main
from pipelinerl_core.run.records import partial_key, retired_key, rollout_key


@pytest.mark.parametrize("key", [rollout_key, partial_key, lambda actor, epoch, _: retired_key(actor, epoch)])
def test_an_actor_whose_clock_is_behind_its_predecessors_has_a_newer_epoch_all_the_same(store, monkeypatch, key):
    monkeypatch.setattr(time, "time", lambda: 1000.5)
    assert main.next_epoch(store, "actor-1") == 1000
    store.put(key("actor-1", 999, 0), b"x")
    store.put(key("actor-10", 5000, 0), b"x")
    assert main.next_epoch(store, "actor-1") == 1000
    store.put(key("actor-1", 1000, 0), b"x")
    assert main.next_epoch(store, "actor-1") == 1001
    store.put(key("actor-1", 3600, 7), b"x")
    assert main.next_epoch(store, "actor-1") == 3601
