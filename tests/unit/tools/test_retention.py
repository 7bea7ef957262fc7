"""Runs that are selected, collected, removed, copied and restored; what is freed is what was said."""

import json
import mmap
import uuid

import pytest

from pipelinerl_core.errors import BrokenRecord, ChecksumMismatch, ConfigError, StoreError
from pipelinerl_core.report.run_list import Wanted, list_runs
from pipelinerl_core.run import locate
from pipelinerl_core.run.commits import read_commits
from pipelinerl_core.run.context import open_run
from pipelinerl_core.run.hub_status import HubWatch, read_hub_of_any_format
from pipelinerl_core.run.locate import LATEST_KEY, remember_latest
from pipelinerl_core.run.records import CONTROL_KEY, GARBAGE_KEY, HUB_KEY, RUN_KEY, role_key
from pipelinerl_core.run.start_count import count_start
from pipelinerl_core.storage.local import FileStore
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.tools.archive import Archive, archive_runs
from pipelinerl_core.tools.audit import Audit
from pipelinerl_core.tools.retention import Removal, remove_runs, select_runs
from tests.builders import hub_record, put_epoch
from tests.conftest import use_endpoint
from tests.fake_s3 import serving
from tests.unit.tools.retention_case import GARBAGE, contents, do, nothing, refused, write_old_run

STATES = ("finished", "stopped", "running")
LEFT_OUT = {HUB_KEY, CONTROL_KEY, GARBAGE_KEY}


@pytest.fixture
def root(tmp_path):
    return open_store(str(tmp_path / "runs"))


@pytest.fixture
def server(monkeypatch):
    with serving() as server:
        use_endpoint(monkeypatch, server.endpoint)
        yield server


def sizes_of(root):
    return {key: size for key, size in root.sizes("").items() if not key.endswith(GARBAGE_KEY)}


def audited(root, name):
    context = open_run(root.child(name).url)
    return Audit(context.store, context.config).run().problems


def freed(before, after):
    """Objects and bytes, as documents of commands name them."""
    gone = before.keys() - after.keys()
    assert after.keys() <= before.keys()
    return {"num_objects": len(gone), "num_bytes": sum(before[key] for key in gone)}


def said(document):
    return {name: document[name] for name in ("num_objects", "num_bytes")}


