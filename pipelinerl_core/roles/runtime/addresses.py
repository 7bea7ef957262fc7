"""The URL under which other hosts reach a role's server."""

import socket


def reachable_url(url: str) -> str:
    """A server's URL for other hosts: a wildcard address is replaced by the address of this host."""
    scheme, _, address = url.partition("://")
    host, _, port = address.rpartition(":")
    if host not in ("0.0.0.0", "[::]", "::"):
        return url
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: the call only selects the outgoing address
            host = probe.getsockname()[0]
        except OSError:
            host = socket.gethostname()
    return f"{scheme}://{host}:{port}"
