"""No wrong answer of a store, foreign object, link or race makes a removal lose what it must keep."""

import json
import os
import time

import pytest
import typer
from typer.testing import CliRunner

from pipelinerl.flows import cli
from pipelinerl.flows.cli.retention import ask, repeatable
from pipelinerl_core.errors import ConfigError, StoreError
from pipelinerl_core.report.run_list import Wanted, list_runs
from pipelinerl_core.run import locate
from pipelinerl_core.run.records import GARBAGE_KEY, REPORT_HTML_KEY, RESUME_KEY, RUN_KEY, STARTS_KEY
from pipelinerl_core.storage.local import FileStore
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.tools import gc as gc_tool
from pipelinerl_core.tools import retention
from pipelinerl_core.tools.archive import Archive, archive_runs
from pipelinerl_core.tools.retention import Removal, remove_runs, select_runs
from tests.unit.tools.retention_case import contents, do, nothing, refused, write_old_run


@pytest.fixture
def root(tmp_path):
    return open_store(str(tmp_path / "runs"))


@pytest.fixture
def run(root):
    write_old_run(root, "run-1", days=5)
    return root.child("run-1")


def test_one_wrong_listing_of_commits_removes_no_run(root, run, tmp_path, monkeypatch):
    objects = contents(root, "run-1")
    listing = FileStore.list
    monkeypatch.setattr(
        FileStore, "list", lambda store, prefix: [] if prefix == "commits" else listing(store, prefix)
    )
    wanted = Wanted(state="stopped", older_than="3d")
    urls, _ = select_runs(root.url, [], wanted)
    assert urls == [run.url], "without its commits the finished run looks stopped"
    removal = Removal(run.url, wanted)
    archive = Archive(run.url, str(tmp_path / "archive"), removes=True, wanted=wanted)
    monkeypatch.undo()
    for errors in (remove_runs([removal], nothing), archive_runs([archive], nothing)):
        (error,) = errors.values()
        assert "is finished" in str(error)
        assert "nothing was removed" in str(error)
    assert contents(root, "run-1") == objects


def test_a_command_checks_the_conditions_again(root, run, monkeypatch):
    listing, looks = FileStore.list, iter([True, True])  # the selection and the question

    def hide(store, prefix):
        return [] if prefix == "commits" and next(looks, False) else listing(store, prefix)

    monkeypatch.setattr(FileStore, "list", hide)
    document = do("rm", "--state", "stopped", "--older-than", "3d", "--root", root.url, "--yes", code=1)
    assert "do not hold" in document["errors"][run.url]
    assert run.exists(RUN_KEY)


def test_a_link_inside_a_run_and_a_link_to_a_run_are_refused(root, run, tmp_path):
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "state").write_bytes(b"x")
    path, at = tmp_path / "runs" / "run-1", ("--root", root.url, "--yes")
    links = {path / "checkpoints" / "00000009.1": tmp_path / "large", path / "weights" / "gone": tmp_path / "nothing"}
    for link, target in links.items():
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(target)
        assert str(link) in do("rm", "run-1", *at, code=2)["errors"][run.url]
        for remove in ([], ["--remove"]):
            arguments = ("archive", "run-1", "--to", tmp_path / "archive", *remove, *at)
            assert str(link) in do(*arguments, code=2)["errors"][run.url]
        link.unlink()
    (tmp_path / "runs" / "best").symlink_to(path)
    assert "is a link" in do("rm", "best", *at, code=2)["errors"][root.child("best").url]
    assert run.exists(RUN_KEY)
    (path / ".#report.html").symlink_to("editor@host.1")
    assert do("rm", "run-1", *at)["runs"]


