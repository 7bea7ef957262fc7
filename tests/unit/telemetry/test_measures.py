"""Confidence intervals of means over prompts."""

import numpy as np
import pytest

from pipelinerl_core.telemetry import measures


def test_the_confidence_interval_is_wilsons_for_shares_and_wider_than_nothing_at_the_ends():
    # Values by scipy.stats.binomtest(right, num).proportion_ci(method="wilson").
    for right, num, expected in [(5, 10, (0.2366, 0.7634)), (0, 10, (0.0, 0.2775)), (45, 50, (0.7864, 0.9565))]:
        values = np.array([1.0] * right + [0.0] * (num - right))
        np.testing.assert_allclose(measures.confidence_interval(values), expected, atol=1e-4)
    low, high = measures.confidence_interval(np.ones(20))
    assert (round(low, 2), high) == (0.84, 1.0)
    assert measures.confidence_interval(np.array([0.5])) != (0.5, 0.5)


def test_means_of_several_samples_give_a_narrower_interval_and_other_values_the_normal_interval():
    few = measures.confidence_interval(np.array([0.0, 1.0] * 10))
    many = measures.confidence_interval(np.array([0.25, 0.75] * 10))
    assert many[1] - many[0] < few[1] - few[0]
    low, high = measures.confidence_interval(np.array([-1.0, 3.0]))
    assert low == pytest.approx(1.0 - 1.959964 * 2.0)
    assert high == pytest.approx(1.0 + 1.959964 * 2.0)


def test_nineteen_of_twenty_intervals_hold_the_true_share():
    rng = np.random.default_rng(0)
    held = [
        low <= 0.9 <= high
        for low, high in (measures.confidence_interval((rng.random(64) < 0.9).astype(float)) for _ in range(2000))
    ]
    assert 0.92 < np.mean(held) < 0.98
