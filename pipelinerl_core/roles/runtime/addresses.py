"""The URL under which other hosts reach a role's server."""

import socket


def reachable_url(url: str) -> str:
    """A server's URL for other hosts: a wildcard address is replaced by the address of this host."""
    scheme, _, address = url.partition("://")
    host, _, port = address.rpartition(":")
    if host not in ("0.0.0.0", "[::]", "::"):
        return url
    return f"{scheme}://{own_outgoing_address()}:{port}"


def own_outgoing_address() -> str:
    """The address from which this host connects to others; its host name without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: the call only selects the outgoing address
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()
