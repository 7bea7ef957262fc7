"""Ports of loopback for servers that tests start."""

import random
import socket
from contextlib import suppress

_given: set[int] = set()
_PORTS = range(20_000, 30_000)
"""Below those that Linux gives to outgoing connections, and to listeners that ask for any."""


def free_port() -> int:
    """A port of loopback on which no process listens, outside of the range that the system assigns by itself.

    Otherwise a client that connects to the port of a server that has ended may be assigned the same port.
    """
    for port in random.SystemRandom().sample(_PORTS, 100):
        if port in _given:
            continue  # the server may not listen yet
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            _given.add(port)
            return port
    raise AssertionError(f"no free port in {_PORTS}")
