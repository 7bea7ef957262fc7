"""Simulated actors of `bench stream`: clients of the hub that lease, sync, send and seal, but do not sample tokens.

All groups have the same rows; only the columns that identify a group differ. The actors run in one process, which
`run_actors` is the main function of.
"""

import itertools
import math
import os
import sys
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import pyarrow as pa

from pipelinerl_core.channel.client import HubClient
from pipelinerl_core.data.codec import encode_rollouts, span_column
from pipelinerl_core.data.schema import ROLLOUT_SCHEMA
from pipelinerl_core.data.segments import SegmentWriter
from pipelinerl_core.errors import PipelineRLError
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.messages import Ack, Group, Lease, Register, Registered, Request, Sealed, Sync, SyncReply
from pipelinerl_core.parent_death import die_with_parent
from pipelinerl_core.roles.runtime.process import keep_freed_memory
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.types import GroupRef, WeightSpan
from tests.rollout_rows import build_group

GROUP_SIZE = 8
NUM_TOKENS = 512
"""Tokens of each completion."""
RUN_ID = "bench"
_EPOCH = 1
# A segment is sealed after so many groups or so many seconds.
_SEALED_GROUPS = 64
_SEAL_SECONDS = 1.0
_MAX_THREADS = 4
_IDLE_SECONDS = 0.005
_STOP_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One measurement: the actors, their groups and the trainer's steps."""

    num_actors: int
    num_tokens: int = NUM_TOKENS
    """Tokens of each completion."""
    groups_per_step: int = 256
    num_leases: int = 8
    """Groups that each actor requests to hold."""
    pause_seconds: float = 0.0
    """Wait of an actor after each group. 0: an actor sends all groups together for which the hub gave credit."""
    max_groups: int = 0
    """Groups that all actors together send at most; 0: no limit."""
    writes_segments: bool = False
    """False: the actor reports segments as sealed but does not write them."""
    hub_bytes: int = 1 << 30
    """Memory that the hub may use for rows."""


class Rows:
    """Makes the rows of groups whose completions have `num_tokens` tokens each."""

    def __init__(self, num_tokens: int) -> None:
        rollouts = build_group(0, group_id=0, size=GROUP_SIZE, num_tokens=num_tokens)
        self._columns = dict(zip(ROLLOUT_SCHEMA.names, encode_rollouts(RUN_ID, rollouts).columns, strict=True))
        self._num_tokens = num_tokens

    def of(self, lease: Lease, actor: str, version: int) -> pa.RecordBatch:
        """The rows of a leased group, sampled by weights `version`; `finished_at` is the Unix time of this call."""
        changed = {
            "group_id": lease.group_id,
            "attempt": lease.attempt,
            "lease_id": lease.lease_id,
            "prompt_id": lease.prompt.prompt_id,
            "actor": actor,
            "finished_at": time.time(),
        }
        columns = {
            name: pa.array([value] * GROUP_SIZE, ROLLOUT_SCHEMA.field(name).type) for name, value in changed.items()
        }
        columns["weight_spans"] = span_column([(WeightSpan(version, 0, self._num_tokens),)] * GROUP_SIZE)
        return pa.RecordBatch.from_arrays(list((self._columns | columns).values()), schema=ROLLOUT_SCHEMA)


