"""What the actors' side and the trainer's side of the hub share: ledger, rows, open exchanges; and credit."""

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa

from pipelinerl_core.errors import SchemaMismatch
from pipelinerl_core.interfaces import CreditSink
from pipelinerl_core.ledger import ActorKey, Ledger
from pipelinerl_core.roles.hub_store import GroupKey

# Groups that an earlier hub may have leased after the last commit that this one has read. A peer that names one
# further out is broken, and every group up to it would be queued.
MAX_UNTOLD_GROUPS = 1 << 16


@dataclass(slots=True, eq=False)
class Peer:
    """An open exchange."""

    credit: CreditSink
    actor: ActorKey | None = None
    """Once it has registered as one."""


class HubState:
    """Everything below is read and changed under `changed`; its methods say whether they take it themselves."""

    def __init__(self, ledger: Ledger, rows: dict[GroupKey, pa.RecordBatch]) -> None:
        """`rows`: those of groups that the ledger was restored with."""
        self.ledger = ledger
        self.changed = threading.Condition()
        """Notified when the reserve that waits may be possible, or has to look again."""
        self.awaited_step: int | None = None
        """The step that a reserve waits for."""
        self.rows = {key: batch for key, batch in rows.items() if ledger.needs_rows(*key)}
        """Of ready and reserved groups."""
        self.peers: dict[str, Peer] = {}
        self.is_stopping = False
        self._first_unlikely = ledger.next_group_id + MAX_UNTOLD_GROUPS

    def check_groups(self, group_ids: Iterable[int]) -> None:
        """SchemaMismatch for a group that no hub can have leased. Under the lock."""
        limit = max(self._first_unlikely, self.ledger.next_group_id)
        for group_id in group_ids:
            if group_id >= limit:
                found = self.ledger.next_group_id
                raise SchemaMismatch(f"group {group_id} was never leased, the next one is {found}")

    def wake_trainer(self) -> None:
        """A group has arrived: let the reserve that waits look again, if that is worth it. Under the lock."""
        if self.awaited_step is not None and self.ledger.is_due(self.awaited_step):
            self.changed.notify_all()

    def forget_rows(self) -> None:
        """Keep the rows of groups that are ready or reserved, and no others. Under the lock."""
        self.rows = {key: batch for key, batch in self.rows.items() if self.ledger.needs_rows(*key)}

    def return_credit(self, groups: "Counter[ActorKey]") -> None:
        """Outside the lock: it writes to the peers."""
        with self.changed:
            found = [(peer.credit, peer.actor) for peer in self.peers.values()]
        sinks = [(sink, groups[actor]) for sink, actor in found if actor is not None and actor in groups]
        for sink, num_groups in sinks:
            sink(num_groups)

    def nudge(self) -> None:
        """Tell the actors to sync now; outside the lock. It is a hint: they sync anyway, a little later."""
        with self.changed:
            sinks = [peer.credit for peer in self.peers.values() if peer.actor is not None]
        for sink in sinks:
            sink(0)
