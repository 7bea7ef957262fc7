"""A run ends if too many of its rollouts fail."""

from dataclasses import replace

from pipelinerl_core.rollouts.error_budget import ErrorBudget, ErrorBudgets
from pipelinerl_core.types import Outcome
from tests.rollout_rows import build_group


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
