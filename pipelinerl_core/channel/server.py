"""The hub's side of the channel: an Arrow Flight server with one exchange per peer.

Two properties of Flight shape this module. The shutdown of Flight waits for every open stream without a deadline:
after `shutdown` the process must end with os._exit. A write to an exchange whose handler has returned crashes the
process: channel/dispatcher.py prevents such writes with a lock.
"""

import hmac
import logging
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.flight as fl

from pipelinerl_core.channel.admission import introduction
from pipelinerl_core.channel.dispatcher import Dispatcher, PeerConnection
from pipelinerl_core.data.checks import MAX_TOKENS_PER_ROW
from pipelinerl_core.data.schema import ROLLOUT_SCHEMA
from pipelinerl_core.interfaces import HubService

if TYPE_CHECKING:
    from pipelinerl_core.channel.tls import Credentials  # a hub without TLS needs no cryptography

MAX_ROW_BYTES = 256 << 20
"""Largest record batch of one message, about 1,000 rollouts of 16k tokens."""

_log = logging.getLogger(__name__)


class HubServer:
    """Serves a HubService. It listens after construction, admits peers after `start`, and ends with `shutdown`."""

    def __init__(
        self,
        service: HubService,
        *,
        host: str,
        port: int,
        token: str,
        max_row_bytes: int = MAX_ROW_BYTES,
        max_tokens_per_row: int = MAX_TOKENS_PER_ROW,
        credentials: "Credentials | None" = None,
    ) -> None:
        """With `credentials` the channel uses TLS. Raises ValueError for an empty token."""
        if not token:
            raise ValueError("the hub needs a token: with an empty token every client would be admitted")
        scheme = "grpc" if credentials is None else "grpc+tls"
        self._dispatcher = Dispatcher(service, max_row_bytes=max_row_bytes, max_tokens_per_row=max_tokens_per_row)
        self._flight = _Flight(self._dispatcher, f"{scheme}://{host}:{port}", token, credentials)
        self.url = f"{scheme}://{host}:{self._flight.port}"

    def start(self) -> None:
        """Admit peers. Earlier connections are refused as unavailable. Each peer is served by its own thread."""
        self._dispatcher.is_open = True

    def shutdown(self, seconds: float) -> bool:
        """Send Goodbye to every peer and wait up to `seconds` until all have disconnected; False after a timeout.

        In both cases the process must then end with os._exit: threads of open streams would block a normal exit.
        """
        self._dispatcher.say_goodbye()
        waiter = threading.Thread(target=self._flight.shutdown, name="flight-shutdown", daemon=True)
        waiter.start()
        waiter.join(seconds)
        return not waiter.is_alive()


class _Flight(fl.FlightServerBase):  # type: ignore[misc]  # pyarrow has no types
    def __init__(self, dispatcher: Dispatcher, location: str, token: str, credentials: "Credentials | None") -> None:
        certificates = None if credentials is None else [tuple(credentials)]
        super().__init__(location, tls_certificates=certificates, middleware={"token": _TokenCheck(token)})
        self._dispatcher = dispatcher

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Serve one peer until its exchange ends."""
        who = introduction(descriptor.command)
        if not self._dispatcher.is_open:
            raise fl.FlightUnavailableError("the hub is starting or shutting down")
        writer.begin(ROLLOUT_SCHEMA)
        try:
            peer = self._dispatcher.connect(who, writer)
            try:
                self._converse(peer, reader)
            finally:
                self._dispatcher.disconnect(peer)
        except Exception as error:  # noqa: BLE001 - a traceback must not reach the peer
            _log.exception("%s: exchange failed", who)
            raise fl.FlightInternalError(f"the hub ended the exchange: {type(error).__name__}") from None
        _log.info("%s disconnected%s", peer.name, " (connection lost)" if context.is_cancelled() else "")

    def _converse(self, peer: PeerConnection, reader: Any) -> None:
        while True:
            try:
                chunk = reader.read_chunk()
            except StopIteration:
                return
            except (pa.ArrowException, fl.FlightError, OSError) as error:
                _log.info("%s: read failed: %s", peer.name, error)
                return
            metadata = chunk.app_metadata.to_pybytes() if chunk.app_metadata is not None else b""
            self._dispatcher.answer(peer, metadata, chunk.data)


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
