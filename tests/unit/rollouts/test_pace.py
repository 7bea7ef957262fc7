"""The pacer: slower while the trainer has plenty, faster when it may run short."""

import math

import pytest

from pipelinerl_core.rollouts.pace import Pacer


def settle(ready_groups: int, pacer: Pacer, seconds: float) -> float:
    for _ in range(int(seconds * 20)):
        pacer.update(ready_groups, 0.05)
    return pacer.delay_seconds


def test_an_engine_that_is_the_bottleneck_is_never_slowed_down():
    assert settle(0, Pacer(16), 5) == 0.0
    assert settle(12, Pacer(16), 5) == 0.0


def test_surplus_slows_down_at_once_and_a_lasting_surplus_slows_down_more():
    # 20 of 16 groups: half a step beyond the target of three quarters; e^(2 * 0.5), and 0.1 * 0.5 more a second.
    pacer = Pacer(16)
    assert pacer.update(20, 1.0) == pytest.approx(0.002 * (math.exp(1.0 + 0.05) - 1.0))
    assert pacer.update(20, 1.0) == pytest.approx(0.002 * (math.exp(1.0 + 0.10) - 1.0))


def test_the_pause_has_a_limit_and_ends_when_groups_are_scarce():
    pacer = Pacer(16)
    assert settle(100, pacer, 100) == pytest.approx(0.002 * (math.exp(4.0) - 1.0))
    assert settle(0, pacer, 0.1) < 0.03
    assert settle(0, pacer, 60) == 0.0


def simulate(engine_groups_per_second: float, *, trainer_starts_at: float, seconds: float) -> tuple[float, float]:
    """(share of the last half that the trainer waits, most groups ready in it).

    20 syncs a second; the trainer takes 16 groups every 0.8 s, which are 20 a second; at most 144 are ready.
    """
    pacer, ready, computing, waited, most = Pacer(16), 0.0, 0.0, 0.0, 0.0
    for sync in range(int(seconds * 20)):
        ready = min(144.0, ready + 0.05 * engine_groups_per_second / (1.0 + pacer.delay_seconds / 0.002))
        if sync >= trainer_starts_at * 20:
            computing -= 0.05
            if computing <= 1e-9 and ready >= 16:
                ready -= 16
                computing = 0.8
        if sync >= seconds * 10:
            waited += 0.05 if computing <= 1e-9 else 0.0
            most = max(most, ready)
        pacer.update(int(ready), 0.05)
    return waited / (seconds / 2), most


@pytest.mark.parametrize("engine_groups_per_second", [25.0, 50.0, 150.0])
def test_a_faster_engine_settles_at_the_rate_of_the_trainer(engine_groups_per_second):
    waits, most = simulate(engine_groups_per_second, trainer_starts_at=0.0, seconds=120.0)
    assert waits < 0.03
    assert most < 2 * 16


@pytest.mark.parametrize("engine_groups_per_second", [25.0, 50.0, 150.0])
def test_a_queue_that_was_full_before_the_trainer_came_leaves_no_slow_engine_behind(engine_groups_per_second):
    waits, most = simulate(engine_groups_per_second, trainer_starts_at=20.0, seconds=60.0)
    assert waits < 0.03
    assert most < 4 * 16