def test_a_repeated_copy_that_is_interrupted_is_no_run(root, run, tmp_path, monkeypatch):
    other = str(tmp_path / "archive")
    assert archive_runs([Archive(run.url, other)], nothing) == {}
    copy = open_store(other).child("run-1")
    archive = Archive(run.url, other)
    assert archive_runs([archive], nothing) == {}
    assert archive.written == []
    assert copy.exists(RUN_KEY)
    run.put("batches/00000004.1/0000.arrow", b"rows")
    put = FileStore.put

    def fail(store, key, data, **options):
        if key.startswith("batches/"):
            raise StoreError("refused")
        put(store, key, data, **options)

    monkeypatch.setattr(FileStore, "put", fail)
    assert archive_runs([Archive(run.url, other)], nothing).keys() == {run.url}
    assert list_runs(open_store(other)) == []
    monkeypatch.undo()
    assert archive_runs([Archive(run.url, other)], nothing) == {}
    assert contents(open_store(other), "run-1") == contents(root, "run-1")


def test_foreign_objects_stay_and_a_run_inside_a_run_is_refused(root, run, tmp_path):
    at = ("--root", root.url, "--yes")
    run.put("notes.txt", b"mine")
    for key in ("logs/a.log", "code/0a.py", "marks/run.json/0a", "broadcasts/1.json", GARBAGE_KEY, REPORT_HTML_KEY):
        run.put(key, b"of the run")
    run.put("weights/old/my/model.bin", b"mine")
    write_old_run(run, "inner")
    for command in (("rm",), ("archive", "--to", tmp_path / "archive", "--remove")):
        assert "another run inside" in do(*command, "run-1", *at, code=2)["errors"][run.url]
    run.delete([f"inner/{key}" for key in run.child("inner").list("")])
    other = root.child("run-2")
    write_old_run(root, "run-2")
    for to in (run.url, f"{run.url}/backup"):
        assert "inside the run" in do("archive", "run-2", "--to", to, "--root", root.url, code=2)["errors"][other.url]
    (removed,) = do("rm", "run-1", *at)["runs"]
    assert removed["kept"] == run.list("") == ["notes.txt", "weights/old/my/model.bin"]


@pytest.mark.parametrize("key", [STARTS_KEY, RESUME_KEY])
def test_a_start_before_and_during_a_removal_keeps_the_run(run, key, monkeypatch):
    run.put(key, b"{}")
    os.utime(f"{run.url.removeprefix('file://')}/{key}", (0, 0))
    removal = Removal(run.url)
    run.put(key, b"[]")
    os.utime(f"{run.url.removeprefix('file://')}/{key}", (0, 0))
    (error,) = remove_runs([removal], nothing).values()
    assert "started meanwhile" in str(error)
    monkeypatch.setattr(retention, "_DELETED_AT_ONCE", 2)
    num_before, deleted = len(run.list("")), []

    def advance(_, num):
        deleted.append(num)
        if sum(deleted) == 1:
            run.put(key, b"{ }")

    (error,) = remove_runs([Removal(run.url)], advance).values()
    assert "started meanwhile" in str(error)
    assert sum(deleted) == num_before - len(run.list("")) == 2
    assert run.exists(RUN_KEY)


def test_a_run_that_was_started_and_has_no_hub_yet_is_kept(run):
    run.put(STARTS_KEY, b"{}")
    with pytest.raises(ConfigError, match="has no hub yet"):
        Removal(run.url)
    then = time.time() - 700
    os.utime(f"{run.url.removeprefix('file://')}/{STARTS_KEY}", (then, then))
    assert Removal(run.url).sizes


def test_an_object_of_another_size_keeps_the_run(run):
    run.put("report.html", b"a")
    removal = Removal(run.url)
    run.put("report.html", b"longer")
    (error,) = remove_runs([removal], nothing).values()
    assert "have changed" in str(error)
    assert run.exists(RUN_KEY)


def test_an_empty_condition_selects_nothing(root, run, tmp_path):
    at = ("--root", root.url, "--yes")
    for command in (["gc"], ["rm"], ["archive", "--to", tmp_path / "archive"]):
        for option in ("--owner", "--tag", "--state", "--older-than"):
            other = "--tag" if option == "--state" else "--state"
            assert f"{option} is empty" in refused(*command, option, "", other, "finished", *at)
    assert "not a run id" in refused("gc", "", *at)
    assert run.exists(RUN_KEY)


