"""Evidence and healthy mean on simulated streams, and which tokens have no older context.

tests/integration/test_rescoring_streams.py has streams of the real engine and learner.
"""

from dataclasses import replace

import numpy as np
import pytest

from pipelinerl_core.algo.parity import PARITY_BOUNDS
from pipelinerl_core.algo.rescoring import (
    ALLOWANCE,
    HEALTHY_TOKENS,
    Evidence,
    HealthyMean,
    OwnedTokens,
    num_fresh_tokens,
    owners,
)
from pipelinerl_core.types import Origin, WeightSpan
from tests.rollout_rows import build_rollout

NUM_TOKENS = 26
"""In one comparison, as in the quickstart."""


def bfloat16_noise(rng: np.random.Generator, size: int, mean: float = 0.012) -> np.ndarray:
    """Differences of an engine and a trainer in bfloat16: most tokens are nearly certain, a few differ widely.

    By default as of models of 0.5 to 7 B parameters; the 99.9th percentile is about 25 times the mean.
    """
    scale = np.where(rng.random(size) < 0.7, 1e-3, 0.03) * np.where(rng.random(size) < 0.01, 5.0, 1.0)
    return rng.laplace(0.0, scale) * mean / 0.0101


def float32_noise(rng: np.random.Generator, size: int, mean: float = 3e-7) -> np.ndarray:
    return rng.laplace(0.0, mean, size)


NOISES = {"bfloat16": bfloat16_noise, "float32": float32_noise}


def measured(dtype, mean, *, size=1400) -> HealthyMean:
    healthy = HealthyMean(dtype)
    healthy.measure({"a/1": NOISES[dtype](np.random.default_rng(99), size, mean)})
    assert healthy.mean == pytest.approx(mean, rel=0.25)
    return healthy


def comparisons(healthy: HealthyMean, evidence: Evidence, stream) -> list[int]:
    """Numbers, from 1 on, of the comparisons under alarm."""
    numbers = []
    for number, differences in enumerate(stream, start=1):
        evidence.add(differences, healthy.norm)
        if evidence.is_alarm:
            numbers.append(number)
        else:
            healthy.follow(differences)
    return numbers


@pytest.mark.parametrize(("dtype", "mean"), [("bfloat16", 0.003), ("bfloat16", 0.02), ("float32", 3e-7)])
def test_ten_thousand_healthy_comparisons_raise_no_alarm(dtype, mean):
    """The mean triples in between, as lengths and entropy may let it."""
    rng = np.random.default_rng(0)
    growth = 1 if mean > 0.01 else 3
    stream = (NOISES[dtype](rng, NUM_TOKENS, mean * growth ** (number / 10_000)) for number in range(10_000))
    assert comparisons(measured(dtype, mean), Evidence(), stream) == []


@pytest.mark.parametrize("seed", range(8))
def test_a_fault_of_seven_times_the_rounding_is_an_alarm_far_below_the_gates_bound(seed):
    rng, mean = np.random.default_rng(seed), 0.003
    assert 7 * mean < PARITY_BOUNDS["bfloat16"]["mean"]
    alarms = comparisons(
        measured("bfloat16", mean), Evidence(), (bfloat16_noise(rng, NUM_TOKENS, 7 * mean) for _ in range(8))
    )
    assert alarms
    assert alarms[-1] == 8


@pytest.mark.parametrize("dtype", NOISES)
def test_an_alarm_ends_a_few_comparisons_after_the_fault(dtype):
    rng, mean = np.random.default_rng(3), {"bfloat16": 0.003, "float32": 3e-7}[dtype]
    size = {"bfloat16": 0.03, "float32": 0.005}[dtype]
    healthy, evidence = measured(dtype, mean), Evidence()
    stream = [rng.laplace(0, size, NUM_TOKENS) for _ in range(10)]
    stream += [NOISES[dtype](rng, NUM_TOKENS, mean) for _ in range(40)]
    alarms = comparisons(healthy, evidence, stream)
    assert alarms[0] <= 3
    assert alarms == list(range(alarms[0], alarms[-1] + 1))
    assert 10 <= alarms[-1] <= 16
    assert evidence.text(healthy.norm) == ""


