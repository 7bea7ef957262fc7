"""What the actor's loops do between the engine and the hub, without either.

Each test runs one loop alone: the test sets the attributes that the other loops of the actor set otherwise.
"""

import asyncio
import time
from types import SimpleNamespace

import pytest

from pipelinerl_core.errors import EngineError, StoreUnavailable, SwapError
from pipelinerl_core.roles.actor.finished_group import FinishedGroup
from tests.builders import group_named, weight_manifest
from tests.unit.roles.actor.actor_case import Engine, Link, actor, turns
from tests.waiting import until


def group(group_id):
    ref = group_named(group_id, num_rollouts=8, num_tokens=80)
    return FinishedGroup(ref, f"lease-{group_id}", rows=None)


@pytest.mark.parametrize(("credit", "first"), [(10, [0, 1, 2, 3, 4]), (3, [0, 1, 2])])
async def test_finished_groups_are_sent_together_up_to_the_credit(credit, first, monkeypatch):
    visits = []
    link = Link()
    tested_actor = actor(link)
    send = tested_actor._send
    monkeypatch.setattr(
        tested_actor, "_send", lambda groups: visits.append([g.ref.group_id for g in groups]) or send(groups)
    )
    for group_id in range(5):
        tested_actor._unsent.put_nowait(group(group_id))
    loop = asyncio.create_task(tested_actor._send_loop())
    await turns()
    assert visits == []  # without credit nothing is sent
    tested_actor._credit = credit
    tested_actor._credit_granted.set()
    await until(lambda: len(link.groups) >= len(first), f"{len(first)} groups")
    await turns()
    loop.cancel()
    assert link.groups == first
    assert visits == [first]


@pytest.mark.parametrize(("failures", "is_given_up"), [(0, False), (2, False), (3, True)])
async def test_a_failed_swap_is_repeated_and_the_third_failure_ends_the_actor(failures, is_given_up):
    engine = Engine(failures)
    tested_actor = actor(Link(), engine)
    loop = asyncio.create_task(tested_actor._swap_loop())
    for _ in range(5):  # the hub offers the newest version with every sync
        tried, end = engine.num_swaps, time.monotonic() + 60
        tested_actor._newest = weight_manifest(7)
        tested_actor._newer.set()
        while engine.num_swaps == tried and engine.weight_version != 7 and not loop.done():
            assert time.monotonic() < end
            await turns(1)
        await turns(10)
    if is_given_up:
        with pytest.raises(SwapError, match="starts again"):
            await loop
    loop.cancel()
    assert (engine.weight_version, len(tested_actor._swaps)) == ((0, 0) if is_given_up else (7, 1))


async def test_weights_that_a_store_cannot_give_now_are_read_at_a_later_sync_and_not_published_again():
    def fetch(manifest):
        fetched.append(manifest.version)
        if len(fetched) < 3:
            raise StoreUnavailable("503")
        return SimpleNamespace(version=manifest.version)

    engine, fetched = Engine(failures=0), []
    tested_actor = actor(Link(), engine)
    tested_actor._subscriber.fetch = fetch
    loop = asyncio.create_task(tested_actor._swap_loop())
    for number in (1, 2, 3):  # the hub offers the newest version with every sync
        tested_actor._newest = weight_manifest(7)
        tested_actor._newer.set()
        await until(lambda number=number: loop.done() or len(fetched) == number, "an attempt")
        assert tested_actor._unreadable == -1
    await until(lambda: loop.done() or engine.weight_version == 7, "a swap")
    assert not loop.done()
    loop.cancel()


def test_an_engine_that_has_ended_for_good_ends_its_actor_which_may_start_again():
    engine = Engine(failures=0)
    actor(Link(), engine)._check_failures()
    engine.failure = "the engine failed: OutOfMemoryError"
    with pytest.raises(EngineError, match="OutOfMemoryError"):
        actor(Link(), engine)._check_failures()
