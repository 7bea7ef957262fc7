"""The table of sampled rollouts: which it holds, what its cells say, and that it can be made again."""

import json

from pipelinerl_core.report.rollout_table import COLUMNS, MAX_STEPS, ROWS_PER_STEP, RolloutTable
from pipelinerl_core.run.follow import RunFollower
from pipelinerl_core.storage.object_store import open_store
from tests.fakes import MemoryStore
from tests.synthetic_run import Shape, write_run


def run_of(steps):
    store = MemoryStore()
    write_run(store, Shape(steps=steps))
    follower = RunFollower(store)
    follower.refresh()
    return store, follower.commits


def test_rows_are_json_and_describe_the_sampled_rollouts():
    store, commits = run_of(3)
    table = RolloutTable(store, 3, decode=lambda ids: "".join(chr(97 + token_id % 26) for token_id in ids))
    assert table.update(commits, limit=10)
    json.dumps(table.rows, allow_nan=False)
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in table.rows]
    assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)
    assert {row["step"] for row in rows} == {1, 2, 3}
    for row in rows:
        assert len(row["completion"]) == row["tokens"] > 0
        assert (row["outcome"], row["finish_reason"], row["actor"]) == ("scored", "stop", "actor-0")
        newest = max(int(version) for version in row["versions"].split(", "))
        assert newest <= row["step"] - 1
        assert row["lag"] is None or row["lag"] >= 0
    assert [(step, row.step, row.started_at < row.finished_at) for step, row in sorted(table.traced.items())] == [
        (step, step, True) for step in (1, 2, 3)
    ]
    groups = [(row["step"], row["group"]) for row in rows]
    assert len(set(groups)) == len(groups), "one of each group"


def test_a_long_run_has_a_bounded_table_with_its_first_and_last_step():
    table = RolloutTable(open_store("memory://none"), 1234, None)
    steps = [step for step in range(1235) if table.has_row(step)]
    assert (steps[0], steps[-1]) == (1, 1234)
    assert 40 <= len(steps) <= MAX_STEPS + 1
    short = RolloutTable(open_store("memory://none"), 7, None)
    assert [step for step in range(8) if short.has_row(step)] == list(range(1, 8))


def test_a_run_that_is_read_again_makes_the_same_table_for_any_number_of_updates():
    store, commits = run_of(5)
    slowly = RolloutTable(store, 5, None)
    for last in (2, 2, 4, 5):
        slowly.update({step: commit for step, commit in commits.items() if step <= last}, limit=2)
    while slowly.update(commits):
        pass
    at_once = RolloutTable(store, 5, None)
    at_once.update(commits, limit=99)
    assert slowly.rows == at_once.rows
    assert len(at_once.rows) <= 5 * ROWS_PER_STEP
    assert not at_once.update(commits, limit=99)


def test_a_batch_that_is_gone_has_no_rows_and_stops_nothing():
    store, commits = run_of(3)
    store.delete([entry.name for entry in commits[2].batches])
    table = RolloutTable(store, 3, None)
    table.update(commits, limit=99)
    assert {row[0] for row in table.rows} == {1, 3}
