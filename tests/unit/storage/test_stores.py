"""Opening stores, preflight, and what single stores do beyond the contract."""

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pipelinerl_core.errors import ConfigError, MissingObject, StoreError, StoreUnavailable
from pipelinerl_core.storage.exclusive import create_exclusively
from pipelinerl_core.storage.local import FileStore
from pipelinerl_core.storage.object_store import check_writable, open_store
from pipelinerl_core.storage.s3 import S3Store


def test_a_plain_path_and_its_file_url_are_the_same_store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    open_store("runs").put("a", b"1")
    assert open_store(f"file://{tmp_path}/runs").get("a") == b"1"
    assert open_store("runs").url == f"file://{tmp_path}/runs"


def test_stores_of_one_memory_name_share_objects_and_others_do_not():
    open_store("memory://one/x").put("a", b"1")
    assert open_store("memory://one").get("x/a") == b"1"
    assert not open_store("memory://two").exists("x/a")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("gs://bucket/x", "unknown scheme 'gs'"),
        ("s3://", "names no bucket"),
        ("s3://bucket/../other", "'..'"),
        ("", "is empty"),
    ],
)
def test_a_wrong_url_is_one_clear_line(url, says):
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        open_store(url)
    assert "\n" not in str(caught.value)


def test_a_root_below_a_file_is_not_writable(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match="cannot be written") as caught:
        check_writable(open_store(f"{tmp_path}/taken/runs"))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_being_written_is_no_object(tmp_path):
    store = open_store(str(tmp_path))
    store.put("commits/1.json", b"{}")
    (tmp_path / "commits" / ".tmp-77-half-2.json").write_bytes(b"{")
    assert store.list("commits") == ["commits/1.json"]


KILLED_WRITER = """
import os, signal, sys
from pathlib import Path
from pipelinerl_core.storage.local import FileStore
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
FileStore(Path(sys.argv[1])).put("weights/1.1/model.safetensors", b"half")
"""


def temporary_files(directory):
    return sorted(path for path in directory.rglob(".tmp-*"))


