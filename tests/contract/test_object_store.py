"""What every object store does: the same claims for memory, a directory, and S3."""

import threading
import time
import uuid

import pytest

from pipelinerl_core.errors import MissingObject, StoreError
from pipelinerl_core.storage import s3
from pipelinerl_core.storage.object_store import check_writable, open_store


@pytest.fixture(params=["memory", "file", pytest.param("s3", marks=[pytest.mark.s3, pytest.mark.slow])])
def store(request, tmp_path):
    if request.param == "memory":
        return open_store(f"memory://{uuid.uuid4().hex}")
    if request.param == "file":
        return open_store(f"file://{tmp_path}/runs")
    return open_store(request.getfixturevalue("s3_url"))


def test_an_object_reads_back_as_written(store):
    store.put("commits/00000001.0.json", b"one")
    store.put("empty", b"")
    store.put("view", memoryview(b"abcdef")[1:3])
    assert store.get("commits/00000001.0.json") == b"one"
    assert store.get("empty") == b""
    assert store.get("view") == b"bc"


@pytest.mark.parametrize("num_bytes", [10 << 20, 12_345_678])
def test_a_large_object_reads_back_and_leaves_no_part(store, num_bytes, monkeypatch):
    monkeypatch.setattr(s3, "PART_BYTES", 5 << 20)  # S3's smallest
    monkeypatch.setattr(s3, "ABANDONED_SECONDS", -3600.0)
    data = bytes(range(251)) * (num_bytes // 251 + 1)
    store.put("weights/1/model.safetensors", memoryview(data)[:num_bytes])
    assert store.get("weights/1/model.safetensors") == data[:num_bytes]
    assert store.unfinished() == {}


def test_a_second_put_replaces_the_whole_object(store):
    store.put("hub.json", b"a longer first version")
    store.put("hub.json", b"short")
    assert store.get("hub.json") == b"short"


def test_the_time_of_the_last_write_is_known(store):
    assert store.written_at("a/1") == 0.0
    store.put("a/1", b"x")
    store.put("a/10", b"x")
    assert abs(store.written_at("a/1") - time.time()) < 60
    store.delete(["a/1"])
    assert store.written_at("a/1") == 0.0


def test_create_only_refuses_an_existing_key_and_keeps_its_object(store):
    store.put("epochs/000001.json", b"first", create_only=True)
    with pytest.raises(FileExistsError, match=r"epochs/000001\.json"):
        store.put("epochs/000001.json", b"second", create_only=True)
    assert store.get("epochs/000001.json") == b"first"


def test_one_of_many_concurrent_creators_wins(store):
    won, barrier = [], threading.Barrier(8)

    def create(number):
        barrier.wait()
        try:
            store.put("lock", str(number).encode(), create_only=True)
            won.append(number)
        except FileExistsError:
            pass

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [str(number).encode() for number in won] == [store.get("lock")]


def test_a_missing_object_is_named(store):
    with pytest.raises(MissingObject, match=r"weights/00000007\.1/model\.safetensors"):
        store.get("weights/00000007.1/model.safetensors")


def test_exists_sees_a_key_written_by_another_client_at_once(store):
    other = open_store(store.url)
    assert not store.exists("a/b")
    assert store.list("a") == []
    other.put("a/b", b"x")
    assert store.exists("a/b")
    assert store.list("a") == ["a/b"]
    assert not store.exists("a")


def test_list_takes_whole_parts_and_sorts_at_any_depth(store):
    for key in ("rollouts/a/1/2.arrow", "rollouts/a/1/10.arrow", "rollouts/ab/0/0.arrow", "run.json"):
        store.put(key, b"x")
    assert store.list("rollouts/a") == ["rollouts/a/1/10.arrow", "rollouts/a/1/2.arrow"]
    assert store.list("rollouts/a/") == store.list("rollouts/a")
    assert store.list("") == ["rollouts/a/1/10.arrow", "rollouts/a/1/2.arrow", "rollouts/ab/0/0.arrow", "run.json"]
    assert store.list("nothing/here") == []


def test_sizes_are_the_bytes_of_the_listed_objects(store):
    for key, data in (("weights/2", b""), ("weights/1", b"12345"), ("run.json", b"{}")):
        store.put(key, data)
    assert [*store.sizes("").items()] == [("run.json", 2), ("weights/1", 5), ("weights/2", 0)]
    assert store.sizes("weights") == {"weights/1": 5, "weights/2": 0}
    assert store.sizes("nothing") == {}


def test_delete_removes_existing_objects_and_ignores_missing_objects(store):
    store.put("x/1", b"1")
    store.put("x/2", b"2")
    store.delete(["x/1", "x/never"])
    assert store.list("x") == ["x/2"]


def test_a_child_is_the_same_store_below_a_prefix(store):
    child = store.child("quickstart-0badcafe")
    child.put("run.json", b"{}")
    assert store.get("quickstart-0badcafe/run.json") == b"{}"
    assert child.list("") == ["run.json"]
    assert child.url == f"{store.url}/quickstart-0badcafe"
    assert open_store(child.url).get("run.json") == b"{}"


@pytest.mark.parametrize(
    "key", ["../x", "a/../../x", "/etc/passwd", "a//b", "", "a/", ".", "a/./b", "a\nb", "a\x00b", "a\\b", ".tmp-1"]
)
def test_a_key_that_could_leave_its_root_is_refused_everywhere(store, key):
    calls = [store.get, store.exists, lambda key: store.put(key, b"x"), lambda key: store.delete([key]), store.child]
    for call in calls:
        with pytest.raises(StoreError, match="key"):
            call(key)
    assert store.list("") == []


def test_a_writable_store_passes_the_preflight_which_leaves_no_object_behind(store):
    check_writable(store)
    assert (store.list(""), store.children()) == ([], [])


def test_children_are_the_first_parts_of_keys_with_several_parts(store):
    assert store.children() == []
    for key in ("runs-1/run.json", "runs-1/commits/1.json", "comparisons/a/b.json", "latest.json"):
        store.put(key, b"1")
    assert store.children() == ["comparisons", "runs-1"]
    assert store.child("runs-1").children() == ["commits"]
