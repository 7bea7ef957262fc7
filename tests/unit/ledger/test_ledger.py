"""The ledger against examples worked out by hand. N = 2 groups per step, max_lag = 1, so W = 4 groups."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pipelinerl_core.algo.advantages import per_turn
from pipelinerl_core.errors import Expelled, Fenced, StaleLease
from pipelinerl_core.ledger import ActorKey, Arrival, Grant, GroupSummary, Ledger, SealedGroup, SyncResult
from pipelinerl_core.ledger.order import deadline, split_trained
from pipelinerl_core.messages import FateRecord, LeaseRef, Reserved, SwapRecord
from pipelinerl_core.types import GroupRef, Origin, PreviousHolder, WeightManifest
from tests.builders import ManualClock, commit_record, small_config, sync_message, trained_by, weight_manifest

A, B, C = ActorKey("actor-0", 1), ActorKey("actor-1", 1), ActorKey("actor-2", 1)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def new_ledger(clock: ManualClock | None = None, *, committed: int = 0, first_attempt: int = 0, **changes) -> Ledger:
    ledger = Ledger(
        small_config(**changes), clock=clock or ManualClock(), boot_id="boot", first_attempt=first_attempt
    )
    if committed >= 0:
        ledger.committed(0, (), manifest(0))
    return ledger


def manifest(version: int, host: str = "here") -> WeightManifest:
    return weight_manifest(version, host=host)


def sync(
    ledger: Ledger, actor: ActorKey, want: int, leases: Sequence[str] = (), version: int = 0, tokens: int = 0, **more
) -> SyncResult:
    message = sync_message(engine_version=version, want=want, leases=tuple(leases), num_tokens=tokens, **more)
    return ledger.sync(actor, message)


def lease(ledger: Ledger, actor: ActorKey, want: int, version: int = 0) -> list[Grant]:
    ledger.register_actor(actor)
    return list(sync(ledger, actor, want, version=version).leases)


def leased(want: int, clock: ManualClock | None = None, **changes) -> tuple[Ledger, list[Grant]]:
    """A new ledger of which actor A has leased `want` groups, and the leases."""
    ledger = new_ledger(clock, **changes)
    return ledger, lease(ledger, A, want)


def summary(
    group_id: int,
    versions: dict[int, int],
    attempt: int = 0,
    actor: ActorKey = A,
    rewards=(0.0, 1.0),
    unscored: int = 0,
    has_turn_rewards: bool = False,
) -> GroupSummary:
    ref = GroupRef(
        group_id=group_id, attempt=attempt, actor=actor.name, actor_epoch=actor.epoch, num_rollouts=4,
        num_tokens=sum(versions.values()) + unscored,
    )  # fmt: skip
    return GroupSummary(ref=ref, rewards=rewards, tokens_by_version=versions, has_turn_rewards=has_turn_rewards)


def deliver(ledger: Ledger, grant: Grant, versions: dict[int, int] | None = None, **more) -> Arrival:
    given = summary(grant.group_id, {0: 10} if versions is None else versions, attempt=grant.attempt, **more)
    return ledger.add_group(given, grant.lease_id)


def deliver_all(ledger: Ledger, grants: Sequence[Grant], versions: dict[int, int] | None = None, **more) -> None:
    for grant in grants:
        deliver(ledger, grant, versions, **more)


def commit(ledger: Ledger, step: int, answer: Reserved) -> None:
    ledger.committed(step, answer.decided, manifest(step))


def trained(*group_ids: int) -> list[FateRecord]:
    return [FateRecord(group_id=group_id, attempt=0, fate="trained", num_tokens=10) for group_id in group_ids]


def ids(answer: Reserved) -> list[int]:
    return [ref.group_id for ref in answer.groups]


def check_closes(tokens: dict[str, int]) -> None:
    assert tokens["generated"] == sum(number for name, number in tokens.items() if name != "generated"), tokens
    assert min(tokens.values()) >= 0, tokens


# ---- order -------------------------------------------------------------------------------------------------------


def test_deadline_follows_the_oldest_live_token_and_moves_on_when_that_token_dies():
    group = summary(0, {3: 5, 7: 1})
    assert deadline(group, 8, max_lag=4, stale="mask") == 8  # version 3: lag 8 - 1 - 3 = 4, live for the last time
    assert deadline(group, 9, max_lag=4, stale="mask") == 12  # only version 7 is live: 7 + 1 + 4
    assert deadline(group, 12, max_lag=4, stale="mask") == 12
    assert deadline(group, 13, max_lag=4, stale="mask") is None


def test_drop_gives_up_a_group_with_its_first_dead_token():
    group = summary(0, {3: 5, 7: 1})
    assert deadline(group, 8, max_lag=4, stale="drop") == 8
    assert deadline(group, 9, max_lag=4, stale="drop") is None


def test_trained_tokens_split_into_live_dead_and_unscored():
    assert split_trained(summary(0, {3: 5, 7: 2}, unscored=4), 9, max_lag=4) == {
        "trained": 2,
        "masked_stale": 5,
        "failed": 4,
    }


# ---- admission ---------------------------------------------------------------------------------------------------


def test_window_admits_w_groups_and_no_more():
    ledger = new_ledger()
    assert [grant.group_id for grant in lease(ledger, A, want=3)] == [0, 1, 2]
    assert [grant.group_id for grant in lease(ledger, B, want=3)] == [3]
    assert ledger.counts.outstanding == 4


def test_ready_and_reserved_groups_hold_their_places_until_their_version_is_committed():
    ledger, grants = leased(4)
    deliver_all(ledger, grants)
    assert sync(ledger, A, want=4).leases == ()
    answer = ledger.reserve(1, epoch=2)
    assert sync(ledger, A, want=4).leases == ()
    commit(ledger, 1, answer)
    assert len(sync(ledger, A, want=4, version=1).leases) == 2


def test_steps_that_an_engine_has_not_seen_hold_places_for_its_actor_only():
    ledger = new_ledger()
    deliver_all(ledger, lease(ledger, A, want=2))
    commit(ledger, 1, ledger.reserve(1, epoch=2))
    assert len(lease(ledger, A, want=9, version=0)) == 2  # W - 1 unseen step * N
    assert len(lease(ledger, B, want=9, version=1)) == 2  # W - 2 leased


def test_without_lag_a_step_is_leased_only_after_its_version_has_been_swapped_in():
    ledger, grants = leased(9, engine={"concurrency": 4}, schedule={"max_lag": 0})
    assert len(grants) == 2
    deliver_all(ledger, grants)
    commit(ledger, 1, ledger.reserve(1, epoch=2))
    assert sync(ledger, A, want=9, version=0).leases == ()
    assert [grant.group_id for grant in sync(ledger, A, want=9, version=1).leases] == [2, 3]


def test_a_filtered_group_gives_its_place_back():
    ledger, grants = leased(4, rollouts={"filter_zero_variance": True})
    assert deliver(ledger, grants[0], rewards=(1.0, 1.0, 1.0)) is Arrival.FILTERED
    assert ledger.reserve(1, epoch=2).reason.endswith("; 1 were filtered, whose rewards are all equal")
    assert [grant.group_id for grant in sync(ledger, A, want=9, leases=[g.lease_id for g in grants[1:]]).leases] == [
        4
    ]


@pytest.mark.parametrize(
    ("advantage", "has_turn_rewards", "arrival"),
    [("turn", True, Arrival.READY), ("turn", False, Arrival.FILTERED), ("leave_one_out", True, Arrival.FILTERED)],
)
def test_equal_sums_of_rewards_of_turns_are_filtered_only_if_no_turn_is_credited(
    advantage, has_turn_rewards, arrival
):
    # Rewards of turns (1, 0) and (0, 1): returns (1, 0) and (1, 1), advantages (0, -1) and (0, 1).
    assert per_turn([1.0, 1.0], [2, 2], [(1.0, 0.0), (0.0, 1.0)]) == [(0.0, -1.0), (0.0, 1.0)]
    ledger, grants = leased(4, rollouts={"filter_zero_variance": True}, loss={"advantage": advantage})
    assert deliver(ledger, grants[0], rewards=(1.0, 1.0), has_turn_rewards=has_turn_rewards) is arrival


# ---- leases ------------------------------------------------------------------------------------------------------


def test_a_lease_the_actor_does_not_list_is_sent_again_and_counts_as_wanted():
    ledger, (first, second) = leased(2)
    result = sync(ledger, A, want=2, leases=[first.lease_id])
    assert [grant.lease_id for grant in result.leases] == [second.lease_id, "2.0.boot"]


def test_a_lease_of_another_actor_must_be_stopped():
    ledger, [grant] = leased(1)
    ledger.register_actor(B)
    assert sync(ledger, B, want=0, leases=[grant.lease_id, "7.0.boot"]).stop_leases == (grant.lease_id, "7.0.boot")


def test_an_expired_lease_goes_to_another_actor_before_new_prompts(clock):
    ledger, (first, _) = leased(2, clock)
    clock.now += 10.5
    assert ledger.expire() == [0, 1]
    assert [(grant.group_id, grant.attempt) for grant in lease(ledger, B, want=3)] == [(0, 1), (1, 1), (2, 0)]
    assert first.lease_id in sync(ledger, A, want=0, leases=[first.lease_id]).stop_leases


def test_a_sync_renews_its_leases(clock):
    ledger, [grant] = leased(1, clock)
    for _ in range(5):
        clock.now += 8
        sync(ledger, A, want=0, leases=[grant.lease_id])
        assert ledger.expire() == []


def test_time_in_which_the_hub_stood_still_expires_nothing(clock):
    ledger = new_ledger(clock)
    lease(ledger, A, want=1)
    clock.now += 60
    ledger.extend(60)
    assert ledger.expire() == []


def test_a_newer_epoch_of_an_actor_frees_the_leases_of_the_older_epoch_and_fences_that_epoch():
    ledger = new_ledger()
    lease(ledger, A, want=2)
    assert [grant.attempt for grant in lease(ledger, ActorKey("actor-0", 2), want=2)] == [1, 1]
    with pytest.raises(Fenced, match="epoch 2"):
        sync(ledger, A, want=1)


def test_the_groups_of_an_expelled_actor_go_to_others_and_its_next_epoch_is_admitted():
    ledger = new_ledger()
    lease(ledger, A, want=2)
    for _ in range(2):  # each reservation repeats the names
        ledger.expel([A])
    with pytest.raises(Expelled, match="does not sample from the versions"):
        sync(ledger, A, want=1)
    with pytest.raises(Expelled):
        ledger.register_actor(A)
    assert [(grant.group_id, grant.attempt) for grant in lease(ledger, B, want=2)] == [(0, 1), (1, 1)]
    assert lease(ledger, ActorKey("actor-0", 2), want=1)


def test_nobody_continues_the_tokens_of_an_expelled_actor():
    ledger, _ = leased(1)
    again = ActorKey("actor-0", 2)
    lease(ledger, again, want=1)  # it continues group 0 from the log of A
    ledger.bye(again)
    lease(ledger, B, want=2)
    ledger.bye(B)
    ledger.expel([again])
    grants = lease(ledger, C, want=2)
    holders = [grant.holders for grant in grants]
    assert holders == [(PreviousHolder("actor-0", 1, 0),), (PreviousHolder("actor-1", 1, 0),)]
    ledger.expel([C])
    assert [grant.holders for grant in lease(ledger, B, want=2)] == holders


def test_a_holder_that_has_continued_the_tokens_of_an_expelled_actor_is_not_continued_either():
    ledger, _ = leased(1)
    ledger.bye(A)
    (grant,) = lease(ledger, B, want=1)
    assert [holder.actor for holder in grant.holders] == [A.name]
    ledger.expel([A])
    ledger.bye(B)
    assert [again.holders for again in lease(ledger, C, want=1)] == [()]


def test_a_log_of_an_expelled_actor_that_a_restarted_hub_has_read_is_not_continued(clock):
    ledger = new_ledger(clock, first_attempt=1000)
    ledger.register_actor(B, [LeaseRef(group_id=1, attempt=0, lease_id="1.0.before")])  # group 0 was leased too
    ledger.restore_holders({0: [PreviousHolder(*A, 0)]})
    ledger.expel([A])
    clock.now += 6
    assert [grant.holders for grant in sync(ledger, B, want=1, leases=["1.0.before"]).leases] == [()]


def test_nothing_is_leased_once_the_last_step_is_committed():
    ledger = new_ledger(trainer={"steps": 1})
    deliver_all(ledger, lease(ledger, A, want=2))
    commit(ledger, 1, ledger.reserve(1, epoch=2))
    assert ledger.is_done
    assert sync(ledger, A, want=4, version=1).leases == ()


# ---- arrivals ----------------------------------------------------------------------------------------------------


def test_a_repeated_group_is_acknowledged_and_counted_once():
    ledger, [grant] = leased(1)
    assert deliver(ledger, grant) is Arrival.READY
    assert deliver(ledger, grant) is Arrival.KNOWN
    assert ledger.tokens()["ready"] == 10


def test_a_group_is_still_known_after_its_training():
    ledger, grants = leased(2)
    deliver_all(ledger, grants)
    commit(ledger, 1, ledger.reserve(1, epoch=2))
    assert deliver(ledger, grants[0]) is Arrival.KNOWN
    assert ledger.tokens()["trained"] == 20


def test_decided_groups_leave_no_trace_and_a_late_attempt_of_them_is_still_superseded(clock):
    ledger = new_ledger(clock)
    lost = lease(ledger, B, want=1)[0]
    clock.now += 11
    ledger.expire()
    for step in range(1, 20):
        for grant in lease(ledger, A, want=2, version=step - 1):
            deliver(ledger, grant, {step - 1: 10})
        commit(ledger, step, ledger.reserve(step, epoch=1))
    assert len(ledger._pool._attempts) == 1  # of the group that was leased twice
    with pytest.raises(StaleLease):
        deliver(ledger, lost, actor=B)
    assert deliver(ledger, Grant(group_id=5, attempt=0, lease_id="5.0.boot", deadline_seconds=0.0)) == Arrival.KNOWN
    again = Grant(group_id=5, attempt=1, lease_id="5.1.boot", deadline_seconds=0.0)
    with pytest.raises(StaleLease):
        deliver(ledger, again)
    sync(ledger, A, 0, tokens=390, version=18)  # 38 groups and the attempt that was refused
    assert ledger.tokens()["superseded"] == 20


def test_tokens_of_a_refused_attempt_that_another_actor_has_continued_count_once(clock):
    ledger, [grant] = leased(1, clock)
    sync(ledger, A, 0, leases=[grant.lease_id], tokens=10)
    clock.now += 11
    ledger.expire()
    [again] = lease(ledger, B, want=1)
    with pytest.raises(StaleLease):
        deliver(ledger, grant)
    assert ledger.tokens()["superseded"] == 10
    continued = summary(0, {0: 12}, attempt=1, actor=B)
    origins = ((A.name, A.epoch, 9),)  # the last token was not in the log
    continued = replace(continued, ref=replace(continued.ref, origins=origins))
    ledger.add_group(continued, again.lease_id)
    totals = ledger.tokens()
    assert (totals["generated"], totals["ready"], totals["superseded"]) == (13, 12, 1)
    check_closes(totals)


def test_rows_for_a_lost_lease_are_refused_and_superseded_once(clock):
    ledger, [grant] = leased(1, clock)
    clock.now += 11
    ledger.expire()
    lease(ledger, B, want=1)
    for _ in range(2):
        with pytest.raises(StaleLease, match="group 0"):
            deliver(ledger, grant)
    sync(ledger, A, 0, tokens=30)
    assert (ledger.tokens()["superseded"], ledger.tokens()["in_flight"]) == (10, 20)
    check_closes(ledger.tokens())


def test_rows_for_an_expired_lease_are_refused_before_the_group_is_leased_again(clock):
    ledger, [grant] = leased(1, clock)
    clock.now += 11
    ledger.expire()
    with pytest.raises(StaleLease):
        deliver(ledger, grant)
    assert (ledger.num_ready, ledger.num_queued) == (0, 1)


def test_rows_with_the_lease_of_another_actor_are_refused():
    ledger, [grant] = leased(1)
    with pytest.raises(StaleLease):
        deliver(ledger, grant, actor=B)


@pytest.mark.parametrize("rewards", [(), (1.0,)])
def test_a_group_with_fewer_than_two_scored_rollouts_fails(rewards):
    ledger, [grant] = leased(1)
    assert deliver(ledger, grant, rewards=rewards) is Arrival.FAILED
    assert ledger.tokens()["failed"] == 10


def test_equal_rewards_are_trained_unless_filtering_is_on():
    ledger, [grant] = leased(1)
    assert deliver(ledger, grant, rewards=(1.0, 1.0)) is Arrival.READY


# ---- reserve -----------------------------------------------------------------------------------------------------


def test_reserve_takes_the_earliest_deadlines_with_ties_by_group_id():
    ledger, grants = leased(4, schedule={"max_lag": 3})
    for grant, version in zip(reversed(grants), (0, 0, 1, 0), strict=True):  # groups 3, 2, 1, 0
        deliver(ledger, grant, {version: 10})
    assert ids(ledger.reserve(1, epoch=2)) == [0, 2]


def test_the_same_question_has_the_same_answer():
    ledger, grants = leased(4)
    deliver_all(ledger, (grants[1], grants[2]))
    first = ledger.reserve(1, epoch=2)
    deliver(ledger, grants[0])
    assert ledger.reserve(1, epoch=2) == first
    assert ids(first) == [1, 2]


def test_too_few_groups_are_not_ready_and_the_reason_says_why():
    ledger, grants = leased(4)
    deliver(ledger, grants[0])
    answer = ledger.reserve(1, epoch=2)
    assert not answer.is_ready
    assert answer.reason == "1 of 2 groups are ready, 3 leased, 0 queued"


def with_two_late_groups(**changes) -> tuple[Ledger, list[Grant]]:
    """Committed through step 2; groups 2 and 3 were leased at version 0 and have not arrived."""
    ledger = new_ledger(**changes)
    grants = lease(ledger, A, want=4)
    for step in (1, 2):
        todo = grants[:2] if step == 1 else lease(ledger, B, want=2, version=1)
        for grant in todo:
            deliver(ledger, grant, {step - 1: 10}, actor=A if step == 1 else B)
        commit(ledger, step, ledger.reserve(step, epoch=2))
    return ledger, grants[2:]


def test_a_stale_group_is_dropped_and_its_place_refilled():
    ledger, late = with_two_late_groups()
    for grant in late:
        deliver(ledger, grant, {0: 10})  # at step 3 a token of version 0 has lag 2
    assert sync(ledger, B, want=9, version=2).leases[0].group_id == 6
    assert ledger.counts.outstanding == 4
    assert not ledger.reserve(3, epoch=2).is_ready
    assert ledger.tokens()["dropped_stale"] == 20
    assert ledger.counts.outstanding == 2


def test_a_group_with_a_live_token_is_trained_and_its_dead_tokens_are_masked():
    ledger, late = with_two_late_groups()
    deliver_all(ledger, late, {0: 7, 1: 3}, unscored=2)
    commit(ledger, 3, ledger.reserve(3, epoch=2))
    tokens = ledger.tokens()
    assert (tokens["trained"], tokens["masked_stale"], tokens["failed"]) == (40 + 6, 14, 4)
    check_closes(tokens)


def test_under_drop_a_dead_token_costs_the_whole_group():
    ledger, late = with_two_late_groups(schedule={"stale": "drop"})
    deliver_all(ledger, late, {0: 7, 1: 3})
    assert not ledger.reserve(3, epoch=2).is_ready
    assert ledger.tokens()["dropped_stale"] == 20


def test_each_untrained_fate_is_told_in_exactly_one_reservation():
    ledger, grants = leased(8, rollouts={"filter_zero_variance": True}, schedule={"max_lag": 3})
    deliver(ledger, grants[0], rewards=(1.0, 1.0))
    deliver_all(ledger, grants[1:3])
    first = ledger.reserve(1, epoch=2)
    deliver(ledger, grants[3], rewards=())
    deliver_all(ledger, grants[4:6])
    second = ledger.reserve(2, epoch=2)  # before step 1 is committed
    assert [(fate.group_id, fate.fate, fate.num_tokens) for fate in first.fates] == [(0, "filtered", 10)]
    assert [(fate.group_id, fate.fate) for fate in second.fates] == [(3, "failed")]


def test_a_reservation_records_frontier_and_open_groups_without_those_of_reservations():
    ledger, grants = leased(6, schedule={"max_lag": 3})
    deliver_all(ledger, grants[:5])
    first = ledger.reserve(1, epoch=2)
    assert (first.next_group_id, first.open_groups) == (6, (2, 3, 4, 5))
    assert ledger.reserve(2, epoch=2).open_groups == (4, 5)


def test_the_tokens_of_a_reservation_count_every_earlier_step_as_trained():
    ledger = new_ledger(schedule={"max_lag": 3})
    deliver_all(ledger, lease(ledger, A, want=4))
    assert ledger.reserve(1, epoch=2).tokens["trained"] == 0
    second = ledger.reserve(2, epoch=2)  # step 1 is not committed, but will be before step 2
    assert (second.tokens["trained"], second.tokens["ready"]) == (20, 20)
    assert ledger.tokens()["trained"] == 0


def test_a_newer_trainer_frees_the_groups_and_fates_that_the_older_trainer_had_reserved():
    ledger, grants = leased(4, rollouts={"filter_zero_variance": True})
    deliver(ledger, grants[0], rewards=(1.0, 1.0))
    deliver_all(ledger, grants[1:3])
    assert len(ledger.reserve(1, epoch=2).fates) == 1
    ledger.register_trainer(3)
    assert (ledger.num_ready, ledger.num_reserved) == (2, 0)
    with pytest.raises(Fenced, match="replaced by epoch 3"):
        ledger.reserve(1, epoch=2)
    again = ledger.reserve(1, epoch=3)
    assert ids(again) == [1, 2]
    assert [fate.group_id for fate in again.fates] == [0]


def test_a_committed_step_cannot_be_reserved_again():
    ledger, _ = with_two_late_groups()
    with pytest.raises(Fenced, match="step 2 is committed already"):
        ledger.reserve(2, epoch=2)


# ---- commits and announcements -----------------------------------------------------------------------------------


def test_a_version_is_announced_by_its_commit_and_a_repeat_changes_nothing():
    ledger = new_ledger(committed=-1)
    assert ledger.newest_version == -1
    assert ledger.committed(0, (), manifest(0))
    assert not ledger.committed(0, (), manifest(0, host="there"))
    assert ledger.newest_version == 0
    assert ledger.manifest is not None
    assert ledger.manifest.host == "there"  # the same version, republished somewhere else


def test_a_version_beyond_the_commits_is_not_announced():
    ledger = new_ledger()
    ledger.announce(manifest(1))
    assert ledger.newest_version == 0


def test_a_gap_between_commits_is_an_error():
    with pytest.raises(ValueError, match="commit 2 follows 0"):
        new_ledger().committed(2, (), manifest(2))


def test_low_water_is_the_lowest_segment_with_an_undecided_group():
    ledger, grants = leased(6, schedule={"max_lag": 3})
    deliver_all(ledger, grants)
    for seq in range(3):
        ledger.sealed(A, seq, [(2 * seq, 0), (2 * seq + 1, 0)])
    first = ledger.reserve(1, epoch=2)
    assert first.low_water == {"actor-0/1": 0}
    commit(ledger, 1, first)
    assert ledger.reserve(2, epoch=2).low_water == {"actor-0/1": 1}
    commit(ledger, 2, ledger.reserve(2, epoch=2))
    commit(ledger, 3, ledger.reserve(3, epoch=2))
    deliver_all(ledger, lease(ledger, B, want=2, version=3), {3: 10}, actor=B)
    assert ledger.reserve(4, epoch=2).low_water == {"actor-0/1": 3}


def test_a_segment_reported_out_of_order_does_not_raise_the_low_water_mark():
    ledger = new_ledger()
    deliver_all(ledger, lease(ledger, A, want=2))
    ledger.sealed(A, 1, [])
    assert ledger.reserve(1, epoch=2).low_water == {"actor-0/1": 0}


def test_segments_reported_out_of_order_count_once_the_gap_is_closed():
    ledger = new_ledger()
    deliver_all(ledger, lease(ledger, A, want=2))
    commit(ledger, 1, ledger.reserve(1, epoch=2))
    for seq in (2, 1, 0):
        ledger.sealed(A, seq, [])
    deliver_all(ledger, lease(ledger, B, want=2, version=1), {1: 10}, actor=B)
    assert ledger.reserve(2, epoch=2).low_water == {"actor-0/1": 3}


# ---- tokens and swaps --------------------------------------------------------------------------------------------


def test_tokens_in_flight_are_the_sampled_tokens_that_an_actor_has_not_delivered():
    ledger, [grant] = leased(1)
    sync(ledger, A, want=0, leases=[grant.lease_id], tokens=25)
    deliver(ledger, grant)
    assert ledger.tokens()["in_flight"] == 15
    sync(ledger, A, want=0, tokens=20)  # an older message overtaken by a newer one
    assert ledger.tokens()["generated"] == 25


def test_tokens_in_flight_of_a_gone_actor_are_superseded_until_the_actor_comes_back(clock):
    ledger, [grant] = leased(1, clock)
    sync(ledger, A, want=0, leases=[grant.lease_id], tokens=25)
    clock.now += 11
    ledger.expire()
    assert (ledger.tokens()["in_flight"], ledger.tokens()["superseded"]) == (0, 25)
    sync(ledger, A, want=0, tokens=30)
    assert (ledger.tokens()["in_flight"], ledger.tokens()["superseded"]) == (30, 0)
    ledger.bye(A)
    assert ledger.tokens()["superseded"] == 30


def swap(version: int) -> SwapRecord:
    return SwapRecord(
        actor="actor-0", actor_epoch=1, version=version, at=0.0, pause_seconds=0.001, num_bytes=1, num_running=1,
        num_tokens=1,
    )  # fmt: skip


def test_a_swap_is_told_once_and_acknowledged_when_a_commit_holds_the_swap():
    ledger, grants = leased(4)
    held = [grant.lease_id for grant in grants]
    sync(ledger, A, want=0, leases=held, swaps=(swap(1), swap(2)))
    assert sync(ledger, A, want=0, leases=held, swaps=(swap(1), swap(2), swap(3))).swaps[0].version == 3
    deliver_all(ledger, grants[:2])
    answer = ledger.reserve(1, epoch=2)
    assert [record.version for record in answer.swaps] == [1, 2, 3]
    assert ledger.actor_reports.acknowledged(A, is_final=False) == -1
    commit(ledger, 1, answer)
    assert ledger.actor_reports.acknowledged(A, is_final=False) == 3
    deliver_all(ledger, grants[2:])
    assert ledger.reserve(2, epoch=2).swaps == ()


# ---- restart -----------------------------------------------------------------------------------------------------


def restarted(clock: ManualClock, *sealed: tuple[int, dict[int, int]]) -> tuple[Ledger, list[Grant]]:
    """A second hub after commit 1: 0 and 1 were trained, 2 and 3 leased, `sealed` are (group_id, tokens)."""
    old = new_ledger(clock, schedule={"max_lag": 3})
    grants = lease(old, A, want=4)
    for grant in grants[:2]:
        deliver(old, grant)
    sync(old, A, want=0, leases=[grant.lease_id for grant in grants[2:]], tokens=33)
    answer = old.reserve(1, epoch=2)
    new = Ledger(small_config(schedule={"max_lag": 3}), clock=clock, boot_id="new", first_attempt=5000)
    sealed_groups = [SealedGroup(summary=summary(group_id, tokens), seq=0) for group_id, tokens in sealed]
    new.restore(commit_record(1, 2, manifest=manifest(1), **trained_by(answer)), sealed_groups, manifest(1))
    return new, grants


def test_a_restarted_hub_takes_sealed_groups_without_a_fate_as_ready():
    ledger, _ = restarted(ManualClock(), (0, {0: 10}), (1, {0: 10}), (2, {0: 7}))
    assert (ledger.num_ready, ledger.num_queued, ledger.next_group_id) == (1, 1, 4)
    tokens = ledger.tokens()
    assert (tokens["trained"], tokens["ready"], tokens["generated"], tokens["in_flight"]) == (20, 7, 33, 6)
    check_closes(tokens)


def test_trained_rows_that_were_not_sealed_find_their_owner_when_they_are_offered_again():
    ledger, grants = restarted(ManualClock())
    check_closes(ledger.tokens())
    assert ledger.tokens()["trained"] == 20
    ledger.register_actor(A)
    for grant in grants[:2]:
        assert deliver(ledger, grant) is Arrival.KNOWN
    assert ledger.tokens()["generated"] == 33
    check_closes(ledger.tokens())


def test_leases_claimed_at_a_registration_stay_and_the_others_are_granted_again_after_the_grace_time(clock):
    ledger, grants = restarted(clock)
    kept = LeaseRef(group_id=2, attempt=0, lease_id=grants[2].lease_id)
    ledger.register_actor(A, [kept])
    ledger.register_actor(B)
    assert sync(ledger, B, want=4, version=1).leases == ()  # grace
    clock.now += 5.5
    assert [(grant.group_id, grant.attempt) for grant in sync(ledger, B, want=2, version=1).leases] == [
        (3, 5000),
        (4, 5000),
    ]
    assert sync(ledger, A, want=0, leases=[kept.lease_id]).stop_leases == ()
    assert deliver(ledger, grants[2]) is Arrival.READY


def test_a_claimed_lease_is_not_sent_to_the_actor_that_has_finished_its_group(clock):
    ledger, grants = restarted(clock)
    ledger.register_actor(A, [LeaseRef(group_id=2, attempt=0, lease_id=grants[2].lease_id)])
    assert sync(ledger, A, want=0).leases == ()
    clock.now += 10.5  # and it never comes
    ledger.expire()
    assert [grant.group_id for grant in lease(ledger, B, want=1, version=1)] == [2]


def test_a_lease_beyond_the_frontier_of_the_last_commit_raises_the_frontier(clock):
    ledger, _ = restarted(clock)
    ledger.register_actor(A, [LeaseRef(group_id=6, attempt=0, lease_id="6.0.boot")])
    assert (ledger.next_group_id, ledger.num_leased, ledger.num_queued) == (7, 1, 4)


def test_a_trainer_presents_its_reservation_again_and_missing_rows_come_later():
    ledger, grants = restarted(ManualClock(), (2, {0: 10}))
    refs = [summary(group_id, {0: 10}).ref for group_id in (2, 3)]
    ledger.register_trainer(2, step=2, refs=refs)
    assert ids(ledger.reserve(2, epoch=2)) == [2, 3]
    assert (ledger.num_reserved, ledger.num_queued, ledger.num_ready) == (2, 0, 0)
    assert deliver(ledger, grants[3], {0: 10}) is Arrival.KNOWN
    assert ledger.needs_rows(3, 0)
    check_closes(ledger.tokens())
    ledger.committed(2, trained(2, 3), manifest(2))
    assert ledger.tokens()["trained"] == 40
    check_closes(ledger.tokens())


def test_groups_of_a_freed_reservation_whose_rows_never_came_are_leased_again(clock):
    ledger, _ = restarted(clock, (2, {0: 10}))
    ledger.register_trainer(2, step=2, refs=[summary(group_id, {0: 10}).ref for group_id in (2, 3)])
    ledger.register_trainer(3)
    assert (ledger.num_ready, ledger.num_queued) == (1, 1)
    check_closes(ledger.tokens())


def test_a_reserved_group_whose_rows_are_lost_is_generated_again_and_the_others_stay_ready():
    ledger, grants = leased(4)
    deliver_all(ledger, grants[:3])
    first = ledger.reserve(1, epoch=2)
    assert ids(first) == [0, 1]
    assert ledger.reserve(1, epoch=2, lost=[(0, 5), (9, 0)]) == first  # of another attempt, and of no group of it
    second = ledger.reserve(1, epoch=2, lost=[(0, 0)])
    assert ids(second) == [1, 2]
    assert ledger.reserve(1, epoch=2, lost=[(0, 0)]) == second  # the answer was lost
    assert ledger.tokens()["superseded"] == 10
    with pytest.raises(StaleLease):
        deliver(ledger, grants[0])
    [again] = lease(ledger, B, want=1)
    assert (again.group_id, again.attempt) == (0, 1)
    commit(ledger, 1, second)
    check_closes(ledger.tokens())


def test_a_lost_group_whose_rows_never_came_to_this_hub_is_leased_again():
    ledger, _ = restarted(ManualClock(), (2, {0: 10}))
    ledger.register_trainer(2, step=2, refs=[summary(group_id, {0: 10}).ref for group_id in (2, 3)])
    answer = ledger.reserve(2, epoch=2, lost=[(3, 0)])
    assert not answer.is_ready
    assert (ledger.num_ready, ledger.num_queued) == (1, 1)
    check_closes(ledger.tokens())


@pytest.mark.parametrize("arrive", [True, False])
def test_a_commit_of_the_previous_hub_keeps_its_tokens_if_the_rows_are_missing(arrive):
    """Its segment is damaged, or not written yet; the trainer had computed the step when the hub was killed."""
    ledger, grants = restarted(ManualClock(), (2, {0: 10}))
    ledger.committed(2, trained(2, 3), manifest(2))
    if arrive:
        assert deliver(ledger, grants[3], {0: 10}) is Arrival.KNOWN
    assert ledger.tokens()["trained"] == 40
    check_closes(ledger.tokens())


def test_a_restarted_hub_waits_for_commits_of_steps_whose_reservation_is_unknown():
    ledger, _ = restarted(ManualClock(), (2, {0: 10}), (3, {0: 10}))
    answer = ledger.reserve(3, epoch=2)  # 2 and 3 are ready here, but they belong to step 2
    assert not answer.is_ready
    assert "steps [2]" in answer.reason
    ledger.committed(2, trained(2, 3), manifest(2))
    assert not ledger.reserve(3, epoch=2).is_ready
    assert ledger.num_ready == 0


def test_a_step_far_ahead_waits_for_the_earlier_commits_and_drops_nothing():
    ledger, _ = restarted(ManualClock(), (2, {0: 10}), (3, {0: 10}))
    answer = ledger.reserve(10**15, epoch=2)
    assert answer.reason == "the commits of steps [2, 3, 4] have not arrived"
    assert not ledger.is_due(6)  # where both would be stale; but they may have been trained in step 2
    assert ledger.num_ready == 2


def test_a_reserve_that_is_not_ready_has_the_number_of_ready_groups():
    ledger, grants = leased(4)
    assert ledger.reserve(1, epoch=2).ready_groups == 0
    deliver(ledger, grants[0])
    assert ledger.reserve(1, epoch=2).ready_groups == 1


# ---- taking over -------------------------------------------------------------------------------------------------


def origins_summary(grant: Grant, actor: ActorKey, num_tokens: int, *origins: Origin) -> GroupSummary:
    ref = GroupRef(
        group_id=grant.group_id, attempt=grant.attempt, actor=actor.name, actor_epoch=actor.epoch, num_rollouts=4,
        num_tokens=num_tokens, origins=origins,
    )  # fmt: skip
    return GroupSummary(ref=ref, rewards=(0.0, 1.0), tokens_by_version={0: num_tokens})


def test_a_lease_names_the_previous_holders_of_its_group_newest_first():
    ledger, (first,) = leased(1)
    assert first.holders == ()
    ledger.bye(A)
    (second,) = lease(ledger, B, want=1)
    assert second.holders == (PreviousHolder("actor-0", 1, 0),)
    ledger.bye(B)
    (third,) = lease(ledger, ActorKey("actor-2", 7), want=1)
    assert third.holders == (PreviousHolder("actor-1", 1, 1), PreviousHolder("actor-0", 1, 0))
    (new,) = sync(ledger, ActorKey("actor-2", 7), want=1, leases=[third.lease_id]).leases
    assert new.holders == ()


def test_holders_are_found_again_by_a_restarted_hub(clock):
    ledger = new_ledger(clock, first_attempt=1000)
    ledger.register_actor(A, [LeaseRef(group_id=1, attempt=0, lease_id="1.0.old")])
    ledger.restore_holders(
        {0: [PreviousHolder("gone", 3, 0)], 1: [PreviousHolder("actor-0", 1, 0)], 9: [PreviousHolder("gone", 3, 0)]}
    )
    clock.now += 30
    ledger.expire()
    grants = {grant.group_id: grant.holders for grant in lease(ledger, B, want=3)}
    assert grants == {0: (PreviousHolder("gone", 3, 0),), 1: (PreviousHolder("actor-0", 1, 0),), 2: ()}


def test_tokens_that_were_taken_over_stay_their_samplers_and_only_the_lost_ones_are_superseded():
    ledger, (first,) = leased(1)
    sync(ledger, A, want=0, leases=[first.lease_id], tokens=100)
    ledger.bye(A)
    (second,) = lease(ledger, B, want=1)
    assert ledger.tokens()["superseded"] == 100
    sync(ledger, B, want=0, leases=[second.lease_id], tokens=30)
    # B found 80 of A's 100 tokens in the log and sampled 30 more.
    assert ledger.add_group(origins_summary(second, B, 110, Origin("actor-0", 1, 80)), second.lease_id) == "ready"
    tokens = ledger.tokens()
    check_closes(tokens)
    assert (tokens["generated"], tokens["ready"], tokens["superseded"]) == (130, 110, 20)
    (other,) = sync(ledger, B, want=1, tokens=40).leases
    assert ledger.add_group(origins_summary(other, B, 10), other.lease_id) == "ready"
    answer = ledger.reserve(1, epoch=1)
    commit(ledger, 1, answer)
    tokens = ledger.tokens()
    check_closes(tokens)
    assert (tokens["generated"], tokens["trained"], tokens["superseded"]) == (140, 120, 20)


def test_quarantined_groups_leave_and_the_step_gets_others():
    ledger, grants = leased(4)
    deliver_all(ledger, grants)
    first = ledger.reserve(1, epoch=2)
    assert ids(first) == [0, 1]
    second = ledger.reserve(1, epoch=2, quarantined=first.groups)
    assert ids(second) == [2, 3]
    assert [(fate.group_id, fate.fate, fate.num_tokens) for fate in second.fates] == [
        (0, "quarantined", 10), (1, "quarantined", 10),
    ]  # fmt: skip
    assert ledger.reserve(1, epoch=2, quarantined=first.groups) == second  # the answer was lost
    assert second.tokens["quarantined"] == 20
    assert not ledger.is_open(0)
    commit(ledger, 1, second)
    assert ledger.tokens()["trained"] == 20
    assert len(lease(ledger, B, want=9, version=1)) == 4  # the window is free again
    check_closes(ledger.tokens())


def test_a_second_try_that_fails_waits_for_groups_and_keeps_every_fate():
    ledger, grants = leased(4)
    deliver_all(ledger, grants)
    first = ledger.reserve(1, epoch=2)
    second = ledger.reserve(1, epoch=2, quarantined=first.groups)
    both = (*first.groups, *second.groups)
    assert not ledger.reserve(1, epoch=2, quarantined=both).is_ready
    more = lease(ledger, B, want=2)
    deliver_all(ledger, more, actor=B)
    third = ledger.reserve(1, epoch=2, quarantined=both)
    assert [fate.fate for fate in third.fates] == ["quarantined"] * 4
    assert not {ref.group_id for ref in both} & set(ids(third))
    check_closes(ledger.tokens())


def test_a_new_trainer_commits_the_fates_of_a_quarantine_that_the_old_trainer_began():
    ledger, grants = leased(4)
    deliver_all(ledger, grants)
    first = ledger.reserve(1, epoch=2)
    ledger.reserve(1, epoch=2, quarantined=first.groups)
    ledger.register_trainer(3)
    answer = ledger.reserve(1, epoch=3)
    assert ids(answer) == [2, 3]
    assert [fate.fate for fate in answer.fates] == ["quarantined"] * 2
    check_closes(answer.tokens)


@pytest.mark.parametrize("present", [(2, 3, 4, 5), (2, 4, 5), (4, 5), ()])
@pytest.mark.parametrize("has_others", [True, False])
def test_a_restarted_hub_hears_of_a_quarantine_from_the_trainer(clock, present, has_others):
    """Rows of none, some or all groups are in segments; the trainer holds the next reservation, or is yet to ask."""
    ledger, _ = restarted(clock, *((group_id, {0: 10}) for group_id in present))
    refused = [summary(group_id, {0: 10}).ref for group_id in (2, 3)]
    others = [summary(group_id, {0: 10}).ref for group_id in (4, 5)] if has_others else []
    ledger.register_trainer(2, step=2, refs=others, quarantined=refused)
    ledger.register_trainer(2, step=2, refs=others, quarantined=refused)  # its connection broke
    assert not any(ledger.is_open(ref.group_id) for ref in refused)
    assert ledger.tokens()["quarantined"] == 20
    answer = ledger.reserve(2, epoch=2, quarantined=refused)
    fates = [FateRecord(group_id=ref.group_id, attempt=0, fate="quarantined", num_tokens=10) for ref in refused]
    if has_others:  # the trainer has the answer of the earlier hub, and commits it
        ledger.committed(2, [*fates, *trained(4, 5)], manifest(2))
        clock.now += 10  # after the grace period
        deliver_ready(ledger)
        later = ledger.reserve(3, epoch=2)
        assert later.is_ready
        assert not any(fate.fate == "quarantined" for fate in later.fates)  # recorded once
    elif answer.is_ready:
        assert list(answer.fates) == fates
    check_closes(ledger.tokens())


def test_the_fates_of_a_registered_quarantine_survive_its_trainer(clock):
    ledger, _ = restarted(clock, *((group_id, {0: 10}) for group_id in (2, 3, 4, 5)))
    refs = [summary(group_id, {0: 10}).ref for group_id in range(2, 6)]
    ledger.register_trainer(2, step=2, refs=refs[2:], quarantined=refs[:2])
    ledger.register_trainer(3)
    answer = ledger.reserve(2, epoch=3)
    assert ids(answer) == [4, 5]
    assert [fate.fate for fate in answer.fates] == ["quarantined"] * 2


@pytest.mark.parametrize("present", [(2, 3, 4, 5), (2, 4, 5), (4, 5)])
@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_restarted_hub_does_not_drop_again_what_the_held_reservation_dropped(clock, present, is_replaced):
    """Simulation, seed 16707: two commits recorded the same group as dropped_stale."""
    ledger, _ = restarted(clock, *((group_id, {0: 10}) for group_id in present))
    fates = [FateRecord(group_id=n, attempt=0, fate="dropped_stale", num_tokens=10) for n in (2, 3)]
    refs = [summary(group_id, {0: 10}).ref for group_id in (4, 5)]
    ledger.register_trainer(2, step=2, refs=refs, fates=fates)
    assert not any(ledger.is_open(group_id) for group_id in (2, 3))
    assert ledger.tokens()["dropped_stale"] == 20
    if is_replaced:  # the trainer dies, and the next trainer commits the fates
        ledger.register_trainer(3)
        answer = ledger.reserve(2, epoch=3)
        assert list(answer.fates) == fates
    else:
        ledger.committed(2, [*fates, *trained(4, 5)], manifest(2))
        clock.now += 10  # after the grace period
        deliver_ready(ledger)
        answer = ledger.reserve(3, epoch=2)
        assert answer.is_ready
        assert not {2, 3} & {fate.group_id for fate in answer.fates}  # recorded once
    check_closes(ledger.tokens())


def deliver_ready(ledger):
    actor = ActorKey("actor-9", 1)
    ledger.register_actor(actor)
    for grant in sync(ledger, actor, 2, version=ledger.newest_version).leases:
        deliver(ledger, grant, {ledger.newest_version: 10}, actor=actor)
