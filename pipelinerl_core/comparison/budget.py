"""The time budget of a comparison: estimates durations from earlier runs and leaves out the last seeds first."""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence

from pipelinerl_core.comparison.plan import PlannedRun, names_of


class Budget:
    """The time budget of one command; starts at construction. `dropped` holds the runs that were left out."""

    def __init__(
        self,
        seconds: float,
        spent: Iterable[tuple[str, float]] = (),
        *,
        begun: Iterable[int] = (),
        limit: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """spent: (arm, seconds) of runs of earlier commands; begun: the first seed, and seeds with a finished run.

        limit: number of runs at the same time.
        """
        self._clock = clock
        self._limit = limit
        self.ends_at = clock() + seconds
        self._spent: dict[str, list[float]] = {}
        for arm, run_seconds in spent:
            self.note(arm, run_seconds)
        self._begun = set(begun)
        self.dropped: list[PlannedRun] = []

    @property
    def left_seconds(self) -> float:
        """Remaining time; negative if the budget is exceeded."""
        return self.ends_at - self._clock()

    def note(self, arm: str, seconds: float) -> None:
        """Record the duration of a run of an arm."""
        self._spent.setdefault(arm, []).append(seconds)

    def expected_seconds(self, runs: Sequence[PlannedRun]) -> float | None:
        """Estimated duration of `runs`: per run the mean of its arm, else of all arms; None without a known run.

        The runs that run already are not included.
        """
        known = [seconds for spent in self._spent.values() for seconds in spent]
        if not known:
            return None
        usual = statistics.fmean(known)
        each = (statistics.fmean(self._spent[run.arm]) if run.arm in self._spent else usual for run in runs)
        return sum(each) / min(self._limit, max(1, len(runs)))

    def trim(self, pending: Sequence[PlannedRun]) -> list[PlannedRun]:
        """The pending runs that fit into the remaining time; whole seeds that are not begun are left out, last first.

        A seed that is begun continues while its next run fits. The very first run is never left out.
        """
        kept = list(pending)
        while kept and not self._fits(kept) and kept[-1].seed not in self._begun:
            self._drop([run for run in kept if run.seed == kept[-1].seed])
            kept = [run for run in kept if run.seed != kept[-1].seed]
        if kept and not self._fits(kept[:1]):
            self._drop(kept)
            return []
        self._begun.update(run.seed for run in kept[:1])
        return kept

    def _fits(self, runs: Sequence[PlannedRun]) -> bool:
        expected = self.expected_seconds(runs)
        return expected is None or expected <= self.left_seconds

    def _drop(self, runs: Sequence[PlannedRun]) -> None:
        self.dropped = sorted([*runs, *self.dropped], key=lambda run: run.seed)


def dropped_lines(dropped: Sequence[PlannedRun], num_arms: int) -> list[str]:
    """Text lines about the runs that were left out. Example: ["seeds 1, 2 dropped: budget"]."""
    by_seed: dict[int, list[PlannedRun]] = {}
    for run in dropped:
        by_seed.setdefault(run.seed, []).append(run)
    whole = [str(seed) for seed, runs in by_seed.items() if len(runs) == num_arms]
    lines = [f"seed {seed}: {', '.join(names_of(runs))} dropped: budget" for seed, runs in by_seed.items()]
    parts = [line for line, runs in zip(lines, by_seed.values(), strict=True) if len(runs) < num_arms]
    return [*([f"seed{'s' * (len(whole) > 1)} {', '.join(whole)} dropped: budget"] if whole else []), *parts]
