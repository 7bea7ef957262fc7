import numpy as np
import pytest

from pipelinerl_core.algo.parity import logprob_parity
from pipelinerl_core.errors import ParityError


def test_figures_are_the_mean_and_the_largest_absolute_difference():
    report = logprob_parity([-1.0, -2.0, -3.0, -4.0], [-1.0, -2.00003, -2.99999, -4.0], "float32")
    assert report.mean == pytest.approx(1e-5)
    assert report.max == pytest.approx(3e-5)
    assert report.num_tokens == 4
    assert report.check() is report


@pytest.mark.parametrize(
    ("dtype", "difference", "ok"),
    [
        ("float32", [9e-5] * 4, True),
        ("float32", [1.1e-4] * 4, False),
        ("float32", [0.011] + [0.0] * 999, False),  # the mean alone, 1.1e-5, would pass
        ("bfloat16", [0.049, -0.049] * 2, True),
        ("bfloat16", [0.051, -0.051] * 2, False),
        ("bfloat16", [0.61] + [0.0] * 999, False),
        ("bfloat16", [0.61] + [0.0] * 1999, True),  # below the 99.9th percentile
        ("bfloat16", [0.009] * 4, True),
        ("bfloat16", [-0.011] * 4, False),
    ],
)
def test_each_bound_holds_by_itself(dtype, difference, ok):
    values = np.linspace(-3, -1, len(difference))
    assert logprob_parity(values, values + difference, dtype).ok is ok


def sampled_logprobs(temperature: float) -> np.ndarray:
    """Log-probabilities, at a temperature, of 4,000 tokens sampled at temperature 1 with about 2 nats of entropy."""
    random = np.random.default_rng(0)
    logits_TV = random.normal(scale=2.5, size=(4000, 100))
    tokens_T = (logits_TV + random.gumbel(size=logits_TV.shape)).argmax(axis=1)
    scaled_TV = logits_TV / temperature
    return (scaled_TV - np.logaddexp.reduce(scaled_TV, axis=1, keepdims=True))[np.arange(4000), tokens_T]


def test_rounding_of_bfloat16_is_accepted_and_a_temperature_off_by_ten_percent_is_refused():
    engine = sampled_logprobs(1.0)
    rounding = np.random.default_rng(1).laplace(scale=0.03, size=engine.size)  # mean 0.03, 99.9th percentile 0.21
    assert logprob_parity(engine + rounding, engine, "bfloat16").ok
    wrong = logprob_parity(engine + rounding, sampled_logprobs(0.9), "bfloat16")
    assert wrong.mean > 0.05
    assert not wrong.ok


def test_the_signed_mean_of_few_tokens_has_a_bound_of_four_standard_errors():
    few = np.random.default_rng(0).normal(scale=0.04, size=50)
    report = logprob_parity(few - few.mean() + 0.015, np.zeros(50), "bfloat16")
    assert report.bounds["signed_mean"] == pytest.approx(4 * few.std() / 50**0.5)
    assert report.ok


def test_differences_of_opposite_sign_do_not_cancel():
    assert not logprob_parity([-1.0, -1.0], [-1.5, -0.5], "bfloat16").ok


def test_a_failed_check_names_both_figures_and_their_bounds():
    with pytest.raises(ParityError, match=r"2 tokens: mean 0\.25 \(at most 0\.0001\), max 0\.5 \(at most 0\.01\)"):
        logprob_parity([-1.0, -1.0], [-1.5, -1.0], "float32").check()


def test_not_a_number_is_not_ok():
    assert not logprob_parity([-1.0, float("nan")], [-1.0, -1.0], "float32").ok


@pytest.mark.parametrize(("engine", "trainer"), [([], []), ([-1.0], [-1.0, -1.0])])
def test_nothing_to_compare_and_different_shapes_are_refused(engine, trainer):
    with pytest.raises(ParityError, match="cannot be compared"):
        logprob_parity(engine, trainer, "float32")
