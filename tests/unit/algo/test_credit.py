"""Advantages, loss weights and lags: numbers worked out by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl_core.algo.advantages import (
    ADVANTAGES,
    decoupled,
    group_mean,
    leave_one_out,
    max_likelihood,
    over_step,
    per_turn,
    standardized,
)
from pipelinerl_core.algo.shaping import overlong_penalty
from pipelinerl_core.algo.staleness import deadline_step, group_deadline, live_mask, token_lags, token_versions
from pipelinerl_core.algo.weighting import loss_weights
from pipelinerl_core.types import WeightSpan


def test_the_baseline_is_the_mean_of_the_other_rewards():
    assert leave_one_out([1.0, 0.0, 0.0, 1.0]) == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])
    assert leave_one_out([1.0, 0.0, 0.0]) == pytest.approx([1.0, -0.5, -0.5])
    assert leave_one_out([3.0, 1.0]) == [2.0, -2.0]


def test_the_advantages_of_max_likelihood_are_divided_by_the_mean():
    assert max_likelihood([1.0, 0.0, 0.0, 0.0]) == [3.0, -1.0, -1.0, -1.0]
    assert max_likelihood([1.0, 1.0]) == [0.0, 0.0]
    assert max_likelihood([0.0, 0.0, 0.0]) == [0.0, 0.0, 0.0]
    assert max_likelihood([0.0, -0.5]) == [0.0, 0.0]
    assert max_likelihood([1.0, 0.0, -0.999]) == [0.0, 0.0, 0.0]


def test_decoupled_standardizes_each_component_before_the_sum():
    side = 0.5 / (3**-0.5 + 1e-4)
    halves = [1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0]
    assert decoupled(halves, [1.0, 1.0]) == pytest.approx([2 * side, 0.0, 0.0, -2 * side])
    assert decoupled(halves, [1.0, 2.0]) == pytest.approx([3 * side, side, -side, -3 * side])
    # A component on a scale of thousands weighs as much as a component of 0 and 1.
    scaled = [1.0, 0.0, 1.0, 0.0], [1000.0, 1000.0, 0.0, 0.0]
    assert decoupled(scaled, [1.0, 1.0]) == pytest.approx([2 * side, 0.0, 0.0, -2 * side], abs=1e-3)


def test_over_step_divides_by_the_deviation_of_all_rollouts():
    groups = [[2.0, -2.0], [1.0, 0.0, -1.0]]
    flat = [2.0, -2.0, 1.0, 0.0, -1.0]
    expected = [value / (np.std(flat, ddof=1) + 1e-4) for value in flat]
    first, second = over_step(groups)
    assert [*first, *second] == pytest.approx(expected)
    assert second[1] == 0.0
    assert over_step([[0.0, 0.0], [0.0, 0.0]]) == [[0.0, 0.0], [0.0, 0.0]]


def test_the_mean_of_the_group_is_a_smaller_leave_one_out():
    rewards = [1.0, 0.0, 0.0, 1.0]
    assert group_mean(rewards) == [0.5, -0.5, -0.5, 0.5]
    assert group_mean(rewards) == pytest.approx([value * 3 / 4 for value in leave_one_out(rewards)])


def test_standardized_divides_by_the_deviation_of_the_sample():
    # squares of 1/2 four times, over 3: std = sqrt(1/3)
    assert standardized([1.0, 0.0, 0.0, 1.0]) == pytest.approx([x / (3**-0.5 + 1e-4) for x in (0.5, -0.5, -0.5, 0.5)])
    rewards = [0.3, 2.0, -1.0, 0.7, 0.7]
    assert standardized(rewards) == pytest.approx(
        [(reward - np.mean(rewards)) / (np.std(rewards, ddof=1) + 1e-4) for reward in rewards]
    )


def test_a_turn_is_compared_with_the_siblings_that_got_that_far():
    # turn 0: baselines 1/2, 1, 1/2; turn 1: the rewards 0 and 1; turn 2: the third one alone
    assert per_turn([1.0, 0.0, 1.0], [1, 2, 3]) == [(0.5,), (-1.0, -1.0), (0.5, 1.0, 0.0)]
    # turn 0: 4 - 3/3, 2 - 5/3, 1 - 6/3, 0 - 7/3; turn 1: the first, the second and the last
    by_rollout = per_turn([4.0, 2.0, 1.0, 0.0], [2, 2, 1, 3])
    assert [list(advantages) for advantages in by_rollout] == [
        pytest.approx([3.0, 3.0]),
        pytest.approx([1 / 3, 0.0]),
        pytest.approx([-1.0]),
        pytest.approx([-7 / 3, -3.0, 0.0]),
    ]


def test_rewards_of_turns_count_from_their_turn_on():
    # returns (3, 1) and (1, 1): the first turn of the first rollout earned 2, the second turn of the second earned 1
    assert per_turn([3.0, 1.0], [2, 2], [(2.0, 0.0), (0.0, 1.0)]) == [(2.0, 0.0), (-2.0, 0.0)]
    # returns (4, 3, 0), (1, 1) and (2): turn 0: 4 - 3/2, 1 - 6/2, 2 - 5/2; turn 1: 3 - 1 and 1 - 3; turn 2: alone
    by_rollout = per_turn([4.0, 1.0, 2.0], [3, 2, 1], [(1.0, 3.0, 0.0), (), ()])
    assert by_rollout == [(2.5, 2.0, 0.0), (-2.0, -2.0), (-0.5,)]


GROUPS = st.integers(2, 9).flatmap(
    lambda size: st.tuples(
        st.lists(st.floats(-100, 100), min_size=size, max_size=size),
        st.lists(st.integers(1, 6), min_size=size, max_size=size),
    )
)


@given(GROUPS)
def test_with_one_turn_each_the_advantages_are_leave_one_out_to_the_last_bit(group):
    rewards, _ = group
    assert per_turn(rewards, [1] * len(rewards)) == [(advantage,) for advantage in leave_one_out(rewards)]


@given(GROUPS)
def test_turns_agree_with_a_second_derivation_in_float64(group):
    """Baselines as a product of matrices: who reached a turn, and who is not oneself."""
    rewards, num_turns = (np.array(column, np.float64) for column in group)
    reached_RK = np.arange(num_turns.max()) < num_turns[:, None]
    others_RR = 1.0 - np.eye(len(rewards))
    counts_RK = others_RR @ reached_RK
    baselines_RK = (others_RR * rewards) @ reached_RK / np.maximum(counts_RK, 1)
    wanted_RK = np.where(counts_RK > 0, rewards[:, None] - baselines_RK, 0.0)
    for advantages, wanted_K, num in zip(per_turn(*group), wanted_RK, group[1], strict=True):
        assert advantages == pytest.approx(wanted_K[:num], abs=1e-6)


def test_turns_need_a_sibling_and_every_rollout_a_turn():
    with pytest.raises(ValueError, match="with 1 scored rollouts has no baseline"):
        per_turn([1.0], [3])
    for num_turns in ([1, 0], [1], [1, 1, 1]):
        with pytest.raises(ValueError, match=r"2 rollouts with .* turns: each has at least one"):
            per_turn([1.0, 0.0], num_turns)


@pytest.mark.parametrize("kind", sorted(set(ADVANTAGES) - {"value"}))
def test_equal_rewards_carry_no_advantage(kind):
    assert ADVANTAGES[kind]([1.0, 1.0, 1.0]) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("kind", ADVANTAGES)
@pytest.mark.parametrize("rewards", [[], [1.0]])
def test_a_group_without_siblings_has_no_baseline(rewards, kind):
    with pytest.raises(ValueError, match=f"with {len(rewards)} scored rollouts"):
        ADVANTAGES[kind](rewards)


@pytest.mark.parametrize(("num_tokens", "penalty"), [(1, 0), (80, 0), (81, -0.05), (90, -0.5), (100, -1)])
def test_the_last_tokens_before_the_limit_cost_up_to_a_reward(num_tokens, penalty):
    assert overlong_penalty(num_tokens, max_tokens=100, overlong_tokens=20) == pytest.approx(penalty)
    assert overlong_penalty(num_tokens, max_tokens=100, overlong_tokens=0) == 0


# Two groups: rollouts of 2 and 6 tokens, and of 4, 3 and 0 tokens: 15 tokens, 5 rollouts.
TOKENS = [[2, 6], [4, 3, 0]]


@pytest.mark.parametrize(
    ("normalization", "expected"),
    [
        ("token", [[1 / 15, 1 / 15], [1 / 15, 1 / 15, 0]]),
        ("sequence", [[1 / 10, 1 / 30], [1 / 20, 1 / 15, 0]]),
        ("prompt", [[1 / 16, 1 / 16], [1 / 14, 1 / 14, 0]]),
        ("constant", [[1 / 50, 1 / 50], [1 / 50, 1 / 50, 0]]),
    ],
)
def test_loss_weights_match_the_fractions_done_by_hand(normalization, expected):
    weights = loss_weights(TOKENS, normalization=normalization, max_tokens=10)
    assert weights == [pytest.approx(group) for group in expected]


@pytest.mark.parametrize("normalization", ["token", "sequence", "prompt"])
def test_weights_of_all_tokens_sum_to_one(normalization):
    tokens = [[2, 6], [4, 3]]
    weights = loss_weights(tokens, normalization=normalization, max_tokens=10)
    assert sum(n * w for ns, ws in zip(tokens, weights, strict=True) for n, w in zip(ns, ws, strict=True)) == (
        pytest.approx(1.0)
    )


SPANS = (WeightSpan(3, 0, 2), WeightSpan(5, 2, 3), WeightSpan(6, 3, 5))


def test_lag_counts_the_steps_between_sampling_and_training():
    # Step 7 trains weights 6: a token of version 6 has lag 0.
    assert token_lags(SPANS, 5, step=7).tolist() == [3, 3, 1, 0, 0]
    assert token_lags(SPANS, 5, step=9).tolist() == [5, 5, 3, 2, 2]


def test_a_token_lives_while_its_lag_is_at_most_max_lag():
    assert live_mask(SPANS, 5, step=7, max_lag=3).tolist() == [True] * 5
    assert live_mask(SPANS, 5, step=7, max_lag=2).tolist() == [False, False, True, True, True]
    assert live_mask(SPANS, 5, step=7, max_lag=0).tolist() == [False, False, False, True, True]


def test_a_token_newer_than_the_weights_is_refused():
    with pytest.raises(ValueError, match="step 6 trains version 5, but a token was sampled by version 6"):
        token_lags(SPANS, 5, step=6)


@pytest.mark.parametrize(
    "spans", [(WeightSpan(0, 0, 2), WeightSpan(1, 3, 5)), (WeightSpan(0, 0, 4),), (WeightSpan(0, 1, 5),), ()]
)
def test_spans_that_do_not_cover_the_tokens_are_refused(spans):
    with pytest.raises(ValueError, match="must cover"):
        token_versions(spans, 5)


@pytest.mark.parametrize("max_lag", [0, 1, 4])
def test_the_deadline_is_the_last_step_at_which_the_token_is_live(max_lag):
    spans = (WeightSpan(3, 0, 1),)
    last = deadline_step(3, max_lag)
    assert live_mask(spans, 1, step=last, max_lag=max_lag).all()
    assert not live_mask(spans, 1, step=last + 1, max_lag=max_lag).any()


def test_the_deadline_of_a_group_is_that_of_its_oldest_live_token():
    versions = [6, 3, 5]
    # max_lag 2: deadlines 9, 6, 8. At step 6 all live; at 7 version 3 is dead; at 10 nothing lives.
    assert group_deadline(versions, step=6, max_lag=2) == 6
    assert group_deadline(versions, step=7, max_lag=2) == 8
    assert group_deadline(versions, step=9, max_lag=2) == 9
    assert group_deadline(versions, step=10, max_lag=2) is None


def test_lags_of_no_tokens_are_no_lags():
    assert token_lags((), 0, step=1).dtype == np.int32
    assert len(token_lags((), 0, step=1)) == 0
