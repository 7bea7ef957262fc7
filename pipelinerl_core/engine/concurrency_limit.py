"""How many sequences an engine with a shared KV cache takes in: up additively, down multiplicatively.

The only controller that acts on it; engine.concurrency is its ceiling. Without it a KV cache that is too small for
the ceiling preempts: sequences are thrown out of the cache and prefilled again, which is work for nothing.
"""

from dataclasses import dataclass

_INTERVAL_SECONDS = 1.0
# After a cut the sequences that are in stay in: what it did shows only when some have ended.
_REST_SECONDS = 5.0
_FULL = 0.95
_ROOM = 0.85
_CUT = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLoad:
    """What the controller looks at."""

    running: int
    """Sequences that hold a place."""
    queued: int
    """Sequences with a place that the engine's own scheduler has not started, or has preempted."""
    kv_usage: float
    """Share of the KV cache in use, in [0, 1]."""
    num_preemptions: int
    """Since the start."""


class Places:
    """The number of places, at most `ceiling`."""

    def __init__(self, ceiling: int, *, now: float) -> None:
        self.number = ceiling
        """Sequences that may run at once now."""
        self._ceiling = ceiling
        self._step = max(1, ceiling // 16)
        self._due = now + _INTERVAL_SECONDS
        self._num_preemptions = 0

    def update(self, load: KVLoad, *, now: float) -> int:
        """Take in one observation, `now` in seconds of any monotonic clock; returns the number of places."""
        if now < self._due:
            return self.number
        self._due = now + _INTERVAL_SECONDS
        is_preempting = load.num_preemptions > self._num_preemptions
        self._num_preemptions = load.num_preemptions
        if is_preempting or load.kv_usage > _FULL:
            self.number = max(1, int(min(self.number, load.running) * _CUT))
            self._due = now + _REST_SECONDS
        elif load.kv_usage < _ROOM and load.queued == 0 and load.running >= self.number:
            self.number = min(self._ceiling, self.number + self._step)
        return self.number
