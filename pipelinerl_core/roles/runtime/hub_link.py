"""A role's connection to the hub that survives restarts of the hub.

hub.json says where the hub is; it is read again whenever a call fails. After every reconnection the role registers
first, so that the hub knows its leases or its reservation before it sees anything else from it.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import pyarrow as pa

from pipelinerl_core.channel.client import HubClient
from pipelinerl_core.channel.refusals import error_of
from pipelinerl_core.errors import (
    HubUnavailable,
    RunOver,
)
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.messages import Answer, Refused, Register, Registered, Request, Reserve, Rows, RowsHeader
from pipelinerl_core.run.hub_status import read_hub
from pipelinerl_core.run.records import HUB_KEY, HubRecord

T = TypeVar("T")
logger = logging.getLogger(__name__)

# Whoever finds no hub for this long seals, flushes and exits.
HUB_DEADLINE_SECONDS = 120.0
# A request that is not answered within this is sent again.
RETRY_SECONDS = 2.0
# A host that vanished says nothing: hub.json is read again after this. What carries many rows may take longer.
_ANSWER_SECONDS = 60.0
_POLL_SECONDS = 0.2


class HubLink:
    """Requests that outlive a hub. Thread-safe; calls block until answered or the deadline passes."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        token: str,
        role: Literal["actor", "trainer"],
        name: str,
        registration: Callable[[], Register],
        is_over: Callable[[], bool] = lambda: False,
        faults: Callable[[str], bool] | None = None,
        deadline_seconds: float = HUB_DEADLINE_SECONDS,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        """`faults` is for tests: asked before each message, True loses it.

        is_over: asked when a hub that this role has never met has left after the last step: whether there is nothing
        to do any more, or that was of another time.
        """
        self._is_over = is_over
        self._store = store
        self._token = token
        self._role = role
        self._name = name
        self._registration = registration
        self._faults = faults
        self._deadline_seconds = deadline_seconds
        self._retry_seconds = retry_seconds
        self._lock = threading.RLock()
        self._client: HubClient | None = None
        self._closed = False
        self.registered: Registered | None = None
        self.on_nudge: Callable[[], None] = lambda: None
        """Called on a thread of the channel when the hub has news: sync at once."""
        self.gives_up: Callable[[], bool] = lambda: False
        """Asked now and then while no hub is there; True ends the wait."""

    @property
    def boot_id(self) -> str:
        """boot_id of the hub this role is registered with."""
        return self.registered.boot_id if self.registered else ""

    def connect(self) -> Registered:
        """Find the hub and register; HubUnavailable after the deadline, RunOver when it has left for good."""
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
        """The hub's answer, through as many hubs as it takes; raises like `connect`.

        seconds: in place of the deadline.
        """
        return self._through_restarts(lambda client: client.request(message, rows, timeout=seconds), seconds)

    def request_all(self, messages: Sequence[tuple[Request, pa.RecordBatch | None]]) -> list[Answer]:
        """The answers to several requests that do not wait for each other, in their order."""
        return self._through_restarts(lambda client: client.request_all(messages, timeout=HUB_DEADLINE_SECONDS))

    def reserve(self, message: Reserve) -> tuple[Answer, list[tuple[RowsHeader, pa.RecordBatch]]]:
        """The hub's answer, and those rows of the reserved groups that came with it."""
        return self._through_restarts(lambda client: client.reserve(message))

    def request_rows(self, message: Rows) -> list[tuple[RowsHeader, pa.RecordBatch]]:
        """The record batches of reserved groups; HubUnavailable, or StreamError for rows the hub does not have."""
        return self._through_restarts(lambda client: client.request_rows(message, timeout=HUB_DEADLINE_SECONDS))

    def close(self, *, bye: bool = True) -> None:
        """End the connection."""
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
                logger.warning("hub lost (%s); looking for it again", error)
                try:
                    self._connect_once(failed)
                except HubUnavailable as still_gone:
                    logger.debug("no hub yet: %s", still_gone)

    def _connect_once(self, failed: HubClient | None) -> Registered:
        with self._lock:
            if self._closed:  # a thread that waited for a hub while the role left
                raise HubUnavailable("the link is closed")
            found = self._find()
            if self._client is not failed:  # another thread was sooner
                return self.register_again()
            if failed is not None:
                failed.close(bye=False)
            self._client = None
            client = self._open(found)
            try:
                answer = self._register(client)
            except BaseException:
                client.close(bye=False)
                raise
            self._client = client  # only now: the hub takes nothing from who has not registered
            return answer

    def _open(self, found: HubRecord) -> HubClient:
        return HubClient(
            found.url,
            deadline_seconds=_ANSWER_SECONDS,
            certificate=found.certificate,
            token=self._token,
            role=self._role,
            name=self._name,
            on_credit=lambda num_groups: self.on_nudge(),
            faults=self._faults,
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
        found = read_hub(self._store)
        if found is None:
            raise HubUnavailable(f"{HUB_KEY} is not there yet: the hub has not started")
        if found.live.get("state") == "done" and (found.boot_id == self.boot_id or self._is_over()):
            raise RunOver("the run is over, its hub has left after the last step")
        return found

    def _wait_or_raise(self, deadline: float, error: HubUnavailable, seconds: float) -> None:
        if self._closed or self.gives_up():
            raise error
        if time.monotonic() > deadline:
            raise HubUnavailable(f"no hub for {seconds:.0f} s ({error}): it died and was not restarted") from error
        time.sleep(_POLL_SECONDS)
