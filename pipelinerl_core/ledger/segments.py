"""Where the rows of undecided groups lie in the object store, and the lowest segment that is still needed."""

from collections.abc import Callable, Mapping

from pipelinerl_core.ledger.groups import ActorKey


class SegmentIndex:
    """Segments by actor epoch. Sequence numbers of an epoch begin at 0 and have no gaps."""

    def __init__(self, low_water: Mapping[str, int] | None = None) -> None:
        """`low_water`: of the commit this hub starts from."""
        self._where: dict[int, dict[int, tuple[ActorKey, int]]] = {}  # group_id -> attempt -> segment
        self._next = {ActorKey.parse(key): seq for key, seq in (low_water or {}).items()}
        self._early: dict[ActorKey, set[int]] = {}

    def add(self, group_id: int, attempt: int, actor: ActorKey, seq: int) -> None:
        """This segment holds an undecided group."""
        self._where.setdefault(group_id, {})[attempt] = (actor, seq)

    def seal(self, actor: ActorKey, seq: int) -> None:
        """A segment is durable, and every undecided group in it is placed."""
        early = self._early.setdefault(actor, set())
        early.add(seq)
        following = self._next.get(actor, 0)
        while following in early:
            early.remove(following)
            following += 1
        self._next[actor] = following

    def find(self, group_id: int, attempt: int) -> tuple[ActorKey, int] | None:
        """The segment that holds a group."""
        return self._where.get(group_id, {}).get(attempt)

    def low_water(self, is_open: Callable[[int], bool]) -> dict[str, int]:
        """ "<actor>/<epoch>" -> lowest segment that may hold rows of an open group; forgets the others."""
        self._where = {group_id: places for group_id, places in self._where.items() if is_open(group_id)}
        lowest = dict(self._next)
        for places in self._where.values():
            for actor, seq in places.values():
                lowest[actor] = min(lowest.get(actor, 0), seq)
        return {str(actor): seq for actor, seq in lowest.items()}
