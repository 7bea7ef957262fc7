"""What actors say about themselves: their newest sample, and every swap until a commit has recorded it."""

from collections.abc import Iterable, Mapping

from pipelinerl_core.ledger.groups import ActorKey
from pipelinerl_core.messages import Sync
from pipelinerl_core.run.records import ActorSample, SwapRecord

SWAP_COUNTER = "swap_version"
"""Counter of an ActorSample: newest version whose swap had been heard of (and is in a commit up to this one)."""


class ActorReports:
    """Samples and swaps by actor epoch."""

    def __init__(self) -> None:
        """Empty."""
        self.samples: dict[ActorKey, ActorSample] = {}
        self._reported: dict[ActorKey, int] = {}  # newest swap version
        self._committed: dict[ActorKey, int] = {}
        self._pending: list[SwapRecord] = []  # in no reservation

    def restore(self, actors: Mapping[str, ActorSample]) -> None:
        """From a commit."""
        for key, sample in actors.items():
            actor = ActorKey.parse(key)
            self.samples[actor] = sample
            self._reported[actor] = self._committed[actor] = int(sample.counters.get(SWAP_COUNTER, -1))

    def record_sync(self, actor: ActorKey, sync: Sync, now: float) -> list[SwapRecord]:
        """Take in a sync; returns the swaps that are new."""
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
        reported = sorted((SwapRecord.model_validate(swap) for swap in sync.swaps), key=lambda swap: swap.version)
        new = [swap for swap in reported if swap.version > self._reported.get(actor, -1)]
        if new:
            self._reported[actor] = new[-1].version
            self._pending.extend(new)
        return new

    def take_swaps(self) -> list[SwapRecord]:
        """Every swap that no reservation has taken yet."""
        taken, self._pending = self._pending, []
        return taken

    def return_swaps(self, swaps: Iterable[SwapRecord]) -> None:
        """The reservation that took them was given up."""
        self._pending = [*swaps, *self._pending]

    def commit_swaps(self, swaps: Iterable[SwapRecord]) -> None:
        """A commit records them: their actors may forget them."""
        for swap in swaps:
            actor = ActorKey(swap.actor, swap.actor_epoch)
            self._committed[actor] = max(self._committed.get(actor, -1), swap.version)

    def acknowledged(self, actor: ActorKey, *, is_final: bool) -> int:
        """Newest swap version that the actor may forget: in a commit, or heard when no commit follows."""
        return (self._reported if is_final else self._committed).get(actor, -1)

    def swap_version(self, actor: ActorKey) -> int:
        """Newest swap version heard of."""
        return self._reported.get(actor, -1)
