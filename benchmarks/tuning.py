"""The learning rate of each arm of a comparison, chosen by a search on a seed that the comparison does not report.

An arm that takes turns learns on fresher data and may stand a higher rate than one that learns on older data, so one
rate for all arms would favour some of them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipelinerl_core.comparison.plan import Plan, Wanted, plan_comparison
from pipelinerl_core.config.arm import Arm
from pipelinerl_core.errors import ConfigError, PipelineRLError

SEED = 99
"""The seed of the search; it is not reported."""
_KEY = "learner.lr"
_ROUNDS = 4
"""Extensions of the grid, after which a best rate at its edge is taken."""
_FOLLOWED = {"pipeline-recompute": "pipeline", "pipeline-drain": "pipeline"}
"""Arm -> arm whose rate it takes: these differ in the KV cache alone."""


class RatesMissing(PipelineRLError):
    """The search has no rate for an arm."""


@dataclass(frozen=True, slots=True)
class Search:
    """The learning rates that were tried for one arm."""

    arm: str
    seconds: Mapping[float, float | None]
    """Learning rate -> seconds to the target; None: the target was not reached."""

    @property
    def best(self) -> float | None:
        """The rate with the shortest time to the target; None: no rate reached the target."""
        reached = {rate: seconds for rate, seconds in self.seconds.items() if seconds is not None}
        return min(reached, key=lambda rate: reached[rate]) if reached else None

    @property
    def is_at_edge(self) -> bool:
        """Whether a rate outside of the grid may be better."""
        return self.best in (None, min(self.seconds), max(self.seconds))

    def extended(self, factor: float) -> list[float]:
        """The rates to try next: one beyond the edge of the best rate; beyond both if no rate reached the target."""
        low, high = min(self.seconds), max(self.seconds)
        beyond = {low: [low / factor], high: [high * factor], None: [low / factor, high * factor]}
        return beyond.get(self.best, [])


def parse_rates(text: str) -> tuple[float, ...]:
    """The grid, in increasing order. Raises ConfigError."""
    try:
        rates = sorted({float(rate) for rate in text.split(",")})
    except ValueError:
        rates = []
    if len(rates) < 2 or rates[0] <= 0:
        raise ConfigError(f"--rates {text}: give at least two learning rates, for example --rates 1e-4,2e-4,4e-4")
    return tuple(rates)


def tuned(
    wanted: Wanted, rates: Sequence[float], compare: Callable[[Plan], Mapping[str, Any]]
) -> tuple[Wanted, list[Search]]:
    """The comparison with each arm at its best rate, and the search. compare: runs a plan, returns comparison.json.

    The grid of an arm grows by the ratio of its two highest rates while its best rate is at an edge. Raises
    RatesMissing if the budget ends before the search does, or if an arm reaches the target at no rate.
    """
    factor = rates[-1] / rates[-2]
    leaders = [arm for arm in wanted.arms if _leader(arm, wanted.arms) == arm.name]
    grid = {arm.name: list(rates) for arm in leaders}
    for _ in range(_ROUNDS):
        searches = _searched(wanted, leaders, grid, compare)
        edges = {search.arm: search.extended(factor) for search in searches if search.is_at_edge}
        if not edges:
            break
        for name, more in edges.items():
            grid[name] += more
    best = {search.arm: search.best for search in searches}
    if lost := [name for name, rate in best.items() if rate is None]:
        raise RatesMissing(f"{', '.join(lost)}: no learning rate reached {wanted.target:g}. Set --target lower")
    chosen = [_at(arm, float(best[_leader(arm, wanted.arms)] or 0), arm.name) for arm in wanted.arms]
    return replace(wanted, arms=tuple(chosen)), searches


def _searched(
    wanted: Wanted,
    arms: Sequence[Arm],
    grid: Mapping[str, Sequence[float]],
    compare: Callable[[Plan], Mapping[str, Any]],
) -> list[Search]:
    """The searches so far: every arm of the grid at every rate, on the seed of the search."""
    points = [(arm, rate, f"{arm.name}-lr{rate:.3g}") for arm in arms for rate in sorted(grid[arm.name])]
    at_rates = tuple(_at(arm, rate, name) for arm, rate, name in points)
    plan = plan_comparison(replace(wanted, arms=at_rates, seeds=(SEED,), name=f"{wanted.name}-rates", reference=""))
    document = compare(plan)
    if document["dropped"] or document["failed"]:
        raise RatesMissing("the search for learning rates is not complete. Run the same command again")
    figures = document["arms"]
    return [
        Search(
            arm.name,
            {rate: _seconds(figures[name]) for point_arm, rate, name in points if point_arm.name == arm.name},
        )
        for arm in arms
    ]


def _seconds(entry: Mapping[str, Any]) -> float | None:
    return next(iter(entry["time_to_target_seconds"]["by_seed"].values()), None)


def _at(arm: Arm, rate: float, name: str) -> Arm:
    return Arm(name, (*arm.overrides, f"{_KEY}={rate:.3g}"))


def _leader(arm: Arm, arms: Iterable[Arm]) -> str:
    leader = _FOLLOWED.get(arm.name, arm.name)
    return leader if leader in [other.name for other in arms] else arm.name


def search_lines(searches: Iterable[Search]) -> list[str]:
    """Example: learning rate of pipeline, seed 99: 0.0001 52 s, 0.0002 43 s, 0.0004 not reached; chosen: 0.0002."""
    lines = []
    for search in searches:
        tried = ", ".join(
            f"{rate:.3g} {'not reached' if seconds is None else f'{seconds:.0f} s'}"
            for rate, seconds in sorted(search.seconds.items())
        )
        chosen = f"{search.best:.3g}{' (at the edge)' * search.is_at_edge}"
        lines.append(f"learning rate of {search.arm}, seed {SEED}: {tried}; chosen: {chosen}")
    return lines
