"""Large objects on S3: written and read in parts, each with its own repetitions; what an interrupted upload leaves.

The server is a fake with faults and a clock: its requests take as long as a test says.
"""

from collections.abc import Iterator

import pytest

from pipelinerl_core.errors import MissingObject, StoreError
from pipelinerl_core.storage import failures, s3
from pipelinerl_core.storage.object_store import open_store
from tests.fake_s3 import LOSE, FakeS3, serving

PART = 1000
LARGE = bytes(range(256)) * 14  # four parts, the last of them shorter


class Clock:
    """In place of module time: sleeping costs nothing, each look at the clock `request_seconds`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.request_seconds = 0.0

    def monotonic(self) -> float:
        self.now += self.request_seconds
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def server(s3_environment, monkeypatch) -> Iterator[FakeS3]:
    monkeypatch.setattr(failures, "time", Clock())
    monkeypatch.setattr(s3, "PART_BYTES", PART)
    with serving() as made:
        s3_environment(made.endpoint)
        yield made


def once_each(*said: str):
    """Faults: the first request of each kind fails with 503."""
    left = set(said)

    def fault(request: str) -> int | None:
        if request not in left:
            return None
        left.discard(request)
        return 503

    return fault


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
    assert server.asked == ["GET", "GET", "GET", "GET"]


@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 2 * PART, 3 * PART])
def test_objects_of_every_size_are_read_whole(server, size):
    server.objects["/bucket/run/a"] = LARGE[:size]
    assert open_store("s3://bucket/run").get("a") == LARGE[:size]


def test_a_write_that_takes_longer_than_failures_are_repeated_gets_repetitions_for_each_part(server):
    failures.time.request_seconds = 2 * failures.RETRY_SECONDS
    server.fault = once_each("POST uploads", *(f"PUT part {n} uploadId" for n in range(1, 5)), "POST uploadId")
    open_store("s3://bucket/run").put("weights/1", LARGE)
    assert server.objects == {"/bucket/run/weights/1": LARGE}
    assert len(server.asked) == 2 * 6
    server.fault = once_each("GET")
    assert open_store("s3://bucket/run").get("weights/1") == LARGE


def test_an_upload_that_fails_is_ended(server):
    server.fault = lambda asked: 403 if asked == "PUT part 3 uploadId" else None
    with pytest.raises(StoreError, match="cannot write part 3 of 'weights/1'"):
        open_store("s3://bucket/run").put("weights/1", LARGE)
    assert server.asked[-1] == "DELETE uploadId"
    assert (server.uploads, server.objects) == ({}, {})


def test_a_completed_upload_whose_answer_was_lost_is_recognised(server):
    lost = once_each("POST uploadId")
    server.fault = lambda asked: LOSE if lost(asked) else None
    open_store("s3://bucket/run").put("weights/1", LARGE)
    assert server.objects == {"/bucket/run/weights/1": LARGE}
    assert server.asked.count("POST uploadId") == 2


def test_an_upload_that_the_store_has_lost_is_no_success(server):
    server.objects["/bucket/run/weights/1"], server.writers["/bucket/run/weights/1"] = b"older", "another writer"

    def lose_uploads(asked):
        if asked == "POST uploadId":
            server.uploads.clear()
            server.writers["/bucket/run/weights/1"] = "another writer"

    server.fault = lose_uploads
    with pytest.raises(StoreError, match="the store has no such upload"):
        open_store("s3://bucket/run").put("weights/1", LARGE)


def test_uploads_of_killed_writers_are_found_after_an_hour_by_the_clock_of_the_store(server):
    server.uploads = {"/bucket/run/a@1": {}, "/bucket/run/alive@2": {1: b"x"}}
    store = open_store("s3://bucket/run")
    assert store.unfinished() == {}
    server.hour = 11  # one hour after both began, half an hour after the newest part of the second
    assert store.unfinished() == {}
    server.uploads["/bucket/run/b@3"] = {}
    server.hour = 12
    assert len(store.unfinished()) == 3
    store.discard(["a?uploadId=/bucket/run/a@1", "gone?uploadId=0"])
    assert set(server.uploads) == {"/bucket/run/alive@2", "/bucket/run/b@3"}


def test_all_parts_of_an_upload_are_counted(server):
    server.uploads = {"/bucket/run/a@1": dict.fromkeys(range(1, 2502), b"xy")}
    server.hour = 12
    assert open_store("s3://bucket/run").unfinished() == {"a?uploadId=/bucket/run/a@1": 5002}


def test_a_store_that_cannot_list_uploads_has_none(server, caplog):
    server.fault = lambda asked: 501
    assert open_store("s3://bucket/run").unfinished() == {}
    assert "unfinished multipart uploads cannot be listed" in caplog.text


def test_an_object_that_is_deleted_while_it_is_read_is_missing(server):
    store = open_store("s3://bucket/run")
    store.put("weights/1", LARGE)
    reads: list[str] = []

    def fault(request: str) -> None:
        reads.append(request)
        if len(reads) == 2:
            server.objects.clear()

    server.fault = fault
    with pytest.raises(MissingObject):
        store.get("weights/1")
