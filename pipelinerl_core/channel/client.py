"""A role's side of the channel to the hub: each request is repeated until it is answered.

Synchronous and thread-safe; every wait has a deadline. A client that is not closed does not block the exit of the
interpreter.
"""

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

import pyarrow as pa
from pydantic import ValidationError

from pipelinerl_core.channel.bundles import Frame, Received
from pipelinerl_core.channel.connection import Connection, Lost, lost_text
from pipelinerl_core.channel.refusals import error_of
from pipelinerl_core.errors import ConfigError, HubUnavailable, StreamError
from pipelinerl_core.messages import (
    Answer,
    Bye,
    Goodbye,
    Group,
    Introduction,
    Refused,
    Request,
    Reserve,
    Reserved,
    Rows,
    RowsHeader,
    SyncNow,
    encode,
)

CLOSE_SECONDS = 2.0
"""Longest wait of `close` for the answer to `bye`, and for the end of each thread."""

_log = logging.getLogger(__name__)

RowsAnswer = tuple[RowsHeader, pa.RecordBatch]


class HubClient:
    """A client of the hub. The constructor connects: HubUnavailable without a hub, ConfigError with a wrong token.

    on_sync_now: called on the reading thread for each SyncNow message.
    faults: for tests; called with "send" or "receive" before each repeatable message, True drops the message.
    SyncNow is not dropped.
    certificate: PEM of the only certificate that is trusted for a grpc+tls:// hub.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str,
        role: Literal["actor", "trainer"],
        name: str,
        on_sync_now: Callable[[], None] | None = None,
        retry_seconds: float = 2.0,
        deadline_seconds: float = 120.0,
        faults: Callable[[str], bool] | None = None,
        certificate: str = "",
    ) -> None:
        self._retry_seconds = retry_seconds
        self._deadline_seconds = deadline_seconds
        self._faults = faults
        self._ids = itertools.count(1)
        self._connection = Connection(url, token, _introduction(role, name), on_sync_now, faults, certificate)

    @property
    def url(self) -> str:
        return self._connection.url

    @property
    def is_connected(self) -> bool:
        """Whether the exchange is open and the hub has not said goodbye."""
        return self._connection.lost is None

    def request(
        self, message: Request, rows: pa.RecordBatch | None = None, *, timeout: float | None = None
    ) -> Answer:
        """Send a request and return the answer, which may be Refused. The request is repeated until it is answered.

        Raises HubUnavailable as soon as the connection is lost, or after `timeout` (default: deadline_seconds).
        """
        return self.request_all([(message, rows)], timeout=timeout)[0]

    def request_all(
        self, messages: Sequence[tuple[Request, pa.RecordBatch | None]], *, timeout: float | None = None
    ) -> list[Answer]:
        """Send several requests at once and return their answers in the same order.

        Raises like `request`; `timeout` holds for all of them together.
        """
        limit_seconds = self._deadline_seconds if timeout is None else timeout
        deadline = time.monotonic() + limit_seconds
        calls = [_Call(self._identified(message), rows, self._faults) for message, rows in messages]
        answers: dict[int, Answer] = {}
        with _Exchange(self._connection, [call.message.id for call in calls]) as exchange:
            while open_calls := [call for call in calls if call.message.id not in answers]:
                exchange.send(open_calls)
                patience = max(self._patience(call.message) for call in open_calls)
                exchange.collect(answers, min(deadline, time.monotonic() + patience))
                if len(answers) < len(calls) and time.monotonic() >= deadline:
                    late = next(call for call in open_calls if call.message.id not in answers)
                    raise HubUnavailable(_late_text(late.message.kind, exchange.url, limit_seconds))
        return [answers[call.message.id] for call in calls]

    def reserve(self, message: Reserve, *, timeout: float | None = None) -> tuple[Answer, list[RowsAnswer]]:
        """Reserve a step: the answer, and the rows that followed it. Request the rows of other groups separately.

        Raises like `request`.
        """
        limit_seconds = self._deadline_seconds if timeout is None else timeout
        deadline = time.monotonic() + limit_seconds
        call = _Call(self._identified(message.model_copy(update={"with_rows": True})), None, self._faults)
        with _Exchange(self._connection, [call.message.id]) as exchange:
            while time.monotonic() < deadline:
                exchange.send([call])
                parts = exchange.next(min(deadline, time.monotonic() + self._patience(call.message)))
                if parts is None or isinstance(parts[0].answer, RowsHeader):  # rows alone: the answer was lost
                    continue
                answer = parts[0].answer
                if not isinstance(answer, Reserved) or not answer.num_following:
                    return answer, []
                return answer, exchange.following(answer.num_following, self._retry_seconds)
        raise HubUnavailable(_late_text(call.message.kind, self.url, limit_seconds))

    def request_rows(self, message: Rows, *, timeout: float | None = None) -> list[RowsAnswer]:
        """The rows of every group that `message` names, in its order; lost rows are requested again.

        Raises the error of a refusal (MissingObject, Fenced, StreamError, ...), or HubUnavailable like `request`.
        """
        limit_seconds = self._deadline_seconds if timeout is None else timeout
        deadline = time.monotonic() + limit_seconds
        answers: dict[tuple[int, int], RowsAnswer] = {}
        while missing := tuple(group for group in message.groups if group not in answers):
            if time.monotonic() >= deadline:
                raise HubUnavailable(
                    f"rows of {len(missing)} of {len(message.groups)} groups of step {message.step} did not come "
                    f"from {self.url} within {limit_seconds:g} s. Read hub.json for a newer hub, then reconnect"
                )
            part = self._identified(message.model_copy(update={"groups": missing}))
            with _Exchange(self._connection, [part.id]) as exchange:
                exchange.send([_Call(part, None, self._faults)])
                for header, rows in exchange.stream(self._retry_seconds, deadline):
                    answers[header.group_id, header.attempt] = (header, rows)
        return [answers[group] for group in message.groups]

    def close(self, *, bye: bool = True) -> None:
        """End the exchange, after a `bye` request if `bye` is set. Takes a few seconds at most."""
        if bye and self.is_connected:
            try:
                self.request(Bye(), timeout=CLOSE_SECONDS)
            except HubUnavailable as error:
                _log.debug("no answer to bye: %s", error)
        self._connection.finish(CLOSE_SECONDS)

    def _identified(self, message: Request) -> Request:
        return message.model_copy(update={"id": next(self._ids)})

    def _patience(self, message: Request) -> float:
        """Seconds before the message is sent again."""
        return self._retry_seconds + (message.wait_seconds if isinstance(message, Reserve) else 0.0)


def _introduction(role: Literal["actor", "trainer"], name: str) -> bytes:
    try:
        return encode(Introduction(role=role, name=name))
    except ValidationError:
        raise ConfigError(
            f"{name!r} is no valid name of a peer: 1 to 100 printable characters, no slash, no leading dot"
        ) from None


def _late_text(kind: str, url: str, limit_seconds: float) -> str:
    advice = "Read hub.json for a newer hub, then reconnect"
    return f"no answer to {kind} from {url} within {limit_seconds:g} s. {advice}"


class _Call:
    """One request with its encoded message, which may be sent several times."""

    def __init__(self, message: Request, rows: pa.RecordBatch | None, faults: Callable[[str], bool] | None) -> None:
        self.message = message
        self._metadata = encode(message)
        self._rows = rows
        self._faults = faults
        self._written: threading.Event | None = None

    def frame(self) -> Frame | None:
        """The frame to be written; None while the previous write is pending, or if a test drops the message."""
        if self._written is not None and not self._written.is_set():
            return None
        self._written = threading.Event()
        if self._faults is not None and self._faults("send"):
            self._written.set()
            return None
        return Frame(self._metadata, self._rows, isinstance(self.message, Group), self._written)


class _Exchange:
    """Open requests on one connection, and the mailbox for their answers."""

    def __init__(self, connection: Connection, numbers: Sequence[int]) -> None:
        self.url = connection.url
        self._connection = connection
        self._numbers = numbers

    def __enter__(self) -> "_Exchange":
        self._mailbox = self._connection.expect(self._numbers)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._connection.forget(self._numbers)

    def send(self, calls: Sequence[_Call]) -> None:
        """Send the requests, except requests whose previous write is still pending."""
        frames = [frame for call in calls if (frame := call.frame()) is not None]
        if frames:
            self._connection.send(frames)

    def collect(self, answers: dict[int, Answer], until: float) -> None:
        """Add answers by request id, until every request has one or until the time `until`."""
        while len(answers) < len(self._numbers) and (parts := self.next(until)) is not None:
            for answer, _ in parts:
                if not isinstance(answer, SyncNow | Goodbye):
                    answers[answer.re] = answer

    def stream(self, patience_seconds: float, deadline: float) -> "list[RowsAnswer]":
        """The rows that arrive up to the last group, or until none arrives for `patience_seconds`."""
        answers: list[RowsAnswer] = []
        while (parts := self.next(min(deadline, time.monotonic() + patience_seconds))) is not None:
            for answer, rows in parts:
                if isinstance(answer, Refused):
                    raise error_of(answer)
                if not isinstance(answer, RowsHeader) or rows is None:
                    raise StreamError(f"the hub answered a request for rows with {answer.kind} and no rows")
                answers.append((answer, rows))
                if answer.remaining == 0:
                    return answers
        return answers

    def following(self, num_groups: int, patience_seconds: float) -> "list[RowsAnswer]":
        """The rows that follow an answer, until none arrives for `patience_seconds`."""
        answers: dict[tuple[int, int], RowsAnswer] = {}
        while len(answers) < num_groups and (parts := self.next(time.monotonic() + patience_seconds)) is not None:
            for answer, rows in parts:
                if isinstance(answer, RowsHeader) and rows is not None:  # otherwise a repeated answer
                    answers[answer.group_id, answer.attempt] = (answer, rows)
        return list(answers.values())

    def next(self, until: float) -> list[Received] | None:
        """The next answers, or None at `until`. Raises HubUnavailable if the connection is lost."""
        try:
            received = self._mailbox.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            return None
        if isinstance(received, Lost):
            raise HubUnavailable(lost_text(self.url, received.reason))
        return received
