"""Large objects on S3: written and read in parts, each with its own repetitions; what an interrupted upload leaves.

The server is a fake with faults and a clock: its requests take as long as a test says.
"""

import re
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from pipelinerl_core.errors import StoreError
from pipelinerl_core.storage import s3
from pipelinerl_core.storage.object_store import open_store

PART = 1000
LARGE = bytes(range(256)) * 14  # four parts, the last of them shorter


class Clock:
    """In place of module time: sleeping costs nothing, a request as much as the server says."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class S3(ThreadingHTTPServer):
    """Objects and multipart uploads. `fails(method, query)` gives the status of a request that fails."""

    daemon_threads = True

    def __init__(self, clock: Clock) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.clock = clock
        self.request_seconds = 0.0
        self.objects: dict[str, bytes] = {}
        self.writers: dict[str, str] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.asked: list[str] = []
        self.fails = lambda said: 0
        self.loses = lambda said: False
        self.lock = threading.Lock()
        self.hour = 10


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: S3

    def log_message(self, *_: object) -> None: ...

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query, keep_blank_values=True).items()}
        part = query.get("partNumber", "")
        said = " ".join([self.command, *(["part", part] if part else []), *sorted(query.keys() - {"partNumber"})])
        with self.server.lock:
            self.server.asked.append(said)
            self.server.clock.now += self.server.request_seconds
            status = self.server.fails(said)
            answer, headers = b"", {}
            if not status:
                status, answer, headers = self.act(url.path, query, body)
        if self.server.loses(said):
            status, answer = 503, b""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer)

    do_GET = do_PUT = do_POST = handle_any

    def do_DELETE(self) -> None:
        self.handle_any()

    def do_HEAD(self) -> None:
        self.handle_any()

    def date_time_string(self, timestamp: float | None = None) -> str:
        return format_datetime(datetime(2026, 1, 1, self.server.hour, tzinfo=UTC), usegmt=True)

    def act(self, path: str, query: dict[str, str], body: bytes) -> tuple[int, bytes, dict[str, str]]:
        server, upload = self.server, query.get("uploadId", "")
        missing = 404, b"<Error><Code>NoSuchUpload</Code></Error>", {}
        if "uploads" in query and self.command == "GET":
            return 200, self.listing(), {}
        if "uploads" in query:
            upload = f"{path}@{len(server.asked)}"
            server.uploads[upload] = {}
            server.writers[path] = self.headers.get("x-amz-meta-writer", "")
            return 200, f"<R><UploadId>{upload}</UploadId></R>".encode(), {}
        if upload and upload not in server.uploads:
            return missing
        if upload and self.command == "PUT":
            server.uploads[upload][int(query["partNumber"])] = body
            return 200, b"", {"ETag": f'"{len(body)}"'}
        if upload and self.command == "GET":
            newest = "<Part><LastModified>2026-01-01T10:30:00Z</LastModified></Part>" if "alive" in path else ""
            return 200, f"<R>{newest}</R>".encode(), {}
        if upload:
            parts = server.uploads.pop(upload)
            if self.command == "POST":
                server.objects[path] = b"".join(parts[number] for number in sorted(parts))
            return 200, b"<R></R>", {}
        if path not in server.objects:
            return 404, b"<Error><Code>NoSuchKey</Code></Error>", {}
        return self.look(path)

    def listing(self) -> bytes:
        uploads = "".join(
            f"<Upload><Key>{one.partition('@')[0].removeprefix('/bucket/')}</Key><UploadId>{one}</UploadId>"
            "<Initiated>2026-01-01T10:00:00Z</Initiated></Upload>"
            for one in self.server.uploads
        )
        return f"<R><IsTruncated>false</IsTruncated>{uploads}</R>".encode()

    def look(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        data = self.server.objects[path]
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if asked is None:
            return 200, data, {"x-amz-meta-writer": self.server.writers[path]}
        start, end = map(int, asked.groups())
        if start >= len(data):
            return 416, b"<Error><Code>InvalidRange</Code></Error>", {}
        return 206, data[start : end + 1], {}


@pytest.fixture
def server(s3_environment, monkeypatch) -> Iterator[S3]:
    clock = Clock()
    monkeypatch.setattr(s3, "time", clock)
    monkeypatch.setattr(s3, "PART_BYTES", PART)
    made = S3(clock)
    s3_environment(f"http://127.0.0.1:{made.server_port}")
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join(60)


def once_each(*said: str):
    """Faults: the first request of each kind fails with 503."""
    left = set(said)

    def fails(one: str) -> int:
        if one not in left:
            return 0
        left.discard(one)
        return 503

    return fails


def test_a_large_object_is_written_in_parts_and_read_in_parts(server):
    store = open_store("s3://bucket/run")
    store.put("weights/1", LARGE)
    assert server.objects == {"/bucket/run/weights/1": LARGE}
    assert server.uploads == {}
    assert sorted(server.asked) == sorted(
        ["POST uploads", *(f"PUT part {n} uploadId" for n in range(1, 5)), "POST uploadId"]
    )
    server.asked.clear()
    assert store.get("weights/1") == LARGE
    assert server.asked == ["GET"] * 4


@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 2 * PART, 3 * PART])
def test_objects_of_every_size_are_read_whole(server, size):
    server.objects["/bucket/run/a"] = LARGE[:size]
    assert open_store("s3://bucket/run").get("a") == LARGE[:size]


def test_a_write_that_takes_longer_than_failures_are_repeated_gets_repetitions_for_each_part(server):
    server.request_seconds = 2 * s3.RETRY_SECONDS
    server.fails = once_each("POST uploads", *(f"PUT part {n} uploadId" for n in range(1, 5)), "POST uploadId")
    open_store("s3://bucket/run").put("weights/1", LARGE)
    assert server.objects == {"/bucket/run/weights/1": LARGE}
    assert len(server.asked) == 2 * 6
    server.fails = once_each("GET")
    assert open_store("s3://bucket/run").get("weights/1") == LARGE


def test_an_upload_that_fails_is_ended(server):
    server.fails = lambda said: 403 if said == "PUT part 3 uploadId" else 0
    with pytest.raises(StoreError, match="cannot write part 3 of 'weights/1'"):
        open_store("s3://bucket/run").put("weights/1", LARGE)
    assert server.asked[-1] == "DELETE uploadId"
    assert (server.uploads, server.objects) == ({}, {})


def test_a_completed_upload_whose_answer_was_lost_is_recognised(server):
    lost = once_each("POST uploadId")
    server.loses = lambda said: bool(lost(said))
    open_store("s3://bucket/run").put("weights/1", LARGE)
    assert server.objects == {"/bucket/run/weights/1": LARGE}
    assert server.asked.count("POST uploadId") == 2


def test_an_upload_that_the_store_has_lost_is_no_success(server):
    server.objects["/bucket/run/weights/1"], server.writers["/bucket/run/weights/1"] = b"older", "another writer"
    fails = server.fails

    def lose_uploads(said):
        if said == "POST uploadId":
            server.uploads.clear()
            server.writers["/bucket/run/weights/1"] = "another writer"
        return fails(said)

    server.fails = lose_uploads
    with pytest.raises(StoreError, match="the store has no such upload"):
        open_store("s3://bucket/run").put("weights/1", LARGE)


def test_uploads_of_killed_writers_are_found_after_an_hour_by_the_clock_of_the_store(server):
    server.uploads = {"/bucket/run/a@1": {}, "/bucket/run/alive@2": {1: b"x"}}
    store = open_store("s3://bucket/run")
    assert store.unfinished() == ()
    server.hour = 11  # one hour after both began, half an hour after the newest part of the second
    assert store.unfinished() == ()
    server.uploads["/bucket/run/b@3"] = {}
    server.hour = 12
    assert len(store.unfinished()) == 3
    store.discard(["a?uploadId=/bucket/run/a@1", "gone?uploadId=0"])
    assert set(server.uploads) == {"/bucket/run/alive@2", "/bucket/run/b@3"}


def test_a_store_that_cannot_list_uploads_has_none(server, caplog):
    server.fails = lambda said: 501
    assert open_store("s3://bucket/run").unfinished() == ()
    assert "unfinished multipart uploads cannot be listed" in caplog.text
