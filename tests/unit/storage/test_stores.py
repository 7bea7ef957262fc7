"""Opening stores, preflight, and what single stores do beyond the contract."""

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipelinerl_core.errors import ConfigError, MissingObject, StoreError, StoreUnavailable
from pipelinerl_core.storage.exclusive import create_exclusively
from pipelinerl_core.storage.local import FileStore
from pipelinerl_core.storage.object_store import check_writable, open_store
from pipelinerl_core.storage.s3 import S3Store
from tests.fake_s3 import LOSE, OUTAGES, Answer, serving


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


@pytest.mark.parametrize(
    ("answer", "is_outage"),
    [
        (Answer(522), True),
        (Answer(302, b"<html>login</html>", "text/html"), True),
        (Answer(400, b"<Error><Code>RequestTimeout</Code></Error>"), True),
        (Answer(400, b"<Error><Code>InvalidArgument</Code></Error>"), False),
        (Answer(501), False),
    ],
)
def test_which_other_answers_are_outages(faulty, answer, is_outage):
    server = faulty()
    server.fault = lambda asked: answer
    with pytest.raises(StoreError) as caught:
        S3Store("s3://bucket/runs", retry_seconds=0.0).list("commits")
    assert isinstance(caught.value, StoreUnavailable) == is_outage


@pytest.mark.parametrize("late", ["write", "removal"])
def test_a_root_whose_listings_are_late_is_refused(tmp_path, monkeypatch, late):
    store, listings = open_store(str(tmp_path)), []

    def list_late(prefix):
        listings.append(FileStore.list(store, prefix))
        return [] if late == "write" else listings[0]

    monkeypatch.setattr(store, "limited", lambda seconds: store)
    monkeypatch.setattr(store, "list", list_late)
    with pytest.raises(ConfigError, match=r"does not list an object right after its write.*NFS"):
        check_writable(store)


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
    assert store.unfinished() == {}  # so new that its writer may be about to lock it
    age(left, 120)
    assert store.unfinished() == {left.relative_to(tmp_path).as_posix(): len(b"half")}
    store.discard(store.unfinished())
    assert temporary_files(tmp_path) == []


def test_the_temporary_file_of_a_live_writer_stays_at_any_age(tmp_path, monkeypatch):
    store, unfinished = open_store(str(tmp_path)), []
    replace = os.replace

    def look(source, target):  # after the data, and before the object has its name
        age(source, 1e6)
        unfinished.extend(store.unfinished())
        store.discard([Path(source).name])
        replace(source, target)

    monkeypatch.setattr(os, "replace", look)
    store.put("a", b"1")
    assert (unfinished, store.get("a")) == ([], b"1")


def test_without_locks_the_age_of_a_temporary_file_decides(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    store = open_store(str(tmp_path))
    store.put("a", b"1")
    (left := tmp_path / ".tmp-77-1-0-b").write_bytes(b"half")
    age(left, 3600)
    assert store.unfinished() == {}
    age(left, 100_000)
    assert store.unfinished() == {left.name: len(b"half")}


def test_no_object_can_be_discarded(tmp_path):
    store = open_store(str(tmp_path))
    store.put("a", b"1")
    age(tmp_path / "a", 1e6)
    store.discard(["a", ".tmp-gone"])
    assert store.get("a") == b"1"


def test_every_new_directory_is_made_durable_with_its_first_object(tmp_path, monkeypatch):
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
    monkeypatch.setattr("pipelinerl_core.storage.failures._FIRST_PAUSE_SECONDS", 0.01)
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
        f"cannot write 'commits/1.json' in file://{tmp_path} now, it is repeated: No space left on device"
    ]
    with pytest.raises(FileExistsError):
        store.put("commits/1.json", b"other", create_only=True)


def test_an_error_that_a_repetition_cannot_change_is_raised_at_once(tmp_path, monkeypatch):
    def refuse(descriptor):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(StoreError, match=r"'a' .*Read-only file system"):
        open_store(str(tmp_path)).put("a", b"")


ERRORS = [errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENOMEM, errno.ETIMEDOUT, errno.EACCES, errno.ENAMETOOLONG]


@pytest.mark.parametrize("number", ERRORS)
@pytest.mark.parametrize("call", ["list", "children", "unfinished", "get", "exists", "delete"])
def test_an_error_of_the_disk_is_no_empty_answer(tmp_path, monkeypatch, number, call):
    store = FileStore(tmp_path, retry_seconds=0)
    store.put("commits/a", b"1")

    def broken(*_, **__):
        raise OSError(number, os.strerror(number))

    for name in ("os.scandir", "os.stat", "os.unlink", "io.open"):
        monkeypatch.setattr(name, broken)
    calls = {"list": "commits", "children": None, "unfinished": None, "delete": ["commits/a"]}
    argument = calls.get(call, "commits/a")
    is_outage = number not in (errno.EACCES, errno.ENAMETOOLONG)
    with pytest.raises(StoreUnavailable if is_outage else StoreError, match=re.escape(os.strerror(number))):
        getattr(store, call)(*([argument] if argument else []))


def test_a_directory_that_vanishes_during_a_listing_is_empty(tmp_path, monkeypatch):
    store = open_store(str(tmp_path))
    store.put("rollouts/a/1", b"1")
    store.put("rollouts/b/1", b"1")
    scandir = os.scandir

    def scan(path):
        if str(path).endswith("rollouts/b"):
            raise FileNotFoundError
        return scandir(path)

    monkeypatch.setattr("os.scandir", scan)
    assert store.list("rollouts") == ["rollouts/a/1"]
    assert store.list("nothing") == []


