"""The pacer: slower while the trainer has plenty, faster when it may run short."""

import math

import pytest

from pipelinerl_core.rollouts.pace import Pacer


def settle(ready_groups: int, pacer: Pacer, syncs: int) -> float:
    for _ in range(syncs):
        pacer.update(ready_groups)
    return pacer.delay_seconds


def test_an_engine_that_is_the_bottleneck_is_never_slowed_down():
    assert settle(0, Pacer(16), 100) == 0.0
    assert settle(12, Pacer(16), 100) == 0.0


def test_one_step_of_surplus_slows_down_by_e_at_once_and_more_if_it_lasts():
    pacer = Pacer(16)
    assert pacer.update(28) == pytest.approx(0.002 * (math.exp(1.0 + 0.005) - 1.0))
    assert pacer.update(28) == pytest.approx(0.002 * (math.exp(1.0 + 0.010) - 1.0))


def test_the_pause_has_a_limit_and_ends_when_groups_are_scarce():
    pacer = Pacer(16)
    assert settle(100, pacer, 1000) == pytest.approx(0.002 * (math.exp(4.0) - 1.0))
    assert settle(0, pacer, 2) < 0.06
    assert settle(0, pacer, 1200) == 0.0


@pytest.mark.parametrize("engine_groups_per_second", [25.0, 50.0, 150.0])
def test_a_faster_engine_settles_at_the_rate_of_the_trainer(engine_groups_per_second):
    """20 syncs a second; the trainer takes 16 groups every 0.8 s, which are 20 groups a second."""
    pacer, ready, computing, taken, made_late = Pacer(16), 0.0, 0.0, 0, 0.0
    for sync in range(2400):
        is_late = sync >= 1200
        made = 0.05 * engine_groups_per_second / (1.0 + pacer.delay_seconds / 0.002)
        ready += made
        made_late += made if is_late else 0.0
        computing -= 0.05
        if computing <= 1e-9 and ready >= 16:
            ready -= 16
            computing = 0.8
            taken += is_late
        pacer.update(int(ready))
    assert taken >= 0.97 * 60 / 0.8  # the trainer hardly ever waits
    assert made_late <= 1.05 * 20 * 60  # and nothing piles up
    assert ready < 2 * 16
