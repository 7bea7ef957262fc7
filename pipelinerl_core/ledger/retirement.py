"""Selects the actor lives (actor epochs) that have ended for good, so that commits need not name them.

A life ends when its actor leaves or expires. The hub then waits, because an actor that was suspended may return, and
until commits contain the fates of the life's groups. A life is retired by an object in the store (docs/storage.md).
"""

from collections.abc import Callable, Iterable

from pipelinerl_core.ledger.groups import ActorKey

RETIRE_SECONDS = 600.0
"""Time between the end of a life and its retirement; none if a newer life of the same actor has registered."""
RETIRE_COMMITS = 4
"""Commits between them: when the last group of a life is decided, two steps may be reserved and two uncommitted."""


class Retirement:
    """Lives that have ended, by the time of the end. Lives that are selected once stay selected."""

    def __init__(self) -> None:
        self.lives: set[ActorKey] = set()
        """Retired lives, and selected lives whose object is not written yet. Their actors are refused."""
        self._selected: set[ActorKey] = set()
        self._ended: dict[ActorKey, tuple[float, int]] = {}  # life -> (time, newest committed step) of its end

    def select(
        self, ended: Iterable[ActorKey], is_replaced: Callable[[ActorKey], bool], *, now: float, committed_step: int
    ) -> list[ActorKey]:
        """The lives to retire now; `ended` are all lives that have ended and have no undecided group."""
        self._ended = {actor: self._ended.get(actor, (now, committed_step)) for actor in ended}
        for actor, (since, step) in self._ended.items():
            has_waited = now - since >= RETIRE_SECONDS or is_replaced(actor)
            if has_waited and committed_step >= step + RETIRE_COMMITS:
                self._selected.add(actor)
        self.lives |= self._selected
        return sorted(self._selected)

    def retire(self, actor: ActorKey) -> None:
        """Note that a life is retired."""
        self.lives.add(actor)
        self._selected.discard(actor)
        self._ended.pop(actor, None)
