"""The list of runs below a root: order, states, figures, and runs that cannot be read."""

import time

import pytest

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.report.run_list import Wanted, list_runs, run_names, run_table
from pipelinerl_core.run.commits import read_commits
from pipelinerl_core.run.reading import read_record
from pipelinerl_core.run.records import RUN_KEY, RunRecord, commit_key, eval_key, eval_version
from pipelinerl_core.storage.object_store import open_store
from tests.counting_store import CountingStore
from tests.synthetic_run import Shape, put_record, write_run


@pytest.fixture
def root(tmp_path):
    root = open_store(str(tmp_path))
    for name, steps, created_at in (("old-1", 6, 100.0), ("new-2", 4, 200.0)):
        record = write_run(root.child(name), Shape(steps=steps))
        changed = record.model_copy(update={"run_id": name, "created_at": created_at})
        root.child(name).put(RUN_KEY, changed.model_dump_json().encode())
    root.put("comparisons/a/comparison.json", b"{}")
    root.put("mlflow.db", b"")
    return root


def test_runs_are_listed_newest_first_with_their_newest_figures(root):
    new, old = list_runs(root)
    assert (new.run_id, old.run_id) == ("new-2", "old-1")
    assert (old.state, old.step, old.steps, old.model) == ("finished", 6, 6, "builtin:sums")
    assert 0 <= old.reward <= 1
    assert old.held_out_first is not None
    assert old.held_out_last is not None
    assert [run.run_id for run in list_runs(root, limit=1)] == ["new-2"]
    assert run_names(root) == ["new-2", "old-1"]


def test_an_evaluation_of_another_set_hides_none_of_the_runs_own(root):
    store = root.child("old-1")
    before = list_runs(root)[1].held_out_last
    newest = max(eval_version(key) for key in store.list("evals"))
    store.put(f"evals/{newest + 1:08}.hard.json", store.get(eval_key(newest)))
    assert list_runs(root)[1].held_out_last == before


def test_a_run_that_was_killed_is_stopped_and_a_damaged_run_says_why(root):
    killed = root.child("killed-3")
    write_run(killed, Shape(steps=5))
    killed.delete([key for key in killed.list("commits") if "00000005" in key])
    root.put(f"damaged-4/{RUN_KEY}", b"{")
    runs_by_id = {run.run_id: run for run in list_runs(root)}
    assert (runs_by_id["synthetic"].state, runs_by_id["synthetic"].step) == ("stopped", 4)
    assert runs_by_id["damaged-4"].state == "unreadable"
    assert RUN_KEY in runs_by_id["damaged-4"].problem


def test_a_run_costs_few_requests_however_long_the_run_is(tmp_path):
    root = open_store(str(tmp_path))
    write_run(root.child("long"), Shape(steps=40))
    counted: list[CountingStore] = []

    class Root(CountingStore):
        def child(self, prefix):
            counted.append(CountingStore(super().child(prefix)))
            return counted[-1]

    assert list_runs(Root(root))[0].step == 40
    assert sum(store.total for store in counted) <= 14


def test_runs_are_found_by_owner_tag_and_state(root):
    for name, owner, tags in (("old-1", "alice@a", ["exp42"]), ("new-2", "bob@a", ["team:x", "exp42"])):
        record = read_record(root.child(name), RUN_KEY, RunRecord)
        config = {**record.config, "tracking": {**record.config["tracking"], "tags": tags}}
        changed = record.model_copy(update={"owner": owner, "config": config})
        root.child(name).put(RUN_KEY, changed.model_dump_json().encode())

    def names(**wanted):
        return [run.run_id for run in list_runs(root, wanted=Wanted(**wanted))]

    assert names() == names(tag="exp42") == names(owner="@a") == names(state="finished") == ["new-2", "old-1"]
    assert names(owner="alice") == ["old-1"]
    assert names(tag="team") == names(tag="team:x") == ["new-2"]
    assert names(tag="team:y") == names(state="running") == names(tag="x") == []
    head, new, _ = run_table(list_runs(root))
    assert head.index("OWNER") == new.index("bob@a")
    assert new.endswith("team:x,exp42")


def test_runs_are_found_by_the_age_of_their_last_activity(root):
    def names(older_than, **values):
        return [run.run_id for run in list_runs(root, wanted=Wanted(older_than=older_than), **values)]

    now = time.time()
    record = read_record(root.child("new-2"), RUN_KEY, RunRecord)
    begun = record.model_copy(update={"run_id": "begun-3", "created_at": now - 7200})
    put_record(root.child("begun-3"), RUN_KEY, begun)
    store = root.child("old-1")
    newest = read_commits(store)[6]
    put_record(store, commit_key(6, newest.epoch), newest.model_copy(update={"committed_at": now - 2 * 86400}))
    root.put(f"damaged-4/{RUN_KEY}", b"{")
    assert names("") == ["begun-3", "new-2", "old-1", "damaged-4"]
    assert names("90min") == ["begun-3", "new-2", "old-1"]
    assert names("2.5 h") == ["new-2", "old-1"]
    assert names("30d") == ["new-2"]
    assert names("30d", with_unreadable=True) == ["new-2", "damaged-4"]
    for wrong in ("30", "d", "-1d", "1w"):
        with pytest.raises(ConfigError, match="must be a number with min, h or d"):
            Wanted(older_than=wrong)


def test_the_table_has_aligned_columns(root):
    head, new, old = run_table(list_runs(root), now=200.0 + 7200)
    assert head.index("STATE") == new.index("finished") == old.index("finished")
    assert "2 h ago" in new
    assert run_table([]) == ["no runs yet"]
