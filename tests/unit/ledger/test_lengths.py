"""The length-bias meter by hand.

A group of three rollouts, lengths 3, 6 and 9, of which the last could not be scored. Thirds are 1, 2 and 3 tokens.
Version 0 sampled all 3 tokens of the first rollout and tokens 0 to 3 of the second, version 1 its tokens 4 and 5.
"""

import numpy as np
import pytest

from pipelinerl_core.data.codec import encode_rollouts
from pipelinerl_core.ledger import ActorKey, GroupSummary, Ledger, SealedGroup
from pipelinerl_core.ledger.lengths import LengthMeter
from pipelinerl_core.ledger.order import split_lengths
from pipelinerl_core.ledger.tokens import TokenLedger
from pipelinerl_core.messages import FateRecord
from pipelinerl_core.roles.hub.recovery import summarize
from pipelinerl_core.run.records import Commit
from pipelinerl_core.telemetry.length_bias import length_bias
from pipelinerl_core.types import LengthTotals
from tests.builders import commit_record, group_named, small_config, sync_message
from tests.synthetic_run import make_rollout

REF = group_named(0, num_rollouts=3, num_tokens=18)
VERSION_0 = LengthTotals(num_tokens=7, first_third=1 + 2, last_third=1, length_sum=3 * 3 + 4 * 6)
VERSION_1 = LengthTotals(num_tokens=2, first_third=0, last_third=2, length_sum=2 * 6)
UNSCORED = LengthTotals(num_tokens=9, first_third=3, last_third=3, length_sum=81)
ALL = LengthTotals(num_tokens=18, first_third=6, last_third=6, length_sum=9 + 36 + 81)


def group() -> GroupSummary:
    rollouts = [
        make_rollout(rollout_index=0, spans=[(0, 0, 3)], reward=0.0),
        make_rollout(rollout_index=1, spans=[(0, 0, 4), (1, 4, 6)], reward=1.0),
        make_rollout(rollout_index=2, spans=[(0, 0, 5), (1, 5, 9)], reward=None),
    ]
    [summary] = summarize([REF], encode_rollouts("run", rollouts))
    return summary


def test_a_summary_counts_thirds_and_lengths_per_version():
    summary = group()
    assert summary.lengths_by_version == {0: VERSION_0, 1: VERSION_1}
    assert summary.lengths_unscored == UNSCORED
    assert summary.lengths == ALL


@pytest.mark.parametrize(("length", "third"), [(1, 0), (2, 1), (3, 1), (4, 1), (5, 2), (8, 3)])
def test_a_third_is_rounded_and_first_and_last_are_alike(length, third):
    ref = group_named(0, num_rollouts=1, num_tokens=length)
    [summary] = summarize([ref], encode_rollouts("run", [make_rollout(spans=[(0, 0, length)])]))
    expected = LengthTotals(num_tokens=length, first_third=third, last_third=third, length_sum=length * length)
    assert summary.lengths == expected


def test_spans_add_up_to_their_rollout_for_every_cut():
    rng = np.random.default_rng(0)
    for length in range(2, 30):
        cut = int(rng.integers(1, length))
        ref = group_named(0, num_rollouts=1, num_tokens=length)
        whole, parts = (
            summarize([ref], encode_rollouts("run", [make_rollout(spans=spans)]))[0]
            for spans in ([(0, 0, length)], [(0, 0, cut), (1, cut, length)])
        )
        assert parts.lengths_by_version.keys() == {0, 1}
        assert whole.lengths == parts.lengths


def test_training_splits_by_the_lag_rule():
    # At step 3 version 0 has lag 2 and version 1 lag 1.
    assert split_lengths(group(), 3, max_lag=1) == {
        "trained": VERSION_1, "masked_stale": VERSION_0, "failed": UNSCORED,
    }  # fmt: skip


def test_short_completions_of_a_group_become_stale_with_the_longest():
    # At step 4 versions 0 and 1 have lags 3 and 2.
    rollouts = [
        make_rollout(rollout_index=0, spans=[(0, 0, 6)]),
        make_rollout(rollout_index=1, spans=[(0, 0, 4), (1, 4, 8), (2, 8, 12)]),
    ]
    [summary] = summarize([group_named(0, num_rollouts=2, num_tokens=18)], encode_rollouts("run", rollouts))
    lengths_by_fate = split_lengths(summary, 4, max_lag=1)
    assert (lengths_by_fate["trained"].num_tokens, lengths_by_fate["masked_stale"].num_tokens) == (4, 14)
    assert lengths_by_fate["masked_stale"].mean_length == pytest.approx((6 * 6 + 8 * 12) / 14)
    assert length_bias({**lengths_by_fate, "generated": summary.lengths}) == pytest.approx(1.2)


