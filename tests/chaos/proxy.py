"""An HTTP proxy before an S3 server that fails on command."""

import http.client
import random
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

UPSTREAM_SECONDS = 30
_HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "expect"})
_SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate</Message></Error>"
_NO_ROOM = b"<Error><Code>XMinioStorageFull</Code><Message>Storage backend has reached its minimum</Message></Error>"
_PAGE = b"<html><head><title>Maintenance</title></head><body>Back soon</body></html>"


class FaultyProxy(ThreadingHTTPServer):
    """Passes requests on, as `mode` says.

    | mode  | what it does |
    |-------|---|
    | pass  | nothing |
    | 503   | answers 503 SlowDown to everything |
    | slow  | waits up to a second before each request |
    | torn  | of half of the requests: the connection breaks in the middle of the body, or before the answer |
    | full  | answers 507 to writes |
    | list  | answers 404 to listings, without a document of S3 |
    | html  | answers everything with status 200 and a web page |
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, upstream: str, seed: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = urlsplit(upstream).netloc
        self.mode = "pass"
        self.num_faults = 0
        self.random = random.Random(seed)
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    @property
    def endpoint(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request, client_address) -> None:
        """A client that left, or one that was cut off: that is what it is for."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = UPSTREAM_SECONDS

    def log_message(self, *args) -> None:
        pass

    def forward(self) -> None:
        proxy: FaultyProxy = self.server
        mode, length = proxy.mode, int(self.headers.get("Content-Length") or 0)
        is_write = self.command in ("PUT", "POST", "DELETE")
        if mode == "torn" and proxy.random.random() < 0.5:
            proxy.num_faults += 1
            self.tear(length)
            return
        body = self.rfile.read(length)
        if mode == "503" or (mode == "full" and self.command == "PUT" and is_write):
            proxy.num_faults += 1
            self.reply(503 if mode == "503" else 507, {}, _SLOW_DOWN if mode == "503" else _NO_ROOM)
            return
        if mode == "html" or (mode == "list" and "list-type=" in self.path):
            proxy.num_faults += 1
            self.reply(200 if mode == "html" else 404, {}, _PAGE)
            return
        if mode == "slow":
            proxy.num_faults += 1
            time.sleep(proxy.random.uniform(0.1, 1.0))
        self.reply(*self.ask(body))

    def ask(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """The answer of the server behind."""
        connection = http.client.HTTPConnection(self.server.upstream, timeout=UPSTREAM_SECONDS)
        try:
            self.send_head(connection)
            connection.send(body)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def send_head(self, connection: http.client.HTTPConnection) -> None:
        """Request line and headers, with the Host that the client has signed."""
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in _HOP_BY_HOP:
                connection.putheader(name, value)
        connection.endheaders()

    def tear(self, length: int) -> None:
        """Half a body reaches the server and then nothing; or all of it, and the answer is lost."""
        half = self.rfile.read(length // 2)
        if length and self.server.random.random() < 0.5:
            connection = http.client.HTTPConnection(self.server.upstream, timeout=UPSTREAM_SECONDS)
            self.send_head(connection)
            connection.send(half)
            connection.close()
        else:
            self.ask(half + self.rfile.read(length - len(half)))
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def reply(self, status: int, headers: dict[str, str], body: bytes) -> None:
        """Send an answer; that of a HEAD request keeps its length and has no body."""
        self.send_response_only(status)
        length = headers.get("Content-Length", str(len(body))) if self.command == "HEAD" else str(len(body))
        for name, value in headers.items():
            if name.lower() not in _HOP_BY_HOP and name.lower() != "content-length":
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward  # noqa: N815 (the names that http.server calls)
