"""One exchange with the hub and its reading and writing thread. Callers never wait for a write."""

import logging
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.flight as fl
from pydantic import ValidationError

from pipelinerl_core.channel.bundles import Frame, Received, frames_of_writes, merged, unbundled
from pipelinerl_core.data.schema import ROLLOUT_SCHEMA, check_schema
from pipelinerl_core.errors import ConfigError, HubUnavailable, SchemaMismatch
from pipelinerl_core.messages import ANSWER, Answer, Goodbye, SyncNow

CERTIFIED_NAME = "pipelinerl-hub"
"""The host name in every hub certificate, independent of the address: clients trust a certificate, not a name."""
CONNECT_SECONDS = 10.0
"""Longest wait for the schema, the first message of the hub."""
_WIRE_ERRORS = (pa.ArrowException, fl.FlightError, OSError)  # errors of a broken connection
_WRITER_SECONDS = 1.0  # a cancelled write returns at once
_CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # a separate connection, without the back-off of other clients
    ("grpc.min_reconnect_backoff_ms", 5000),  # bounds one attempt to connect
)

_log = logging.getLogger(__name__)


class Lost(NamedTuple):
    """Takes the place of an answer if the connection is lost."""

    reason: str


Mailbox = queue.SimpleQueue[list[Received] | Lost]
"""Each item holds all answers of one write, so that the waiting thread wakes once for them."""


class Connection:
    """One exchange with its two threads. `lost` is the reason of its end; None while the exchange is open."""

    def __init__(
        self,
        url: str,
        token: str,
        command: bytes,
        on_sync_now: Callable[[], None] | None,
        faults: Callable[[str], bool] | None,
        certificate: str = "",
    ) -> None:
        self.url = url
        self.lost: str | None = None
        self.waiting: dict[int, Mailbox] = {}
        self._lock = threading.Lock()
        self._on_sync_now = on_sync_now
        self._faults = faults
        self._schema_received = threading.Event()
        self._is_unauthenticated = False
        self._frames: queue.SimpleQueue[Sequence[Frame] | None] = queue.SimpleQueue()
        self._client, self._writer, self._reader = _open_exchange(url, token, command, certificate)
        # Before the interpreter exits: a thread that reads from Flight would hang it.
        self._finalizer = weakref.finalize(self, _cancel, self._reader)
        self._read_thread = threading.Thread(target=self._read, name="hub-reader", daemon=True)
        self._write_thread = threading.Thread(target=self._write, name="hub-writer", daemon=True)
        self._write_thread.start()
        self._read_thread.start()  # second: when it ends it joins the other
        self._await_hub()

    def expect(self, numbers: Sequence[int]) -> Mailbox:
        """A mailbox for the answers to these request ids. Raises HubUnavailable if the connection is lost."""
        mailbox: Mailbox = queue.SimpleQueue()
        with self._lock:
            if self.lost is not None:
                raise HubUnavailable(lost_text(self.url, self.lost))
            self.waiting.update(dict.fromkeys(numbers, mailbox))
        return mailbox

    def forget(self, numbers: Sequence[int]) -> None:
        """Drop later answers to these request ids."""
        with self._lock:
            for number in numbers:
                self.waiting.pop(number, None)

    def send(self, frames: Sequence[Frame]) -> None:
        """Pass frames to the writing thread, which combines groups into one write."""
        for part in frames_of_writes(frames):
            self._frames.put(part)

    def cut(self, reason: str) -> None:
        """End the exchange at once; waiting requests raise HubUnavailable."""
        self._lose(reason)
        self._frames.put(None)
        self._finalizer()

    def finish(self, seconds: float) -> None:
        """Close the writing side, wait up to `seconds` for the hub to end the exchange, then cancel."""
        self._frames.put(None)
        self._read_thread.join(seconds)
        self.cut("closed")
        self._read_thread.join(seconds)
        self._write_thread.join(seconds)

    def _await_hub(self) -> None:
        """Wait for the hub's schema, which shows that the peer is admitted. Flight may report a refusal only then."""
        if not self._schema_received.wait(CONNECT_SECONDS):
            self.cut(f"the hub did not answer within {CONNECT_SECONDS:g} s")
        if self._is_unauthenticated:
            raise ConfigError(_token_text(self.url))
        if self.lost is not None:
            raise HubUnavailable(_absent_text(self.url, self.lost))

    def _lose(self, reason: str) -> None:
        with self._lock:
            if self.lost is None:
                self.lost = reason
            mailboxes = list(dict.fromkeys(self.waiting.values()))
        for mailbox in mailboxes:
            mailbox.put(Lost(reason))

    def _write(self) -> None:
        try:
            while (frames := self._frames.get()) is not None:
                metadata, rows = merged(frames)
                if rows is None:
                    self._writer.write_metadata(metadata)
                else:
                    self._writer.write_with_metadata(rows, metadata)
                for frame in frames:
                    frame.written.set()
            self._writer.done_writing()
        except _WIRE_ERRORS as error:
            self._lose(_reason_of(error))

    def _read(self) -> None:
        reason = "the hub ended the exchange"
        try:
            check_schema(self._reader.schema)
            self._schema_received.set()
            while True:
                chunk = self._reader.read_chunk()
                answer = ANSWER.validate_json(chunk.app_metadata.to_pybytes())
                if isinstance(answer, Goodbye):
                    reason = "the hub said goodbye"
                    break
                self._deliver(answer, chunk.data)
        except StopIteration:
            pass
        except fl.FlightUnauthenticatedError:
            self._is_unauthenticated = True
            reason = "the hub refuses the token"
        except SchemaMismatch as error:
            reason = str(error)
        except ValidationError:
            reason = "the hub sent a message that this release cannot parse"
        except _WIRE_ERRORS as error:
            reason = _reason_of(error)
        except Exception as error:  # noqa: BLE001 - an error of the role's callback; waiting requests must fail
            _log.exception("the reading thread failed")
            reason = f"the reading thread failed: {type(error).__name__}"
        self._end(reason)

    def _end(self, reason: str) -> None:
        """Close the exchange after the last read."""
        self.cut(reason)
        self._schema_received.set()
        self._write_thread.join(_WRITER_SECONDS)
        if self._write_thread.is_alive():  # the thread may be using the writer and the client
            return
        try:
            self._writer.close()
            self._client.close()
        except _WIRE_ERRORS as error:
            _log.debug("close: %s", _reason_of(error))

    def _deliver(self, answer: Answer, rows: pa.RecordBatch | None) -> None:
        if isinstance(answer, SyncNow):
            if self._on_sync_now is not None:
                self._on_sync_now()
            return
        parts: dict[Mailbox, list[Received]] = {}
        for part in unbundled(answer, rows):
            if isinstance(part.answer, SyncNow | Goodbye) or (self._faults is not None and self._faults("receive")):
                continue
            mailbox = self.waiting.get(part.answer.re)
            if mailbox is not None:
                parts.setdefault(mailbox, []).append(part)
        for mailbox, received in parts.items():
            mailbox.put(received)


