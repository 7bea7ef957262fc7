"""What the actors' side and the trainer's side of the hub share: ledger, rows, open exchanges; and credit."""

import math
import random
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pyarrow as pa

from pipelinerl_core.errors import SchemaMismatch, WrongPeer
from pipelinerl_core.interfaces import CreditSink
from pipelinerl_core.ledger import ActorKey, Ledger
from pipelinerl_core.messages import Refused
from pipelinerl_core.roles.hub.rows import RowMemory
from pipelinerl_core.types import GroupKey

# Groups that an earlier hub may have leased after the last commit that this one has read. A peer that names one
# further out is broken, and every group up to it would be queued.
MAX_UNTOLD_GROUPS = 1 << 16
# Groups one actor may have at the hub, however small the window, if there is room for them.
MIN_CREDIT = 8


@dataclass(slots=True, eq=False)
class Peer:
    """An open exchange."""

    credit: CreditSink
    actor: ActorKey | None = None
    """Once it has registered as one."""
    granted: int = 0
    """Groups that it may still send of the credit it was told of last."""


class HubState:
    """Everything below is read and changed under `changed`; its methods say whether they take it themselves."""

    def __init__(
        self, ledger: Ledger, memory: RowMemory, rows: Mapping[GroupKey, pa.RecordBatch], boot_id: str
    ) -> None:
        """`rows`: those of groups that the ledger was restored with, all from segments."""
        self.ledger = ledger
        self._boot_id = boot_id
        self.changed = threading.Condition()
        """Notified when the reserve that waits may be possible, or has to look again."""
        self.awaited_step: int | None = None
        """The step that a reserve waits for."""
        self.rows = memory
        """Of ready and reserved groups."""
        for key, batch in rows.items():
            if ledger.needs_rows(*key):
                self.rows.keep(key, batch, is_sealed=True)
        self.peers: dict[str, Peer] = {}
        self.granted = 0
        """Of all peers."""
        self.is_stopping = False
        self._first_unlikely = ledger.next_group_id + MAX_UNTOLD_GROUPS

    def check_groups(self, group_ids: Iterable[int]) -> None:
        """SchemaMismatch for a group that no hub can have leased. Under the lock."""
        limit = max(self._first_unlikely, self.ledger.next_group_id)
        for group_id in group_ids:
            if group_id >= limit:
                found = self.ledger.next_group_id
                raise SchemaMismatch(f"group {group_id} was never leased, the next one is {found}")

    def check_own(self, actor: ActorKey, named: ActorKey, groups: Iterable[GroupKey]) -> None:
        """WrongPeer if an actor speaks as `named`, or of groups that are another's; under the lock.

        An attempt that nobody holds may be its own of old: what becomes of it the ledger says.
        """
        if named != actor:
            raise WrongPeer(f"{actor} sent a message of {named}: an actor speaks for itself")
        for group_id, attempt in groups:
            holder = self.ledger.holder(group_id, attempt)
            if holder not in (None, actor):
                raise WrongPeer(f"{actor} sent group {group_id} attempt {attempt}, which is {holder}'s")

    def unknown_boot(self, re: int) -> Refused:
        """To a peer that has not registered with this hub."""
        return Refused(re=re, code="unknown_boot", detail=f"this hub is {self._boot_id}: register")

    def wake_trainer(self) -> None:
        """A group has arrived: let the reserve that waits look again, if that is worth it. Under the lock."""
        if self.awaited_step is not None and self.ledger.is_due(self.awaited_step):
            self.changed.notify_all()

    def forget_rows(self) -> None:
        """Keep the rows of groups that are ready or reserved, and no others. Under the lock."""
        self.rows.keep_only(self.ledger.needed_rows())

    def grant_credit(self, peer: Peer, limit: int) -> int:
        """Groups that an actor may send from now on, `limit` at most. Under the lock.

        The room in memory, less what the others were granted and have not used, is shared among the actors. Where
        there is less than one group for each, chance decides at every sync, so that nobody waits for ever for one
        that does not use its share.
        """
        free = self.rows.free_groups()
        share = math.floor(free / max(1, len(self.peers)) + random.random())
        room = math.floor(free) - (self.granted - peer.granted)
        credit = max(0, min(limit, share, room))
        self.granted += credit - peer.granted
        peer.granted = credit
        return credit

    def use_credit(self, peer: Peer) -> None:
        """An actor has sent a group. Under the lock."""
        if peer.granted:
            peer.granted -= 1
            self.granted -= 1

    def return_credit(self, groups: "Counter[ActorKey]") -> None:
        """Tell actors to ask for credit again, unless they have plenty. Outside the lock: it writes to the peers."""
        with self.changed:
            short = [(peer.credit, actor) for peer, actor in self._heard() if peer.granted < MIN_CREDIT]
        sinks = [(sink, groups[actor]) for sink, actor in short if actor in groups]
        for sink, num_groups in sinks:
            sink(num_groups)

    def nudge(self) -> None:
        """Tell the actors to sync now; outside the lock. It is a hint: they sync anyway, a little later."""
        with self.changed:
            sinks = [peer.credit for peer, _ in self._heard()]
        for sink in sinks:
            sink(0)

    def _heard(self) -> list[tuple[Peer, ActorKey]]:
        """Actors that are there: one so long silent that it counts as gone needs no news. Under the lock."""
        found = ((peer, peer.actor) for peer in self.peers.values())
        return [(peer, actor) for peer, actor in found if actor is not None and not self.ledger.is_gone(actor)]
