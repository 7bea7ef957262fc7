"""Who waits for whom, in seconds since the run began: what the report's advice goes by.

    engine      the trainer waits for groups that are being generated
    window      the trainer waits while slots stand empty that the schedule has no place for
    stale_wait  enough groups are ready, but schedule.stale=wait holds the step back
    actors      engine time lost to slots that stand empty because no group was granted

Slots decide between engine and window: ten seconds of waiting with a quarter of all slots empty for want of a place
are 2.5 s of window and 7.5 s of engine. An actor with a quarter of its slots empty for ten seconds adds 2.5 s to
actors, whether or not the trainer waits. What an actor says holds until its next sync, a fraction of a second later.
"""

from collections.abc import Mapping

from pipelinerl_core.ledger.groups import ActorKey
from pipelinerl_core.messages import Sync

CAUSES = ("engine", "window", "stale_wait", "actors")
# Actors sync, and the trainer asks again, several times a second: who is silent for longer is not there.
_SILENCE_SECONDS = 2.0


class Waits:
    """Running totals. Every method takes the time of the event, in seconds of any one clock."""

    def __init__(self, seconds: Mapping[str, float] | None = None) -> None:
        """`seconds`: totals of a commit, to go on from."""
        self._seconds = dict.fromkeys(CAUSES, 0.0) | dict(seconds or {})
        self._empty: dict[ActorKey, tuple[float, float]] = {}  # share of empty slots, since when
        self._present: dict[ActorKey, tuple[float, float]] = {}  # those who are there, the longest silent one first
        self._present_sum = 0.0  # of their shares
        self._asked_at: float | None = None  # the trainer's newest question, while it waits
        self._booked_at = 0.0
        self._is_held_back = False

    def trainer_waits(self, now: float, *, is_held_back: bool = False) -> None:
        """The trainer asked for a step and gets none yet. `is_held_back`: only schedule.stale=wait is against it."""
        self._book_trainer(now)
        self._asked_at, self._booked_at, self._is_held_back = now, now, is_held_back

    def trainer_resumes(self, now: float) -> None:
        """The trainer got its groups."""
        self._book_trainer(now)
        self._asked_at = None

    def actor_synced(self, actor: ActorKey, now: float, empty_share: float) -> None:
        """An actor spoke, and `empty_share` of its slots stand empty from now on for want of a grant."""
        self._book_trainer(now)
        share, since = self._empty.get(actor, (0.0, now))
        self._seconds["actors"] += share * _within(now - since)
        self._empty[actor] = (empty_share, now)
        self._present_sum += empty_share - self._present.pop(actor, (0.0, now))[0]
        self._present[actor] = (empty_share, now)

    def totals(self) -> dict[str, float]:
        """Cause -> seconds."""
        return dict(self._seconds)

    def _book_trainer(self, now: float) -> None:
        if self._asked_at is None:
            return
        until = min(now, self._asked_at + _SILENCE_SECONDS)
        seconds, self._booked_at = max(0.0, until - self._booked_at), now
        if self._is_held_back:
            self._seconds["stale_wait"] += seconds
            return
        share = self._empty_share(now)
        self._seconds["window"] += seconds * share
        self._seconds["engine"] += seconds * (1 - share)

    def _empty_share(self, now: float) -> float:
        """Over the actors that are there."""
        while self._present:
            actor, (share, since) = next(iter(self._present.items()))
            if now - since <= _SILENCE_SECONDS:
                return self._present_sum / len(self._present)
            del self._present[actor]
            self._present_sum -= share
        self._present_sum = 0.0  # nobody is left, nor the rounding errors of the sum
        return 0.0


def empty_share(sync: Sync, num_leases: int, group_size: int) -> float:
    """Share of an actor's slots that stay empty although it asked for more groups than the `num_leases` it got."""
    if sync.want <= num_leases or not sync.concurrency:
        return 0.0
    num_sequences = sync.running + sync.waiting + num_leases * group_size
    return max(0.0, 1 - num_sequences / sync.concurrency)


def _within(seconds: float) -> float:
    return min(max(0.0, seconds), _SILENCE_SECONDS)