def _open_exchange(url: str, token: str, command: bytes, certificate: str) -> tuple[Any, Any, Any]:
    """Client, writer and reader. Raises HubUnavailable without a hub and ConfigError with a wrong token; Flight may
    report both only at the first read.
    """
    options = fl.FlightCallOptions(headers=[(b"authorization", f"Bearer {token}".encode())])
    trust = {"tls_root_certs": certificate, "override_hostname": CERTIFIED_NAME} if certificate else {}
    try:
        client = fl.FlightClient(url, generic_options=list(_CHANNEL_OPTIONS), **trust)
        writer, reader = client.do_exchange(fl.FlightDescriptor.for_command(command), options)
        writer.begin(ROLLOUT_SCHEMA)
    except fl.FlightUnauthenticatedError:
        raise ConfigError(_token_text(url)) from None
    except _WIRE_ERRORS as error:
        raise HubUnavailable(_absent_text(url, _reason_of(error))) from None
    return client, writer, reader


def _cancel(reader: Any) -> None:
    """End the exchange at once; may be called while other threads read or write."""
    try:
        reader.cancel()
    except _WIRE_ERRORS as error:
        _log.debug("cancel: %s", error)


def _token_text(url: str) -> str:
    return f"the hub at {url} refuses the token; set PIPELINERL_TOKEN to the token of the hub"


def _absent_text(url: str, reason: str) -> str:
    return f"no hub at {url}: {reason}. Start the hub, or read hub.json"


def lost_text(url: str, reason: str) -> str:
    """The error text for a lost connection."""
    return f"the connection to the hub at {url} is lost: {reason}. Read hub.json for a newer hub, then reconnect"


def _reason_of(error: BaseException) -> str:
    """The reason why the exchange failed, as one line."""
    if "certificate verify failed" in str(error):
        return "its certificate is not the certificate in hub.json"
    return " ".join(str(error).split())[:200] or type(error).__name__