def test_a_drill_with_thirty_runs():
    """Collect, remove, archive and restore by age, owner, tag and state; what was said is what was freed."""
    root, other = (open_store(f"memory://{uuid.uuid4().hex}/{name}") for name in ("runs", "archive"))
    runs = {}
    for number in range(30):
        values = {
            "days": number + 0.5, "owner": ("alice@a", "bob@b")[number % 2],
            "tags": (("exp1", "team:x"), ("exp2",))[number // 2 % 2], "state": STATES[number // 4 % 3],
        }  # fmt: skip
        runs[f"run-{number:02d}"] = values
        write_old_run(root, f"run-{number:02d}", **values)
    remember_latest(root.child("run-00").url)

    before = sizes_of(root)
    arguments = ("gc", "--root", root.url, "--older-than", "10d", "--state", "stopped")
    promised = do(*arguments, "--dry-run")
    assert {run["run_id"] for run in promised["runs"]} == {
        name for name, run in runs.items() if run["state"] == "stopped" and run["days"] > 10
    }
    assert said(do(*arguments, "--yes")) == {"num_objects": 0, "num_bytes": 0}
    assert sizes_of(root) == before
    collected = do(*arguments, "--yes")
    assert said(collected) == said(promised) == freed(before, sizes_of(root))
    assert said(promised)["num_objects"] == len(GARBAGE) * len(promised["runs"]) > 0

    before = sizes_of(root)
    arguments = ("rm", "--root", root.url, "--owner", "alice", "--tag", "exp1", "--state", "finished")
    doomed = {
        name for name, run in runs.items()
        if (run["owner"], run["tags"][0], run["state"]) == ("alice@a", "exp1", "finished")
    }  # fmt: skip
    promised = do(*arguments, "--dry-run")
    assert sizes_of(root) == before
    removed = do(*arguments, "--yes")
    assert {run["run_id"] for run in removed["runs"]} == doomed
    assert "run-00" in doomed
    assert set(root.children()) == runs.keys() - doomed
    assert said(removed) == said(promised) == freed(before, sizes_of(root))
    assert json.loads(root.get(LATEST_KEY))["run_id"] == "run-01"

    archived = {name for name in runs.keys() - doomed if runs[name]["state"] == "stopped"}
    originals = {name: contents(root, name) for name in archived}
    moved = do("archive", "--root", root.url, "--state", "stopped", "--to", other.url, "--remove", "--yes")
    assert {run["run_id"] for run in moved["runs"]} == archived == set(other.children())
    assert set(root.children()) == runs.keys() - doomed - archived
    restored = do("archive", "--root", other.url, "--state", "stopped", "--to", root.url)
    assert restored["num_objects"] == moved["num_objects"]
    for name, objects in originals.items():
        assert contents(root, name) == {key: data for key, data in objects.items() if key not in LEFT_OUT}
    for name in root.children():
        assert audited(root, name) == [], name


def test_conditions_and_names_of_a_command(root):
    write_old_run(root, "run-1")
    at = ("--root", root.url)
    for command in ("gc", "rm"):
        assert "not both" in refused(command, "run-1", "--tag", "a", *at, "--yes")
        assert "--older-than 3w: must be a number" in refused(command, "--older-than", "3w", *at, "--yes")
    assert "no terminal" in refused("gc", *at)
    assert "no terminal" in refused("rm", "run-1", *at)
    assert "no terminal" in refused("archive", "run-1", *at, "--to", root.url, "--remove")
    assert "give runs" in refused("rm", *at, "--yes")
    assert "give runs" in refused("archive", *at, "--to", root.url)
    assert "a live run is not removed" in refused("rm", "--state", "running", *at, "--yes")
    assert do("rm", "--tag", "nobody", *at, "--yes")["runs"] == []
    assert "already" in do("archive", "run-1", *at, "--to", root.url, code=2)["errors"][root.child("run-1").url]
    assert root.children() == ["run-1"]


def test_a_run_that_fails_is_named_and_the_others_go_on(root, tmp_path):
    for name, state in (("good", "finished"), ("damaged", "unreadable"), ("live", "running")):
        write_old_run(root, name, state=state)
    at = ("--root", root.url, "--yes")
    document = do("gc", *at, "--now", code=1)
    assert {run["run_id"] for run in document["runs"]} == {"good", "live"}
    assert [url.rpartition("/")[2] for url in document["errors"]] == ["damaged"]
    document = do("rm", "--older-than", "1h", *at, code=1)
    assert [run["run_id"] for run in document["runs"]] == ["good"]
    errors = {url.rpartition("/")[2]: text for url, text in document["errors"].items()}
    assert "this run is live" in errors["live"]
    assert "unreadable" in errors["damaged"]
    assert root.children() == ["damaged", "live"]
    for command in (("rm",), ("archive", "--to", tmp_path / "archive", "--remove")):
        assert "only by its name" in refused(*command, "--state", "unreadable", *at)
    assert [run["run_id"] for run in do("rm", "damaged", *at)["runs"]] == ["damaged"]
    assert "no run at" in do("rm", "live-2", *at, code=2)["errors"]["live-2"]


def test_a_run_of_another_format_is_copied_and_removed_by_its_name(root, tmp_path):
    write_old_run(root, "old")
    store = root.child("old")
    hub = json.loads(hub_record(live={"state": "done"}).model_dump_json())
    for key, value in ((RUN_KEY, json.loads(store.get(RUN_KEY))), (HUB_KEY, {**hub, "of_another_release": 1})):
        store.put(key, json.dumps({**value, "format_version": 3}).encode())
    copied = do("archive", "old", "--root", root.url, "--to", tmp_path / "archive")
    assert [run["run_id"] for run in copied["runs"]] == ["old"]
    store.put(HUB_KEY, b"no JSON")
    with pytest.raises(BrokenRecord, match="not JSON"):
        read_hub_of_any_format(store)
    store.put(HUB_KEY, json.dumps({**hub, "of_another_release": 1, "format_version": 3}).encode())
    assert [run["run_id"] for run in do("rm", "old", "--root", root.url, "--yes")["runs"]] == ["old"]
    assert root.children() == []


def test_a_run_that_starts_after_the_question_is_kept(root):
    objects = write_old_run(root, "run-1")
    removal = Removal(root.child("run-1").url)
    put_epoch(root.child("run-1"), 9, "hub")
    (error,) = remove_runs([removal], nothing).values()
    assert "started meanwhile" in str(error)
    assert contents(root, "run-1").items() >= objects.items()


def test_a_run_that_has_no_hub_yet_is_kept(root):
    write_old_run(root, "run-1", days=0)
    root.child("run-1").delete(root.child("run-1").list("epochs"))
    with pytest.raises(ConfigError, match="may be starting"):
        Removal(root.child("run-1").url)


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_a_run_that_was_started_a_moment_ago_is_kept_in_every_store(tmp_path, scheme):
    own_root = open_store(f"{scheme}://{tmp_path.name}" if scheme == "memory" else str(tmp_path))
    write_old_run(own_root, "run-1")
    run = own_root.child("run-1")
    count_start(run.url, "a-flow-run", 1, 3)
    with pytest.raises(ConfigError, match="was started a moment ago and has no hub yet"):
        Removal(run.url)


def test_a_run_that_may_be_evaluating_is_kept_until_it_has_a_report(root):
    write_old_run(root, "run-1", days=0)
    with pytest.raises(ConfigError, match="may be evaluating"):
        Removal(root.child("run-1").url)
    steps = max(read_commits(root.child("run-1")))
    root.child("run-1").put("report.json", json.dumps({"steps": steps - 1}).encode())  # of an earlier end
    with pytest.raises(ConfigError, match="may be evaluating"):
        Removal(root.child("run-1").url)
    root.child("run-1").put("report.json", json.dumps({"steps": steps}).encode())
    assert remove_runs([Removal(root.child("run-1").url)], nothing) == {}


def test_an_object_that_is_written_before_or_during_a_removal_keeps_the_run(root):
    objects = write_old_run(root, "run-1")
    removal = Removal(root.child("run-1").url)
    root.child("run-1").put("report.json", b"{}")
    (error,) = remove_runs([removal], nothing).values()
    assert "nothing was removed" in str(error)
    assert contents(root, "run-1").items() >= objects.items()
    write = [b"{}"]

    def write_once(*_):
        if write:
            root.child("run-1").put("report.json", write.pop())

    root.child("run-1").delete(["report.json"])
    removal = Removal(root.child("run-1").url)
    (error,) = remove_runs([removal], write_once).values()
    assert "report.json was written during the removal" in str(error)
    assert remove_runs([Removal(root.child("run-1").url)], nothing) == {}
    assert root.children() == []


def test_shared_memory_goes_unless_a_process_maps_it(root, tmp_path, monkeypatch):
    monkeypatch.setattr(locate, "SHARED_MEMORY", tmp_path / "shm")
    for name in ("run-1", "run-2"):
        write_old_run(root, name)
        (tmp_path / "shm" / f"pipelinerl-{name}").mkdir(parents=True)
    weights = tmp_path / "shm" / "pipelinerl-run-2" / "1.safetensors"
    weights.write_bytes(b"x" * 4096)
    with weights.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):  # of a copy under another root
        do("rm", "run-1", "run-2", "--root", root.url, "--yes")
    assert [path.name for path in (tmp_path / "shm").iterdir()] == ["pipelinerl-run-2"]


