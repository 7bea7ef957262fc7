"""Connections between roles and the hub: what HubServer and HubClient do, without Arrow Flight."""

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pipelinerl_core.channel.refusals import code_of, error_of
from pipelinerl_core.errors import HubUnavailable, PipelineRLError
from pipelinerl_core.messages import Bye, Refused, Reserve, Reserved, Rows, RowsHeader
from tests.simulation.oracle import check_ledger
from tests.simulation.primitives import Event, process, world


class Network:
    """Servers by URL."""

    def __init__(self) -> None:
        self.servers: dict[str, SimulatedServer] = {}
        self.loses = 0.0
        """Share of the messages that are lost."""
        self.numbers = itertools.count(1)


NETWORK = Network()


class SimulatedServer:
    """HubServer."""

    def __init__(self, service: Any, *, host: str, port: int, token: str, credentials: Any) -> None:
        self.service, self._process = service, process()
        self.url = f"grpc://10.0.0.1:{next(NETWORK.numbers)}"
        self.is_open = False
        NETWORK.servers[self.url] = self
        self.clients: list[SimulatedClient] = []
        self._process.on_end.append(lambda _: self.cut())

    def start(self) -> None:
        self.is_open = True

    def cut(self) -> None:
        """All connections are lost."""
        self.is_open = False
        for client in list(self.clients):
            client.lost("the hub has ended")

    def shutdown(self, seconds: float) -> bool:
        self.cut()
        return True


class SimulatedClient:
    """HubClient: each request is repeated until it is answered."""

    def __init__(self, url: str, *, token: str, role: str, name: str, on_sync_now: Callable[[], None],
                 retry_seconds: float = 2.0, deadline_seconds: float = 60.0, **_: Any) -> None:  # fmt: skip
        self.url, self._deadline, self._retry = url, deadline_seconds, retry_seconds
        self._on_sync_now = on_sync_now
        self._process = process()
        self._ids = itertools.count(1)
        self._calls: list[Event] = []
        self.is_connected = False
        world().sleep(world().rng.random() * 0.002)
        server = NETWORK.servers.get(url)
        if server is None or not server.is_open or not server._process.is_alive:
            raise HubUnavailable(f"{url} does not answer")
        self._server = server
        self._peer = f"{role}/{name}#{next(NETWORK.numbers)}"
        self.is_connected = True
        server.clients.append(self)
        self._process.on_end.append(lambda _: self._vanish())
        self._queue: deque[Callable[[], None]] = deque()
        self._arrived = Event()
        world().spawn(server._process, self._serve_all)

    def _serve_all(self) -> None:
        """The exchange with this peer, in the hub's process: one message after the other."""
        service = self._server.service
        service.connected(self._peer, self._sync_now)
        while self.is_connected:
            self._arrived.wait()
            self._arrived.clear()
            while self._queue:
                self._queue.popleft()()
        service.disconnected(self._peer)

    def _sync_now(self) -> None:
        if self.is_connected:
            world().spawn(self._process, self._on_sync_now)

    def lost(self, reason: str) -> None:
        """The connection is lost."""
        self.is_connected = False
        if self in self._server.clients:
            self._server.clients.remove(self)
        for call in self._calls:
            call.set()
        self._arrived.set()

    def _vanish(self) -> None:
        if self.is_connected:
            self.lost("the peer has ended")

    def request(self, message: Any, rows: Any = None, *, timeout: float | None = None) -> Any:
        return self.request_all([(message, rows)], timeout=timeout)[0]

    def request_all(self, messages: Sequence[tuple[Any, Any]], *, timeout: float | None = None) -> list[Any]:
        deadline = world().now + (self._deadline if timeout is None else timeout)
        return [self._exchange(message, rows, deadline)[0][0] for message, rows in messages]

    def reserve(self, message: Reserve, *, timeout: float | None = None) -> tuple[Any, list[tuple[RowsHeader, Any]]]:
        deadline = world().now + self._deadline
        answers = self._exchange(message.model_copy(update={"with_rows": True}), None, deadline)
        answer = answers[0][0]
        if not isinstance(answer, Reserved) or not answer.num_following:
            return answer, []
        return answer, [(header, part.rows()) for header, part in answers[1:]]

    def request_rows(self, message: Rows, *, timeout: float | None = None) -> list[tuple[RowsHeader, Any]]:
        answers = self._exchange(message, None, world().now + (timeout or self._deadline))
        for answer, _ in answers:
            if isinstance(answer, Refused):
                raise error_of(answer)
        return [(header, part.rows()) for header, part in answers]

    def _exchange(self, message: Any, rows: Any, deadline: float) -> list[tuple[Any, Any]]:
        message = message.model_copy(update={"id": next(self._ids)})
        own = world()
        while own.now < deadline:
            if not self.is_connected:
                raise HubUnavailable(f"the connection to {self.url} is lost")
            ended, answers = Event(), []
            self._calls.append(ended)
            is_lost = own.rng.random() < NETWORK.loses
            own.sleep(own.rng.random() * 0.002)
            if not self.is_connected:
                raise HubUnavailable(f"the connection to {self.url} is lost")
            if not is_lost:
                self._queue.append(partial(self._serve, message, rows, answers, ended))
                self._arrived.set()
            wait = self._retry + (message.wait_seconds if isinstance(message, Reserve) else 0.0)
            ended.wait(min(wait, deadline - own.now))
            self._calls.remove(ended)
            if answers and self.is_connected and own.rng.random() >= NETWORK.loses:
                return answers
        raise HubUnavailable(f"{message.kind}: no answer from {self.url}")

    def _serve(self, message: Any, rows: Any, answers: list[tuple[Any, Any]], ended: Event) -> None:
        """In the hub's process."""
        received: list[tuple[Any, Any]] = []
        try:
            received.extend(self._server.service.handle(self._peer, message, rows))
        except PipelineRLError as error:
            received.append((Refused(re=message.id, code=code_of(error), detail=str(error)[:500]), None))
        self._server.service.read(check_ledger)
        world().sleep(world().rng.random() * 0.002)
        answers.extend(received)
        ended.set()

    def close(self, *, bye: bool = True) -> None:
        if bye and self.is_connected:
            with contextlib.suppress(HubUnavailable):
                self.request(Bye(), timeout=2.0)
        self._vanish()