@pytest.mark.parametrize("size", [0.05, 3.0, np.inf])  # the evidence of a token is limited, the figure is not
def test_an_alarm_says_how_large_the_difference_is(size):
    healthy, evidence = measured("bfloat16", 0.003), Evidence()
    evidence.add(np.full(200, size), healthy.norm)
    assert evidence.text(healthy.norm).startswith(f"mean |difference| {size:.2g} over 200 tokens (0.00")


def test_few_outliers_are_no_alarm_and_nan_is():
    evidence = Evidence()
    evidence.add(np.where(np.arange(200) < 3, 3.0, 1e-7), 1e-5)
    assert not evidence.is_alarm
    evidence.add(np.zeros(0), 1e-5)
    evidence.add(np.array([1e-7, np.nan]), 1e-5)
    assert evidence.is_alarm


def test_before_the_healthy_mean_is_known_the_bound_is_the_gates():
    healthy = HealthyMean("bfloat16")
    healthy.measure({"a/1": np.full(HEALTHY_TOKENS - 1, 0.003)})
    assert healthy.mean is None
    assert ALLOWANCE * healthy.norm == PARITY_BOUNDS["bfloat16"]["mean"]
    healthy.measure({"a/1": np.full(1, 0.003)})
    assert healthy.norm == healthy.mean == pytest.approx(0.003)
    healthy.measure({"a/1": np.full(9999, 0.02)})
    assert healthy.mean == pytest.approx(0.003)


def test_an_engine_that_is_wrong_from_its_start_is_not_the_norm():
    wrong = HealthyMean("bfloat16")
    wrong.measure({"a/1": np.full(1000, 0.04)})
    assert wrong.is_refused
    assert ALLOWANCE * wrong.norm == PARITY_BOUNDS["bfloat16"]["mean"]
    beside_others = HealthyMean("bfloat16")
    beside_others.measure({"a/1": np.full(1000, 0.02), "b/1": np.full(1000, 0.003), "few/1": np.full(9, 1e-9)})
    assert beside_others.norm == pytest.approx(0.003)


def test_rounding_that_is_nearly_zero_at_the_start_is_not_the_norm():
    healthy = HealthyMean("bfloat16")
    healthy.measure({"a/1": np.full(1000, 1e-6)})
    assert healthy.norm == 0.002


def test_a_stored_healthy_mean_is_kept():
    healthy = HealthyMean("bfloat16")
    healthy.adopt(0.003)
    healthy.measure({"a/1": np.full(1000, 0.02)})
    assert healthy.norm == 0.003


def test_a_comparison_far_above_the_healthy_mean_moves_the_mean_by_half_of_its_weight():
    healthy = measured("bfloat16", 0.004)
    before = healthy.mean
    healthy.follow(np.full(NUM_TOKENS, 0.4))
    assert healthy.mean == pytest.approx(before * (1 + 0.5 / 10))  # the first mean counts as ten comparisons


def test_with_adapters_the_rounding_grows_after_version_0():
    """As recorded with LoRA in bfloat16: the mean doubles within a few comparisons."""
    rng = np.random.default_rng(0)
    growth = np.concatenate([np.linspace(1, 2.2, 6), np.full(1000, 2.2)])
    stream = (bfloat16_noise(rng, NUM_TOKENS, 0.003 * factor) for factor in growth)
    assert comparisons(measured("bfloat16", 0.003), Evidence(), stream) == []


def test_tokens_before_the_first_swap_are_fresh():
    rollout = build_rollout(np.random.default_rng(0), num_tokens=10)
    spans = (WeightSpan(3, 0, 2), WeightSpan(3, 2, 4), WeightSpan(5, 4, 10))
    assert num_fresh_tokens(rollout) == 10
    assert num_fresh_tokens(replace(rollout, weight_spans=spans)) == 4


def test_tokens_belong_to_the_actor_that_sampled_them():
    rollout = replace(build_rollout(np.random.default_rng(0), num_tokens=10), origins=(Origin("actor-7", 2, 4),))
    assert owners(rollout, 9) == [OwnedTokens("actor-7/2", 0, 4), OwnedTokens("actor-0/9", 4, 10)]
