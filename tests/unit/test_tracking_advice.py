"""The bottleneck by hand: who is busy while the other waits."""

import pytest

from pipelinerl_core.tracking.advice import advice, bottleneck

CONFIG = {"engine": {"concurrency": 96, "pace": False}, "schedule": {"max_lag": 4}}


@pytest.mark.parametrize(
    ("trainer_idle", "actor_idle", "delay_seconds", "kind"),
    [
        (0.03, 0.02, 0.010, "trainer"),  # paced: full slots, held back
        (0.03, 0.40, 0.000, "trainer"),  # not paced: the window keeps slots empty
        (0.40, 0.02, 0.000, "engine"),
        (0.25, 0.33, 0.000, "window"),  # both wait: windows of groups in bursts
        (0.10, 0.05, 0.000, "balanced"),
    ],
)
def test_the_bottleneck_is_the_side_that_nobody_waits_for(trainer_idle, actor_idle, delay_seconds, kind):
    assert bottleneck(trainer_idle, actor_idle, delay_seconds) == kind


def test_the_advice_names_the_key_and_its_value():
    found = advice(0.25, 0.33, 0.0, CONFIG)
    assert found["bottleneck"] == "window"
    assert "waited 25% of the time, 33% of the slots" in found["advice"]
    assert "schedule.max_lag higher (now 4)" in found["advice"]
    assert "engine.pace=true" in found["advice"]


def test_a_run_that_was_too_short_gets_none():
    assert advice(None, 0.2, 0.0, CONFIG) == {"bottleneck": None, "advice": None}
