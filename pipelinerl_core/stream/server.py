"""The hub's side of the channel: Arrow Flight, one long-lived exchange per peer.

It carries messages between peers and a `HubService` and knows nothing of ledgers. Requests and answers are JSON in
the metadata of a write; rows are the record batch of the same write. Both directions use ROLLOUT_SCHEMA.

Three properties of Flight shape this module. Writing to an exchange whose handler has returned crashes the process:
a peer's writer is touched only under its lock, and never once `_is_dead` is set under that lock. Flight's shutdown
waits for every open stream without a deadline: after `shutdown` the process must leave by os._exit. And every peer
has a thread of its own: a hundred of them, each of which lets go of the interpreter a dozen times per message, spend
most of their time on handing it to each other. So messages of actors, which wait for nothing, are worked on in turn.
"""

import hmac
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl

from pipelinerl_core.errors import Fenced, MissingObject, PipelineRLError, SchemaMismatch, StaleLease, WrongPeer
from pipelinerl_core.interfaces import HubService
from pipelinerl_core.messages import (
    Answer,
    Answers,
    Credit,
    Goodbye,
    Group,
    Groups,
    Introduction,
    Refused,
    Request,
    encode,
)
from pipelinerl_core.stream.bundles import bundled
from pipelinerl_core.stream.checks import MAX_TOKENS_PER_ROW, apart, check_groups, check_places
from pipelinerl_core.stream.door import check_sender, id_of, introduction, parse
from pipelinerl_core.stream.schema import ROLLOUT_SCHEMA, conform
from pipelinerl_core.stream.tls import Credentials
from pipelinerl_core.types import GroupRef

MAX_ROW_BYTES = 256 << 20
"""Largest record batch of one message, about 1,000 rollouts of 16k tokens."""

_REFUSAL_CODES: tuple[tuple[type[PipelineRLError], str], ...] = (
    (SchemaMismatch, "schema"),
    (StaleLease, "stale_lease"),
    (WrongPeer, "wrong_peer"),
    (Fenced, "fenced"),
    (MissingObject, "missing_rows"),
)
_MAX_DETAIL = 500  # characters; what they are about may be the peer's own words
_GOODBYE_SECONDS = 0.2  # how long shutdown waits for the lock of one peer, which a frozen one may hold

_log = logging.getLogger(__name__)

_TakeGroups = Callable[[str, Sequence[Group], pa.RecordBatch], Sequence[Answer | Exception]]
"""`handle_groups` of a service that takes in the checked groups of one write together, where it has that: cheaper."""


class _Peer:
    """One exchange. `write` may be called from any thread at any time."""

    def __init__(self, name: str, who: Introduction, writer: Any) -> None:
        self.name = name
        self.who = who
        self._writer = writer
        self._lock = threading.Lock()
        self._is_dead = False

    def write(self, answer: Answer, rows: pa.RecordBatch | None = None, *, lock_seconds: float = -1) -> None:
        """Send, or do nothing if the peer has gone."""
        if not self._lock.acquire(timeout=lock_seconds):
            return
        try:
            if self._is_dead:
                return
            if rows is None:
                self._writer.write_metadata(encode(answer))
            else:
                self._writer.write_with_metadata(conform(rows), encode(answer))
        except (pa.ArrowException, fl.FlightError, OSError) as error:
            _log.debug("%s: write failed, its reader will end: %s", self.name, error)
        finally:
            self._lock.release()

    def end(self) -> None:
        """Forbid every later write. Must precede the return of the exchange's handler."""
        with self._lock:
            self._is_dead = True

    def return_credit(self, num_groups: int) -> None:
        """CreditSink of this peer."""
        self.write(Credit(num_groups=num_groups))


class FlightHubServer:
    """Serves a HubService. It listens from construction; `start` lets peers in; `shutdown` ends it."""

    def __init__(
        self,
        service: HubService,
        *,
        host: str,
        port: int,
        token: str,
        max_row_bytes: int = MAX_ROW_BYTES,
        max_tokens_per_row: int = MAX_TOKENS_PER_ROW,
        credentials: Credentials | None = None,
    ) -> None:
        """With `credentials` the channel is TLS."""
        if not token:
            raise ValueError("the hub needs a token; an empty one would let everybody in")
        scheme = "grpc" if credentials is None else "grpc+tls"
        self._flight = _Flight(
            service,
            f"{scheme}://{host}:{port}",
            token,
            credentials,
            max_row_bytes=max_row_bytes,
            max_tokens_per_row=max_tokens_per_row,
        )
        self.url = f"{scheme}://{host}:{self._flight.port}"

    def start(self) -> None:
        """Let peers in; earlier ones are told to come again. Flight serves on threads of its own."""
        self._flight.is_open = True

    def shutdown(self, seconds: float) -> bool:
        """Say goodbye to every peer, wait up to `seconds` for them to leave; True if all have.

        Whatever it returns, the process must then leave by os._exit: threads of open streams would hold up its exit.
        """
        self._flight.is_open = False
        self._flight.say_goodbye()
        waiter = threading.Thread(target=self._flight.shutdown, name="flight-shutdown", daemon=True)
        waiter.start()
        waiter.join(seconds)
        return not waiter.is_alive()