def test_files_of_other_programs_are_in_no_listing(store, tmp_path):
    for path in (".nfs0001", ".DS_Store", ".snapshot/daily/commits/2", "commits/.nfs0002", "commits/1"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    store = open_store(str(tmp_path))
    assert store.list("") == ["commits/1"]
    assert store.children() == ["commits"]


# ---- S3 faults: a loopback endpoint that fails on purpose ----


@pytest.fixture
def faulty(s3_environment):
    """A function that starts the fake server with a list of answers, for its first requests."""
    with serving() as server:
        s3_environment(server.endpoint)

        def start(script=()):
            server.script = list(script)
            server.fault = lambda asked: server.script.pop(0) if server.script else None
            return server

        yield start


@pytest.mark.parametrize("name", OUTAGES)
@pytest.mark.parametrize("call", ["list", "children", "exists", "get", "put", "create", "delete"])
def test_an_answer_that_no_s3_server_gives_is_an_outage(faulty, name, call):
    server = faulty()
    store = S3Store("s3://bucket/runs", retry_seconds=0.0)
    assert store.is_conditional
    store.put("commits/a", b"1")
    arguments = {
        "list": ("commits",), "children": (), "put": ("commits/a", b"2"), "create": ("b", b"3"),
        "delete": (["commits/a"],),
    }  # fmt: skip
    server.script = [OUTAGES[name]]
    call_store = lambda: getattr(store, call)(*arguments.get(call, ("commits/a",)))  # noqa: E731
    if (call, name) == ("delete", "200 empty"):  # a server may answer so
        call_store()
    else:
        with pytest.raises(StoreUnavailable):
            call_store()
    assert server.script == []
    patient = open_store("s3://bucket/runs")
    server.script = [OUTAGES[name]]
    assert patient.list("commits") == (["commits/a"] if "/bucket/runs/commits/a" in server.objects else [])


def test_the_stores_of_all_runs_have_one_client(faulty):
    faulty()
    store = open_store("s3://bucket/runs")
    assert store.child("a")._fs is store.child("b")._fs is store.limited(3.0)._fs is store._fs


@pytest.mark.parametrize(
    ("variable", "value"),
    [("AWS_ENDPOINT_URL_S3", "localhost:9000"), ("AWS_PROFILE", "no-such"), ("", "")],
    ids=["endpoint", "profile", "bucket"],
)
def test_a_wrong_configuration_of_s3_is_a_config_error_of_one_line(faulty, monkeypatch, variable, value):
    faulty()
    if variable:
        monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError) as refused:
        open_store("s3://bucket/run" if variable else "s3://My_Bucket!/run").list("commits")
    assert "\n" not in str(refused.value)


def test_s3_repeats_after_passing_errors_and_sends_no_surprise_checksums(faulty):
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
    server = faulty([None] + [503] * 100)
    store = S3Store("s3://bucket/runs", retry_seconds=5.0)
    with pytest.raises(MissingObject):
        store.get("a")  # makes its client, which may take seconds
    server.requests.clear()
    with pytest.raises(StoreUnavailable, match=server.endpoint):
        store.get("a")
    assert 1 < len(server.requests) < 12


def test_s3_create_whose_answer_was_lost_is_recognised_as_its_own(faulty):
    server = faulty()
    store = open_store("s3://bucket/runs")
    assert store.is_conditional
    server.requests.clear()
    server.script[:] = [None, LOSE]  # the look for the object, then the PUT that arrives
    store.put("epochs/1", b"mine", create_only=True)
    assert server.objects == {"/bucket/runs/epochs/1": b"mine"}
    assert [method for method, _, _ in server.requests] == ["GET", "PUT", "PUT", "HEAD"]


def test_s3_create_that_another_won_is_refused(faulty):
    server = faulty()
    store = open_store("s3://bucket/runs")
    assert store.is_conditional

    def create_meanwhile(asked):
        if asked == "PUT":
            server.objects["/bucket/runs/epochs/1"] = b"same bytes"

    server.fault = create_meanwhile
    with pytest.raises(FileExistsError):
        store.put("epochs/1", b"same bytes", create_only=True)
    assert "/bucket/runs/epochs/1" not in server.writers


def test_the_probe_tells_conditional_stores_from_others(faulty):
    server = faulty()
    assert open_store("s3://bucket/runs").is_conditional
    assert server.objects == {}
    server.is_conditional = False
    assert not open_store("s3://bucket/runs").is_conditional
    refusal = Answer(501, b"<Error><Code>NotImplemented</Code></Error>")
    server.fault = lambda asked: refusal if asked == "PUT" else None
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


def test_s3_missing_object_and_missing_bucket_differ(faulty):
    server = faulty()
    store = open_store("s3://bucket/runs")
    with pytest.raises(MissingObject):
        store.get("a")
    assert not store.exists("a")
    server.fault = lambda asked: Answer(404, b"<Error><Code>NoSuchBucket</Code></Error>")
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
        with pytest.raises(ConfigError, match="no answer within 5 s"):
            check_writable(open_store("s3://bucket/runs"))
        silent.setblocking(False)
        silent.accept()[0].close()
        with pytest.raises(BlockingIOError):  # there was no second attempt
            silent.accept()
