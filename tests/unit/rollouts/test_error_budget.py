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
    scored = build_group(0, group_id=0, size=8)
    refused = [replace(rollout, error="prompt: too long", outcome=Outcome.ERROR) for rollout in scored]
    few = ErrorBudgets([""])
    for _ in range(30):
        few.add(refused)
        few.add(scored)
    assert not few.is_spent, "prompts that cannot be used count as one rollout each"
    for _ in range(ErrorBudget.WINDOW):
        few.add(refused)
    assert few.is_spent
    alone = ErrorBudgets([""])
    alone.add(group("sums", Outcome.ERROR))
    assert alone.is_spent
