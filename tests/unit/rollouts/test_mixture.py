"""The runner and the error budgets of a mixture."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

from pipelinerl_core.rollouts.mixture import ErrorBudgets, MixtureRunner
from pipelinerl_core.rollouts.runner import ErrorBudget
from pipelinerl_core.types import Outcome
from tests.rollout_rows import build_group


class Runner:
    def __init__(self, name):
        self.name, self.forgotten = name, []

    async def run(self, lease, restored=None):
        return [self.name, lease.group_id, restored]

    def growth(self):
        return [self.name]

    def forget(self, keys):
        self.forgotten += keys


def test_a_group_goes_to_the_runner_of_its_part_and_the_log_has_all_parts():
    parts = {name: Runner(name) for name in ("math", "guess")}
    runner = MixtureRunner(parts)
    lease = SimpleNamespace(group_id=7, prompt=SimpleNamespace(source="guess"))
    assert asyncio.run(runner.run(lease, {})) == ["guess", 7, {}]
    assert runner.growth() == ["math", "guess"]
    runner.forget(key for key in [(7, 0)])
    assert parts["math"].forgotten == parts["guess"].forgotten == [(7, 0)]


def test_a_run_ends_only_if_every_part_exceeds_its_budget_of_errors():
    def group(part, outcome):
        failure = None if outcome is Outcome.SCORED else f"{part} raised"
        return [
            replace(build_group(0, group_id=0, size=2)[0], source=part, outcome=outcome, error=failure)
        ] * ErrorBudget.WINDOW

    budgets = ErrorBudgets(["math", "guess"])
    budgets.add(group("math", Outcome.SCORED))
    budgets.add(group("guess", Outcome.ERROR))
    assert (budgets.is_spent, budgets.num_errors, budgets.first_error) == (False, 200, "guess raised")
    budgets.add(group("math", Outcome.ERROR))
    assert budgets.is_spent
    alone = ErrorBudgets([""])
    alone.add(group("sums", Outcome.ERROR))
    assert alone.is_spent
