"""A receiver of webhooks for tests."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SECRET = "abcdefghijklmnop"


class Webhook(ThreadingHTTPServer):
    """Keeps the messages; `status` is its answer."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.messages: list[dict[str, str]] = []
        self.status = 200
        self.url = f"http://127.0.0.1:{self.server_address[1]}/hook/{SECRET}"

    def about(self, name: str) -> list[str]:
        """Subjects of the messages about a run, without its name."""
        subjects = [message["subject"] for message in self.messages]
        return [subject.rpartition(name)[2] for subject in subjects if name in subject]

    def body_about(self, name: str) -> str:
        """Body of the only message about a run."""
        (body,) = [message["body"] for message in self.messages if name in message["subject"]]
        return body


class _Handler(BaseHTTPRequestHandler):
    server: Webhook

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.status == 200 and self.path.endswith(SECRET):
            self.server.messages.append(message)
        self.send_response(self.server.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def webhook() -> Iterator[Webhook]:
    """A receiver on a thread, during the block."""
    with Webhook() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()