def test_latest_is_removed_with_the_last_run_and_is_never_that_of_another_user(root, tmp_path, monkeypatch):
    write_old_run(root, "run-1")
    remember_latest(root.child("run-1").url, "alice@a")
    monkeypatch.setattr("getpass.getuser", lambda: "bob")
    for command in (("rm",), ("archive", "--to", tmp_path / "archive", "--remove")):
        document = do(*command, "latest", "--root", root.url, "--yes", code=2)
        assert "you have no run" in document["errors"]["latest"]
    assert root.child("run-1").exists(RUN_KEY)
    monkeypatch.setattr("getpass.getuser", lambda: "alice")
    do("rm", "latest", "--root", root.url, "--yes")
    assert not root.exists(LATEST_KEY)
    assert root.list("") == ["latest.alice.json"]
    assert root.children() == []


class Interrupted(Exception):
    """Stands for the death of the process."""


def fail_after(monkeypatch, method, num_calls):
    """Let a method of FileStore fail from its call number `num_calls` on."""
    calls, original = [], getattr(FileStore, method)

    def counted(*arguments, **options):
        calls.append(arguments)
        if len(calls) > num_calls:
            raise Interrupted
        return original(*arguments, **options)

    monkeypatch.setattr(FileStore, method, counted)


def test_an_interrupted_removal_leaves_a_listed_run_and_can_be_repeated(root):
    wanted = Wanted(state="finished", older_than="3d")
    num_objects = len(write_old_run(root, "run-1", days=5))
    for num_deleted in (*range(0, num_objects, 4), *range(num_objects - 7, num_objects)):
        write_old_run(root, "run-1", days=5)
        with pytest.MonkeyPatch.context() as patch:
            fail_after(patch, "delete", num_deleted)
            with pytest.raises(Interrupted):
                remove_runs([Removal(root.child("run-1").url)], nothing)
        assert [run.run_id for run in list_runs(root)] == ["run-1"]
        if num_deleted < num_objects - 1:  # with run.json alone, only by its name
            assert select_runs(root.url, [], wanted)[0] == [root.child("run-1").url]
        assert do("rm", "run-1", "--root", root.url, "--yes")["num_objects"] == num_objects - num_deleted
        assert root.children() == []