def test_a_removal_takes_the_whole_owner(root, run):
    at = ("--root", root.url, "--dry-run")
    for owner, num_runs in (("alice", 1), ("alice@a", 1), ("ali", 0), ("a", 0)):
        assert len(do("rm", "--owner", owner, *at)["runs"]) == num_runs, owner
        assert len(do("gc", "--owner", owner, *at)["runs"]) == num_runs, owner
    assert len(list_runs(root, wanted=Wanted(owner="ali"))) == 1


def test_a_root_that_does_not_exist_is_refused_and_no_target_is_made(root, tmp_path):
    missing, other = tmp_path / "missing", tmp_path / "archive"
    for command in (["gc"], ["rm", "--tag", "a"], ["archive", "--tag", "a", "--to", other]):
        assert "is no directory" in refused(*command, "--root", missing, "--yes")
    write_old_run(root, "run-1")
    do("archive", "--tag", "nobody", "--to", other, "--root", root.url)
    assert not other.exists()


def test_shared_memory_that_is_used_again_after_the_question_stays(root, run, tmp_path, monkeypatch):
    monkeypatch.setattr(locate, "SHARED_MEMORY", tmp_path / "shm")
    staged = tmp_path / "shm" / "pipelinerl-run-1" / "staged"
    staged.mkdir(parents=True)
    memory = gc_tool.find_shared_memory(root.url)
    assert len(memory) == 1
    (staged / f"actor-0.{os.getpid()}").mkdir()
    assert gc_tool.delete_shared_memory(root.url, memory) == {}
    assert staged.is_dir()


def test_a_damaged_run_hides_no_other_run(root, run):
    for name, tags in (("null", None), ("text", "abc"), ("numbers", [1, "a"])):
        write_old_run(root, name)
        record = json.loads(root.get(f"{name}/{RUN_KEY}"))
        record["config"]["tracking"]["tags"] = tags
        root.put(f"{name}/{RUN_KEY}", json.dumps(record).encode())
    assert {listed.name: listed.tags for listed in list_runs(root)} == {
        "run-1": (), "null": (), "text": (), "numbers": ("a",),
    }  # fmt: skip


def test_an_error_of_one_run_or_of_latest_does_not_end_the_others(root, run, monkeypatch, caplog):
    write_old_run(root, "run-2")
    removals = [Removal(root.child(name).url) for name in ("run-1", "run-2")]

    def fail(*_):
        raise OSError("no such device")

    monkeypatch.setattr(removals[0].store, "discard", fail)
    monkeypatch.setattr(retention, "update_latest", fail)
    errors = remove_runs(removals, nothing)
    assert [*errors] == [run.url]
    assert "no such device" in str(errors[run.url])
    assert "latest.json is not set" in caplog.text
    assert root.children() == ["run-1"]


def test_the_question_names_owner_state_age_and_root_and_ctrl_c_is_an_interrupt(root, run, monkeypatch, capsys):
    num_objects = len(run.list(""))
    monkeypatch.setattr("pipelinerl.flows.cli.retention.require_yes", lambda **_: None)
    for command in (["rm", "run-1"], ["gc", "--now"]):
        ended = CliRunner().invoke(cli.app, [*command, "--root", root.url], input="n\n")
        assert ended.exit_code == 1
        assert f"(alice@a, finished, 5 d ago, {root.url})" in ended.output
    assert len(run.list("")) == num_objects

    class Interrupted:
        def readline(self, *_):
            raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin", Interrupted())
    with pytest.raises(typer.Exit) as ended, repeatable("rm"):
        ask([], "Remove?", yes=False)
    assert ended.value.exit_code == 130
    assert "interrupted; the same `pipelinerl rm`" in capsys.readouterr().err
