"""Processes each message of a peer: admission checks, the hub service, and the answer.

Requests and answers are JSON; rows are the record batch of the same write. Both directions use ROLLOUT_SCHEMA.

A peer's writer is used only under its lock, and never after `_is_closed` is set: a write to an exchange whose handler
has returned crashes the process. Messages of actors are processed one at a time, since none of them waits: a hundred
threads that each release the interpreter lock a dozen times per message would spend most of their time switching.
"""

import itertools
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Protocol

import pyarrow as pa
import pyarrow.flight as fl

from pipelinerl_core.channel.admission import check_sender, id_of, parse
from pipelinerl_core.channel.bundles import bundled
from pipelinerl_core.channel.refusals import code_of
from pipelinerl_core.data.checks import check_groups, check_row_count, rows_of_groups
from pipelinerl_core.data.schema import conform
from pipelinerl_core.errors import PipelineRLError, SchemaMismatch
from pipelinerl_core.interfaces import HubService, RowSlice
from pipelinerl_core.messages import (
    Answer,
    Answers,
    Goodbye,
    Group,
    Groups,
    Introduction,
    Refused,
    Request,
    SyncNow,
    encode,
)
from pipelinerl_core.types import GroupRef

_MAX_DETAIL = 500  # characters; error texts may quote long values of the peer

_log = logging.getLogger(__name__)


class PeerWriter(Protocol):
    """Flight's writer for one peer. Its methods may raise Arrow, Flight and OS errors."""

    def write_metadata(self, metadata: bytes) -> None:
        """A message without rows."""

    def write_with_metadata(self, rows: pa.RecordBatch, metadata: bytes) -> None:
        """A message with its rows."""


class PeerConnection:
    """One exchange with a peer. Its methods may be called from any thread at any time.

    A write blocks while the peer does not read, and may only block the threads of this peer: the exchange thread
    sends answers, and a second thread sends unsolicited messages (`send_unsolicited`).
    """

    def __init__(self, name: str, who: Introduction, writer: PeerWriter) -> None:
        self.name = name
        self.who = who
        self._writer = writer
        self._lock = threading.Lock()
        self._is_closed = False
        self._num_faults = 0
        self._unsolicited: list[SyncNow | Goodbye | None] = []  # None ends the thread
        self._has_unsolicited = threading.Condition()

    def note_fault(self, error: PipelineRLError) -> None:
        """Count a faulty message; the 1st, 2nd, 4th, 8th, ... are logged."""
        self._num_faults += 1
        if self._num_faults.bit_count() == 1:
            _log.warning("%s: refused (%d so far): %s", self.name, self._num_faults, str(error)[:_MAX_DETAIL])

    def write(self, answer: Answer, rows: pa.RecordBatch | None = None) -> None:
        """Send an answer; no effect if the exchange has ended."""
        with self._lock:
            if self._is_closed:
                return
            try:
                if rows is None:
                    self._writer.write_metadata(encode(answer))
                else:
                    self._writer.write_with_metadata(conform(rows), encode(answer))
            except (pa.ArrowException, fl.FlightError, OSError) as error:
                _log.debug("%s: write failed, the read will fail too: %s", self.name, error)

    def end(self) -> None:
        """Prevent all later writes. Must be called before the exchange's handler returns."""
        with self._lock:
            self._is_closed = True
        self._enqueue(None)

    def request_sync(self) -> None:
        """Send SyncNow."""
        self._enqueue(SyncNow())

    def say_goodbye(self) -> None:
        """Send Goodbye: the hub is shutting down."""
        self._enqueue(Goodbye())

    def _enqueue(self, message: SyncNow | Goodbye | None) -> None:
        with self._has_unsolicited:
            if self._unsolicited[-1:] != [message]:  # an equal message that is not sent yet suffices
                self._unsolicited.append(message)
            self._has_unsolicited.notify()

    def send_unsolicited(self) -> None:
        """Send unsolicited messages until `end` is called."""
        while True:
            with self._has_unsolicited:
                self._has_unsolicited.wait_for(lambda: self._unsolicited)
                message = self._unsolicited.pop(0)
            if message is None:
                return
            self.write(message)


