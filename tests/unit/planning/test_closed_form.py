"""The closed forms against numbers worked out by hand, a search of every setting, and published figures."""

import numpy as np
import pytest

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.planning.closed_form import (
    System,
    best_pipeline,
    conventional,
    mean_staleness,
    pipeline,
)
from pipelinerl_core.planning.lengths import Lengths
from pipelinerl_core.planning.utilization import UtilizationCurve
from tests.builders import small_config


def system(**changes) -> System:
    values = {
        "accelerators": 2,
        "batch": 8,
        "lengths": Lengths.uniform(2),
        "utilization": UtilizationCurve(((4.0, 1.0),)),
        "train_flashes": 3.0,
    }
    return System(**(values | changes))


def test_lengths_by_hand():
    lengths = Lengths.uniform(3)
    assert lengths.mean == pytest.approx(2)
    assert lengths.running == pytest.approx([1, 2 / 3, 1 / 3])
    assert lengths.spread(1) == pytest.approx(1)
    assert lengths.spread(2) == pytest.approx((1 * 1 + 2 * 3 + 3 * 5) / 9 / 2)
    assert Lengths.of([5, 5]).spread(8) == pytest.approx(1)
    assert Lengths.of([1, 3, 3, 3]).shares == pytest.approx([0.25, 0, 0.75])


def test_drawn_lengths_have_the_distribution():
    drawn = Lengths.of([1, 3, 3, 3]).draw(np.random.default_rng(0), 2_500, 4).ravel()
    assert set(drawn) == {1, 3}
    assert np.mean(drawn) == pytest.approx(2.5, rel=0.02)


def test_the_curve_is_linear_between_its_points_and_constant_after_them():
    curve = UtilizationCurve(((100.0, 0.3), (200.0, 0.4)))
    assert curve.at(np.array([0.0, 50, 150, 1000])) == pytest.approx([0, 0.15, 0.35, 0.4])
    assert curve.step_flashes(np.array([1e-3, 50, 400])) == pytest.approx([1 / 0.003, 1 / 0.003, 1000])


@pytest.mark.parametrize("points", [(), ((4.0, 1.5),), ((4.0, 0.5), (2.0, 0.7)), ((4.0, 0.5), (8.0, 0.4))])
def test_a_curve_that_does_not_increase_is_refused(points):
    with pytest.raises(ConfigError, match="utilization curve"):
        UtilizationCurve(points)


def test_conventional_by_hand():
    """8 sequences of 1 or 2 tokens on 2 accelerators: 4 and 2 on each, 4 / 1 and 2 / 0.5 flashes, 12 tokens."""
    setting = conventional(system(), 1)
    assert (setting.generation, setting.training, setting.lag) == pytest.approx((12 / 8, 2 / 3, 0))
    assert setting.throughput == pytest.approx(12 / (8 + 12 * 3 / 2))


def test_a_longer_phase_fills_the_accelerators():
    """16 sequences: 8 and 4 per accelerator, 8 and 4 flashes, 24 tokens."""
    setting = conventional(system(), 2)
    assert (setting.generation, setting.lag) == pytest.approx((24 / 12, 1))


def test_pipeline_by_hand():
    """4 sequences in flight sample 4 * 2 tokens during the longest completion: 5.3 completions of 1.5, 0.67 steps."""
    setting = pipeline(system(), 4, 1)
    assert (setting.generation, setting.training, setting.lag) == pytest.approx((1, 1 / 3, 1))
    assert setting.throughput == pytest.approx(1 / 3)


@pytest.mark.parametrize("max_lag", [1, 2, 3, 7, 30])
def test_the_search_finds_the_best_of_all_settings(max_lag):
    given = system(
        accelerators=8,
        lengths=Lengths.uniform(20),
        utilization=UtilizationCurve(((6.0, 0.3), (14.0, 0.5))),
        train_flashes=2.5,
    )
    every = [pipeline(given, sequences, generators) for sequences in range(1, 60) for generators in range(1, 8)]
    best = max(setting.throughput for setting in every if setting.lag <= max_lag)
    chosen = best_pipeline(given, max_lag)
    assert chosen.throughput == pytest.approx(best)
    assert chosen.lag <= max_lag
    assert chosen.lag == min(setting.lag for setting in every if setting.throughput >= best - 1e-12)


