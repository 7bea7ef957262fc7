"""The rank correlation of `pipelinerl bench study`, by hand."""

import math

import numpy as np
import pytest

from pipelinerl_core.bench.study import ARMS, bootstrap, spearman, table
from pipelinerl_core.comparison.whatif.plan import parse_study_arm, studied_config
from pipelinerl_core.config import load_config


def test_spearman_is_the_correlation_of_the_ranks():
    values = np.array([0.1, 0.2, 0.3, 0.4])
    assert spearman(values, values**3) == pytest.approx(1)
    assert spearman(values, -values) == pytest.approx(-1)
    # Ranks 1 2 3 4 and 2 1 4 3: 1 - 6 * 4 / (4 * 15) = 0.6.
    assert spearman(values, np.array([2.0, 1.0, 4.0, 3.0])) == pytest.approx(0.6)
    # Ranks 1 2.5 2.5 4 beside 1 2 3 4: 4.5 / sqrt(4.5 * 5).
    assert spearman(np.array([0.0, 1.0, 1.0, 2.0]), values) == pytest.approx(4.5 / math.sqrt(22.5))
    assert math.isnan(spearman(values, np.zeros(4)))


def test_the_interval_of_equal_orders_ends_at_one():
    values = np.arange(9.0)
    assert bootstrap(values, values) == pytest.approx((1.0, 1.0))
    low, high = bootstrap(values, np.array([3.0, 1, 4, 1, 5, 9, 2, 6, 5]))
    assert -1 <= low < high <= 1


def test_every_arm_can_be_studied_and_stands_in_the_table():
    recorded = load_config("quickstart")
    arms = [parse_study_arm(text) for text in ARMS]
    assert len({studied_config(recorded, arm.overrides).model_dump_json() for arm in arms}) == len(arms) == 8
    entry = {"settings": [], "studied": [0.5, 0.7], "fresh": [0.4, 0.4], "within_limit": 1}
    text = table({"seeds": [0, 1], "arms": {"ppo": entry}, "spearman": 0.5, "low": 0.1, "high": 0.9})
    assert "0.600    0.400  1 of 2" in text
    assert "Spearman 0.50 (0.10 to 0.90" in text