class _Flight(fl.FlightServerBase):  # type: ignore[misc]  # pyarrow has no types
    def __init__(
        self,
        service: HubService,
        location: str,
        token: str,
        credentials: Credentials | None,
        *,
        max_row_bytes: int,
        max_tokens_per_row: int,
    ) -> None:
        certificates = None if credentials is None else [tuple(credentials)]
        super().__init__(location, tls_certificates=certificates, middleware={"token": _TokenCheck(token)})
        self.is_open = False
        self._service = service
        self._max_row_bytes = max_row_bytes
        self._max_tokens_per_row = max_tokens_per_row
        self._peers: dict[str, _Peer] = {}
        self._lock = threading.Lock()
        self._serials = itertools.count(1)
        self._turn = threading.Lock()

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """One peer, from its coming to its going. The peer's name is unique: "<role>/<name>#<serial>"."""
        who = introduction(descriptor.command)
        name = f"{who}#{next(self._serials)}"
        if not self.is_open:
            raise fl.FlightUnavailableError("the hub is starting or shutting down")
        writer.begin(ROLLOUT_SCHEMA)
        try:
            self._host(_Peer(name, who, writer), reader)
        except Exception as error:  # noqa: BLE001 - a traceback must not reach the peer
            _log.exception("%s: exchange failed", name)
            raise fl.FlightInternalError(f"the hub ended the exchange: {type(error).__name__}") from None
        _log.info("%s has gone%s", name, " (connection lost)" if context.is_cancelled() else "")

    def _host(self, peer: _Peer, reader: Any) -> None:
        with self._lock:
            self._peers[peer.name] = peer
        if not self.is_open:  # it came while goodbye was said to the others
            peer.write(Goodbye(), lock_seconds=_GOODBYE_SECONDS)
        try:
            self._service.connected(peer.name, peer.return_credit)
            self._converse(peer, reader)
        finally:
            peer.end()
            with self._lock:
                self._peers.pop(peer.name, None)
            self._service.disconnected(peer.name)

    def say_goodbye(self) -> None:
        """Tell every peer that the hub is shutting down."""
        with self._lock:
            peers = list(self._peers.values())
        for peer in peers:
            peer.write(Goodbye(), lock_seconds=_GOODBYE_SECONDS)

    def _converse(self, peer: _Peer, reader: Any) -> None:
        while True:
            try:
                chunk = reader.read_chunk()
            except StopIteration:
                return
            except (pa.ArrowException, fl.FlightError, OSError) as error:
                _log.info("%s: read failed: %s", peer.name, error)
                return
            metadata = chunk.app_metadata.to_pybytes() if chunk.app_metadata is not None else b""
            self._answer(peer, metadata, chunk.data)

    def _answer(self, peer: _Peer, metadata: bytes, rows: pa.RecordBatch | None) -> None:
        try:
            request = parse(metadata)
        except SchemaMismatch as error:
            peer.write(Refused(re=id_of(metadata), code="schema", detail=str(error)[:_MAX_DETAIL]))
            return
        if isinstance(request, Groups):
            peer.write(self._answer_groups(peer, request, rows))
            return
        for answer, answer_rows in bundled(self._answers_to(peer, request, rows)):
            peer.write(answer, answer_rows)

    def _answer_groups(self, peer: _Peer, request: Groups, rows: pa.RecordBatch | None) -> Answers:
        """Looked at together; when something is wrong, one by one, so that only what is at fault is refused."""
        refs = [group.ref for group in request.groups]
        with self._turn:
            try:
                whole = self._sized(rows)
                check_places(refs, whole)
                is_checked = self._are_sound(refs, whole)
            except SchemaMismatch as error:
                refusals = tuple(_refusal(peer, group, error) for group in request.groups)
                return Answers(re=request.id, answers=refusals)
            take = getattr(self._service, "handle_groups", None)
            if is_checked and take is not None and peer.who.role == "actor":
                answers = self._take_together(peer, request.groups, take, whole)
            else:
                answers = [
                    self._answer_group(peer, group, part, is_checked)
                    for group, part in zip(request.groups, apart(refs, whole), strict=True)
                ]
        return Answers.model_validate({"re": request.id, "answers": answers})

    def _take_together(
        self, peer: _Peer, groups: Sequence[Group], take: "_TakeGroups", rows: pa.RecordBatch
    ) -> list[Answer]:
        try:
            found = take(peer.name, groups, rows)
        except Exception as error:  # noqa: BLE001 - answered, see _refusal
            return [_refusal(peer, group, error) for group in groups]
        return [
            _refusal(peer, group, answer) if isinstance(answer, Exception) else answer
            for group, answer in zip(groups, found, strict=True)
        ]

    def _answer_group(self, peer: _Peer, group: Group, rows: pa.RecordBatch, is_checked: bool) -> Answer:
        try:
            check_sender(peer.who, group)
            [(answer, _)] = self._service.handle(peer.name, group, rows if is_checked else self._admit(group, rows))
        except Exception as error:  # noqa: BLE001 - answered, see _refusal
            return _refusal(peer, group, error)
        return answer

    def _are_sound(self, refs: list[GroupRef], rows: pa.RecordBatch) -> bool:
        try:
            check_groups(refs, rows, max_tokens_per_row=self._max_tokens_per_row)
        except SchemaMismatch:
            return False
        return True

    def _answers_to(
        self, peer: _Peer, request: Request, rows: pa.RecordBatch | None
    ) -> Iterator[tuple[Answer, pa.RecordBatch | None]]:
        """What the service says, or why it was not asked."""
        try:
            check_sender(peer.who, request)
            if peer.who.role == "actor":
                with self._turn:
                    answers = list(self._service.handle(peer.name, request, self._admit(request, rows)))
                yield from answers
            else:  # a trainer's reserve waits, its rows are read from the store
                yield from self._service.handle(peer.name, request, self._admit(request, rows))
        except Exception as error:  # noqa: BLE001 - answered, see _refusal
            yield _refusal(peer, request, error), None

    def _admit(self, request: Request, rows: pa.RecordBatch | None) -> pa.RecordBatch | None:
        """The door: rows exactly with group messages, of the right schema and size, those that the message names."""
        if not isinstance(request, Group):
            if rows is not None:
                raise SchemaMismatch(f"a {request.kind} message carries no rows")
            return None
        rows = self._sized(rows)
        check_groups([request.ref], rows, max_tokens_per_row=self._max_tokens_per_row)
        return rows

    def _sized(self, rows: pa.RecordBatch | None) -> pa.RecordBatch:
        if rows is None:
            raise SchemaMismatch("a group message carries its rows as the record batch of the same write")
        num_bytes = rows.get_total_buffer_size()
        if num_bytes > self._max_row_bytes:
            raise SchemaMismatch(f"{num_bytes} bytes of rows in one message, the limit is {self._max_row_bytes}")
        return conform(rows)


