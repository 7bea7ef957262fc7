"""The evaluator's record."""

from pipelinerl_core.roles.evaluator.main import mean_components
from pipelinerl_core.types import RewardComponent, Score


def test_a_component_is_the_mean_over_the_rewards_that_have_it():
    right = Score(1.1, (RewardComponent("correct", 1.0), RewardComponent("short", 0.1)))
    wrong = Score(0.0, (RewardComponent("correct", 0.0),))
    assert mean_components([right, wrong, 0.5]) == {"correct": 0.5, "short": 0.1}
    assert mean_components([0.5]) == {}
