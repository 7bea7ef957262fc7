"""Waits of the trainer and the actors since the start of the run, seconds by cause; input of the report's advice.

    engine      the trainer waits for groups that are being generated
    window      the trainer waits while engine slots are empty because the schedule grants no group
    stale_wait  enough groups are ready, but schedule.stale=wait holds the step back
    actors      engine time lost in slots that are empty because no group was granted

The share of empty slots divides a wait between engine and window: if a quarter of all slots is empty for want of a
grant, a wait of 10 s counts as 2.5 s of window and 7.5 s of engine. An actor with a quarter of its slots empty for
10 s adds 2.5 s to actors, whether or not the trainer waits. The report of an actor is valid until its next sync.
"""

from collections.abc import Mapping

from pipelinerl_core.ledger.groups import ActorKey
from pipelinerl_core.messages import Sync

CAUSES = ("engine", "window", "stale_wait", "actors")
# Actors sync and a waiting trainer repeats its request several times per second. Later they count as absent.
_SILENCE_SECONDS = 2.0


class Waits:
    """Running totals. Every method takes the time of the event, in seconds of any one clock."""

    def __init__(self, seconds: Mapping[str, float] | None = None) -> None:
        """`seconds`: initial totals, from a commit."""
        self._seconds = dict.fromkeys(CAUSES, 0.0) | dict(seconds or {})
        self._empty: dict[ActorKey, tuple[float, float]] = {}  # (share of empty slots, time of the sync)
        self._present: dict[ActorKey, tuple[float, float]] = {}  # present actors, the oldest sync first
        self._present_sum = 0.0  # sum of the shares of present actors
        self._asked_at: float | None = None  # time of the newest request, while the trainer waits
        self._booked_at = 0.0
        self._is_held_back = False

    def trainer_waits(self, now: float, *, is_held_back: bool = False) -> None:
        """The trainer requested a step that is not ready; `is_held_back`: only because of schedule.stale=wait."""
        self._book_trainer(now)
        self._asked_at, self._booked_at, self._is_held_back = now, now, is_held_back

    def trainer_resumes(self, now: float) -> None:
        """The trainer has received its groups."""
        self._book_trainer(now)
        self._asked_at = None

    def actor_synced(self, actor: ActorKey, now: float, empty_share: float) -> None:
        """An actor has synced; `empty_share` of its slots are empty for want of a grant."""
        self._book_trainer(now)
        share, since = self._empty.get(actor, (0.0, now))
        self._seconds["actors"] += share * min(max(0.0, now - since), _SILENCE_SECONDS)
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
        """Mean share of empty slots over the present actors."""
        while self._present:
            actor, (share, since) = next(iter(self._present.items()))
            if now - since <= _SILENCE_SECONDS:
                return self._present_sum / len(self._present)
            del self._present[actor]
            self._present_sum -= share
        self._present_sum = 0.0  # also removes rounding errors of the sum
        return 0.0


def empty_share(sync: Sync, num_leases: int, group_size: int) -> float:
    """Share of an actor's slots that stay empty because the actor received fewer groups than it requested."""
    if sync.want <= num_leases or not sync.concurrency:
        return 0.0
    num_sequences = sync.running + sync.waiting + num_leases * group_size
    return max(0.0, 1 - num_sequences / sync.concurrency)
