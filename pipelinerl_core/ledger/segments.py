"""The segments in the object store that hold rows of undecided groups, and the lowest segment still needed."""

from collections.abc import Callable, Mapping

from pipelinerl_core.ledger.groups import ActorKey


class SegmentIndex:
    """Segments by actor epoch. Sequence numbers of an epoch begin at 0 and have no gaps."""

    def __init__(self, low_water: Mapping[str, int] | None = None) -> None:
        """`low_water`: low-water marks of the commit that the hub starts from."""
        self._segments: dict[int, dict[int, tuple[ActorKey, int]]] = {}  # group_id -> attempt -> segment
        self._next = {ActorKey.parse(key): seq for key, seq in (low_water or {}).items()}
        self._early: dict[ActorKey, set[int]] = {}

    def add(self, group_id: int, attempt: int, actor: ActorKey, seq: int) -> None:
        self._segments.setdefault(group_id, {})[attempt] = (actor, seq)

    def seal(self, actor: ActorKey, seq: int) -> None:
        """Note that a segment is durable, after `add` for each of its undecided groups."""
        early = self._early.setdefault(actor, set())
        early.add(seq)
        following = self._next.get(actor, 0)
        while following in early:
            early.remove(following)
            following += 1
        self._next[actor] = following

    def find(self, group_id: int, attempt: int) -> tuple[ActorKey, int] | None:
        """(actor epoch, seq) of the segment that holds a group; None if unknown."""
        return self._segments.get(group_id, {}).get(attempt)

    def holders(self, is_open: Callable[[int], bool]) -> set[ActorKey]:
        """Actor epochs whose segments hold rows of an open group."""
        needed = (attempts for group_id, attempts in self._segments.items() if is_open(group_id))
        return {actor for attempts in needed for actor, _ in attempts.values()}

    def actors(self) -> set[ActorKey]:
        """Actor epochs with a low-water mark."""
        return set(self._next)

    def retire(self, actor: ActorKey) -> None:
        """Drop the mark of an actor epoch whose groups are all decided."""
        self._next.pop(actor, None)
        self._early.pop(actor, None)

    def low_water(self, is_open: Callable[[int], bool]) -> dict[str, int]:
        """ "<actor>/<epoch>" -> lowest segment that may hold rows of an open group; drops other groups."""
        self._segments = {group_id: attempts for group_id, attempts in self._segments.items() if is_open(group_id)}
        lowest = dict(self._next)
        for attempts in self._segments.values():
            for actor, seq in attempts.values():
                lowest[actor] = min(lowest.get(actor, 0), seq)
        return {str(actor): seq for actor, seq in lowest.items()}
