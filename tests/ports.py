"""Ports of loopback for servers that tests start."""

import random
import socket
from contextlib import suppress

_given: set[int] = set()
_PORTS = range(20_000, 30_000)
"""Below those that Linux gives to outgoing connections, and to listeners that ask for any."""


def free_port() -> int:
    """A port of loopback that nobody listens on, and that the system gives to nobody while its server is away.

    One who connects to a dead server's port may otherwise get that very port for himself.
    """
    for port in random.SystemRandom().sample(_PORTS, 100):
        if port in _given:
            continue  # its server may not listen yet
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            _given.add(port)
            return port
    raise AssertionError(f"no free port in {_PORTS}")