class SimulatedActor:
    """One actor; `visit` does all work that is due. Raises PipelineRLError if the hub is gone."""

    def __init__(self, url: str, token: str, name: str, *, cell: Cell, rows: Rows, store: ObjectStore) -> None:
        self.num_groups = 0
        """Groups that the hub accepted."""
        self.num_refused = 0
        self.is_drained = False
        self._name = name
        self._cell = cell
        self._rows = rows
        self._segments = SegmentWriter(store, name, _EPOCH, RUN_ID, max_seconds=math.inf, max_bytes=1 << 62)
        self._sync_requested = threading.Event()
        self._client = HubClient(url, token=token, role="actor", name=name, on_sync_now=self._sync_requested.set)
        registered = self._client.request(Register(role="actor", name=name, epoch=_EPOCH))
        assert isinstance(registered, Registered)
        self._boot_id = registered.boot_id
        self._sync_seconds = registered.sync_seconds
        self._synced_at = 0.0
        self._credit = 0
        self._version = 0
        self._leases: dict[str, Lease] = {}
        self._unsealed: list[tuple[int, int]] = []
        self._num_sealed = 0
        self._sealed_at = time.monotonic()
        self._num_tokens = 0

    def visit(self, budget: "itertools.count[int]") -> bool:
        """Sync and seal if due, then send; returns whether there was anything to do. `budget` counts sent groups."""
        is_due = self._sync_requested.is_set() or time.monotonic() - self._synced_at >= self._sync_seconds
        if is_due:
            self._sync()
        num = min(self._credit, len(self._leases), 1 if self._cell.pause_seconds else sys.maxsize)
        if self._cell.max_groups:
            num = sum(1 for _ in range(num) if next(budget) < self._cell.max_groups)
        is_old = time.monotonic() - self._sealed_at >= _SEAL_SECONDS
        if len(self._unsealed) >= _SEALED_GROUPS or (self._unsealed and is_old):
            self._seal()
        if num:
            self._send([self._leases.pop(lease_id) for lease_id in list(itertools.islice(self._leases, num))])
        return bool(is_due or num)

    def _sync(self) -> None:
        self._sync_requested.clear()
        message = Sync(
            boot_id=self._boot_id,
            engine_version=self._version,
            running=len(self._leases) * GROUP_SIZE,
            waiting=0,
            concurrency=self._cell.num_leases * GROUP_SIZE,
            want=max(0, self._cell.num_leases - len(self._leases)),
            leases=tuple(self._leases),
            num_tokens=self._num_tokens,
            running_seconds=0.0,
        )
        reply = self._client.request(message)
        assert isinstance(reply, SyncReply)
        self._synced_at = time.monotonic()
        self._sync_seconds = reply.sync_seconds
        self._credit = reply.credit
        if reply.manifest is not None:
            self._version = max(self._version, reply.manifest.version)
        self._leases.update((lease.lease_id, lease) for lease in reply.leases)
        for lease_id in reply.stop_leases:
            self._leases.pop(lease_id, None)
        self.is_drained = reply.state == "drain"

    def _send(self, leases: list[Lease]) -> None:
        num_tokens = GROUP_SIZE * self._cell.num_tokens
        messages: list[tuple[Request, pa.RecordBatch | None]] = []
        for lease in leases:
            ref = GroupRef(
                group_id=lease.group_id,
                attempt=lease.attempt,
                actor=self._name,
                actor_epoch=_EPOCH,
                num_rollouts=GROUP_SIZE,
                num_tokens=num_tokens,
            )
            rows = self._rows.of(lease, self._name, self._version)
            if self._cell.writes_segments:
                self._segments.append(rows, ref)
            messages.append((Group(lease_id=lease.lease_id, ref=ref), rows))
        num_accepted = sum(isinstance(answer, Ack) for answer in self._client.request_all(messages))
        self.num_groups += num_accepted
        self.num_refused += len(leases) - num_accepted
        self._credit -= len(leases)
        self._num_tokens += len(leases) * num_tokens
        if len(self._leases) < self._cell.num_leases / 2:
            self._sync_requested.set()  # as an actor whose engine has free slots
        self._unsealed += [(lease.group_id, lease.attempt) for lease in leases]
        time.sleep(self._cell.pause_seconds)

    def _seal(self) -> None:
        self._sealed_at = time.monotonic()
        self._segments.seal()
        groups = tuple(self._unsealed)
        self._client.request(Sealed(actor=self._name, epoch=_EPOCH, seq=self._num_sealed, groups=groups))
        self._num_sealed, self._unsealed = self._num_sealed + 1, []


def run_actors(connection: Connection, parent_pid: int, cell: Cell, run_url: str, token: str) -> None:
    """Main function of the process: receive the URL of the hub, connect all actors, and send None.

    The actors begin with the second message and end with the third. Then send (accepted, refused) groups.
    """
    die_with_parent(parent_pid)
    hub_url: str = connection.recv()
    keep_freed_memory()
    rows, store, stop, budget = Rows(cell.num_tokens), open_store(run_url), threading.Event(), itertools.count()
    actors = [
        SimulatedActor(hub_url, token, f"actor-{index}", cell=cell, rows=rows, store=store)
        for index in range(cell.num_actors)
    ]
    connection.send(None)
    connection.recv()
    num_threads = min(len(actors), _MAX_THREADS)
    threads = [
        threading.Thread(target=_drive, args=(actors[first::num_threads], stop, budget), daemon=True)
        for first in range(num_threads)
    ]
    for thread in threads:
        thread.start()
    connection.recv()
    stop.set()
    for thread in threads:
        thread.join(timeout=_STOP_SECONDS)
    connection.send((sum(actor.num_groups for actor in actors), sum(actor.num_refused for actor in actors)))
    os._exit(0)  # the clients' threads have nothing left to do


def _drive(actors: list[SimulatedActor], stop: threading.Event, budget: "itertools.count[int]") -> None:
    """Visit each actor in turn, until stopped or until the run is drained."""
    try:
        while not stop.is_set() and not any(actor.is_drained for actor in actors):
            if not sum(actor.visit(budget) for actor in actors):
                time.sleep(_IDLE_SECONDS)
    except PipelineRLError as error:
        sys.stderr.write(f"simulated actors: {error}\n")