def age(path, seconds):
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_the_temporary_file_of_a_killed_writer_is_found_and_removed(tmp_path):
    ended = subprocess.run([sys.executable, "-c", KILLED_WRITER, str(tmp_path)], check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    (left,) = temporary_files(tmp_path)
    store = open_store(str(tmp_path))
    assert store.unfinished() == ()  # so new that its writer may be about to lock it
    age(left, 120)
    assert store.unfinished() == (left.relative_to(tmp_path).as_posix(),)
    store.discard(store.unfinished())
    assert temporary_files(tmp_path) == []


def test_the_temporary_file_of_a_live_writer_stays_however_old_it_is(tmp_path, monkeypatch):
    store, found = open_store(str(tmp_path)), []
    replace = os.replace

    def look(source, target):  # after the data, and before the object has its name
        age(source, 1e6)
        found.extend(store.unfinished())
        store.discard([Path(source).name])
        replace(source, target)

    monkeypatch.setattr(os, "replace", look)
    store.put("a", b"1")
    assert (found, store.get("a")) == ([], b"1")


def test_without_locks_the_age_of_a_temporary_file_decides(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    store = open_store(str(tmp_path))
    store.put("a", b"1")
    (left := tmp_path / ".tmp-77-1-0-b").write_bytes(b"half")
    age(left, 3600)
    assert store.unfinished() == ()
    age(left, 100_000)
    assert store.unfinished() == (left.name,)


def test_no_object_can_be_discarded(tmp_path):
    store = open_store(str(tmp_path))
    store.put("a", b"1")
    age(tmp_path / "a", 1e6)
    store.discard(["a", ".tmp-gone"])
    assert store.get("a") == b"1"


def test_every_new_directory_is_durable_before_the_object_that_lies_in_it(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda number: (synced.append(os.readlink(f"/proc/self/fd/{number}")), fsync(number))
    )
    store = open_store(str(tmp_path / "root"))
    store.put("a/b/first", b"1")
    directories = [str(tmp_path / name) for name in ("", "root", "root/a", "root/a/b")]
    assert [path for path in synced if os.path.isdir(path)] == directories
    synced.clear()
    store.put("a/b/second", b"2")
    assert [path for path in synced if os.path.isdir(path)] == directories[-1:]


def test_a_failed_write_leaves_the_old_object_and_no_rubbish(tmp_path, monkeypatch):
    store = FileStore(tmp_path, retry_seconds=0)
    store.put("hub.json", b"old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StoreError, match=r"'hub\.json'.*No space left"):
        store.put("hub.json", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["hub.json"]
    assert store.get("hub.json") == b"old"


def test_a_write_waits_for_room_on_a_full_disk(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("pipelinerl_core.storage.local._POLL_SECONDS", 0.01)
    store = FileStore(tmp_path)
    sync, failures = os.fsync, iter([28, 122, 27])

    def full(descriptor):
        number = next(failures, None)
        if number is not None:
            raise OSError(number, os.strerror(number))
        sync(descriptor)

    monkeypatch.setattr("os.fsync", full)
    store.put("commits/1.json", b"{}", create_only=True)
    assert store.get("commits/1.json") == b"{}"
    assert [record.getMessage() for record in caplog.records] == [
        f"no space for commits/1.json below {tmp_path} (No space left on device): waiting"
    ]
    with pytest.raises(FileExistsError):
        store.put("commits/1.json", b"other", create_only=True)


def test_other_failures_of_a_disk_are_not_waited_for(tmp_path, monkeypatch):
    def broken(descriptor):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.fsync", broken)
    with pytest.raises(StoreError, match="Input/output error"):
        open_store(str(tmp_path)).put("a", b"")


# ---- S3 faults: a loopback endpoint that fails on purpose ----


class FaultyS3(ThreadingHTTPServer):
    """PUT and GET with If-None-Match. `script` holds a fault per request: a status, or "lose" (act, then hang up)."""

    daemon_threads = True

    def __init__(self, script=()):
        super().__init__(("127.0.0.1", 0), FaultyHandler)
        self.script = list(script)
        self.objects = {}
        self.writers = {}
        self.requests = []
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class FaultyHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def handle_one(self, act):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append((self.command, self.path, dict(self.headers)))
        fault = self.server.script.pop(0) if self.server.script else None
        status, answer = (fault, b"") if isinstance(fault, int) else act(body)
        writer = self.server.writers.get(self.path)
        if fault == "lose":
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        if writer is not None:
            self.send_header("x-amz-meta-writer", writer)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer)

    def put(self, body):
        if self.headers.get("If-None-Match") == "*" and self.path in self.server.objects:
            return 412, b"<Error><Code>PreconditionFailed</Code><Condition>If-None-Match</Condition></Error>"
        self.server.objects[self.path] = body
        self.server.writers[self.path] = self.headers.get("x-amz-meta-writer")
        return 200, b""

    def look(self, body):
        found = self.server.objects.get(self.path)
        return (404, b"<Error><Code>NoSuchKey</Code></Error>") if found is None else (200, found)

    def remove(self, body):
        self.server.objects.pop(self.path, None)
        return 204, b""

    def do_PUT(self):
        self.handle_one(self.put)

    def do_GET(self):
        self.handle_one(self.look)

    def do_HEAD(self):
        self.handle_one(self.look)

    def do_DELETE(self):
        self.handle_one(self.remove)


@pytest.fixture
def faulty(s3_environment):
    servers = []

    def start(script=()):
        server = FaultyS3(script)
        servers.append(server)
        s3_environment(server.endpoint)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_s3_repeats_what_may_pass_and_sends_no_surprise_checksums(faulty):
    server = faulty([503, 500])
    store = open_store("s3://bucket/runs")
    store.put("a", b"data")
    assert store.get("a") == b"data"
    assert [(method, path) for method, path, _ in server.requests] == [("PUT", "/bucket/runs/a")] * 3 + [
        ("GET", "/bucket/runs/a")
    ]
    assert not any("checksum" in name.lower() for _, _, headers in server.requests for name in headers)


def test_s3_waits_for_room_in_a_full_store(faulty):
    server = faulty([507, 507])
    open_store("s3://bucket/runs").put("a", b"data")
    assert len(server.requests) == 3


def test_s3_does_not_repeat_a_refusal_and_names_key_and_endpoint(faulty):
    server = faulty([403])
    with pytest.raises(StoreError, match=rf"'a' in s3://bucket/runs at {server.endpoint}") as caught:
        open_store("s3://bucket/runs").put("a", b"data")
    assert not isinstance(caught.value, StoreUnavailable)
    assert len(server.requests) == 1


def test_s3_gives_up_at_its_deadline(faulty):
    server = faulty([404] + [503] * 100)
    store = S3Store("s3://bucket/runs", retry_seconds=5.0)
    with pytest.raises(MissingObject):
        store.get("a")  # makes its client, which may take seconds
    server.requests.clear()
    started = time.monotonic()
    with pytest.raises(StoreUnavailable, match=server.endpoint):
        store.get("a")
    assert 1 < len(server.requests) < 12
    assert time.monotonic() - started < 30


def test_s3_create_whose_answer_was_lost_is_recognised_as_its_own(faulty):
    server = faulty()
    store = open_store("s3://bucket/runs")
    assert store.is_conditional
    server.requests.clear()
    server.script[:] = [None, "lose"]  # HEAD, then the PUT that arrives
    store.put("epochs/1", b"mine", create_only=True)
    assert server.objects == {"/bucket/runs/epochs/1": b"mine"}
    assert [method for method, _, _ in server.requests] == ["HEAD", "PUT", "PUT", "HEAD"]


def test_s3_create_that_another_won_is_refused(faulty):
    server = faulty()
    store = open_store("s3://bucket/runs")
    assert store.is_conditional
    server.writers.clear()
    server.script[:] = [404]  # HEAD does not see it yet
    server.objects["/bucket/runs/epochs/1"] = b"same bytes"
    with pytest.raises(FileExistsError):
        store.put("epochs/1", b"same bytes", create_only=True)
    assert server.writers == {}


def test_the_probe_tells_conditional_stores_from_others(faulty, monkeypatch):
    server = faulty()
    assert open_store("s3://bucket/runs").is_conditional
    assert server.objects == {}
    monkeypatch.setattr(FaultyHandler, "put", lambda self, body: (200, b""))
    assert not open_store("s3://bucket/runs").is_conditional
    monkeypatch.setattr(FaultyHandler, "put", lambda self, body: (501, b"<Error><Code>NotImplemented</Code></Error>"))
    assert not open_store("s3://bucket/runs").is_conditional


def test_the_probe_does_not_take_an_outage_for_a_store_without_conditional_put(faulty):
    server = faulty([503] * 100)
    store = S3Store("s3://bucket/runs", retry_seconds=0.0)
    with pytest.raises(StoreError):
        _ = store.is_conditional
    server.script.clear()
    assert store.is_conditional


def test_a_writer_that_died_between_its_mark_and_the_object_is_named(store, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    store.put("marks/run.json/dead", b"")
    with pytest.raises(FileExistsError, match=r"has died .* remove marks/run\.json/dead"):
        create_exclusively(store, "run.json", b"{}")
    assert store.list("") == ["marks/run.json/dead"]
    create_exclusively(store, "epochs/2.json", b"{}")
    with pytest.raises(FileExistsError, match="exists already"):
        create_exclusively(store, "epochs/2.json", b"other")
    assert store.get("epochs/2.json") == b"{}"


def test_s3_missing_object_and_missing_bucket_differ(faulty, monkeypatch):
    faulty()
    store = open_store("s3://bucket/runs")
    with pytest.raises(MissingObject):
        store.get("a")
    assert not store.exists("a")
    missing_bucket = (404, b"<Error><Code>NoSuchBucket</Code></Error>")
    monkeypatch.setattr(FaultyHandler, "look", lambda self, body: missing_bucket)
    with pytest.raises(StoreError, match=r"'a' in s3://bucket/runs at") as caught:
        store.get("a")
    assert not isinstance(caught.value, MissingObject)


def test_the_preflight_refuses_an_endpoint_without_a_server(s3_environment):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{probe.getsockname()[1]}"
    s3_environment(endpoint)
    with pytest.raises(ConfigError, match=endpoint) as caught:
        check_writable(open_store("s3://bucket/runs"))
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_the_preflight_gives_a_silent_endpoint_five_seconds(s3_environment):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        s3_environment(f"http://127.0.0.1:{silent.getsockname()[1]}")
        started = time.monotonic()
        with pytest.raises(ConfigError, match="no answer within 5 s"):
            check_writable(open_store("s3://bucket/runs"))
        assert time.monotonic() - started < 14
