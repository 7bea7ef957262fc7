"""How often something that ends may be started again: the count, what resets the count, and the words for both."""

from collections.abc import Callable
from math import inf


def restart_text(count: int, limit: int) -> str:
    """Part of a log line: which restart in a row this is."""
    return f"restart {count} of {limit}"


def spent_text(count: int, rule: str) -> str:
    """Part of an error message: how many restarts were in vain, and the rule that allows no more."""
    return f"after {count} restarts ({rule})"


class RestartBudget:
    """Counts the restarts of one process, from its first start, which is now. Not safe between threads."""

    def __init__(
        self,
        limit: int,
        rule: str,
        *,
        clock: Callable[[], float],
        settled_seconds: float = inf,
        window_seconds: float = inf,
    ) -> None:
        """At most `limit` restarts in a row; `rule` names the limit in messages, such as a key and its value.

        settled_seconds: a life of this length resets the count, because the process was started well.
        window_seconds: a restart counts for this long.
        """
        self._limit = limit
        self._rule = rule
        self._clock = clock
        self._settled_seconds = settled_seconds
        self._window_seconds = window_seconds
        self._started_at = clock()
        self._restarts: list[float] = []

    @property
    def count(self) -> int:
        """Restarts that count now."""
        now = self._clock()
        if now - self._started_at >= self._settled_seconds:
            return 0
        return sum(at >= now - self._window_seconds for at in self._restarts)

    @property
    def is_spent(self) -> bool:
        """Whether no restart is left."""
        return self.count >= self._limit

    def take(self) -> bool:
        """Count a restart, with which a new life begins; False, and nothing changes, if the budget is spent."""
        count = self.count
        if count >= self._limit:
            return False
        self._started_at = self._clock()
        self._restarts = [*self._restarts[len(self._restarts) - count :], self._started_at]
        return True

    def reset(self) -> None:
        """Count from 0 again."""
        self._restarts = []

    @property
    def restart_text(self) -> str:
        """The newest restart, for a log line."""
        return restart_text(self.count, self._limit)

    @property
    def spent_text(self) -> str:
        """Why there is no further restart, for an error message."""
        return spent_text(self.count, self._rule)
