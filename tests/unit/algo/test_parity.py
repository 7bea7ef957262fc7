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
        ("bfloat16", [0.019] * 4, True),
        ("bfloat16", [-0.021] * 4, False),
        ("bfloat16", [0.51] + [0.0] * 99, False),
    ],
)
def test_each_bound_holds_by_itself_and_signs_do_not_cancel(dtype, difference, ok):
    values = np.linspace(-3, -1, len(difference))
    assert logprob_parity(values, values + difference, dtype).ok is ok


def test_differences_of_opposite_sign_do_not_cancel():
    assert not logprob_parity([-1.0, -1.0], [-1.5, -0.5], "bfloat16").ok


def test_a_failed_check_names_both_figures_and_their_bounds():
    with pytest.raises(
        ParityError, match=r"mean \|difference\| 0\.25 \(at most 0\.0001\), max 0\.5 \(at most 0\.01\)"
    ):
        logprob_parity([-1.0, -1.0], [-1.5, -1.0], "float32").check()


def test_not_a_number_is_not_ok():
    assert not logprob_parity([-1.0, float("nan")], [-1.0, -1.0], "float32").ok


@pytest.mark.parametrize(("engine", "trainer"), [([], []), ([-1.0], [-1.0, -1.0])])
def test_nothing_to_compare_and_different_shapes_are_refused(engine, trainer):
    with pytest.raises(ParityError, match="cannot be compared"):
        logprob_parity(engine, trainer, "float32")
