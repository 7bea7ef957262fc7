"""Limit of a process's restarts: the count, the conditions that reset the count, and both as text."""

from collections.abc import Callable
from math import inf


def restart_text(count: int, limit: int) -> str:
    """Part of a log line: the number of this restart in a row."""
    return f"restart {count} of {limit}"


def spent_text(count: int, rule: str) -> str:
    """Part of an error message: the number of restarts, and the rule that allows no further restart."""
    return f"after {count} restarts ({rule})"


class RestartBudget:
    """Counts the restarts of one process, whose first start is now. Not thread-safe."""

    def __init__(
        self,
        limit: int,
        rule: str,
        *,
        clock: Callable[[], float],
        stable_seconds: float = inf,
        window_seconds: float = inf,
    ) -> None:
        """At most `limit` restarts in a row; `rule` names the limit in messages, such as a key and its value.

        stable_seconds: after running for this long, the process is stable and the count is 0.
        window_seconds: a restart counts for this long.
        """
        self._limit = limit
        self._rule = rule
        self._clock = clock
        self._stable_seconds = stable_seconds
        self._window_seconds = window_seconds
        self._started_at = clock()
        self._restarts: list[float] = []

    @property
    def count(self) -> int:
        now = self._clock()
        if now - self._started_at >= self._stable_seconds:
            return 0
        return sum(at >= now - self._window_seconds for at in self._restarts)

    @property
    def is_spent(self) -> bool:
        """Whether no restart is left."""
        return self.count >= self._limit

    def take(self) -> bool:
        """Count a restart, which happens now; returns False and changes nothing if the budget is spent."""
        count = self.count
        if count >= self._limit:
            return False
        self._started_at = self._clock()
        self._restarts = [*self._restarts[len(self._restarts) - count :], self._started_at]
        return True

    def reset(self) -> None:
        """Set the count to 0."""
        self._restarts = []

    @property
    def restart_text(self) -> str:
        """The newest restart, for a log line."""
        return restart_text(self.count, self._limit)

    @property
    def spent_text(self) -> str:
        """The reason for no further restart, for an error message."""
        return spent_text(self.count, self._rule)