def test_settings_without_meaning_are_refused():
    with pytest.raises(ConfigError, match="one must train"):
        pipeline(system(), 4, 2)
    with pytest.raises(ConfigError, match="lag of 0"):
        best_pipeline(system(), 0)
    with pytest.raises(ConfigError, match="phase"):
        conventional(system(), 0)
    with pytest.raises(ConfigError, match="accelerators"):
        system(accelerators=1)
    with pytest.raises(ConfigError, match="1 token or more"):
        Lengths.of([0])


def test_the_system_of_emulated_accelerators():
    config = small_config(
        emulation={"accelerators": 4, "token_seconds": 0.001, "saturation": 10, "train_token_seconds": 0.003}
    )
    emulated = System.of(config, Lengths.uniform(3), prompt_tokens=1.0)
    assert (emulated.accelerators, emulated.batch) == (4, 2 * 4)
    assert emulated.train_flashes == pytest.approx(3 * (1 + 1 / 2))
    assert emulated.utilization.at(np.array([5.0])) == pytest.approx([0.5])


@pytest.mark.parametrize(
    ("concurrency", "batch", "queue", "balance", "spread", "measured"),
    [
        (120, 240, 2, 0.63, 1.42, 1.26),
        (240, 120, 2, 0.92, 1.43, 3.59),
        (128, 128, 2, 1.07, 1.44, 3.09),
        (240, 120, 1, 0.86, 1.42, 3.40),
        (120, 120, 1, 0.67, 1.42, 1.92),
        (128, 128, 1, 1.14, 1.45, 2.01),
    ],
)
def test_mean_staleness_is_near_the_published_measurements(concurrency, batch, queue, balance, spread, measured):
    """Six training runs of the article."""
    staleness = mean_staleness(concurrency=concurrency, batch=batch, queue=queue, balance=balance, spread=spread)
    assert staleness == pytest.approx(measured, abs=0.31)


def test_mean_staleness_by_hand():
    given = {"concurrency": 120, "batch": 240, "spread": 1.5, "queue": 2}
    assert mean_staleness(balance=0.5, **given) == pytest.approx(0.75 + 0.5)
    assert mean_staleness(balance=2.0, **given) == pytest.approx(0.375 + 5 / 4)
    with pytest.raises(ConfigError, match="above 0"):
        mean_staleness(balance=0, **given)


def test_the_case_study_of_the_paper_has_the_published_setting_and_rates():
    """arXiv:2509.19128, appendix A.4: tokens per flash, and a lag of about 133.

    The paper prints neither L, tau nor the values of its measured curve U(h), but rates that give what the model
    needs: conventional training has 26.02 tokens per flash on 128 accelerators; 44 accelerators with 192 sequences
    each generate 16.9; conventional generation with G = 133 has 18.3. Hence these rates agree by construction; the
    best setting, its lag and the speedup are results. L hardly matters.
    """
    study = System(
        accelerators=128,
        batch=128,
        lengths=Lengths.uniform(2048),
        utilization=UtilizationCurve(((128.0, 0.275), (192.0, 16.9 / 44))),
        train_flashes=128 / 26.02,
    )
    best, alternating = best_pipeline(study, 132), conventional(study, 133)
    assert (best.sequences, best.generators, best.lag) == (192, 44, 132)
    rates = (best.generation, best.training, best.throughput)
    assert rates == pytest.approx((16.9, 17.08, 16.9), rel=0.005)
    rates = (alternating.generation, alternating.training, alternating.throughput)
    assert rates == pytest.approx((18.3, 26.02, 10.7), rel=0.005)
    assert best.throughput / alternating.throughput == pytest.approx(1.57, rel=0.005)
    ratios = {lag: best_pipeline(study, lag).throughput / conventional(study, lag + 1).throughput
              for lag in range(120, 150)}  # fmt: skip
    assert max(ratios, key=ratios.__getitem__) == pytest.approx(133, abs=2)
