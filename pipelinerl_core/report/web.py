"""The server of `pipelinerl serve`: the runs of a root as pages, as JSON and for Prometheus. It only reads.

| path | what |
|------|------|
| /            | the runs; `owner`, `tag`, `state`, `older_than` and `sort` in the query |
| /runs.json   | the same as JSON |
| /runs/RUN/   | the page of a run, by its id, or `latest` |
| /runs/RUN/status.json | the document of `pipelinerl status RUN --json` |
| /runs/RUN/rollouts | the rollouts of a step, two steps or all; `step`, `sort`, `where` and others in the query |
| /runs/RUN/rollouts/12.3 | a rollout, its tokens and its trace; `colours` in the query |
| /compare     | two runs side by side, each as `run` in the query |
| /metrics     | the runs that are running or were recently, for Prometheus |
| /targets.json | addresses of the metrics of their roles, for Prometheus' http_sd_configs |
| /healthz     | 200 |

A page of the web can give its own name the address of this server (DNS rebinding) and would then read everything, so
the Host header of a request must be an IP address, the name of this host, or a name of --allowed-host.

With a token, each request but /healthz needs it: as `Authorization: Bearer TOKEN`, as a cookie, or once as `?token=`,
which sets the cookie.
"""

import base64
import hashlib
import hmac
import json
import logging
import re
import socket
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import Any, NoReturn
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit

from pipelinerl_core.errors import ConfigError, MissingObject, SchemaMismatch, StoreError, StoreUnavailable
from pipelinerl_core.report import live_page, runs_page
from pipelinerl_core.report.html import served_styles, styles
from pipelinerl_core.report.rollouts_page import WantedRollouts
from pipelinerl_core.report.root_pages import RootPages
from pipelinerl_core.report.run_list import SORTS, Wanted
from pipelinerl_core.report.trace import Place, parse_place
from pipelinerl_core.telemetry.role_metrics import CONTENT_TYPE

logger = logging.getLogger(__name__)

_TIMEOUT_SECONDS = 30
_HTML, _JSON, _TEXT = "text/html; charset=utf-8", "application/json", "text/plain; charset=utf-8"


def _hashes(*texts: str) -> str:
    """The sources of a Content-Security-Policy that allow exactly these inline texts."""
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


_HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; connect-src 'self'; "
    f"script-src {_hashes(live_page.SCRIPT, runs_page.SCRIPT)}; style-src {_hashes(styles(), served_styles())}; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every answer: a page runs only its own script, also if a text of a model or a run has a script."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], pages: RootPages, names: Collection[str], token: str) -> None:
        self.pages = pages
        self.token = token
        # Cookies are for all ports of a host: the servers of two roots must not share one.
        self.cookie = f"pipelinerl-{hashlib.sha256(token.encode()).hexdigest()[:8]}"
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        own = socket.gethostname()
        self._names = {name.lower().rstrip(".") for name in ("localhost", own, own.partition(".")[0], *names)}
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that has closed the page is no error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def answers_to(self, host: str) -> bool:
        """Whether a Host header names this server; the port may be that of a forwarding."""
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
            return name in self._names or bool(ip_address(name.partition("%")[0]))
        except ValueError:
            return False

    def accepts(self, token: str) -> bool:
        """Whether this is the token of the server, or the server has none."""
        return not self.token or hmac.compare_digest(token.encode(), self.token.encode())


