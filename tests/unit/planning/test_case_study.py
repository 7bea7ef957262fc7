"""The paper's case study: the model finds the published setting and the published figures."""

import pytest

from pipelinerl_core.planning.case_study import case_study, case_study_lines


@pytest.fixture(scope="module")
def document():
    return case_study()


def test_the_best_setting_and_its_rates_are_the_published_ones(document):
    results, published = document["results"], document["published"]
    assert (results["sequences"], results["generators"]) == (192, 44)
    assert results["lag"] == document["max_lag"] == document["steps_per_phase"] - 1 == 132
    for key in published.keys() - {"lag"}:
        assert results[key] == pytest.approx(published[key], rel=0.005), key
    assert document["best_lag"] == pytest.approx(published["lag"], abs=2)


def test_the_text_has_both_columns(document):
    lines = case_study_lines(document)
    assert any(line.split()[-2:] == ["192", "192"] for line in lines)
    assert any(line.startswith("lag at most G - 1 = 132") for line in lines)
