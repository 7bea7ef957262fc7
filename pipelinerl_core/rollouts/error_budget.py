"""Ends a run whose rewards or environments are broken."""

import logging
from collections.abc import Sequence

from pipelinerl_core.rollouts.player import PROMPT_ERROR
from pipelinerl_core.types import Rollout

logger = logging.getLogger(__name__)


class ErrorBudget:
    """Stops a run whose rewards are broken: more than a fifth of errors over the last 200 rollouts.

    An episode whose environment took too long counts too, so that a slow service is not taken for a bad policy. A
    prompt that cannot be used counts as one rollout: a few of them say nothing about the others.
    """

    WINDOW = 200
    SHARE = 0.2

    def __init__(self, part: str = "") -> None:
        """part: of a mixture, for the log."""
        self._part = f"mixture.{part}: " if part else ""
        self._recent: list[bool] = []
        self.first_error: str | None = None
        self.num_errors = 0

    def add(self, rollouts: list[Rollout]) -> None:
        """Count the outcomes of a group."""
        if all((rollout.error or "").startswith(PROMPT_ERROR) for rollout in rollouts):
            rollouts = rollouts[:1]
        for rollout in rollouts:
            failed = rollout.error is not None  # with or without environment.timeout_reward
            self._recent.append(failed)
            self.num_errors += failed
            if failed and self.first_error is None:
                self.first_error = rollout.error
            if failed and self.num_errors & (self.num_errors - 1) == 0:  # the 1st, 2nd, 4th, 8th
                logger.warning(
                    "%s%d rollouts failed so far; the newest: %s",
                    self._part, self.num_errors, rollout.error,
                )  # fmt: skip
        del self._recent[: -self.WINDOW]

    @property
    def is_spent(self) -> bool:
        """Whether the run should stop."""
        return len(self._recent) == self.WINDOW and sum(self._recent) > self.SHARE * self.WINDOW


class ErrorBudgets:
    """One ErrorBudget per part: a run ends only if every part is broken."""

    def __init__(self, parts: Sequence[str]) -> None:
        """parts: the names; without a mixture [""]."""
        self._budgets = {name: ErrorBudget(name) for name in parts}

    def add(self, rollouts: list[Rollout]) -> None:
        """Count the outcomes of a group."""
        self._budgets["" if "" in self._budgets else rollouts[0].source].add(rollouts)

    @property
    def num_errors(self) -> int:
        """Rollouts without a reward, of all parts."""
        return sum(budget.num_errors for budget in self._budgets.values())

    @property
    def first_error(self) -> str | None:
        return next((budget.first_error for budget in self._budgets.values() if budget.first_error), None)

    @property
    def is_spent(self) -> bool:
        """Whether the run should stop."""
        return all(budget.is_spent for budget in self._budgets.values())
