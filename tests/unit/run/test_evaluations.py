"""Which versions are evaluated, and when there are enough."""

from pipelinerl_core.run.evaluations import next_to_evaluate
from pipelinerl_core.run.versions import names_several


def test_versions_are_evaluated_in_order_and_once():
    assert next_to_evaluate([10, 0, 5], {}) == 0
    assert next_to_evaluate([0, 5, 10], {0: 0.2, 10: 0.4}) == 5
    assert next_to_evaluate([0, 5], {0: 0.2, 5: 0.3}) is None


def test_two_versions_at_the_level_are_enough():
    assert next_to_evaluate([0, 5, 10, 15], {0: 0.2, 5: 0.5, 10: 0.4}, enough=0.5) == 15
    assert next_to_evaluate([0, 5, 10, 15, 20], {0: 0.2, 5: 0.5, 10: 0.4, 15: 0.6}, enough=0.5) is None


def test_one_version_or_several():
    assert [names_several(text) for text in ("last", "12", "all", "0,5")] == [False, False, True, True]
