"""Reports of actors: the newest sample of each actor epoch, and every swap until a commit has recorded the swap."""

from collections.abc import Iterable, Mapping

from pipelinerl_core.ledger.groups import ActorKey
from pipelinerl_core.messages import ActorSample, SwapRecord, Sync


class ActorReports:
    """Samples and swaps by actor epoch."""

    def __init__(self) -> None:
        self.samples: dict[ActorKey, ActorSample] = {}
        self._reported: dict[ActorKey, int] = {}  # newest swap version
        self._committed: dict[ActorKey, int] = {}
        self._pending: list[SwapRecord] = []  # not yet part of a reservation

    def restore(self, actors: Mapping[str, ActorSample]) -> None:
        """Restore samples and swap versions from a commit."""
        for key, sample in actors.items():
            actor = ActorKey.parse(key)
            self.samples[actor] = sample
            self._reported[actor] = self._committed[actor] = sample.counters.swap_version

    def record_sync(self, actor: ActorKey, sync: Sync, now: float) -> list[SwapRecord]:
        """Store the sample and the swaps of a sync; returns the new swaps."""
        self.samples[actor] = ActorSample(
            at=now,
            engine_version=sync.engine_version,
            running=sync.running,
            waiting=sync.waiting,
            concurrency=sync.concurrency,
            num_tokens=sync.num_tokens,
            running_seconds=sync.running_seconds,
            counters=sync.counters,
        )
        reported = sorted(sync.swaps, key=lambda swap: swap.version)
        new = [swap for swap in reported if swap.version > self._reported.get(actor, -1)]
        if new:
            self._reported[actor] = new[-1].version
            self._pending.extend(new)
        return new

    def take_swaps(self) -> list[SwapRecord]:
        """Remove and return all pending swaps, for a reservation."""
        taken, self._pending = self._pending, []
        return taken

    def return_swaps(self, swaps: Iterable[SwapRecord]) -> None:
        """Make swaps of an abandoned reservation pending again."""
        self._pending = [*swaps, *self._pending]

    def commit_swaps(self, swaps: Iterable[SwapRecord]) -> None:
        """Note that a commit records these swaps: their actors need not report them again."""
        for swap in swaps:
            actor = ActorKey(swap.actor, swap.actor_epoch)
            self._committed[actor] = max(self._committed.get(actor, -1), swap.version)

    def acknowledged(self, actor: ActorKey, *, is_final: bool) -> int:
        """Newest swap version that the actor need not report again: committed, or with `is_final` only reported."""
        return (self._reported if is_final else self._committed).get(actor, -1)

    def retire(self, actor: ActorKey) -> None:
        """Drop the sample of an actor epoch; its pending swaps stay until a commit records them."""
        self.samples.pop(actor, None)
        self._reported.pop(actor, None)
        self._committed.pop(actor, None)

    def swap_version(self, actor: ActorKey) -> int:
        """Newest reported swap version; -1 for none."""
        return self._reported.get(actor, -1)
