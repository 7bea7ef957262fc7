"""A small S3 server in this process, whose answers a test chooses: faults that no real server shows on demand."""

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


class Answer(NamedTuple):
    """An answer in place of the server's own. `acts`: the server does what was asked before."""

    status: int
    body: bytes = b""
    content_type: str = "application/xml"
    acts: bool = False


LOSE = Answer(0, acts=True)
"""The server does what was asked, and closes the connection without an answer."""

_HTML = b"<html><head><title>502</title></head><body><h1>Service away</h1></body></html>"
_SLOW_DOWN = b"<?xml version='1.0'?><Error><Code>SlowDown</Code></Error>"
OUTAGES = {
    "404 text": Answer(404, b"404 page not found\n", "text/plain"),
    "404 HTML": Answer(404, _HTML, "text/html"),
    "404 empty": Answer(404),
    "200 HTML": Answer(200, _HTML, "text/html"),
    "200 empty": Answer(200),
    "200 torn": Answer(200, b"<?xml version='1.0'?><ListBucketResult><IsTrunc"),
    "503 SlowDown": Answer(503, _SLOW_DOWN),
    "503 HTML": Answer(503, _HTML, "text/html"),
    "500 empty": Answer(500),
}
"""Name -> what a store that is away, or a proxy before it, answers."""


