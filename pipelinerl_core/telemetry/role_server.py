"""Serves /healthz, /readyz (status 503 with the reason in the body if they do not hold) and /metrics of one process.

The server accepts GET without parameters and has no password. The answers hold numbers and names, no text of rollouts
or configuration.
"""

import errno
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Protocol

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.telemetry.role_metrics import CONTENT_TYPE

_TIMEOUT_SECONDS = 10
# Ports tried from placement.metrics_port on, one for each role of the host.
_NUM_PORTS = 64


class Observed(Protocol):
    """The health and the metrics of a process."""

    def health(self) -> tuple[bool, str]:
        """Whether the main loop runs, and a line about it."""

    def readiness(self) -> tuple[bool, str]:
        """Whether the role does its work, and a line about it."""

    def exposition(self) -> bytes:
        """The metrics as text."""


class RoleServer:
    """Serves from construction to `close`."""

    def __init__(self, observed: Observed, host: str, port: int) -> None:
        """Bind the first free port from `port` on, any port for 0. Raises ConfigError if no port can be bound."""
        self._server = _bind(observed, host, port)
        self._thread = threading.Thread(target=self._server.serve_forever, name="health", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """http://host:port of the bound address."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def close(self) -> None:
        """Stop; returns within a second."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=1.0)


def _bind(observed: Observed, host: str, port: int) -> "_Server":
    for candidate in range(port, min(port + _NUM_PORTS, 65536)) if port else (0,):
        try:
            return _Server((host, candidate), observed)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                reason = error.strerror or str(error)
                raise ConfigError(
                    f"placement.metrics_host={host}, metrics_port={candidate} cannot be bound: {reason}. "
                    "Set an address of this host, or an empty metrics_host to serve no metrics"
                ) from None
    raise ConfigError(
        f"placement.metrics_port={port}: this and the next {_NUM_PORTS - 1} ports are in use. Set another port, or 0"
    )


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], observed: Observed) -> None:
        self.observed = observed
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _TIMEOUT_SECONDS
    server_version = "pipelinerl"
    sys_version = ""

    def do_GET(self) -> None:
        observed = self.server.observed
        answers: dict[str, Callable[[], tuple[bool, str]]] = {
            "/healthz": observed.health,
            "/readyz": observed.readiness,
        }
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._send(HTTPStatus.OK, CONTENT_TYPE, observed.exposition())
        elif path in answers:
            is_well, line = answers[path]()
            status = HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE
            self._send(status, "text/plain; charset=utf-8", f"{line}\n".encode())
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing per request."""
