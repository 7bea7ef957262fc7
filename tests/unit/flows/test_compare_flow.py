"""How long a planned run of a comparison continues."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from pipelinerl.flows import compare_flow
from pipelinerl_core.comparison.plan import Wanted, plan_comparison
from pipelinerl_core.config.arm import Arm

ARMS = (Arm("keep", ("engine.kv=keep",)), Arm("drain", ("engine.kv=drain",)))


@pytest.mark.parametrize(
    ("reached", "completed", "levels"),
    [
        ([True], [True], [0.57]),
        ([True, True], [False, True], [0.57, 0.62]),
        ([True, False], [False, True], [0.57, 0.62]),  # the last step
        ([False], [False], [0.57]),  # drained: the comparison does not start it again
    ],
)
def test_a_run_that_was_stopped_below_the_target_is_continued(monkeypatch, reached, completed, levels):
    plan = plan_comparison(Wanted(source="quickstart", arms=ARMS, target=0.5, seeds=(0,)))
    tried, answers, done = [], iter(reached), iter(completed)

    def run_arm(url, config, target, enough_reward, labels, is_checked):
        tried.append(enough_reward)
        return next(answers)

    monkeypatch.setattr(compare_flow, "run_arm", SimpleNamespace(with_options=lambda **_: run_arm))
    monkeypatch.setattr(compare_flow, "is_complete", lambda *_: next(done))
    monkeypatch.setattr(compare_flow, "get_run_logger", MagicMock())
    compare_flow.run_to_target(plan, plan.runs[0], "memory://r", {})
    assert tried == pytest.approx(levels)
