"""The alarm on simulated streams, and which tokens have no older context."""

from dataclasses import replace

import numpy as np
import pytest

from pipelinerl_core.algo.rescoring import (
    MIN_TOKENS,
    WINDOW_TOKENS,
    MismatchWindow,
    OwnedTokens,
    alarm,
    num_fresh_tokens,
    owners,
)
from pipelinerl_core.testing.rollout_rows import build_rollout
from pipelinerl_core.types import Origin, WeightSpan

TOKENS_PER_STEP = 40


def bfloat16_noise(rng: np.random.Generator, size: int) -> np.ndarray:
    """Differences of an engine and a trainer in bfloat16: most tokens are nearly certain, a few differ widely.

    Mean |difference| 0.012, 99.9th percentile about 0.3: as of models of 0.5 to 7 B parameters.
    """
    scale = np.where(rng.random(size) < 0.7, 1e-3, 0.03) * np.where(rng.random(size) < 0.01, 5.0, 1.0)
    return rng.laplace(0.0, scale)


def float32_noise(rng: np.random.Generator, size: int) -> np.ndarray:
    return rng.laplace(0.0, 3e-7, size)


NOISES = {"bfloat16": bfloat16_noise, "float32": float32_noise}


def first_alarms(dtype, samplers, *, steps, seed):
    """Actor -> the first step with an alarm. samplers: actor -> (rng, size, step) -> differences of a step."""
    rng, windows, found = np.random.default_rng(seed), {name: MismatchWindow() for name in samplers}, {}
    for step in range(1, steps + 1):
        for name, sample in samplers.items():
            windows[name].add(sample(rng, TOKENS_PER_STEP, step))
        values = {name: window.values_M for name, window in windows.items()}
        for name, own in values.items():
            if alarm(own, [other for one, other in values.items() if one != name], dtype):
                found.setdefault(name, step)
    return found


@pytest.mark.parametrize("dtype", NOISES)
@pytest.mark.parametrize("seed", range(5))
def test_a_thousand_healthy_steps_raise_no_alarm(dtype, seed):
    def healthy(rng, size, step):
        return NOISES[dtype](rng, size)

    assert first_alarms(dtype, {"a/1": healthy, "b/1": healthy}, steps=1000, seed=seed) == {}


# Mean |difference| of an old version: in bfloat16 a policy that has moved enough to matter, in float32 any other one.
OLD_VERSION = {"bfloat16": 0.3, "float32": 0.005}


@pytest.mark.parametrize("dtype", NOISES)
@pytest.mark.parametrize("failing", [{"b/1"}, {"a/1", "b/1"}])
@pytest.mark.parametrize("seed", range(8))
def test_actors_that_keep_an_old_version_are_named_within_five_steps(dtype, failing, seed):
    start = 51

    def sampler(name):
        def sample(rng, size, step):
            noise = NOISES[dtype](rng, size)
            if name in failing and step >= start:  # few tokens differ much, most hardly
                noise += rng.standard_normal(size) * rng.exponential(OLD_VERSION[dtype], size)
            return noise

        return sample

    found = first_alarms(dtype, {"a/1": sampler("a/1"), "b/1": sampler("b/1")}, steps=start + 4, seed=seed)
    assert found.keys() == failing
    assert all(step >= start for step in found.values())


def test_a_difference_within_the_bound_is_found_by_the_other_actors():
    rng = np.random.default_rng(0)
    healthy, off = bfloat16_noise(rng, 2000), rng.laplace(0.0, 0.045, 2000)
    assert alarm(off, [], "bfloat16") == ""
    assert alarm(off, [healthy], "bfloat16").endswith("on the other actors")
    assert alarm(healthy, [off], "bfloat16") == ""
    assert alarm(off, [healthy[: MIN_TOKENS - 1]], "bfloat16") == ""


def test_another_temperature_shifts_the_signed_mean():
    rng = np.random.default_rng(0)
    assert alarm(bfloat16_noise(rng, 2000) + 0.02, [], "bfloat16").startswith("signed mean")


def test_few_tokens_one_outlier_and_nan():
    quiet = np.full(200, 1e-7)
    outlier = np.where(np.arange(200) == 7, 3.0, quiet)
    assert alarm(np.full(MIN_TOKENS - 1, 9.0), [], "float32") == ""
    assert alarm(outlier, [], "float32") == ""
    window = MismatchWindow()
    window.add(np.where(np.arange(200) == 7, np.nan, quiet))
    assert alarm(window.values_M, [], "float32")


def test_a_window_keeps_the_newest_tokens():
    window = MismatchWindow()
    window.add(np.zeros(0))
    for step in range(50):
        window.add(np.full(100, float(step)))
    assert np.unique(window.values_M).tolist() == [47.0, 48.0, 49.0]
    assert len(window.values_M) >= WINDOW_TOKENS


def test_tokens_before_the_first_swap_are_fresh():
    rollout = build_rollout(np.random.default_rng(0), num_tokens=10)
    spans = (WeightSpan(3, 0, 2), WeightSpan(3, 2, 4), WeightSpan(5, 4, 10))
    assert num_fresh_tokens(rollout) == 10
    assert num_fresh_tokens(replace(rollout, weight_spans=spans)) == 4


def test_tokens_belong_to_the_actor_that_sampled_them():
    rollout = replace(build_rollout(np.random.default_rng(0), num_tokens=10), origins=(Origin("actor-7", 2, 4),))
    assert owners(rollout, 9) == [OwnedTokens("actor-7/2", 0, 4), OwnedTokens("actor-0/9", 4, 10)]
