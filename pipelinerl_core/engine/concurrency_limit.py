"""How many sequences an engine with a shared KV cache runs at once: additive increase, multiplicative decrease.

engine.concurrency is the ceiling of the limit; nothing else changes the limit. If the KV cache is too small for the
ceiling, vLLM preempts sequences without this controller: their keys and values are dropped and computed again later.
"""

_INTERVAL_SECONDS = 1.0
# After a decrease the running sequences keep running: the effect shows only when some of them have ended.
_SECONDS_AFTER_DECREASE = 5.0
_MAX_KV_USAGE = 0.95
_MAX_KV_USAGE_TO_INCREASE = 0.85
_DECREASE_FACTOR = 0.8


class ConcurrencyLimit:
    """The number of sequences that may run at once, from 1 to `ceiling`."""

    def __init__(self, ceiling: int, *, now: float, num_preemptions: int = 0) -> None:
        self.value = ceiling
        """The limit now."""
        self._ceiling = ceiling
        self._step = max(1, ceiling // 16)
        self._due = now + _INTERVAL_SECONDS
        self._num_preemptions = num_preemptions

    def update(self, *, running: int, queued: int, kv_usage: float, num_preemptions: int, now: float) -> int:
        """Process one observation; returns the limit.

        Args:
            running: sequences that count against the limit.
            queued: sequences among them that the engine's own scheduler has not started, or has preempted.
            kv_usage: share of the KV cache in use, in [0, 1].
            num_preemptions: since any moment before the controller was built; only those for lack of KV cache.
            now: seconds of any monotonic clock.
        """
        if now < self._due:
            return self.value
        self._due = now + _INTERVAL_SECONDS
        is_preempting = num_preemptions > self._num_preemptions
        self._num_preemptions = num_preemptions
        if is_preempting or kv_usage > _MAX_KV_USAGE:
            self.value = max(1, int(min(self.value, running) * _DECREASE_FACTOR))
            self._due = now + _SECONDS_AFTER_DECREASE
        elif kv_usage < _MAX_KV_USAGE_TO_INCREASE and queued == 0 and running >= self.value:
            self.value = min(self._ceiling, self.value + self._step)
        return self.value
