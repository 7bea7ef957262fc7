"""Simulated actors of `bench stream`: real clients of the hub that lease, sync, send and seal, and generate nothing.

Their rows are prebuilt (bench/stream_rows.py), so their speed is that of the channel. An actor answers a nudge of the
hub with a sync, as a real one does, and sends what it holds of leases together. Segments are written only where that
is asked for, with `Seal.WRITE`; with `Seal.SAY` the message that one is sealed is sent without it, for the hub's
share of the cost, as long as the rows fit into its memory.

Run by `bench stream` as a process of its own; it leaves when its standard input ends.
"""

import argparse
import itertools
import json
import math
import sys
import threading
import time
from dataclasses import dataclass, field
from enum import StrEnum

import pyarrow as pa

from pipelinerl_core.bench.stream_rows import ACTOR_EPOCH, GROUP_SIZE, RUN_ID, Rows, group_ref
from pipelinerl_core.channel.client import HubClient
from pipelinerl_core.data.segments import SegmentWriter
from pipelinerl_core.errors import PipelineRLError
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.messages import (
    Ack,
    Group,
    Lease,
    Refused,
    Register,
    Registered,
    Request,
    Sealed,
    Sync,
    SyncReply,
)
from pipelinerl_core.parent_death import die_with_parent
from pipelinerl_core.roles.runtime.process import freeze_startup_objects, keep_freed_memory, leave
from pipelinerl_core.run.context import open_run

# A segment has so many groups, or those of so long.
_SEALED_GROUPS = 64
_SEAL_SECONDS = 1.0
_MAX_DRIVERS = 4
_IDLE_SECONDS = 0.005
_STOP_SECONDS = 10.0
_MAX_FREE_BYTES = 256 << 20


@dataclass(slots=True)
class Counts:
    """What an actor has done."""

    groups: int = 0
    syncs: int = 0
    refused: int = 0


