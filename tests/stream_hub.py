"""A small hub for tests of the channel: a queue with credit, no ledger. The hub can also run as a separate process.

`python -m tests.stream_hub` reads the token from PIPELINERL_TOKEN, prints the URL, and ends at the
first line or the end of standard input.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa

from pipelinerl_core.channel.server import HubServer
from pipelinerl_core.data.checks import rows_of_groups
from pipelinerl_core.errors import MissingObject
from pipelinerl_core.interfaces import RowSlice
from pipelinerl_core.messages import (
    Ack,
    Answer,
    Group,
    Register,
    Registered,
    Request,
    Reserve,
    Reserved,
    Rows,
    RowsHeader,
    Sync,
    SyncReply,
)
from pipelinerl_core.types import GroupKey, GroupRef


class QueueHub:
    """A HubService that stores groups in order of arrival and returns credit when the rows are first fetched."""

    def __init__(self, *, credit: int = 4, groups_per_step: int = 1) -> None:
        self.rows: dict[GroupKey, pa.RecordBatch] = {}
        self.received: list[Request] = []
        self.connections: list[str] = []
        self.disconnections: list[str] = []
        self._credit = credit
        self._groups_per_step = groups_per_step
        self._refs: dict[GroupKey, GroupRef] = {}
        self._ready: list[GroupKey] = []
        self._steps: dict[int, tuple[GroupRef, ...]] = {}
        self._taken: set[GroupKey] = set()
        self._senders: dict[GroupKey, str] = {}
        self.sync_requests: dict[str, Callable[[], None]] = {}
        """Peer -> sends SyncNow."""
        self._condition = threading.Condition()

    def connected(self, peer: str, request_sync: Callable[[], None]) -> None:
        """Store the function that sends SyncNow."""
        with self._condition:
            self.connections.append(peer)
            self.sync_requests[peer] = request_sync

    def disconnected(self, peer: str) -> None:
        with self._condition:
            self.disconnections.append(peer)
            self.sync_requests.pop(peer, None)
            self._condition.notify_all()

    def handle(
        self, peer: str, request: Request, rows: pa.RecordBatch | None
    ) -> Iterator[tuple[Answer, RowSlice | None]]:
        """One answer per request; for Rows, one per group."""
        with self._condition:
            self.received.append(request)
        if isinstance(request, Rows):
            yield from self._hand_out(request)
        elif isinstance(request, Register):
            answer = Registered(
                re=request.id, boot_id="boot", newest_version=0, sync_seconds=0.05, credit=self._credit
            )
            yield answer, None
        elif isinstance(request, Sync):
            yield SyncReply(re=request.id, boot_id="boot"), None
        elif isinstance(request, Group):
            yield Ack(re=request.id, note=self._accept(peer, request, rows)), None
        elif isinstance(request, Reserve):
            yield from self._reserve_rows(request)
        else:
            yield Ack(re=request.id), None

    def handle_groups(self, peer: str, groups: Sequence[Group], rows: pa.RecordBatch) -> list[Answer | Exception]:
        parts = rows_of_groups([group.ref for group in groups], rows)
        with self._condition:
            self.received.extend(groups)
        return [
            Ack(re=group.id, note=self._accept(peer, group, part)) for group, part in zip(groups, parts, strict=True)
        ]

    def wait_for(self, disconnections: int, seconds: float) -> bool:
        """Wait until that many peers have disconnected; returns whether they did within `seconds`."""
        with self._condition:
            return self._condition.wait_for(lambda: len(self.disconnections) >= disconnections, seconds)

    def _accept(self, peer: str, request: Group, rows: pa.RecordBatch | None) -> str:
        key = (request.ref.group_id, request.ref.attempt)
        with self._condition:
            if key in self.rows:
                return "known"
            assert rows is not None
            self.rows[key] = rows
            self._refs[key] = request.ref
            self._senders[key] = peer
            self._ready.append(key)
            self._condition.notify_all()
        return "new"

    def _reserve_rows(self, request: Reserve) -> Iterator[tuple[Answer, RowSlice | None]]:
        answer = self._reserve(request)
        groups = answer.groups if request.with_rows else ()
        yield answer.model_copy(update={"num_following": len(groups)}), None
        keys = tuple((ref.group_id, ref.attempt) for ref in groups)
        yield from self._hand_out(Rows(id=request.id, step=request.step, groups=keys))

    def _reserve(self, request: Reserve) -> Reserved:
        with self._condition:
            if request.step not in self._steps:
                if not self._condition.wait_for(
                    lambda: len(self._ready) >= self._groups_per_step, request.wait_seconds
                ):
                    return Reserved(re=request.id, is_ready=False, reason=f"{len(self._ready)} groups ready")
                keys, self._ready = self._ready[: self._groups_per_step], self._ready[self._groups_per_step :]
                self._steps[request.step] = tuple(self._refs[key] for key in keys)
            return Reserved(re=request.id, is_ready=True, groups=self._steps[request.step])

    def _hand_out(self, request: Rows) -> Iterator[tuple[Answer, RowSlice | None]]:
        for number, key in enumerate(request.groups):
            if key not in self.rows:
                raise MissingObject(f"no rows of group {key}")
            header = RowsHeader(
                re=request.id, group_id=key[0], attempt=key[1], remaining=len(request.groups) - number - 1
            )
            with self._condition:
                is_first = key not in self._taken
                self._taken.add(key)
                request_sync = self.sync_requests.get(self._senders[key])
            if is_first and request_sync is not None:
                request_sync()
            yield header, RowSlice(self.rows[key], 0, self.rows[key].num_rows)


def main() -> None:
    """Serve until the first line or the end of standard input."""
    groups_per_step = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    service = QueueHub(credit=4 * groups_per_step, groups_per_step=groups_per_step)
    server = HubServer(service, host="127.0.0.1", port=0, token=os.environ["PIPELINERL_TOKEN"])
    server.start()
    sys.stdout.write(f"{server.url}\n")
    sys.stdout.flush()
    sys.stdin.readline()
    server.shutdown(2.0)
    os._exit(0)


if __name__ == "__main__":
    main()
