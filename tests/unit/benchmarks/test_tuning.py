"""The search for the learning rate of each arm of a comparison."""

import pytest

from benchmarks.tuning import SEED, RatesMissing, parse_rates, search_lines, tuned
from pipelinerl_core.comparison.plan import Wanted
from pipelinerl_core.config.arm import Arm
from pipelinerl_core.errors import ConfigError

ARMS = (
    Arm("pipeline", ("schedule.max_lag=8",)),
    Arm("pipeline-drain", ("engine.kv=drain",)),
    Arm("conventional-1", ("schedule.kind=conventional", "schedule.steps_per_phase=1")),
)


class Machine:
    """Answers a plan with the seconds that each arm would need, and keeps the plans."""

    def __init__(self, seconds, dropped=()):
        self.seconds, self.dropped, self.plans = seconds, list(dropped), []

    def compare(self, plan):
        self.plans.append(plan)
        arms = {}
        for run in plan.runs:
            name, _, _ = run.arm.partition("-lr")
            value = self.seconds[name](run.config.learner.lr)
            arms[run.arm] = {"time_to_target_seconds": {"by_seed": {str(run.seed): value}}}
        return {"arms": arms, "dropped": self.dropped, "failed": {}}


def near(best):
    """Seconds that grow with the distance from the best rate; a rate above 6 times the best diverges."""
    return lambda rate: None if rate > 6 * best else 50 * max(rate / best, best / rate)


def wanted():
    return Wanted(source="quickstart", arms=ARMS, overrides=("trainer.steps=4", "learner.lr=1e-4"), seeds=(0, 1))


def test_every_arm_has_its_own_rate_and_the_grid_grows_beyond_its_edges():
    machine = Machine({"pipeline": near(2e-4), "conventional-1": near(1.6e-3)})
    chosen, searches = tuned(wanted(), (1e-4, 2e-4, 4e-4), machine.compare)
    assert [arm.overrides[-1] for arm in chosen.arms] == [
        "learner.lr=0.0002", "learner.lr=0.0002", "learner.lr=0.0016",
    ]  # fmt: skip
    assert [arm.name for arm in chosen.arms] == [arm.name for arm in ARMS]
    assert chosen.seeds == (0, 1)
    assert [search.arm for search in searches] == ["pipeline", "conventional-1"], "kv arms take the pipeline's rate"
    assert sorted(searches[0].seconds) == [1e-4, 2e-4, 4e-4]
    assert sorted(searches[1].seconds) == [1e-4, 2e-4, 4e-4, 8e-4, 1.6e-3, 3.2e-3]
    assert {run.seed for plan in machine.plans for run in plan.runs} == {SEED}
    assert search_lines(searches)[0] == (
        "learning rate of pipeline, seed 99: 0.0001 100 s, 0.0002 50 s, 0.0004 100 s; chosen: 0.0002"
    )


def test_a_lower_rate_is_tried_too_and_rates_that_reach_nothing_are_named():
    machine = Machine({"pipeline": near(5e-5), "conventional-1": near(1e-4)})
    chosen, searches = tuned(wanted(), (1e-4, 2e-4, 4e-4), machine.compare)
    assert chosen.arms[0].overrides[-1] == "learner.lr=5e-05"
    assert "0.0004 not reached" in search_lines(searches)[0]
    with pytest.raises(RatesMissing, match="pipeline: no learning rate reached"):
        tuned(wanted(), (1e-4, 2e-4), Machine({"pipeline": lambda _: None, "conventional-1": near(1e-4)}).compare)


def test_a_search_that_the_budget_cuts_is_no_result():
    machine = Machine({"pipeline": near(2e-4), "conventional-1": near(2e-4)}, dropped=["seed 99 dropped: budget"])
    with pytest.raises(RatesMissing, match="Run the same command again"):
        tuned(wanted(), (1e-4, 2e-4, 4e-4), machine.compare)


@pytest.mark.parametrize("text", ["1e-4", "a,b", "0,1e-4", ""])
def test_a_grid_has_two_rates_above_0(text):
    with pytest.raises(ConfigError, match="give at least two learning rates"):
        parse_rates(text)
