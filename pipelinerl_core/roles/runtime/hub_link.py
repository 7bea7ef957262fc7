"""A role's connection to the hub, which survives restarts of the hub.

hub.json has the address of the hub; the link reads hub.json again after every failed call. After every reconnection
the link first registers the role, so that the hub has the role's leases or reservation before any other request.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar
from urllib.parse import urlsplit

import pyarrow as pa

from pipelinerl_core.channel.client import HubClient
from pipelinerl_core.channel.refusals import error_of
from pipelinerl_core.errors import ConfigError, HubUnavailable, RunOver
from pipelinerl_core.host import is_loopback
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.messages import Answer, Refused, Register, Registered, Request, Reserve, Rows, RowsHeader
from pipelinerl_core.run.hub_status import has_ended, read_hub
from pipelinerl_core.run.records import HUB_KEY, HubRecord

T = TypeVar("T")
logger = logging.getLogger(__name__)

# A role without a hub for this long seals, flushes and exits.
HUB_DEADLINE_SECONDS = 120.0
# A request without an answer for this long is sent again.
RETRY_SECONDS = 2.0
# A host that has failed closes no connection: after this long without an answer the link reads hub.json again.
# Requests with many rows have a longer deadline.
_ANSWER_SECONDS = 60.0
_POLL_SECONDS = 0.2


class HubLink:
    """Sends requests across restarts of the hub. Thread-safe; calls block until the answer or the deadline."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        token: str,
        role: Literal["actor", "trainer"],
        name: str,
        registration: Callable[[], Register],
        is_over: Callable[[], bool] = lambda: False,
        deadline_seconds: float = HUB_DEADLINE_SECONDS,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        """registration: returns the message with which the role registers.

        is_over: whether the run is complete; called if hub.json is from a finished hub with which this role was never
        registered, because the file may be older than the resumption of the run.
        """
        self._is_over = is_over
        self._store = store
        self._token = token
        self._role = role
        self._name = name
        self._registration = registration
        self._deadline_seconds = deadline_seconds
        self._retry_seconds = retry_seconds
        self._lock = threading.RLock()
        self._client: HubClient | None = None
        self._closed = False
        self._elsewhere: tuple[str, float] | None = None
        """The first heartbeat that was read of a hub on the loopback address of another host: (boot id, time)."""
        self.registered: Registered | None = None
        self.on_sync_now: Callable[[], None] = lambda: None
        """Called on a thread of the channel for each SyncNow."""
        self.is_cancelled: Callable[[], bool] = lambda: False
        """Called repeatedly while no hub is available; True ends the wait."""

    @property
    def boot_id(self) -> str:
        """boot_id of the hub with which this role is registered."""
        return self.registered.boot_id if self.registered else ""

    def connect(self) -> Registered:
        """Find the hub and register. Raises HubUnavailable after the deadline, RunOver if the run has ended."""
        return self._connect_until(time.monotonic() + self._deadline_seconds, self._deadline_seconds)

    def _connect_until(self, deadline: float, seconds: float) -> Registered:
        while True:
            client = self._client
            try:
                return self._connect_once(client)
            except HubUnavailable as error:
                self._wait_or_raise(deadline, error, seconds)

    def register_again(self) -> Registered:
        """Register on the open connection: the hub answered with an unknown boot_id."""
        with self._lock:
            if self._client is None:
                raise HubUnavailable("not connected")
            return self._register(self._client)

    def request(
        self, message: Request, rows: pa.RecordBatch | None = None, *, seconds: float | None = None
    ) -> Answer:
        """The hub's answer; repeated after restarts of the hub. Raises as `connect`.

        seconds: replaces the deadline.
        """
        return self._through_restarts(lambda client: client.request(message, rows, timeout=seconds), seconds)

    def request_all(self, messages: Sequence[tuple[Request, pa.RecordBatch | None]]) -> list[Answer]:
        """The answers to several requests that are sent without waiting for each other, in the same order."""
        return self._through_restarts(lambda client: client.request_all(messages, timeout=HUB_DEADLINE_SECONDS))

    def reserve(self, message: Reserve) -> tuple[Answer, list[tuple[RowsHeader, pa.RecordBatch]]]:
        """The hub's answer, and the rows of reserved groups that the answer includes."""
        return self._through_restarts(lambda client: client.reserve(message))

    def request_rows(self, message: Rows) -> list[tuple[RowsHeader, pa.RecordBatch]]:
        """The record batches of reserved groups. Raises as `connect`, and StreamError if the hub lacks rows."""
        return self._through_restarts(lambda client: client.request_rows(message, timeout=HUB_DEADLINE_SECONDS))

    def close(self, *, bye: bool = True) -> None:
        with self._lock:
            self._closed = True
            if self._client is not None:
                self._client.close(bye=bye)

    def _through_restarts(self, call: Callable[[HubClient], T], seconds: float | None = None) -> T:
        seconds = self._deadline_seconds if seconds is None else seconds
        deadline = time.monotonic() + seconds
        while True:
            client = self._client
            try:
                if client is None:
                    self._connect_until(deadline, seconds)
                    continue
                return call(client)
            except HubUnavailable as error:
                self._wait_or_raise(deadline, error, seconds)
                self._reconnect(client, error)

    def _reconnect(self, failed: HubClient | None, error: HubUnavailable) -> None:
        with self._lock:
            if self._client is failed and not self._closed:
                logger.warning("connection to the hub lost (%s); reconnecting", error)
                try:
                    self._connect_once(failed)
                except HubUnavailable as still_gone:
                    logger.debug("no hub yet: %s", still_gone)

    def _connect_once(self, failed: HubClient | None) -> Registered:
        with self._lock:
            if self._closed:  # a thread waited for a hub while the role closed the link
                raise HubUnavailable("the link is closed")
            record = self._find()
            if self._client is not failed:  # another thread has reconnected
                return self.register_again()
            if failed is not None:
                failed.close(bye=False)
            self._client = None
            client = self._open(record)
            try:
                answer = self._register(client)
            except BaseException:
                client.close(bye=False)
                raise
            self._client = client  # only now: the hub refuses requests before the registration
            return answer

    def _open(self, record: HubRecord) -> HubClient:
        return HubClient(
            record.url,
            deadline_seconds=_ANSWER_SECONDS,
            certificate=record.certificate,
            token=self._token,
            role=self._role,
            name=self._name,
            on_sync_now=lambda: self.on_sync_now(),
            retry_seconds=self._retry_seconds,
        )

    def _register(self, client: HubClient) -> Registered:
        answer = client.request(self._registration())
        if isinstance(answer, Refused):
            raise error_of(answer)
        if not isinstance(answer, Registered):
            raise HubUnavailable(f"the hub answered {answer.kind} to register")
        self.registered = answer
        return answer

    def _find(self) -> HubRecord:
        record = read_hub(self._store)
        if record is None:
            raise HubUnavailable(f"{HUB_KEY} does not exist: the hub has not started")
        if record.live.get("state") == "done" and (record.boot_id == self.boot_id or self._is_over()):
            raise RunOver("the run is over, its hub has ended after the last step")
        if record.host != socket.gethostname() and is_loopback(urlsplit(record.url).hostname or ""):
            beat = record.boot_id, record.beat
            self._elsewhere = self._elsewhere or beat
            if beat == self._elsewhere or has_ended(record):  # the run is resumed here, and its hub has not started
                raise HubUnavailable(f"the hub at {record.url} of host {record.host} does not live")
            raise ConfigError(
                f"the hub listens at {record.url} of host {record.host}, which other hosts cannot reach. Set "
                "placement.hub_host to an address of the host that runs the train flow"
            )
        return record

    def _wait_or_raise(self, deadline: float, error: HubUnavailable, seconds: float) -> None:
        if self._closed or self.is_cancelled():
            raise error
        if time.monotonic() > deadline:
            raise HubUnavailable(f"no hub for {seconds:.0f} s ({error}): it was not restarted") from error
        time.sleep(_POLL_SECONDS)