class _Refused(Exception):
    """An answer with a status other than 200."""

    def __init__(self, status: HTTPStatus, text: str = "") -> None:
        super().__init__(text)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _TIMEOUT_SECONDS

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        try:
            self._check(url.path, query)
            if "token" in query and self.server.token and url.path != "/healthz":
                self._set_cookie(url.path, query)
                return
            if _RUN_WITHOUT_SLASH.fullmatch(url.path):
                self._redirect(HTTPStatus.MOVED_PERMANENTLY, f"{_last_part(url.path)}/")
                return
            kind, body = self._find(url.path, query)
        except _Refused as refused:
            self.send_error(refused.status, explain=str(refused) or None)
            return
        except (ConfigError, MissingObject) as error:  # MissingObject: the run was removed
            self.send_error(HTTPStatus.NOT_FOUND, explain=str(error))
            return
        except (StoreError, SchemaMismatch) as error:  # a later request may succeed
            logger.warning("%s: %s", url.path, error)
            is_away = isinstance(error, StoreUnavailable)
            text = "The store does not answer. Try again later." if is_away else "The run cannot be read now."
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, explain=text)
            return
        except Exception:
            logger.exception("%s", url.path)
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR)
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _check(self, path: str, query: Mapping[str, list[str]]) -> None:
        if not self.server.answers_to(self.headers.get("Host", "")):
            raise _Refused(
                HTTPStatus.MISDIRECTED_REQUEST,
                "This server answers to IP addresses, to the name of its host, and to the names that "
                "`pipelinerl serve --allowed-host NAME` allows.",
            )
        kind, _, bearer = self.headers.get("Authorization", "").partition(" ")
        sent = (bearer if kind.lower() == "bearer" else "", self._cookie())
        tokens = query["token"][:1] if "token" in query else sent
        if path != "/healthz" and not any(map(self.server.accepts, tokens)):
            raise _Refused(
                HTTPStatus.UNAUTHORIZED, "Open the address with ?token=, which `pipelinerl serve` has printed."
            )

    def _cookie(self) -> str:
        """Not by http.cookies, which reads no cookie after one of another server that it does not understand."""
        pairs = (part.strip().partition("=") for part in self.headers.get("Cookie", "").split(";"))
        return next((unquote(value) for name, _, value in pairs if name == self.server.cookie), "")

    def _set_cookie(self, path: str, query: Mapping[str, list[str]]) -> None:
        """Keep the token as a cookie, and open the page without the token in its address."""
        rest = urlencode({name: values for name, values in query.items() if name != "token"}, doseq=True)
        value = f"{self.server.cookie}={quote(query['token'][0], safe='')}"
        self._redirect(
            HTTPStatus.SEE_OTHER,
            f"{_last_part(path) or '.'}{f'?{rest}' if rest else ''}",
            f"{value}; Path=/; HttpOnly; SameSite=Lax",
        )

    def _redirect(self, status: HTTPStatus, location: str, cookie: str = "") -> None:
        """location: relative, for a proxy with a prefix."""
        self.send_response(status)
        if cookie:
            self.send_header("Set-Cookie", cookie)
        self.send_header("Location", location)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _find(self, path: str, query: Mapping[str, list[str]]) -> tuple[str, bytes]:
        pages = self.server.pages
        answers: dict[str, Callable[[], tuple[str, bytes]]] = {
            "/": lambda: (_HTML, pages.runs_page(*_filters(query)).encode()),
            "/runs.json": lambda: _json({"runs": [run.document() for run in pages.runs(*_filters(query))]}),
            "/compare": lambda: (_HTML, pages.two_runs_page(_two_runs(query)).encode()),
            "/metrics": lambda: (CONTENT_TYPE, pages.exposition()),
            "/targets.json": lambda: _json(pages.targets()),
            "/healthz": lambda: (_TEXT, b"ok\n"),
        }
        if path in answers:
            return answers[path]()
        match path.split("/")[1:]:
            case ["runs", name, ""]:
                return _HTML, pages.run(unquote(name)).page().encode()
            case ["runs", name, "status.json"]:
                return _json(pages.run(unquote(name)).status())
            case ["runs", name, "rollouts"]:
                wanted = _rollouts(query)
                # Another site may open the page for a reader, but not ask beside its own page.
                is_foreign = self.headers.get("Sec-Fetch-Site") in ("cross-site", "same-site")
                if wanted.needs_search and is_foreign and self.headers.get("Sec-Fetch-Dest") != "document":
                    raise _Refused(HTTPStatus.FORBIDDEN, "Another site asks for a search: enter the address again.")
                return _HTML, pages.run(unquote(name)).rollouts_page(wanted).encode()
            case ["runs", name, "rollouts", place]:
                colours = query.get("colours", ["version"])[0]
                return _HTML, pages.run(unquote(name)).rollout_page(_rollout(place), colours).encode()
            case _:
                raise _Refused(HTTPStatus.NOT_FOUND)

    def end_headers(self) -> None:
        """Also of errors."""
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing per request."""


_RUN_WITHOUT_SLASH = re.compile(r"/runs/[^/]+")


def _last_part(path: str) -> str:
    return quote(unquote(path.rpartition("/")[2]), safe="")


def _json(value: object) -> tuple[str, bytes]:
    return _JSON, json.dumps(value).encode()


def _filters(query: Mapping[str, list[str]]) -> tuple[Wanted, str]:
    given = {name: values[0] for name, values in query.items()}
    sort = given.get("sort", "started")
    if sort not in SORTS:
        _refuse(f"sort must be {', '.join(SORTS)}.")
    try:
        owner, tag, state, older_than = (given.get(name, "") for name in ("owner", "tag", "state", "older_than"))
        return Wanted(owner=owner, tag=tag, state=state, older_than=older_than), sort
    except ConfigError as error:
        _refuse(str(error))


def _rollouts(query: Mapping[str, list[str]]) -> WantedRollouts:
    names = {each.name for each in fields(WantedRollouts)}
    wanted = WantedRollouts(**{name: values[0] for name, values in query.items() if name in names})
    try:
        wanted.check()
    except ConfigError as error:
        _refuse(str(error))
    return wanted


def _rollout(text: str) -> Place:
    place = parse_place(unquote(text))
    if place.rollout is None:
        raise _Refused(HTTPStatus.NOT_FOUND)
    return place


def _two_runs(query: Mapping[str, list[str]]) -> list[str]:
    names = query.get("run", [])
    if len(names) != 2:
        _refuse("Select two runs of the list.")
    return names


def _refuse(text: str) -> NoReturn:
    raise _Refused(HTTPStatus.BAD_REQUEST, text)


def build_server(
    pages: RootPages, host: str, port: int, names: Collection[str] = (), token: str = ""
) -> ThreadingHTTPServer:
    """A listening server; call `serve_forever`. Raises ConfigError if the address cannot be bound.

    names: host names to which the server answers, besides `host`, this host's own name and IP addresses; any other
    is refused with 421. token: a request without it is refused with 401; empty: no token is needed.
    """
    try:
        return _Server((host, port), pages, (host, *names), token)
    except OSError as error:
        raise ConfigError(f"{host}:{port} cannot be bound: {error.strerror or error}. Set another --port") from None
