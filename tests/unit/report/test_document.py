"""Figures of the report, worked out by hand from constructed runs."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelinerl_core.data.codec import from_segment, to_segment
from pipelinerl_core.errors import SchemaMismatch
from pipelinerl_core.messages import ActorSample, SwapRecord
from pipelinerl_core.report import utilization
from pipelinerl_core.report.document import weights_table
from pipelinerl_core.report.facts import collect
from pipelinerl_core.run.commits import read_commits
from pipelinerl_core.run.records import RUN_KEY, WEIGHTS_TABLE_KEY, EvalRecord, commit_key, eval_key
from pipelinerl_core.storage.digests import entry_of
from tests.builders import put_epoch, run_record
from tests.synthetic_run import (
    TRAINER_EPOCH,
    Shape,
    build_report,
    make_commit,
    make_rollout,
    put_batch,
    put_record,
    render_report,
    training_row,
    write_run,
)

REQUIRED = {
    "run_id",
    "schedule",
    "engine",
    "steps",
    "wall_seconds",
    "reward_components",
    "reward_first",
    "reward_last",
    "eval_first",
    "eval_last",
    "eval_components",
    "tokens_generated",
    "tokens_trained",
    "num_swaps",
    "swap_pause_seconds",
    "lag",
    "ess_mean",
    "multi_version_fraction",
    "max_versions_in_a_rollout",
    "three_version_rollouts",
    "trainer_idle_fraction",
    "actor_idle_fraction",
    "ledger",
    "tokens_per_second",
    "rollouts_per_second",
    "completion_length",
    "versions",
    "samples",
}


def sample(at, *, running_seconds, num_tokens=0, concurrency=10, version=0):
    return ActorSample(
        at=at,
        engine_version=version,
        running=1,
        waiting=0,
        concurrency=concurrency,
        num_tokens=num_tokens,
        running_seconds=running_seconds,
    )


def commit_at(step, reserved, *, wait=None, actors=None):
    """Reserved at `reserved`, computed 6 s and committed 7 s later."""
    commit = make_commit(step, reserved_at=float(reserved))
    return commit.model_copy(
        update={
            "computed_at": reserved + 6.0,
            "committed_at": reserved + 7.0,
            "metrics": {} if wait is None else {"time/reserve_wait_seconds": wait},
            "actors": actors or {},
        }
    )


def test_trainer_idle_is_waiting_over_the_time_between_first_and_last_commit():
    # Commits at 107, 117 and 127: 20 s. Waits 3 s and 2 s; what was waited before the first commit does not count.
    commits = [
        commit_at(0, 0),
        commit_at(1, 100, wait=90.0),
        commit_at(2, 110, wait=3.0),
        commit_at(3, 120, wait=2.0),
    ]
    assert utilization.trainer_idle_fraction(commits) == pytest.approx(5 / 20)


def test_the_span_has_whole_phases():
    # Phases of two steps: 20 s of generation, then two commits at 107 and 110, 137 and 140, 167 and 170.
    commits = [commit_at(1, 100, wait=20.0), commit_at(2, 103, wait=0.0), commit_at(3, 130, wait=20.0),
               commit_at(4, 133, wait=0.0), commit_at(5, 160, wait=20.0)]  # fmt: skip
    commits = [commit.model_copy(update={"manifest": commit.manifest if commit.step % 2 == 0 else None})
               for commit in commits]  # fmt: skip
    assert utilization.span_seconds(commits) == pytest.approx(30)
    assert utilization.trainer_idle_fraction(commits) == pytest.approx(20 / 30)


def test_trainer_idle_without_measured_waits_is_the_gap_after_computing():
    # Computed at 106 and 116, reserved at 110 and 120: 4 s each, but the first commit is at 107, so 3 s count of one.
    commits = [commit_at(1, 100), commit_at(2, 110), commit_at(3, 120)]
    assert utilization.trainer_idle_fraction(commits) == pytest.approx((3 + 4) / 20)


def test_one_step_has_no_idle_fraction():
    assert utilization.trainer_idle_fraction([commit_at(0, 0), commit_at(1, 100)]) is None
    assert utilization.actor_use([commit_at(1, 100)]) is None


def test_actor_idle_sums_actors_and_starts_with_the_first_commit():
    # Span from 107. Actor a: 100 to 110 at 10 running (3 s of it inside), then 110 to 120 at 8.
    # Actor b, 20 slots: 110 to 120 at 5. Capacity 3*10 + 10*10 + 10*20 = 330, used 3*10 + 80 + 50 = 160.
    commits = [
        commit_at(1, 100, actors={"a/1": sample(100, running_seconds=0, num_tokens=0)}),
        commit_at(
            2,
            110,
            actors={
                "a/1": sample(110, running_seconds=100, num_tokens=1000),
                "b/1": sample(110, running_seconds=7, num_tokens=70, concurrency=20),
            },
        ),
        commit_at(
            3,
            120,
            actors={
                "a/1": sample(120, running_seconds=180, num_tokens=1800),
                "b/1": sample(120, running_seconds=57, num_tokens=570, concurrency=20),
            },
        ),
    ]
    use = utilization.actor_use(commits)
    assert use.idle_fraction == pytest.approx(1 - 160 / 330)
    assert use.tokens_per_second == pytest.approx((300 + 800 + 500) / (120 - 107))


def test_a_restarted_actor_counts_as_idle_between_its_epochs():
    # Epoch 1 stops at 50 sequence-seconds; epoch 2 adds 40 by 120, the time between is idle. Span from 107, a sample
    # there, capacity 13 s * 10.
    commits = [
        commit_at(1, 100, actors={"a/1": sample(107, running_seconds=50)}),
        commit_at(2, 110, actors={"a/2": sample(110, running_seconds=0)}),
        commit_at(3, 120, actors={"a/2": sample(120, running_seconds=40)}),
    ]
    assert utilization.actor_use(commits).idle_fraction == pytest.approx(1 - 40 / 130)


def killed_run():
    """Steps 1 to 3, killed; 1,000 s later resumed with a new trainer and a new actor, steps 4 and 5."""
    before = [
        commit_at(step, 10 * step, wait=1.0, actors={"a/1": sample(10 * step, running_seconds=100 * step)})
        for step in (1, 2, 3)
    ]
    after = [
        commit_at(
            step, 1000 + 10 * step, wait=500.0 if step == 4 else 2.0,
            actors={
                "a/1": sample(30, running_seconds=300),  # restored from the last commit
                "a/5": sample(1000 + 10 * step, running_seconds=100 * (step - 3)),
            },
        ).model_copy(update={"epoch": 9})
        for step in (4, 5)
    ]  # fmt: skip
    waits = [{"engine": float(commit.step)} for commit in [*before, *after]]
    return [commit.model_copy(update={"waits": wait}) for commit, wait in zip([*before, *after], waits, strict=True)]


def test_the_time_in_which_the_whole_run_was_down_belongs_to_no_side():
    # Commits at 17, 27, 37 and 1047, 1057: 20 s and 10 s. Waits 1 + 1 and 2 s. All slots were full.
    commits = killed_run()
    assert [[commit.step for commit in part] for part in utilization.stretches(commits)] == [[1, 2, 3], [4, 5]]
    assert utilization.span_seconds(commits) == 30
    assert utilization.down_seconds(commits) == 1010
    assert utilization.trainer_idle_fraction(commits) == pytest.approx(4 / 30)
    assert utilization.actor_use(commits).idle_fraction == pytest.approx(0.0)
    assert utilization.wait_shares(commits)["engine"] == pytest.approx((2 + 1) / 30)


def test_a_restart_of_the_trainer_alone_is_not_a_time_in_which_the_run_was_down():
    commits = killed_run()
    actors = {"a/1": sample(1040, running_seconds=400)}
    commits[3] = commits[3].model_copy(update={"actors": actors})
    assert len(utilization.stretches(commits)) == 1


def test_the_seconds_of_a_run_are_those_of_start_evaluation_down_and_training(store):
    put_record(store, RUN_KEY, run_record(run_id="r", created_at=0.0))
    for commit in [commit_at(0, 2), *killed_run()]:
        put_record(store, commit_key(commit.step, commit.epoch), commit)
    evaluation = {"version": 0, "num_prompts": 1, "accuracy": 0.5, "mean_tokens": 1.0, "errors": 0, "seconds": 4.0}
    put_record(store, eval_key(0), EvalRecord.model_validate(evaluation))
    put_epoch(store, TRAINER_EPOCH)
    put_epoch(store, 9, adopted_through=3)
    report = build_report(store)
    # Commit 0 at 9 s; the evaluation of 4 s can block only the second until step 1 was reserved.
    assert report["seconds"] == {"start": 9.0, "evaluation": 1.0, "down": 1010.0, "training": 1057 - 9 - 1 - 1010}


def test_evaluation_lasts_until_the_first_actor_starts(store):
    put_record(store, RUN_KEY, run_record(run_id="r", created_at=1000.0))
    put_epoch(store, TRAINER_EPOCH)
    for commit in (commit_at(0, 1003), commit_at(1, 1100, actors={"a/1065": sample(1100, running_seconds=1)})):
        put_record(store, commit_key(commit.step, commit.epoch), commit)
    evaluation = {"version": 0, "num_prompts": 1, "accuracy": 0.5, "mean_tokens": 1.0, "errors": 0, "seconds": 4.0}
    put_record(store, eval_key(0), EvalRecord.model_validate(evaluation))
    # Commit 0 at 1010, the actor's epoch is its start in Unix seconds; step 1 is committed at 1107.
    assert build_report(store)["seconds"] == {"start": 10.0, "evaluation": 55.0, "down": 0.0, "training": 42.0}


@pytest.fixture
def two_step_run(store):
    """A store with two steps, three rollouts, two actors; step 1 trains version 0, step 2 versions 0 and 1."""
    put_record(
        store,
        RUN_KEY,
        run_record(
            run_id="r", created_at=90.0, config={"schedule": {"kind": "pipeline"}, "engine": {"kind": "embedded"}}
        ),
    )
    put_record(store, commit_key(0, 2), commit_at(0, 91))
    first = [
        training_row(make_rollout(spans=[(0, 0, 4)], reward=0.0, actor="a")),
        training_row(make_rollout(spans=[(0, 0, 2)], reward=1.0, actor="b")),
    ]
    second = [training_row(make_rollout(spans=[(0, 0, 3), (1, 3, 10)], reward=1.0, actor="a"), oldest_version=1)]
    swap = SwapRecord(
        actor="a", actor_epoch=1, version=1, at=108.0, pause_seconds=0.01, num_bytes=5, num_running=3, num_tokens=60
    )
    for step, rows, actors, swaps, tokens in (
        (1, first, {"a/1": sample(100, running_seconds=0, num_tokens=50)}, (), {"generated": 70, "ready": 70}),
        (
            2,
            second,
            {"a/1": sample(110, running_seconds=90, num_tokens=100, version=1)},
            (swap, swap),
            {"generated": 120, "trained": 6, "ready": 114},
        ),
    ):
        commit = commit_at(step, 90 + 10 * step, wait=1.0, actors=actors)
        metrics = {**commit.metrics, "importance/ess": 1.0 - 0.1 * step, "weights/copy_seconds": 0.1 * step}
        update = {"batches": put_batch(store, step, 2, rows), "swaps": swaps, "tokens": tokens, "metrics": metrics}
        put_record(store, commit_key(step, 2), commit.model_copy(update=update))
    for version, accuracy in ((2, 0.75), (0, 0.25)):
        put_record(
            store,
            eval_key(version),
            EvalRecord(
                version=version,
                num_prompts=4,
                accuracy=accuracy,
                mean_tokens=2,
                errors=0,
                seconds=1,
                components={"short": accuracy / 2},
            ),
        )


def test_report_by_hand(store, two_step_run):
    report = build_report(store)
    assert (report["run_id"], report["schedule"], report["engine"], report["steps"]) == (
        "r",
        "pipeline",
        "embedded",
        2,
    )
    assert report["wall_seconds"] == pytest.approx(117 - 90)
    assert (report["reward_first"], report["reward_last"]) == (0.5, 1.0)
    assert (report["eval_first"], report["eval_last"]) == (0.25, 0.75)
    assert report["eval_components"] == {"short": {"first": 0.125, "last": 0.375}}
    assert (report["samples"], report["versions"]) == (3, 3)
    # Trained: 4 + 2 tokens of version 0 in step 1 (lag 0), 7 of version 1 in step 2 (lag 0); 3 were masked.
    assert (report["tokens_generated"], report["tokens_trained"], report["tokens_masked_stale"]) == (120, 13, 3)
    assert report["lag"] == {"mean": 0.0, "p99": 0, "max": 0}
    assert report["multi_version_fraction"] == pytest.approx(1 / 3)
    assert (report["max_versions_in_a_rollout"], report["three_version_rollouts"]) == (2, 0)
    assert report["completion_length"] == {"median": 4.0, "p99.5": pytest.approx(4 + 6 * 0.99), "max": 10}
    assert report["num_swaps"] == 1, "a swap that is reported twice is one swap"
    assert report["swap_pause_seconds"] == {"p50": 0.01, "p99": 0.01, "max": 0.01}
    assert report["weights"]["copy_seconds"] == pytest.approx(0.15)
    assert report["weights"]["share"] == pytest.approx(0.3 / report["seconds"]["training"])
    assert report["ess_mean"] == pytest.approx(0.85)
    assert report["trainer_idle_fraction"] == pytest.approx(1 / 10)
    assert report["actor_idle_fraction"] == pytest.approx(0.1)  # 9 of 10 slots
    assert report["rollouts_per_second"] == pytest.approx(1 / 10)
    assert report["tokens_per_second"] == pytest.approx(5.0)
    assert report["ledger"] == {"generated": 120, "trained": 6, "ready": 114}


def test_lag_of_a_trained_old_token_is_counted_from_the_step_before(store, two_step_run):
    rows = [training_row(make_rollout(spans=[(0, 0, 3), (1, 3, 10)]))]  # nothing masked: 3 tokens at lag 1
    update = {"batches": put_batch(store, 2, 2, rows)}
    put_record(store, commit_key(2, 2), commit_at(2, 110).model_copy(update=update))
    lag = build_report(store)["lag"]
    assert lag == {"mean": pytest.approx(3 / 16), "p99": 1, "max": 1}


def test_a_synthetic_run_has_every_figure_and_is_plain_json(store):
    write_run(store, Shape(steps=12), crash_at=5)
    report = build_report(store)
    assert set(report) >= REQUIRED
    assert all(report[key] is not None for key in REQUIRED)
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert report["trainer_idle_fraction"] == pytest.approx(11 * 0.2 / (11 * 0.8) - 0.1 / 8.8, abs=1e-6)
    assert report["actor_idle_fraction"] == pytest.approx(0.05, abs=1e-6)
    assert report["lag"]["max"] == 3
    assert report["tokens_trained"] == report["ledger"]["trained"]
    assert sum(num for name, num in report["ledger"].items() if name != "generated") == report["tokens_generated"]


def test_steps_whose_rows_are_removed_keep_their_means_and_their_tokens(store):
    write_run(store, Shape(steps=12))
    whole = build_report(store)
    store.delete([key for step in range(1, 9) for key in store.list("batches") if f"/{step:08}." in key])
    facts = collect(store)
    assert [step.step for step in facts.steps] == [9, 10, 11, 12]
    assert list(facts.mean_rewards()) == list(range(1, 13))
    rewards = dict(facts.metric("reward/mean"))
    assert facts.mean_rewards()[3] == rewards[3]
    report = build_report(store)
    assert (report["tokens_trained"], report["tokens_masked_stale"]) == (
        whole["ledger"]["trained"], whole["ledger"]["masked_stale"]
    )  # fmt: skip
    rows = pq.read_table(pa.BufferReader(weights_table(facts))).to_pylist()
    assert {row["version"] for row in rows if row["tokens_trained"] is None} == set(range(8))


def test_an_evaluation_without_a_reward_has_no_accuracy_in_documents():
    record = EvalRecord(version=3, num_prompts=8, accuracy=0.0, mean_tokens=1, errors=8, seconds=1)
    assert record.document()["accuracy"] is None
    assert record.model_copy(update={"errors": 0}).document()["accuracy"] == 0.0


def test_a_run_without_a_step_has_a_report(store):
    put_record(store, RUN_KEY, run_record())
    report = build_report(store)
    assert report["steps"] == 0
    assert report["reward_last"] is None
    assert json.dumps(report, allow_nan=False)


def test_weights_table_by_hand(store, two_step_run):
    store.put(WEIGHTS_TABLE_KEY, weights_table(collect(store)))
    rows = pq.read_table(pa.BufferReader(store.get(WEIGHTS_TABLE_KEY))).to_pylist()
    keys = ["version", "actor", "pause_seconds", "bytes", "tokens_sampled", "tokens_trained"]
    assert [tuple(row[key] for key in keys) for row in rows] == [
        (0, "a", None, 2_400_000, 60, 4),  # 60 tokens until its swap
        (0, "b", None, 2_400_000, None, 2),
        (1, "a", 0.01, 2_400_000, 40, 7),  # from 60 to 100
    ]
    assert rows[2]["swapped"].timestamp() == 108.0
    assert rows[2]["published"].timestamp() == pytest.approx(100.65)
    assert rows[0]["digest"] != rows[2]["digest"]


def test_a_batch_of_another_version_is_refused_by_name(store, two_step_run):
    key = next(key for key in store.list("batches"))
    (batch,) = from_segment(store.get(key), key)
    data = to_segment([batch.replace_schema_metadata({"schema": "batch", "schema_version": "2"})])
    store.put(key, data)
    commit = next(
        commit for commit in read_commits(store).values() if key in [entry.name for entry in commit.batches]
    )
    commit = commit.model_copy(update={"batches": (entry_of(key, data),)})
    put_record(store, commit_key(commit.step, commit.epoch), commit)
    with pytest.raises(SchemaMismatch, match="version '2' cannot be read: this release reads 3"):
        build_report(store)


def test_a_damaged_batch_is_left_out_of_the_report(store, two_step_run, caplog):
    key = next(key for key in store.list("batches"))
    store.put(key, store.get(key)[:100])
    build_report(store)
    render_report(store)
    assert "the report has no figures of the rollouts of step 1: " in caplog.text
    assert key in caplog.text


def test_synthetic_batches_have_the_columns_of_the_batch_schema(store):
    from pipelinerl_core.data.schema import BATCH_SCHEMA

    write_run(store, Shape(steps=1))
    with pa.ipc.open_file(store.get(next(iter(store.list("batches"))))) as reader:
        for field in reader.schema:
            assert BATCH_SCHEMA.field(field.name).type.equals(field.type) or pa.types.is_list(field.type), field