def test_each_class_keeps_its_own_lengths_and_undecided_groups_are_ready():
    tokens = TokenLedger()
    tokens.arrive_group(group())
    assert tokens.lengths.totals() == {"generated": ALL, "ready": ALL}
    tokens.train_group(group(), 3, max_lag=1)
    tokens.arrive_group(group())
    tokens.decide_group(group(), "filtered")
    tokens.refuse(group())
    tokens.report(ActorKey("actor-0", 1), 54)
    assert tokens.lengths.totals() == {
        "generated": ALL + ALL + ALL, "trained": VERSION_1, "masked_stale": VERSION_0, "failed": UNSCORED,
        "filtered": ALL, "superseded": ALL,
    }  # fmt: skip
    assert tokens.totals()["generated"] == tokens.lengths.arrived.num_tokens
    assert tokens.accounts[ActorKey("actor-0", 1)].present == 0


def test_a_restart_keeps_decided_groups_and_counts_ready_groups_when_they_are_reported_again():
    meter = LengthMeter.restore({"generated": ALL + VERSION_0, "trained": ALL, "ready": VERSION_0})
    assert meter.totals() == {"generated": ALL, "trained": ALL}
    meter.arrive(VERSION_0)
    assert meter.totals() == {"generated": ALL + VERSION_0, "trained": ALL, "ready": VERSION_0}


def test_means_and_shares():
    assert VERSION_1.mean_length == 6.0
    assert VERSION_0.mean_length == pytest.approx(33 / 7)
    assert (ALL.first_third_share, ALL.last_third_share) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    assert LengthTotals().mean_length is None
    assert LengthTotals().last_third_share is None
    assert ALL - UNSCORED == VERSION_0 + VERSION_1


# ---- through a ledger --------------------------------------------------------------------------------------------


def ledger_of(first_attempt: int = 0) -> Ledger:
    return Ledger(small_config(), clock=lambda: 1000.0, first_attempt=first_attempt)


FOUR = LengthTotals(num_tokens=4, first_third=2, last_third=2, length_sum=8)


def times(count: int) -> LengthTotals:
    return sum([FOUR] * count, LengthTotals())


def four_tokens(group_id: int) -> GroupSummary:
    """Two rollouts of two tokens, all of version 0: a first and a last third of one token each."""
    ref = group_named(group_id, num_tokens=4)
    return GroupSummary(ref=ref, rewards=(0.0, 1.0), tokens_by_version={0: 4}, lengths_by_version={0: FOUR})


def test_a_commit_carries_the_meter_through_a_restart_of_the_hub():
    old = ledger_of()
    old.committed(0, (), None)
    old.register_actor(ActorKey("actor-0", 1))
    sync = sync_message(want=5)
    leases = old.sync(ActorKey("actor-0", 1), sync).leases
    assert len(leases) == 4
    for grant in leases:
        old.add_group(four_tokens(grant.group_id), grant.lease_id)
    first = old.reserve(1, epoch=2)
    second = old.reserve(2, epoch=2)
    assert first.lengths == {"generated": times(4), "ready": times(4)}
    assert second.lengths == {"generated": times(4), "ready": times(2), "trained": times(2)}

    commit = commit_record(
        2,
        2,
        next_group_id=4,
        tokens=second.tokens,
        lengths=second.lengths,
        waits={"engine": 3.0},
        fates=tuple(FateRecord(group_id=n, attempt=0, fate="trained", num_tokens=4) for n in (2, 3)),
    )
    commit = Commit.model_validate_json(commit.model_dump_json())
    new = ledger_of(first_attempt=1000)
    new.restore(commit, [SealedGroup(summary=four_tokens(n), seq=0) for n in (0, 1, 2, 3)], None)
    assert new.lengths() == {"generated": times(4), "trained": times(4)}
    assert new.tokens()["trained"] == 16
    assert new.waits.totals()["engine"] == 3.0


def test_rows_that_come_after_their_reservation_was_presented_are_booked_once():
    ledger = ledger_of(first_attempt=1000)
    ledger.committed(0, (), None)
    ledger.register_trainer(2, 1, [four_tokens(n).ref for n in (0, 1)])
    fates = [FateRecord(group_id=n, attempt=0, fate="trained", num_tokens=4) for n in (0, 1)]
    assert ledger.lengths() == {}
    for _ in range(2):
        ledger.add_group(four_tokens(0), "x")
    assert ledger.lengths() == {"generated": FOUR, "ready": FOUR}
    ledger.committed(1, fates, None)
    assert ledger.lengths() == {"generated": FOUR, "trained": FOUR}  # the rows of group 1 never came
    assert ledger.tokens()["trained"] == 8
