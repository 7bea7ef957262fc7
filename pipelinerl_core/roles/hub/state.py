"""State shared by all request handlers of the hub: ledger, rows in memory, connected peers and their credit."""

import math
import random
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from pipelinerl_core.errors import ConfigError, SchemaMismatch, WrongPeer
from pipelinerl_core.ledger import ActorKey, Ledger
from pipelinerl_core.messages import Refused
from pipelinerl_core.roles.hub.rows import RowMemory
from pipelinerl_core.types import GroupKey

# Groups that an earlier hub may have leased after the newest commit. A peer that names a higher group id is faulty:
# every group up to that id would be queued.
MAX_UNRECORDED_GROUPS = 1 << 16
# Minimum of groups that one actor may have at the hub, if the memory has room for them.
MIN_CREDIT = 8


@dataclass(slots=True, eq=False)
class PeerState:
    """A connected peer."""

    request_sync: Callable[[], None]
    """Sends SyncNow; no effect after the peer has disconnected."""
    actor: ActorKey | None = None
    """The actor epoch; None for a trainer, or before the registration."""
    tokens: Mapping[str, str] = field(default_factory=dict)
    """`Register.tokens` of an actor."""
    granted: int = 0
    """Unused groups of the credit granted last."""


class HubState:
    """All fields are read and changed under the lock `changed`; each method states whether it acquires the lock."""

    def __init__(
        self, ledger: Ledger, memory: RowMemory, rows: Mapping[GroupKey, pa.RecordBatch], boot_id: str
    ) -> None:
        """`rows`: rows of the groups with which the ledger was restored, read from segments."""
        self.ledger = ledger
        self._boot_id = boot_id
        self.changed = threading.Condition()
        """Notified when the waiting reserve has to be evaluated again."""
        self.awaited_step: int | None = None
        """The step of the reserve that waits; None without a waiting reserve."""
        self.rows = memory
        """Rows of ready and reserved groups."""
        for key, batch in rows.items():
            if ledger.needs_rows(*key):
                self.rows.keep(key, batch, is_sealed=True)
        self.peers: dict[str, PeerState] = {}
        self.tokens: Mapping[str, str] = {}
        """`Register.tokens` of the trainer; empty before its registration."""
        self.granted = 0
        """Sum of `granted` over all peers."""
        self.is_stopping = False
        self._first_unlikely = ledger.next_group_id + MAX_UNRECORDED_GROUPS

    def check_groups(self, group_ids: Iterable[int]) -> None:
        """Raises SchemaMismatch for a group id that no hub can have leased. The caller holds the lock."""
        limit = max(self._first_unlikely, self.ledger.next_group_id)
        for group_id in group_ids:
            if group_id >= limit:
                next_id = self.ledger.next_group_id
                raise SchemaMismatch(f"group {group_id} was never leased, the next one is {next_id}")

    def check_tokens(self, actor: ActorKey, tokens: Mapping[str, str]) -> None:
        """Raises ConfigError if an actor makes other tokens of a text than the trainer. The caller holds the lock.

        Re-scoring cannot see this, because the trainer scores the tokens that the actor sends.
        """
        differing = sorted(name for name, digest in tokens.items() if self.tokens.get(name, digest) != digest)
        if differing:
            raise ConfigError(
                f"{actor}: {', '.join(differing)} of its model.path differ from the trainer's, so that prompts would "
                "be other tokens. Use the same model directory and the same version of transformers on every host"
            )

    def check_ownership(self, actor: ActorKey, named: ActorKey, groups: Iterable[GroupKey]) -> None:
        """Raises WrongPeer if an actor names another epoch or groups of another actor. The caller holds the lock.

        If no actor holds an attempt, the check passes and the ledger decides how to treat the attempt.
        """
        if named != actor:
            raise WrongPeer(f"{actor} sent a message of {named}: an actor may only name itself")
        for group_id, attempt in groups:
            holder = self.ledger.holder(group_id, attempt)
            if holder not in (None, actor):
                raise WrongPeer(f"{actor} sent group {group_id} attempt {attempt}, which is {holder}'s")

    def unknown_boot(self, re: int) -> Refused:
        """The refusal for a peer that has not registered with this hub process."""
        return Refused(re=re, code="unknown_boot", detail=f"this hub is {self._boot_id}: register")

    def wake_trainer(self) -> None:
        """Wake the waiting reserve if its step has enough ready groups. The caller holds the lock."""
        if self.awaited_step is not None and self.ledger.is_due(self.awaited_step):
            self.changed.notify_all()

    def drop_unneeded_rows(self) -> None:
        """Drop rows of groups that are neither ready nor reserved. The caller holds the lock."""
        self.rows.keep_only(self.ledger.needed_rows())

    def grant_credit(self, peer: PeerState, limit: int) -> int:
        """How many groups an actor may send from now on, at most `limit`. The caller holds the lock.

        The free memory, less the unused credit of other peers, is divided equally among the peers. The fraction is
        rounded at random at every sync: if the share is below one group, every actor still gets credit eventually.
        While the trainer waits, one group fits: the memory may be full of rows that actors have not sealed before
        they ended.
        """
        free = self.rows.free_groups()
        if self.awaited_step is not None:
            free = max(1.0, free)
        share = math.floor(free / max(1, len(self.peers)) + random.random())
        room = math.floor(free) - (self.granted - peer.granted)
        credit = max(0, min(limit, share, room))
        self.granted += credit - peer.granted
        peer.granted = credit
        return credit

    def take_back_credit(self) -> None:
        """From actors that have expired, whose exchanges may look alive. The caller holds the lock."""
        for peer in self.peers.values():
            if peer.granted and peer.actor is not None and self.ledger.is_gone(peer.actor):
                self.granted -= peer.granted
                peer.granted = 0

    def use_credit(self, peer: PeerState) -> None:
        """Count a group that an actor has sent. The caller holds the lock."""
        if peer.granted:
            peer.granted -= 1
            self.granted -= 1

    def return_credit(self, actors: Collection[ActorKey]) -> None:
        """Ask those of the actors that have little credit to sync now. The caller must not hold the lock."""
        with self.changed:
            live = self._live_actors()
            short = [peer for peer, actor in live if peer.granted < MIN_CREDIT and actor in actors]
        for peer in short:
            peer.request_sync()

    def request_sync(self) -> None:
        """Ask all actors to sync now; actors also sync without it. The caller must not hold the lock."""
        with self.changed:
            live = self._live_actors()
        for peer, _ in live:
            peer.request_sync()

    def is_first(self, actor: ActorKey) -> bool:
        """Whether no other live actor has a smaller name. The caller holds the lock."""
        others = (peer.actor for peer in self.peers.values())
        return not any(other is not None and other < actor and not self.ledger.is_gone(other) for other in others)

    def _live_actors(self) -> list[tuple[PeerState, ActorKey]]:
        """Registered actors whose epoch has not left or expired. The caller holds the lock."""
        registered = ((peer, peer.actor) for peer in self.peers.values())
        return [(peer, actor) for peer, actor in registered if actor is not None and not self.ledger.is_gone(actor)]
