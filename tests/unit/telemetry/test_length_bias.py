"""Figures of the length-bias meter, by hand.

By step 2: 10 tokens of completions of 4 and 30 of completions of 12 have arrived; of the long ones 10 were masked.
"""

import fnmatch
import re

import pytest

from pipelinerl_core.run.follow import RunFollower, commit_metrics
from pipelinerl_core.telemetry.length_bias import length_bias, length_line, length_metrics, length_report
from pipelinerl_core.telemetry.metrics import METRICS
from pipelinerl_core.types import LengthTotals
from tests.synthetic_run import Shape, write_run


def tokens(num: int, length: int, first: int = 0, last: int = 0) -> LengthTotals:
    return LengthTotals(num_tokens=num, first_third=first, last_third=last, length_sum=num * length)


def undeclared(names) -> list[str]:
    return [name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in PATTERNS)]


SHORT, LONG, MASKED = tokens(10, 4, first=2, last=2), tokens(20, 12, first=4, last=10), tokens(10, 12, first=6)
PATTERNS = [re.sub("<.*?>", "*", name) for name in METRICS]
NOW = {"generated": SHORT + LONG + MASKED, "trained": SHORT + LONG, "masked_stale": MASKED}


def test_the_bias_is_the_mean_length_of_trained_over_generated_tokens():
    # Generated: (10 * 4 + 30 * 12) / 40 = 10. Trained: (10 * 4 + 20 * 12) / 30 = 9.33.
    assert length_bias(NOW) == pytest.approx(28 / 3 / 10)
    assert length_bias({}) is None
    assert length_bias({"generated": SHORT}) is None


def test_metrics_of_a_step_are_over_the_lengths_booked_since_the_step_before():
    before = {"generated": SHORT, "trained": SHORT}
    metrics = {key: value for key, value in length_metrics(NOW, before).items() if value is not None}
    assert metrics == pytest.approx(
        {
            "length/bias": 1.0,
            "length/mean_generated": 12.0,
            "length/first_third_generated": 10 / 30,
            "length/last_third_generated": 10 / 30,
            "length/mean_trained": 12.0,
            "length/first_third_trained": 4 / 20,
            "length/last_third_trained": 10 / 20,
            "length/mean_masked": 12.0,
            "length/first_third_masked": 6 / 10,
            "length/last_third_masked": 0.0,
        }
    )
    assert undeclared(length_metrics(NOW, before)) == []
    assert set(length_metrics(NOW, NOW).values()) == {None}, "nothing was booked"


def test_the_report_has_every_class_and_the_line_is_short():
    report = length_report(NOW)
    assert report["classes"]["masked_stale"] == {
        "num_tokens": 10, "mean_length": 12.0, "first_third": 0.6, "last_third": 0.0,
    }  # fmt: skip
    assert length_line(report) == "mean length of 10.0 generated, 9.3 trained, 12.0 masked_stale; bias 0.93"
    assert length_line(length_report({})) == ""


def test_a_commit_has_the_lengths_and_waits_since_the_commit_before(store):
    write_run(store, Shape(steps=3))
    follower = RunFollower(store)
    follower.refresh()
    metrics = commit_metrics(follower.commits[2], follower.commits[1])
    assert metrics["wait/engine_seconds"] == pytest.approx(0.15)
    assert metrics["wait/window_seconds"] == pytest.approx(0.05)
    now, before = (follower.commits[step].lengths["generated"] for step in (2, 1))
    assert metrics["length/mean_generated"] == pytest.approx((now - before).mean_length)
    assert undeclared(metrics) == []