class Seal(StrEnum):
    """What an actor does about segments."""

    NONE = "none"
    SAY = "say"
    WRITE = "write"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How each actor behaves."""

    num_leases: int
    """Groups it wants to hold."""
    burst: int
    """Groups that it sends together, as far as its leases and its credit go."""
    seal: Seal = Seal.NONE
    max_groups: int = 0
    """Groups that all actors of the process send in all; 0: no end."""
    pause_seconds: float = 0.0
    """After each sending."""


class SimulatedActor:
    """One actor; `visit` does what is to be done now. Raises PipelineRLError when the hub has gone."""

    def __init__(self, url: str, token: str, name: str, *, rows: Rows, load: Load, store: ObjectStore) -> None:
        self._name = name
        self._segments = SegmentWriter(store, name, ACTOR_EPOCH, RUN_ID, max_seconds=math.inf, max_bytes=1 << 62)
        self._rows = rows
        self._load = load
        self.counts = Counts()
        self._nudged = threading.Event()
        self._client = HubClient(
            url, token=token, role="actor", name=name, on_credit=lambda num_groups: self._nudged.set()
        )
        registered = self._client.request(Register(role="actor", name=name, epoch=ACTOR_EPOCH))
        assert isinstance(registered, Registered)
        self._boot_id = registered.boot_id
        self._sync_seconds = registered.sync_seconds
        self._synced_at = 0.0
        self._credit = 0
        self._version = 0
        self._leases: dict[str, Lease] = {}
        self._name_column = pa.array([name] * GROUP_SIZE)
        self._sent: list[tuple[int, int]] = []
        self._num_sealed = 0
        self._sealed_at = time.monotonic()
        self._num_tokens = 0
        self.is_drained = False

    def visit(self, budget: "itertools.count[int] | None" = None) -> bool:
        """Sync if that is due, then send what may be sent; whether anything was done."""
        is_due = self._nudged.is_set() or time.monotonic() - self._synced_at >= self._sync_seconds
        if is_due:
            self._sync()
        num = min(self._credit, len(self._leases), self._load.burst)
        if num and budget is not None:
            num = sum(1 for _ in range(num) if next(budget) < self._load.max_groups)
        is_old = time.monotonic() - self._sealed_at >= _SEAL_SECONDS
        if len(self._sent) >= _SEALED_GROUPS or (self._sent and is_old):
            self._seal()
        if num:
            self._send([self._leases.pop(lease_id) for lease_id in list(itertools.islice(self._leases, num))])
        return bool(is_due or num)

    def _sync(self) -> None:
        self._nudged.clear()
        message = Sync(
            boot_id=self._boot_id,
            engine_version=self._version,
            running=len(self._leases) * GROUP_SIZE,
            waiting=0,
            concurrency=max(1, self._load.num_leases) * GROUP_SIZE,
            want=max(0, self._load.num_leases - len(self._leases)),
            leases=tuple(self._leases),
            num_tokens=self._num_tokens,
            running_seconds=0.0,
        )
        reply = self._client.request(message)
        assert isinstance(reply, SyncReply)
        self._synced_at = time.monotonic()
        self._sync_seconds = reply.sync_seconds
        self._credit = reply.credit
        self.counts.syncs += 1
        if reply.manifest is not None:
            self._version = max(self._version, reply.manifest.version)
        self._leases.update((lease.lease_id, lease) for lease in reply.leases)
        for lease_id in reply.stop_leases:
            self._leases.pop(lease_id, None)
        self.is_drained = reply.state == "drain"

    def _send(self, leases: list[Lease]) -> None:
        messages: list[tuple[Request, pa.RecordBatch | None]] = []
        for lease in leases:
            ref = group_ref(lease, self._name, self._rows.num_tokens)
            rows = self._rows.of(lease, self._name_column, self._version)
            if self._load.seal is Seal.WRITE:
                self._segments.append(rows, ref)
            messages.append((Group(lease_id=lease.lease_id, ref=ref), rows))
        for answer in self._client.request_all(messages):
            self.counts.refused += isinstance(answer, Refused)
            self.counts.groups += isinstance(answer, Ack)
        self._credit -= len(leases)
        self._num_tokens += len(leases) * GROUP_SIZE * self._rows.num_tokens
        if len(self._leases) < self._load.num_leases / 2:
            self._nudged.set()  # as a real actor whose slots are about to stand empty
        self._sent += [(lease.group_id, lease.attempt) for lease in leases]
        if self._load.pause_seconds:
            time.sleep(self._load.pause_seconds)

    def _seal(self) -> None:
        self._sealed_at = time.monotonic()
        if self._load.seal is Seal.NONE:
            self._sent = []
            return
        self._segments.seal()
        message = Sealed(actor=self._name, epoch=ACTOR_EPOCH, seq=self._num_sealed, groups=tuple(self._sent))
        self._client.request(message)
        self._num_sealed, self._sent = self._num_sealed + 1, []


@dataclass(slots=True)
class Crew:
    """The actors of a process, and the threads that visit each in turn: so many of them are busy at once."""

    actors: list[SimulatedActor]
    load: Load
    stop: threading.Event
    budget: "itertools.count[int] | None" = None
    threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        """Begin to send."""
        num = min(len(self.actors), _MAX_DRIVERS)
        if self.load.max_groups:
            self.budget = itertools.count()
        self.threads = [
            threading.Thread(target=self._drive, args=(self.actors[index::num],), daemon=True) for index in range(num)
        ]
        for thread in self.threads:
            thread.start()

    def _drive(self, actors: list[SimulatedActor]) -> None:
        try:
            while not self.stop.is_set():
                is_idle = sum(actor.visit(self.budget) for actor in actors) == 0
                if any(actor.is_drained for actor in actors):
                    return
                if is_idle:
                    time.sleep(_IDLE_SECONDS)
        except PipelineRLError as error:
            sys.stderr.write(f"simulated actors: {error}\n")


def main() -> int:
    """Say `ready` once all are connected, begin with the first line of standard input, end with its end."""
    parser = argparse.ArgumentParser(description="Simulated actors.")
    parser.add_argument("--run", required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--first", type=int, default=0, help="number of the first actor")
    parser.add_argument("--num", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True, help="of each completion")
    parser.add_argument("--leases", type=int, default=8)
    parser.add_argument("--burst", type=int, default=1 << 30)
    parser.add_argument("--seal", type=Seal, choices=[*Seal], default=Seal.NONE)
    parser.add_argument("--max-groups", type=int, default=0)
    parser.add_argument("--pause-seconds", type=float, default=0.0)
    options = parser.parse_args()
    die_with_parent(options.parent_pid)
    keep_freed_memory(_MAX_FREE_BYTES)
    load = Load(
        num_leases=options.leases,
        burst=options.burst,
        seal=options.seal,
        max_groups=options.max_groups,
        pause_seconds=options.pause_seconds,
    )
    context, rows, stop = open_run(options.run), Rows(options.tokens), threading.Event()
    actors = [
        SimulatedActor(
            options.url,
            context.token,
            f"actor-{options.first + index}",
            rows=rows,
            load=load,
            store=context.store,
        )
        for index in range(options.num)
    ]
    crew = Crew(actors, load, stop)
    freeze_startup_objects()
    _say({"ready": len(actors)})
    sys.stdin.readline()
    crew.start()
    sys.stdin.read()
    stop.set()
    for thread in crew.threads:
        thread.join(timeout=_STOP_SECONDS)
    counts = [actor.counts for actor in actors]
    _say({name: sum(getattr(one, name) for one in counts) for name in ("groups", "syncs", "refused")})
    return 0


def _say(document: dict[str, int]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    leave(main())
