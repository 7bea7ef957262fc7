"""The rollouts of a mixture: each group is sampled and scored by the runner of its part, all on one engine."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from pipelinerl_core.messages import Lease
from pipelinerl_core.rollouts.runner import ErrorBudget, GroupRunner
from pipelinerl_core.types import PartialRow, Rollout


class MixtureRunner:
    """The methods of `GroupRunner` over one runner per part."""

    def __init__(self, runners: Mapping[str, GroupRunner]) -> None:
        """runners: part -> its runner, with the configuration, the codec and the scorer or player of the part."""
        self._runners = runners

    async def run(self, lease: Lease, restored: Mapping[int, PartialRow] | None = None) -> list[Rollout]:
        """See `GroupRunner.run`; `lease.prompt.source` names the part."""
        return await self._runners[lease.prompt.source].run(lease, restored)

    def growth(self) -> list[PartialRow]:
        """See `GroupRunner.growth`."""
        return list(chain.from_iterable(runner.growth() for runner in self._runners.values()))

    def forget(self, keys: Iterable[tuple[int, int]]) -> None:
        """See `GroupRunner.forget`."""
        closed = list(keys)
        for runner in self._runners.values():
            runner.forget(closed)


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
        """The first error of the first part that has one."""
        return next((budget.first_error for budget in self._budgets.values() if budget.first_error), None)

    @property
    def is_spent(self) -> bool:
        """Whether the run should stop."""
        return all(budget.is_spent for budget in self._budgets.values())
