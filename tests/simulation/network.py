"""The exchanges between roles and the hub, in place of Arrow Flight: channel/ is otherwise as it is."""

import itertools
from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from pipelinerl_core.channel.admission import introduction
from pipelinerl_core.channel.client import HubClient
from pipelinerl_core.channel.dispatcher import Dispatcher
from pipelinerl_core.data.schema import ROLLOUT_SCHEMA
from pipelinerl_core.errors import HubUnavailable
from tests.simulation.oracle import check_ledger, check_memory
from tests.simulation.primitives import Event, process, world
from tests.simulation.world import Process, World


class Network:
    """Servers by URL."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin a run."""
        self.servers: dict[str, SimulatedFlight] = {}
        self.loses = 0.0
        """Share of the messages that are lost."""
        self.ports = itertools.count(1)
        self.most_bytes = 0
        """Of rows in the memory of a hub."""
        self.sampled: Counter[tuple[str, int]] = Counter()
        """Actor epoch -> tokens that its engine has sampled."""
        self.reached: Counter[str] = Counter()
        """What hubs have done -> how often."""

    def drops(self, direction: str) -> bool:
        """Whether the next message is lost."""
        return self.loses > 0 and world().rng.random() < self.loses


NETWORK = Network()


def hub_client(url: str, **options: Any) -> HubClient:
    """HubClient on a network that loses messages."""
    return HubClient(url, **{**options, "faults": NETWORK.drops})


class Pipe:
    """One direction of an exchange: messages in their order, each after a short time."""

    def __init__(self, exchange: "Exchange") -> None:
        self._exchange = exchange
        self._messages: deque[tuple[bytes, pa.RecordBatch | None]] = deque()
        self._changed = Event()
        self._is_done = False

    def write_metadata(self, metadata: bytes) -> None:
        self._write(metadata, None)

    def write_with_metadata(self, rows: pa.RecordBatch, metadata: bytes) -> None:
        self._write(metadata, rows)

    def _write(self, metadata: bytes, rows: pa.RecordBatch | None) -> None:
        self._exchange.check()
        world().sleep(world().rng.random() * 0.002)
        self._exchange.check()
        self._messages.append((metadata, rows))
        self._changed.set()

    def done_writing(self) -> None:
        self._is_done = True
        self._changed.set()

    def read(self) -> tuple[bytes, pa.RecordBatch | None]:
        """The next message. Raises StopIteration after the last, and OSError if the exchange is lost."""
        while True:
            self._exchange.check()
            if (seconds := self._exchange.seconds_apart) > 0:
                world().sleep(seconds)
            elif self._messages:
                return self._messages.popleft()
            elif self._is_done:
                raise StopIteration
            else:
                self._changed.wait()
                self._changed.clear()

    def wake(self) -> None:
        """Let the reader see that the exchange is lost."""
        self._changed.set()


class Exchange:
    """A connection of two processes; lost if either ends. Also Flight's reader of the role."""

    def __init__(self, role: Process, hub: Process) -> None:
        self._world: World = world()
        self._ends = role, hub
        self._reason = ""
        self.requests, self.answers = Pipe(self), Pipe(self)
        self.is_accepted = Event()
        for end in self._ends:
            end.on_end.append(lambda _: self.cut("the peer has ended"))

    @property
    def seconds_apart(self) -> float:
        """For how long no message passes."""
        return max(end.cut_off_until for end in self._ends) - world().now

    def check(self) -> None:
        """Raises why the exchange is lost."""
        if self._reason:
            raise OSError(self._reason)

    def cut(self, reason: str) -> None:
        """The exchange is lost, with all messages on their way."""
        if not self._reason and not self._world.is_over:
            self._reason = reason
            self.is_accepted.set()
            self.requests.wake()
            self.answers.wake()

    @property
    def schema(self) -> pa.Schema:
        self.is_accepted.wait()
        self.check()
        return ROLLOUT_SCHEMA

    def read_chunk(self) -> SimpleNamespace:
        metadata, rows = self.answers.read()
        return SimpleNamespace(app_metadata=pa.py_buffer(metadata), data=rows)

    def cancel(self) -> None:
        self.cut("cancelled")


class SimulatedFlight:
    """The Flight server of a hub."""

    def __init__(self, dispatcher: Dispatcher, location: str, token: str, credentials: Any) -> None:
        self._dispatcher, self.process = dispatcher, process()
        self.port = next(NETWORK.ports)
        NETWORK.servers[f"{location.rpartition(':')[0]}:{self.port}"] = self
        self.exchanges: list[Exchange] = []
        self._has_ended = Event()

    def accept(self, role: Process, command: bytes) -> Exchange:
        exchange = Exchange(role, self.process)
        self.exchanges.append(exchange)
        world().spawn(self.process, lambda: self._serve(exchange, command))
        return exchange

    def _serve(self, exchange: Exchange, command: bytes) -> None:
        if self._dispatcher.is_open:
            peer = self._dispatcher.connect(introduction(command), exchange.answers)
            exchange.is_accepted.set()
            try:
                while True:
                    metadata, rows = exchange.requests.read()
                    self._dispatcher.answer(peer, metadata, rows)
                    hub: Any = self._dispatcher._service
                    hub.read(lambda ledger: check_ledger(ledger, NETWORK.sampled, NETWORK.reached))
                    check_memory(hub._state.rows.used_bytes, NETWORK.most_bytes)
            except (StopIteration, OSError):
                pass
            self._dispatcher.disconnect(peer)
            exchange.answers.done_writing()
        else:
            exchange.cut("the hub is starting or shutting down")
        self.exchanges.remove(exchange)
        self._has_ended.set()

    def shutdown(self) -> None:
        """Returns when all exchanges have ended."""
        while self.exchanges:
            self._has_ended.wait()
            self._has_ended.clear()


def open_exchange(url: str, token: str, command: bytes, certificate: str) -> tuple[Any, Any, Any]:
    """Client, writer and reader."""
    world().sleep(world().rng.random() * 0.002)
    server = NETWORK.servers.get(url)
    if server is None or not server.process.is_alive:
        raise HubUnavailable(f"{url} does not answer")
    exchange = server.accept(process(), command)
    exchange.requests.close = lambda: None  # type: ignore[attr-defined]
    return SimpleNamespace(close=lambda: None), exchange.requests, exchange
