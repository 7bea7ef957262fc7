"""Restarts in a row are counted until a long life, a reset, or the end of a window."""

import pytest

from pipelinerl_core.restart_budget import RestartBudget
from tests.builders import ManualClock


@pytest.fixture
def clock():
    return ManualClock(0.0)


def taken(budget: RestartBudget, times: int) -> list[bool]:
    return [budget.take() for _ in range(times)]


def test_a_budget_is_spent_after_exactly_so_many_restarts_and_says_by_which_rule(clock):
    budget = RestartBudget(2, "placement.max_restarts=2", clock=clock)
    assert taken(budget, 1) == [True]
    assert (budget.restart_text, budget.is_spent) == ("restart 1 of 2", False)
    assert taken(budget, 3) == [True, False, False]
    assert (budget.spent_text, budget.is_spent) == ("after 2 restarts (placement.max_restarts=2)", True)


def test_a_limit_of_0_allows_none(clock):
    budget = RestartBudget(0, "none", clock=clock)
    assert taken(budget, 1) == [False]
    assert budget.spent_text == "after 0 restarts (none)"


def test_a_life_as_long_as_the_settled_time_resets_the_count(clock):
    budget = RestartBudget(2, "", clock=clock, stable_seconds=600.0)
    for _ in range(2):
        clock.now += 599.0
        assert budget.take()
    clock.now += 599.0
    assert not budget.take()
    clock.now += 1.0
    assert taken(budget, 3) == [True, True, False]


def test_the_first_life_counts_as_the_others_do(clock):
    budget = RestartBudget(1, "", clock=clock, stable_seconds=600.0)
    clock.now += 600.0
    assert taken(budget, 2) == [True, False]


def test_a_restart_counts_for_as_long_as_the_window(clock):
    budget = RestartBudget(2, "", clock=clock, window_seconds=600.0)
    assert budget.take()
    clock.now = 300.0
    assert budget.take()
    clock.now = 600.0
    assert not budget.take()
    clock.now = 600.5
    assert taken(budget, 2) == [True, False]
    clock.now = 900.5
    assert taken(budget, 2) == [True, False]


def test_a_reset_gives_back_all_restarts(clock):
    budget = RestartBudget(2, "", clock=clock)
    taken(budget, 3)
    budget.reset()
    assert taken(budget, 3) == [True, True, False]