class Dispatcher:
    """Answers the peers of a HubService. Thread-safe."""

    def __init__(self, service: HubService, *, max_row_bytes: int, max_tokens_per_row: int) -> None:
        self.is_open = False
        """Whether peers are admitted: False before the start and after `say_goodbye`."""
        self._service = service
        self._max_row_bytes = max_row_bytes
        self._max_tokens_per_row = max_tokens_per_row
        self._peers: dict[str, PeerConnection] = {}
        self._lock = threading.Lock()
        self._serials = itertools.count(1)
        self._actor_lock = threading.RLock()  # taken again for each group of a faulty message

    def connect(self, who: Introduction, writer: PeerWriter) -> PeerConnection:
        """Add a peer with the unique name "<role>/<name>#<serial>". Unless it raises, `disconnect` must follow."""
        peer = PeerConnection(f"{who}#{next(self._serials)}", who, writer)
        threading.Thread(target=peer.send_unsolicited, name=f"unsolicited-{peer.name}", daemon=True).start()
        with self._lock:
            self._peers[peer.name] = peer
        if not self.is_open:  # the peer connected while Goodbye was sent to the others
            peer.say_goodbye()
        try:
            self._service.connected(peer.name, peer.request_sync)
        except BaseException:
            self.disconnect(peer)
            raise
        return peer

    def disconnect(self, peer: PeerConnection) -> None:
        """Remove a peer; after the return nothing is written to its exchange."""
        peer.end()
        with self._lock:
            self._peers.pop(peer.name, None)
        self._service.disconnected(peer.name)

    def say_goodbye(self) -> None:
        """Send Goodbye to every peer and admit no further peers."""
        self.is_open = False
        with self._lock:
            peers = list(self._peers.values())
        for peer in peers:
            peer.say_goodbye()

    def answer(self, peer: PeerConnection, metadata: bytes, rows: pa.RecordBatch | None) -> None:
        """Answer one message; a faulty message is answered with a refusal."""
        try:
            request = parse(metadata)
        except SchemaMismatch as error:
            peer.note_fault(error)
            peer.write(Refused(re=id_of(metadata), code="schema", detail=str(error)[:_MAX_DETAIL]))
            return
        if isinstance(request, Groups):
            peer.write(self._answer_groups(peer, request, rows))
            return
        for answer, answer_rows in bundled(self._answers_to(peer, request, rows)):
            peer.write(answer, answer_rows)

    def _answer_groups(self, peer: PeerConnection, request: Groups, rows: pa.RecordBatch | None) -> Answers:
        """Check all groups together. If a check fails, check each group alone and refuse only faulty groups."""
        refs = [group.ref for group in request.groups]
        with self._actor_lock:
            try:
                whole = self._conforming(rows)
                check_row_count(refs, whole)
            except SchemaMismatch as error:
                answers: list[Answer] = [_refusal(peer, group, error) for group in request.groups]
            else:
                if peer.who.role == "actor" and self._are_valid(refs, whole):
                    answers = self._handle_together(peer, request.groups, whole)
                else:
                    parts = zip(request.groups, rows_of_groups(refs, whole), strict=True)
                    answers = [answer for part in parts for answer, _ in self._answers_to(peer, *part)]
        return Answers.model_validate({"re": request.id, "answers": answers})

    def _handle_together(self, peer: PeerConnection, groups: Sequence[Group], rows: pa.RecordBatch) -> list[Answer]:
        try:
            answers = self._service.handle_groups(peer.name, groups, rows)
        except Exception as error:  # noqa: BLE001 - answered, see _refusal
            return [_refusal(peer, group, error) for group in groups]
        return [
            _refusal(peer, group, answer) if isinstance(answer, Exception) else answer
            for group, answer in zip(groups, answers, strict=True)
        ]

    def _are_valid(self, refs: list[GroupRef], rows: pa.RecordBatch) -> bool:
        try:
            check_groups(refs, rows, max_tokens_per_row=self._max_tokens_per_row)
        except SchemaMismatch:
            return False
        return True

    def _answers_to(
        self, peer: PeerConnection, request: Request, rows: pa.RecordBatch | None
    ) -> Iterator[tuple[Answer, RowSlice | None]]:
        """The answers of the service, or a refusal."""
        try:
            check_sender(peer.who, request)
            if peer.who.role == "actor":
                with self._actor_lock:
                    answers = list(self._service.handle(peer.name, request, self._checked_rows(request, rows)))
                yield from answers
            else:  # in parallel: a reserve waits, and rows may be read from the store
                yield from self._service.handle(peer.name, request, self._checked_rows(request, rows))
        except Exception as error:  # noqa: BLE001 - answered, see _refusal
            yield _refusal(peer, request, error), None

    def _checked_rows(self, request: Request, rows: pa.RecordBatch | None) -> pa.RecordBatch | None:
        """Raises SchemaMismatch for rows of a non-group message, and for invalid rows of a group message."""
        if not isinstance(request, Group):
            if rows is not None:
                raise SchemaMismatch(f"a {request.kind} message carries no rows")
            return None
        rows = self._conforming(rows)
        check_groups([request.ref], rows, max_tokens_per_row=self._max_tokens_per_row)
        return rows

    def _conforming(self, rows: pa.RecordBatch | None) -> pa.RecordBatch:
        if rows is None:
            raise SchemaMismatch("a group message carries its rows as the record batch of the same write")
        num_bytes = rows.get_total_buffer_size()
        if num_bytes > self._max_row_bytes:
            raise SchemaMismatch(f"{num_bytes} bytes of rows in one message, the limit is {self._max_row_bytes}")
        return conform(rows)


def _refusal(peer: PeerConnection, request: Request, error: Exception) -> Refused:
    """The refusal of a request. The text of an unexpected error is logged and not sent to the peer."""
    if not isinstance(error, PipelineRLError):
        _log.error("%s: %s failed", peer.name, request.kind, exc_info=error)
        return Refused(re=request.id, code="internal", detail=f"{request.kind}: {type(error).__name__} in the hub")
    code = code_of(error)
    if code in ("schema", "wrong_peer"):
        peer.note_fault(error)
    return Refused(re=request.id, code=code, detail=str(error)[:_MAX_DETAIL])
