"""Handles every request of the hub protocol: updates the ledger and the rows in memory under one lock.

    actor --sync--> leases, newest version          trainer --reserve--> waits until a step's groups are ready
          --group-> rows kept, reserve woken                --rows-----> rows from memory, else from a segment
          --sealed> position of rows in the store           --committed> groups removed, version announced

roles/hub/trainer_side.py handles the trainer. Prompts, summaries and store reads are made outside the lock.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import pyarrow as pa

from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import WrongPeer
from pipelinerl_core.interfaces import ObjectStore, PromptSource, RowSlice
from pipelinerl_core.ledger import ActorKey, Grant, Ledger
from pipelinerl_core.messages import (
    Ack,
    Answer,
    Bye,
    Committed,
    Group,
    Lease,
    Register,
    Registered,
    Request,
    Reserve,
    Rows,
    Sealed,
    SwapRecord,
    Sync,
    SyncReply,
)
from pipelinerl_core.roles.hub.arrivals import Arrivals
from pipelinerl_core.roles.hub.rows import RowMemory
from pipelinerl_core.roles.hub.state import MIN_CREDIT, HubState, PeerState
from pipelinerl_core.roles.hub.trainer_side import TrainerRequests
from pipelinerl_core.types import GroupKey

logger = logging.getLogger(__name__)

SYNC_SECONDS = 0.05
"""Shortest interval between two syncs of an actor, used while there are few actors."""
MAX_SYNC_SECONDS = 1.5
"""Longest interval: an actor without a sync for 2 s is not counted by the report of waits (ledger/waits.py)."""
# More syncs would cost the hub more time than the groups. For urgent changes the hub requests a sync.
_MAX_SYNCS_PER_SECOND = 500
# If two calls of `tick` are further apart, the process was suspended and could not receive syncs.
_STALL_SECONDS = 2.0
_RECENT_SWAPS = 200
# Approximate size of a rollout without its completion.
_ROW_BYTES = 1000


class Hub:
    """The HubService of a run. `handle` raises StaleLease, WrongPeer, SchemaMismatch, Fenced and StoreError.

    The channel turns these errors into refusals and checks the role and name of the peer (channel/admission.py). The
    hub checks that an actor only uses its registered actor epoch.
    """

    def __init__(
        self,
        config: RunConfig,
        ledger: Ledger,
        source: PromptSource,
        store: ObjectStore,
        *,
        boot_id: str,
        rows: Mapping[GroupKey, pa.RecordBatch] | None = None,
    ) -> None:
        """`rows`: rows of the groups with which the ledger was restored."""
        self.boot_id = boot_id
        self._config = config
        self._source = source
        memory = RowMemory(config.placement.hub_bytes, _default_group_bytes(config))
        self._state = HubState(ledger, memory, rows or {}, boot_id)
        self._changed = self._state.changed
        self._ledger = ledger
        self._trainer = TrainerRequests(self._state, store)
        self._arrivals = Arrivals(config, self._state, self._trainer.read_missed_commits)
        self._prompt_lock = threading.Lock()
        self._ticked_at = time.monotonic()
        self.swap_pauses: deque[float] = deque(maxlen=_RECENT_SWAPS)
        """Pauses of recent swaps, seconds."""
        self.num_swaps = 0

    @property
    def is_finished(self) -> bool:
        """Whether the last step is committed."""
        with self._changed:
            return self._ledger.is_done or (self._ledger.is_draining and not self._state.is_stopping)

    @property
    def num_peers(self) -> int:
        with self._changed:
            return len(self._state.peers)

    @property
    def row_bytes(self) -> int:
        """Memory used by the kept rows and their bookkeeping, bytes."""
        with self._changed:
            return self._state.rows.used_bytes

    @property
    def has_trainer_registered(self) -> bool:
        return self._trainer.has_registered

    @property
    def step_metrics(self) -> dict[str, float]:
        """Metrics of the newest commit."""
        return self._trainer.step_metrics

    def stop(self) -> None:
        """Grant no further leases and ask the actors to leave."""
        with self._changed:
            self._state.is_stopping = self._ledger.is_draining = True
            self._changed.notify_all()

    def tick(self) -> None:
        """Expire actors and leases; to be called several times per second."""
        now = time.monotonic()
        with self._changed:
            if now - self._ticked_at > _STALL_SECONDS:
                logger.warning("the hub was suspended for %.1f s: leases are extended", now - self._ticked_at)
                self._ledger.extend(now - self._ticked_at)
            self._ticked_at = now
            expired = self._ledger.expire()
            self._state.take_back_credit()
        if expired:
            logger.warning("leases expired, to be granted again: groups %s", expired)

    def lives_to_retire(self) -> list[ActorKey]:
        """Actor epochs to retire (`Ledger.lives_to_retire`)."""
        with self._changed:
            return self._ledger.lives_to_retire()

    def retire(self, lives: Iterable[ActorKey]) -> None:
        """Remove retired actor epochs from later commits."""
        with self._changed:
            self._ledger.retire(lives)

    def read(self, query: Callable[[Ledger], dict[str, object]]) -> dict[str, object]:
        """The result of `query`, evaluated under the lock."""
        with self._changed:
            return query(self._ledger)

    def connected(self, peer: str, request_sync: Callable[[], None]) -> None:
        """Add a peer whose exchange has opened; the peer registers next."""
        with self._changed:
            self._state.peers[peer] = PeerState(request_sync)

    def disconnected(self, peer: str) -> None:
        """Remove a peer whose exchange has ended. Its leases stay until they expire: the peer may reconnect."""
        with self._changed:
            gone = self._state.peers.pop(peer, None)
            self._state.granted -= gone.granted if gone is not None else 0

    def handle(
        self, peer: str, request: Request, rows: pa.RecordBatch | None
    ) -> Iterator[tuple[Answer, RowSlice | None]]:
        if isinstance(request, Rows):
            yield from self._trainer.send_rows(request)
        elif isinstance(request, Reserve):
            yield from self._trainer.reserve(request)
        else:
            yield self._answer(peer, request, rows), None

    def handle_groups(self, peer: str, groups: Sequence[Group], rows: pa.RecordBatch) -> list[Answer | Exception]:
        """For each group of one write, with checked rows: the answer that `handle` would yield, or the error."""
        return self._arrivals.receive(peer, groups, rows)

    def _answer(self, peer: str, request: Request, rows: pa.RecordBatch | None) -> Answer:
        match request:
            case Register():
                return self._register(peer, request)
            case Sync():
                return self._sync(peer, request)
            case Group():
                return _or_raise(*self._arrivals.receive(peer, [request], rows))
            case Sealed():
                return self._sealed(peer, request)
            case Committed():
                return self._trainer.committed(request)
            case Bye():
                return self._bye(peer, request)
            case _:
                raise TypeError(f"no handler for {request.kind}")

    def _register(self, peer: str, request: Register) -> Answer:
        actor = None
        if request.role == "trainer":
            self._trainer.register(request)
        else:
            actor = ActorKey(request.name, request.epoch)
        with self._changed:
            if actor is not None:
                self._state.check_groups(lease.group_id for lease in request.leases)
                self._state.check_tokens(actor, request.tokens)
                self._ledger.register_actor(actor, request.leases)
                self._state.peers[peer].actor, self._state.peers[peer].tokens = actor, request.tokens
            answer = Registered(
                re=request.id,
                boot_id=self.boot_id,
                newest_version=self._ledger.newest_version,
                sync_seconds=self._sync_seconds(),
                credit=self._credit(peer, actor) if actor else 0,
            )
        logger.info(
            "%s registered: epoch %d, %d leases, step %s, %d groups reserved",
            peer, request.epoch, len(request.leases), request.step, len(request.reservation),
        )  # fmt: skip
        return answer

    def _sync(self, peer: str, request: Sync) -> Answer:
        with self._changed:
            actor = self._state.peers[peer].actor
            if actor is None or request.boot_id != self.boot_id:
                return self._state.unknown_boot(request.id)
            _check_swaps(actor, request.swaps)
            self._state.check_tokens(actor, self._state.peers[peer].tokens)  # the trainer may have registered later
            result = self._ledger.sync(actor, request)
            is_final = self._ledger.is_draining or self._ledger.is_done
            manifest = self._ledger.manifest
            swaps_acknowledged = self._ledger.actor_reports.acknowledged(actor, is_final=is_final)
            state = "drain" if is_final else "pause" if self._ledger.must_pause(request.engine_version) else "run"
            credit = self._credit(peer, actor)
            ready_groups = self._ledger.num_ready
            evaluates = self._state.is_first(actor)
            self.swap_pauses.extend(swap.pause_seconds for swap in result.swaps)
            self.num_swaps += len(result.swaps)
        if result.stop_leases:
            logger.info("%s must stop %d leases, first %s", actor, len(result.stop_leases), result.stop_leases[0])
        return SyncReply(
            re=request.id,
            boot_id=self.boot_id,
            leases=tuple(self._lease(grant) for grant in result.leases),
            stop_leases=result.stop_leases,
            manifest=manifest,
            state=state,
            sync_seconds=self._sync_seconds(),
            credit=credit,
            ready_groups=ready_groups,
            swaps_acknowledged=swaps_acknowledged,
            evaluates=evaluates,
        )

    def _lease(self, grant: Grant) -> Lease:
        with self._prompt_lock:
            prompt = self._source.prompt(grant.group_id)
        return Lease(
            group_id=grant.group_id,
            attempt=grant.attempt,
            lease_id=grant.lease_id,
            deadline_seconds=grant.deadline_seconds,
            group_size=self._config.rollouts.group_size,
            prompt=prompt,
            holders=grant.holders,
        )

    def _sealed(self, peer: str, request: Sealed) -> Answer:
        with self._changed:
            actor = self._state.peers[peer].actor
            if actor is None:
                return self._state.unknown_boot(request.id)
            self._state.check_ownership(actor, ActorKey(request.actor, request.epoch), request.groups)
            self._ledger.sealed(actor, request.seq, request.groups)
            self._state.rows.seal(key for key in request.groups if self._ledger.segment_of(*key) is not None)
        return Ack(re=request.id)

    def _bye(self, peer: str, request: Bye) -> Answer:
        with self._changed:
            actor = self._state.peers[peer].actor
            if actor is not None:
                self._ledger.bye(actor)
        logger.info("%s left", peer)
        return Ack(re=request.id)

    def _sync_seconds(self) -> float:
        """Interval between two syncs of each actor, seconds."""
        limit = min(MAX_SYNC_SECONDS, self._config.placement.lease_seconds / 4)
        return max(SYNC_SECONDS, min(limit, len(self._state.peers) / _MAX_SYNCS_PER_SECOND))

    def _credit(self, peer: str, actor: ActorKey) -> int:
        limit = max(MIN_CREDIT, self._config.window_groups)
        return self._state.grant_credit(self._state.peers[peer], limit - self._ledger.num_ready_of(actor))


def _or_raise(answer: Answer | Exception) -> Answer:
    try:
        if isinstance(answer, Exception):
            raise answer
        return answer
    finally:
        del answer  # avoids a reference cycle between the error and its traceback, which would keep the rows


def _default_group_bytes(config: RunConfig) -> int:
    """Size of a group with completions of maximal length: 4 bytes of id, 4 of log-probability, 1 bit per token."""
    return config.rollouts.group_size * (config.rollouts.max_tokens * 33 // 4 + _ROW_BYTES)


def _check_swaps(actor: ActorKey, swaps: Iterable[SwapRecord]) -> None:
    """Raises WrongPeer for a swap of another actor epoch."""
    for swap in swaps:
        named = ActorKey(swap.actor, swap.actor_epoch)
        if named != actor:
            raise WrongPeer(f"{actor} reports a swap of {named}: an actor may only report its own swaps")
