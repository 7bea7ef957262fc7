"""Who waits for whom, by hand. Every actor has 8 slots, a group is 4 rollouts."""

import pytest

from pipelinerl_core.ledger import ActorKey, GroupSummary, Ledger
from pipelinerl_core.ledger.waits import Waits, empty_share
from pipelinerl_core.messages import Sync
from tests.builders import group_named, small_config, sync_message

A, B = ActorKey("actor-0", 1), ActorKey("actor-1", 1)


def totals(waits: Waits) -> dict[str, float]:
    return {cause: seconds for cause, seconds in waits.totals().items() if seconds}


def test_the_trainer_waits_for_busy_engines():
    waits = Waits()
    waits.actor_synced(A, 10.0, 0.0)
    waits.trainer_waits(10.0)
    waits.trainer_waits(10.5)
    waits.trainer_resumes(10.75)
    waits.trainer_resumes(12.0)  # it did not wait since
    assert totals(waits) == {"engine": 0.75}


def test_empty_slots_share_the_wait_between_window_and_engine():
    waits = Waits()
    waits.actor_synced(A, 10.0, 0.5)
    waits.actor_synced(B, 10.0, 0.0)
    waits.trainer_waits(10.0)  # a quarter of all slots is empty
    waits.trainer_resumes(11.0)
    assert totals(waits) == {"window": 0.25, "engine": 0.75}


def test_a_change_at_a_sync_counts_from_then_on():
    waits = Waits()
    waits.actor_synced(A, 10.0, 0.0)
    waits.trainer_waits(10.0)
    waits.actor_synced(A, 10.5, 1.0)  # full until here, empty from here on
    waits.trainer_resumes(11.25)
    waits.actor_synced(A, 11.25, 0.0)
    assert totals(waits) == {"engine": 0.5, "window": 0.75, "actors": 0.75}


def test_a_step_that_is_held_back_waits_for_old_groups_whatever_the_engines_do():
    waits = Waits()
    waits.actor_synced(A, 10.0, 1.0)
    waits.trainer_waits(10.0)
    waits.trainer_waits(10.5, is_held_back=True)
    waits.trainer_resumes(11.5)
    assert totals(waits) == {"window": 0.5, "stale_wait": 1.0}


def test_actors_lose_engine_time_whether_or_not_the_trainer_waits():
    waits = Waits()
    for now, share in ((10.0, 0.25), (11.0, 0.5), (12.0, 0.0), (13.0, 0.0)):
        waits.actor_synced(A, now, share)
    waits.actor_synced(B, 12.0, 1.0)
    waits.actor_synced(B, 12.5, 0.0)
    assert totals(waits) == {"actors": 0.25 + 0.5 + 0.5}


def test_a_silent_role_is_not_waiting():
    waits = Waits()
    waits.actor_synced(A, 10.0, 1.0)
    waits.trainer_waits(20.0)  # the actor is gone
    waits.actor_synced(B, 29.0, 0.0)  # and so is the trainer, since 22
    waits.trainer_waits(30.0)
    waits.trainer_resumes(30.5)
    waits.actor_synced(A, 40.0, 0.0)  # back after half a minute, of which it was heard for no more than 2 s
    assert totals(waits) == {"engine": 2.5, "actors": 2.0}


def test_a_clock_that_steps_back_takes_nothing_away():
    waits = Waits()
    waits.trainer_waits(10.0)
    waits.trainer_waits(9.0)
    waits.trainer_resumes(9.5)
    assert totals(waits) == {"engine": 0.5}


def test_totals_go_on_from_a_commit():
    waits = Waits({"engine": 7.0})
    waits.trainer_waits(1.0)
    waits.trainer_resumes(2.0)
    assert totals(waits) == {"engine": 8.0}


@pytest.mark.parametrize(
    ("running", "waiting", "want", "leases", "share"),
    [
        (8, 0, 1, 0, 0.0),  # full, and asks ahead
        (4, 2, 2, 0, 0.25),  # two slots empty, nothing granted
        (0, 0, 3, 1, 0.5),  # one of three groups granted: half the slots get work
        (0, 0, 2, 2, 0.0),  # all granted
        (0, 0, 0, 0, 0.0),  # wants none: it is not ready itself
        (6, 4, 1, 0, 0.0),  # more sequences than slots
    ],
)
def test_slots_are_empty_in_vain_when_more_was_asked_for_than_granted(running, waiting, want, leases, share):
    assert empty_share(sync(running, want, waiting=waiting), leases, 4) == share


def sync(running: int, want: int, waiting: int = 0, leases: tuple[str, ...] = ()) -> Sync:
    return sync_message(running=running, waiting=waiting, want=want, leases=leases)


def test_a_reservation_has_the_waits_before_its_step():
    """N = 2, max_lag = 1: W = 4 groups."""
    now = [0.0]
    ledger = Ledger(small_config(), clock=lambda: now[0])
    ledger.committed(0, (), None)
    ledger.register_actor(A)
    first = ledger.sync(A, sync(0, want=2)).leases
    assert not ledger.reserve(1, epoch=2).is_ready
    now[0] = 1.0
    names = tuple(grant.lease_id for grant in first)
    second = ledger.sync(A, sync(4, want=5, leases=names)).leases
    assert (len(first), len(second)) == (2, 2)  # 4 running and 8 granted: its slots are full
    now[0] = 1.5
    names += tuple(grant.lease_id for grant in second)
    assert not ledger.sync(A, sync(2, want=2, leases=names)).leases  # 6 of 8 slots are empty, no place is free
    now[0] = 2.0
    for grant in first:
        ref = group_named(grant.group_id, num_rollouts=4, num_tokens=4)
        ledger.add_group(GroupSummary(ref=ref, rewards=(0.0, 1.0), tokens_by_version={0: 4}), grant.lease_id)
    answer = ledger.reserve(1, epoch=2)
    assert answer.waits == {"engine": 1.5 + 0.5 * 0.25, "window": 0.5 * 0.75, "stale_wait": 0.0, "actors": 0.0}
    ledger.sync(A, sync(0, want=0))
    assert ledger.waits.totals()["actors"] == 0.5 * 0.75