class FakeS3(ThreadingHTTPServer):
    """Objects and multipart uploads in memory; paths are /<bucket>/<key>."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.writers: dict[str, str] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.asked: list[str] = []
        """Method and parameters of each request, such as "PUT part 3 uploadId"."""
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        """Method, path and headers."""
        self.fault: Callable[[str], Answer | int | None] = lambda asked: None
        """The answer to a request in place of the server's own; a number is a status."""
        self.is_conditional = True
        """Whether If-None-Match is obeyed."""
        self.hour = 10
        """Of the server's clock."""
        self.lock = threading.RLock()

    @property
    def endpoint(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def serving() -> Iterator[FakeS3]:
    """A server for the time of the context."""
    server = FakeS3()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(60)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two packets; with Nagle a client waits 40 ms between them
    server: FakeS3

    def log_message(self, *_: object) -> None: ...

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query, keep_blank_values=True).items()}
        part, options = query.get("partNumber"), query.keys() & {"uploads", "uploadId", "list-type"}
        asked = " ".join([self.command, *(["part", part] if part else []), *sorted(options)])
        with self.server.lock:
            self.server.asked.append(asked)
            self.server.requests.append((self.command, url.path, dict(self.headers)))
            fault = self.server.fault(asked)
            answer = Answer(fault) if isinstance(fault, int) else fault
            headers: dict[str, str] = {}
            if answer is None or answer.acts:
                status, text, headers = self.act(unquote(url.path), query, body)
                answer = answer or Answer(status, text)
        if not answer.status:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.send_response(answer.status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def __getattr__(self, name: str) -> Callable[[], None]:
        if name.startswith("do_"):
            return self.handle_any
        raise AttributeError(name)

    def date_time_string(self, timestamp: float | None = None) -> str:
        return format_datetime(datetime(2026, 1, 1, self.server.hour, tzinfo=UTC), usegmt=True)

    def act(self, path: str, query: dict[str, str], body: bytes) -> tuple[int, bytes, dict[str, str]]:
        server, upload = self.server, query.get("uploadId", "")
        if "list-type" in query:
            return self.listing(path.rstrip("/"), query.get("prefix", ""), query.get("delimiter", ""))
        if "uploads" in query and self.command == "GET":
            return self.list_uploads()
        if "uploads" in query:
            upload = f"{path}@{len(server.asked)}"
            server.uploads[upload] = {}
            server.writers[path] = self.headers.get("x-amz-meta-writer", "")
            return 200, f"<R><UploadId>{upload}</UploadId></R>".encode(), {}
        if upload:
            return self.in_upload(path, upload, query, body)
        if self.command == "PUT":
            if server.is_conditional and self.headers.get("If-None-Match") == "*" and path in server.objects:
                return 412, b"<Error><Code>PreconditionFailed</Code><Condition>If-None-Match</Condition></Error>", {}
            server.objects[path] = body
            server.writers[path] = self.headers.get("x-amz-meta-writer", "")
            return 200, b"", {"ETag": '"1"'}
        if self.command == "DELETE":
            server.objects.pop(path, None)
            return 204, b"", {}
        if path not in server.objects:
            return 404, b"<?xml version='1.0'?><Error><Code>NoSuchKey</Code></Error>", {}
        return self.look(path)

    def in_upload(
        self, path: str, upload: str, query: dict[str, str], body: bytes
    ) -> tuple[int, bytes, dict[str, str]]:
        server = self.server
        if upload not in server.uploads:
            return 404, b"<Error><Code>NoSuchUpload</Code></Error>", {}
        if self.command == "PUT":
            server.uploads[upload][int(query["partNumber"])] = body
            return 200, b"", {"ETag": f'"{len(body)}"'}
        if self.command == "GET":
            return self.list_parts(server.uploads[upload], int(query.get("part-number-marker", 0)))
        parts = server.uploads.pop(upload)
        if self.command == "POST":
            server.objects[path] = b"".join(parts[number] for number in sorted(parts))
        return 200, b"<R><ETag>1</ETag></R>", {}

    def list_parts(self, parts: dict[int, bytes], after: int) -> tuple[int, bytes, dict[str, str]]:
        """As S3, up to 1000 parts on a page."""
        numbers = sorted(number for number in parts if number > after)
        listed = "".join(
            f"<Part><PartNumber>{number}</PartNumber><Size>{len(parts[number])}</Size>"
            "<LastModified>2026-01-01T10:30:00Z</LastModified></Part>"
            for number in numbers[:1000]
        )
        is_truncated = "true" if numbers[1000:] else "false"
        last = max(numbers[:1000], default=0)
        page = f"<IsTruncated>{is_truncated}</IsTruncated><NextPartNumberMarker>{last}</NextPartNumberMarker>{listed}"
        return 200, f"<R>{page}</R>".encode(), {}

    def listing(self, bucket: str, prefix: str, delimiter: str) -> tuple[int, bytes, dict[str, str]]:
        """All keys on one page."""
        keys = [
            path.removeprefix(f"{bucket}/") for path in sorted(self.server.objects) if path.startswith(f"{bucket}/")
        ]
        keys = [key for key in keys if key.startswith(prefix)]
        inner = {key: key.removeprefix(prefix).partition(delimiter or "\0") for key in keys}
        whole = [key for key, (_, separator, _) in inner.items() if not separator]
        folders = sorted({prefix + first + separator for first, separator, _ in inner.values() if separator})
        sizes = {key: len(self.server.objects[f"{bucket}/{key}"]) for key in whole}
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{size}</Size></Contents>" for key, size in sizes.items()
        )
        prefixes = "".join(
            f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in folders
        )
        document = f"<IsTruncated>false</IsTruncated>{contents}{prefixes}"
        return 200, f"<?xml version='1.0'?><ListBucketResult>{document}</ListBucketResult>".encode(), {}

    def list_uploads(self) -> tuple[int, bytes, dict[str, str]]:
        uploads = "".join(
            f"<Upload><Key>{upload.partition('@')[0].removeprefix('/bucket/')}</Key><UploadId>{upload}</UploadId>"
            "<Initiated>2026-01-01T10:00:00Z</Initiated></Upload>"
            for upload in self.server.uploads
        )
        return 200, f"<R><IsTruncated>false</IsTruncated>{uploads}</R>".encode(), {}

    def look(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        data = self.server.objects[path]
        headers = {"ETag": '"1"', "x-amz-meta-writer": self.server.writers.get(path, "")}
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if asked is None:
            return 200, data, headers
        start, end = map(int, asked.groups())
        if start >= len(data):
            return 416, b"<Error><Code>InvalidRange</Code></Error>", {}
        part = data[start : end + 1]
        return 206, part, {**headers, "Content-Range": f"bytes {start}-{start + len(part) - 1}/{len(data)}"}