def _refusal(peer: _Peer, request: Request, error: Exception) -> Refused:
    """One bad request must not end the hub, nor show its insides."""
    if not isinstance(error, PipelineRLError):
        _log.error("%s: %s failed", peer.name, request.kind, exc_info=error)
        return Refused(re=request.id, code="internal", detail=f"{request.kind}: {type(error).__name__} in the hub")
    code = next((code for kind, code in _REFUSAL_CODES if isinstance(error, kind)), "internal")
    if code == "wrong_peer":
        _log.warning("%s: %s", peer.name, error)
    return Refused(re=request.id, code=code, detail=str(error)[:_MAX_DETAIL])


class _TokenCheck(fl.ServerMiddlewareFactory):  # type: ignore[misc]  # pyarrow has no types
    def __init__(self, token: str) -> None:
        super().__init__()
        self._expected = f"Bearer {token}".encode()

    def start_call(self, info: Any, headers: Mapping[str, list[str | bytes]]) -> None:
        """Refuse the call unless it carries the token."""
        del info
        for name, values in headers.items():
            if name.lower() != "authorization":
                continue
            given = values[0].encode() if isinstance(values[0], str) else values[0]
            if hmac.compare_digest(given, self._expected):
                return
        raise fl.FlightUnauthenticatedError("wrong or missing token")