def test_an_interrupted_copy_is_no_run_and_can_be_repeated(root, tmp_path):
    objects = write_old_run(root, "run-1")
    other = open_store(str(tmp_path / "archive"))
    for num_written in range(1, len(objects), 5):
        with pytest.MonkeyPatch.context() as patch:
            fail_after(patch, "put", num_written)
            with pytest.raises(Interrupted):
                archive_runs([Archive(root.child("run-1").url, other.url, removes=True)], nothing)
        assert list_runs(other) == []
        archive = Archive(root.child("run-1").url, other.url)
        assert archive_runs([archive], nothing) == {}
        assert len(archive.written) <= len(objects) - (num_written - 1)  # without the mark
        assert contents(other, "run-1") == contents(root, "run-1") == objects
        assert remove_runs([Removal(other.child("run-1").url)], nothing) == {}


def test_a_copy_between_a_directory_and_s3_survives_refused_requests(root, server):
    objects = write_old_run(root, "run-1")
    archive = Archive(root.child("run-1").url, "s3://bucket/archive")
    server.asked.clear()
    assert archive_runs([archive], nothing) == {}
    other, num_requests = open_store("s3://bucket/archive"), len(server.asked)
    assert audited(other, "run-1") == []
    for number in (num_requests // 2, num_requests - 2):
        server.objects.clear()
        archive = Archive(root.child("run-1").url, other.url, removes=True)
        server.asked.clear()
        server.fault = lambda asked, number=number: 403 if len(server.asked) == number + 1 else None
        (error,) = archive_runs([archive], nothing).values()
        server.fault = lambda asked: None
        assert isinstance(error, StoreError)
        assert contents(root, "run-1") == objects
        assert list_runs(other) == []
    assert archive_runs([Archive(root.child("run-1").url, other.url, removes=True)], nothing) == {}
    assert root.children() == []
    do("archive", "run-1", "--root", other.url, "--to", root.url, "--remove", "--yes")
    assert contents(root, "run-1") == objects
    assert other.list("") == []


def test_a_copy_that_reads_back_otherwise_is_no_run(root, tmp_path, monkeypatch):
    objects = write_old_run(root, "run-1")
    archive = Archive(root.child("run-1").url, str(tmp_path / "archive"), removes=True)
    put = FileStore.put
    monkeypatch.setattr(FileStore, "put", lambda store, key, data: put(store, key, data[:-1] + b"?"))
    (error,) = archive_runs([archive], nothing).values()
    assert isinstance(error, ChecksumMismatch)
    assert not (tmp_path / "archive" / "run-1" / RUN_KEY).exists()
    assert contents(root, "run-1") == objects


def test_a_wrong_listing_makes_no_copy_and_removes_nothing(root, tmp_path, monkeypatch):
    objects = write_old_run(root, "run-1")
    archive = Archive(root.child("run-1").url, str(tmp_path / "archive"), removes=True)
    sizes = FileStore.sizes
    looks = iter([False, True])

    def hide_once(store, prefix):
        listed = sizes(store, prefix)
        hides = prefix == "batches" or (prefix == "" and store.url == archive.url and not next(looks, True))
        return {key: size for key, size in listed.items() if not (hides and key.startswith("batches/"))}

    monkeypatch.setattr(FileStore, "sizes", hide_once)
    (error,) = archive_runs([archive], nothing).values()
    assert "have changed during the copy" in str(error)
    assert list_runs(open_store(str(tmp_path / "archive"))) == []
    monkeypatch.undo()
    assert contents(root, "run-1") == objects


def test_a_copy_to_the_same_place_by_another_name_removes_nothing(root, tmp_path):
    objects = write_old_run(root, "run-1")
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    url = root.child("run-1").url
    for to in (tmp_path / "link", tmp_path / "runs" / ".." / "runs"):
        (error,) = archive_runs([Archive(url, f"file://{to}", removes=True)], nothing).values()
        assert "at this place already" in str(error)
    with pytest.raises(ConfigError, match="at this place already"):
        Archive(url, url)
    assert contents(root, "run-1") == objects


def test_a_live_run_is_copied_and_the_copy_is_not_live(root, tmp_path, monkeypatch):
    write_old_run(root, "run-1", state="running")
    store, other = root.child("run-1"), open_store(str(tmp_path / "archive"))
    for key in (role_key("hub", "hub"), "meetings/00000001.json", "broadcasts/1.json", CONTROL_KEY):
        store.put(key, b"{}")
    with pytest.raises(ConfigError, match="this run is live"):
        Archive(store.url, other.url, removes=True)
    archive = Archive(store.url, other.url)
    get, lost = FileStore.get, sorted(GARBAGE)[-1]

    def remove_once(read, key):
        if key == lost and read.url == store.url:  # as the trainer removes a checkpoint during the copy
            store.delete([key])
        return get(read, key)

    monkeypatch.setattr(FileStore, "get", remove_once)
    assert archive_runs([archive], nothing) == {}
    copy = other.child("run-1")
    assert HubWatch(copy).find_live() is None
    assert copy.list("") == [
        key
        for key in store.list("")
        if key not in LEFT_OUT and key.split("/")[0] not in ("roles", "meetings", "broadcasts")
    ]
    assert audited(other, "run-1") == []
    assert (list_runs(root)[0].state, list_runs(other)[0].state) == ("running", "stopped")
    with pytest.raises(ConfigError, match="this run is live"):
        Archive(copy.url, root.url).copy(nothing)


def test_a_copy_that_has_gone_on_is_not_mixed_with_its_original(root, tmp_path):
    write_old_run(root, "run-1")
    other = open_store(str(tmp_path / "archive"))
    url, copy = root.child("run-1").url, other.child("run-1")
    assert archive_runs([Archive(url, other.url)], nothing) == {}
    put_epoch(copy, 9)
    with pytest.raises(ConfigError, match="started there after the copy"):
        Archive(url, other.url)
    assert archive_runs([Archive(copy.url, root.url)], nothing) == {}  # the newer one replaces the older one
    write_old_run(other, "run-1", owner="another")
    with pytest.raises(ConfigError, match="is another run"):
        Archive(url, other.url)


@pytest.mark.slow
@pytest.mark.s3
def test_retention_on_a_real_s3_server(s3_url, tmp_path):
    root = open_store(s3_url)
    objects = write_old_run(root, "run-1")
    do("archive", "run-1", "--root", s3_url, "--to", tmp_path, "--remove", "--yes")
    assert root.list("") == []
    do("archive", "run-1", "--root", tmp_path, "--to", s3_url)
    assert contents(root, "run-1") == objects
    assert audited(root, "run-1") == []
    promised = do("gc", "--root", s3_url, "--dry-run")
    before = sizes_of(root)
    assert said(do("gc", "--root", s3_url, "--now", "--yes")) == said(promised) == freed(before, sizes_of(root))
    do("rm", "--tag", "x", "--root", s3_url, "--yes")
    assert root.children() == ["run-1"]
