"""The page of a live run: a status line, and the report, which is rendered again after new commits.

| path | what |
|------|------|
| /            | the page |
| /status.json | the document of `pipelinerl status --json` |
| /metrics     | the same document for Prometheus |
| /targets.json | addresses of the roles' own metrics, for Prometheus' http_sd_configs |
| /healthz     | 200 |

The server reads only stored objects, so the server can run on any host and stop at any time.

A page of the web can give its own name the address of this server (DNS rebinding) and would then read everything, so
the Host header of a request must be an IP address, the name of this host, or a name of --allowed-host.
"""

import base64
import hashlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from pipelinerl_core.errors import ConfigError, StoreError
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.report.facts import RunCache, collect
from pipelinerl_core.report.html import page_of, styles
from pipelinerl_core.report.live_view import status_line, status_of
from pipelinerl_core.report.samples import Decode
from pipelinerl_core.report.scrape_targets import role_progress, targets
from pipelinerl_core.run.follow import RunFollower
from pipelinerl_core.run.hub_status import HubWatch
from pipelinerl_core.telemetry.role_metrics import CONTENT_TYPE, run_exposition

logger = logging.getLogger(__name__)

STATUS_SECONDS = 1.0
"""Largest age of a status."""
PAGE_SHARE = 0.1
"""Largest share of the time spent on rendering the page."""
_TIMEOUT_SECONDS = 30
_STYLE = """#live {position:sticky;top:0;margin:0;padding:.6rem 1rem;background:Canvas;z-index:9;
border-bottom:1px solid color-mix(in srgb, CanvasText 20%, Canvas);
font-variant-numeric:tabular-nums;white-space:pre-wrap}"""
_SCRIPT = """
let page = document.getElementById("live").dataset.page;
setInterval(async () => {
  try {
    const status = await (await fetch("status.json")).json();
    document.getElementById("live").textContent = status.line;
    if (status.page === page) return;
    const next = new DOMParser().parseFromString(await (await fetch(".")).text(), "text/html");
    document.querySelector("main").replaceWith(next.querySelector("main"));
    page = status.page;
  } catch (error) {
    document.getElementById("live").textContent = "the server of this page has stopped";
  }
}, 2000);
"""
_LIVE = f"""<style>{_STYLE}</style>
<p id="live" data-page="@PAGE@">@LINE@</p>
<script>{_SCRIPT}</script>
"""


class LivePage:
    """The documents of one run. Thread-safe."""

    def __init__(self, store: ObjectStore, decode: Decode | None) -> None:
        """Raises MissingObject if there is no such run."""
        self._store = store
        self._decode = decode
        self._follower = RunFollower(store)
        self._hub = HubWatch(store)
        self._run_id = self._follower.run.run_id
        self._cache = RunCache()
        self._lock = threading.Lock()
        self._status: dict[str, Any] = {}
        self._status_at = -STATUS_SECONDS
        self._body = ""
        self._page = ""
        self._next_page_at = 0.0

    def status(self) -> dict[str, Any]:
        """The status, at most STATUS_SECONDS old, with `line` (text) and `page`: step and evaluations of the page."""
        with self._lock:
            if time.monotonic() - self._status_at >= STATUS_SECONDS:
                self._follower.refresh()
                hub, progress = self._hub.look(), role_progress(self._store)
                status = status_of(self._follower, hub, progress, silent_seconds=self._hub.silent_seconds)
                is_due = not self._body or time.monotonic() >= self._next_page_at or status["state"] != "running"
                self._status = {
                    **status,
                    "line": f"{self._run_id}: {status['state']}, {status_line(status)}",
                    "page": f"{status['step']}/{status['num_evaluations']}" if is_due else self._page,
                }
                self._status_at = time.monotonic()
            return self._status

    def targets(self) -> list[dict[str, Any]]:
        """The document of /targets.json. Raises StoreError."""
        return targets(self._store)

    def page(self) -> str:
        """The page; rendered again after new commits, within PAGE_SHARE of the time."""
        status = self.status()
        with self._lock:
            if not self._body or self._page != status["page"]:
                begun = time.monotonic()
                facts = collect(self._store, self._cache)
                self._body = page_of(self._store, facts, self._decode)
                self._page = status["page"]
                self._next_page_at = time.monotonic() + (time.monotonic() - begun) / PAGE_SHARE
            live = _LIVE.replace("@LINE@", escape(status["line"])).replace("@PAGE@", self._page)
            return self._body.replace("<body>", f"<body>{live}", 1)


def _hashes(*texts: str) -> str:
    """The sources of a Content-Security-Policy that allow exactly these inline texts."""
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


_HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; connect-src 'self'; script-src {_hashes(_SCRIPT)}; "
    f"style-src {_hashes(_STYLE, styles())}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
"""Headers of every answer: the page runs only its own script, also if a text of a model or a run has a script."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], find_page: Callable[[], LivePage], names: Collection[str]) -> None:
        self.find_page = find_page
        own = socket.gethostname()
        self._names = {name.lower().rstrip(".") for name in ("localhost", own, own.partition(".")[0], *names)}
        super().__init__(address, _Handler)

    def answers_to(self, host: str) -> bool:
        """Whether a Host header names this server; the port may be that of a forwarding."""
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
            return name in self._names or bool(ip_address(name.partition("%")[0]))
        except ValueError:
            return False


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _TIMEOUT_SECONDS

    def do_GET(self) -> None:
        if not self.server.answers_to(self.headers.get("Host", "")):
            self.send_error(
                HTTPStatus.MISDIRECTED_REQUEST,
                explain="This page answers to IP addresses, to the name of its host, and to the names that "
                "`pipelinerl status --web --allowed-host NAME` allows.",
            )
            return
        find_page = self.server.find_page
        answers: dict[str, tuple[str, Callable[[], bytes]]] = {
            "/": ("text/html; charset=utf-8", lambda: find_page().page().encode()),
            "/status.json": ("application/json", lambda: json.dumps(find_page().status()).encode()),
            "/metrics": (CONTENT_TYPE, lambda: run_exposition(find_page().status())),
            "/targets.json": ("application/json", lambda: json.dumps(find_page().targets()).encode()),
            "/healthz": ("text/plain", lambda: b"ok\n"),
        }
        kind, make = answers.get(self.path.partition("?")[0], ("", None))
        if make is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            body = make()
        except (StoreError, ConfigError) as error:  # no run yet, or no store: a later request may succeed
            logger.warning("%s: %s", self.path, error)
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, "the run cannot be read now; try again later")
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def end_headers(self) -> None:
        """Also of errors."""
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing per request."""


def build_server(
    find_page: Callable[[], LivePage], host: str, port: int, names: Collection[str] = ()
) -> ThreadingHTTPServer:
    """A listening server; call `serve_forever`. Raises ConfigError if the address cannot be bound.

    find_page: called for each request, on any thread; if it raises StoreError or ConfigError, the answer is 503.
    names: host names to which the server answers, besides `host`, this host's own name and IP addresses; any other
    is refused with 421.
    """
    try:
        return _Server((host, port), find_page, (host, *names))
    except OSError as error:
        raise ConfigError(f"{host}:{port} cannot be bound: {error.strerror or error}. Set another --port") from None
