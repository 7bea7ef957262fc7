"""The plan of a comparison: its runs, their names, which are done, and what fits into the budget."""

import json
import os
from dataclasses import replace

import pytest

from benchmarks.learning import replace_section
from pipelinerl_core.comparison.budget import Budget, dropped_lines
from pipelinerl_core.comparison.plan import Wanted, incomplete_runs, is_complete, plan_comparison, plan_sweep
from pipelinerl_core.comparison.results import HTML_KEY, JSON_KEY, SVG_KEY, Results
from pipelinerl_core.comparison.table import notes
from pipelinerl_core.config.arm import Arm
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.run.locate import create_run, run_url
from pipelinerl_core.run.records import REPORT_JSON_KEY, EvalRecord, commit_key, eval_key
from pipelinerl_core.storage.object_store import open_store
from tests.builders import ManualClock
from tests.synthetic_run import make_commit, put_record

ARMS = (Arm("keep", ("engine.kv=keep",)), Arm("drain", ("engine.kv=drain",)))


def plan_of(**changes):
    wanted = {"source": "quickstart", "arms": ARMS, "overrides": ("trainer.steps=4",), **changes}
    return plan_comparison(Wanted(**wanted))


# ---- plan -----------------------------------------------------------------------------------------------------


def test_runs_are_planned_seed_by_seed_with_one_warm_start_per_seed():
    plan = plan_of(seeds=(0, 2))
    assert [(run.arm, run.seed) for run in plan.runs] == [("keep", 0), ("drain", 0), ("keep", 2), ("drain", 2)]
    assert {(run.config.seed, run.config.model.path) for run in plan.runs} == {
        (0, "builtin:sums?seed=0"), (2, "builtin:sums?seed=2"),
    }  # fmt: skip
    assert [run.config.engine.kv for run in plan.runs] == ["keep", "drain"] * 2


def test_a_model_of_ones_own_is_the_same_for_every_seed(tmp_path):
    plan = plan_of(overrides=(f"model.path={tmp_path}",))
    assert {run.config.model.path for run in plan.runs} == {str(tmp_path)}


def test_a_run_is_named_after_arm_seed_and_digest_of_its_configuration():
    first, again = plan_of().runs[0], plan_of().runs[0]
    assert first.run_id == again.run_id
    assert first.run_id.startswith("keep-s0-")
    assert len(first.run_id.rpartition("-")[2]) == 8
    changed = plan_of(overrides=("trainer.steps=5",)).runs[0]
    assert changed.run_id != first.run_id


def test_changed_code_or_rows_of_the_user_are_new_runs_and_a_new_comparison(tmp_path):
    reward, rows = tmp_path / "reward.py", tmp_path / "rows.jsonl"
    own = (f"reward.function={reward}:score", "prompts.kind=file", f"prompts.path={rows}")
    plans = []
    for code, row in (("def score(): ...", "{}"), ("def score(): return 1", "{}"), ("def score(): ...", '{"a": 1}')):
        reward.write_text(code)
        rows.write_text(row)
        plans.append(plan_of(overrides=own))
    assert len({plan.key for plan in plans}) == len({plan.runs[0].run_id for plan in plans}) == 3
    rows.write_text("{}")
    assert plan_of(overrides=own).key == plans[0].key


def test_more_seeds_or_time_are_the_same_comparison_and_another_target_is_not():
    plan = plan_of(seeds=(0,))
    assert plan_of(seeds=(0, 1, 2), budget_minutes=5.0).key == plan.key
    assert plan_of(seeds=(0,), target=0.4).key != plan.key
    assert plan_of(seeds=(0,), overrides=("trainer.steps=5",)).key != plan.key
    assert plan_of(seeds=(0,), target=0.4).runs == plan.runs, "but its runs are found again"


def test_weights_are_kept_often_enough_unless_the_user_says_otherwise():
    assert plan_of().runs[0].config.weights.durable_every == 5
    assert plan_of(overrides=("weights.durable_every=7",)).runs[0].config.weights.durable_every == 7


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"arms": ARMS[:1]}, "at least two"),
        (
            {"arms": (ARMS[0], Arm("b", ("engine.kvs=keep",)))},
            "arm b: engine.kvs: no such key; did you mean engine.kv",
        ),
        ({"seeds": ()}, "seeds"),
        ({"seeds": (1, 1)}, "seeds 1,1"),
        ({"seeds": (-1,)}, "seeds -1"),
        ({"seeds": (2**63,)}, "seeds 9223372036854775808"),
        ({"arms": (ARMS[0], Arm("b", ARMS[0].overrides))}, "arms keep and b have the same settings"),
        ({"target": -0.1}, "--target -0.1"),
        ({"limit": 0}, "--limit 0"),
        ({"target": 1.1}, "--target 1.1"),
        ({"margin": -0.1}, "--margin -0.1"),
        ({"margin": float("inf")}, "--margin inf"),
        ({"margin": float("nan")}, "--margin nan"),
        ({"overrides": ("seed=7",)}, "every arm has the seeds of --seeds"),
        ({"arms": (ARMS[0], Arm("b", ("seed=7",)))}, "every arm has the seeds of --seeds"),
        ({"overrides": ('tracking={mlflow_uri="http://a:s3cret@h"}',)}, r"Write tracking\.mlflow_uri=URL$"),
        ({"budget_minutes": 0.0}, "--budget-minutes 0"),
        ({"reference": "best"}, "--reference best: no such arm; there are keep, drain"),
        ({"overrides": ("eval.num_prompts=0",)}, "arm keep: eval.num_prompts=0"),
        ({"overrides": ("model.path=builtin:sum",)}, "arm keep: model.path=builtin:sum: no such built-in model"),
    ],
)
def test_bad_input_is_refused_by_name(changes, word):
    with pytest.raises(ConfigError, match=word):
        plan_of(**changes)


def test_a_sweep_has_a_run_for_each_combination_and_each_seed():
    plan = plan_sweep("quickstart", ["learner.lr=1e-6,3e-6", "seed=0,2", "trainer.steps=4"], limit=2)
    assert [(run.arm, run.seed) for run in plan.runs] == [
        ("learner.lr=1e-6", 0), ("learner.lr=3e-6", 0), ("learner.lr=1e-6", 2), ("learner.lr=3e-6", 2),
    ]  # fmt: skip
    assert [run.config.learner.lr for run in plan.runs] == [1e-6, 3e-6] * 2
    assert {run.config.trainer.steps for run in plan.runs} == {4}
    assert plan.runs[0].run_id.startswith("learner.lr-1e-6-s0-"), "a name for a directory"
    assert plan.rewards_to_stop() == [], "each run ends at its last step"
    more = plan_sweep("quickstart", ["trainer.steps=4", "learner.lr=1e-6,3e-6", "seed=0,1,2"])
    assert more.key == plan.key, "more seeds extend a sweep"
    assert {run.run_id for run in plan.runs} < {run.run_id for run in more.runs}


def test_a_sweep_without_seeds_has_that_of_the_configuration_and_one_of_seeds_alone_has_one_arm():
    two = plan_sweep("quickstart", ["learner.lr=1e-6,3e-6", "loss.kind=grpo,dapo"], overrides=["seed=7"])
    assert {run.seed for run in two.runs} == {7}
    assert two.reference == "learner.lr=1e-6,loss.kind=grpo"
    assert len({run.run_id for run in two.runs}) == 4
    assert [run.arm for run in plan_sweep("quickstart", ["seed=1,2"]).runs] == ["quickstart"] * 2


def test_a_login_in_a_grid_is_in_no_name_or_setting(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "")
    plan = plan_sweep("quickstart", ["tracking.mlflow_uri=http://bob:S3cret@h", "seed=0,1"])
    assert "S3cret" not in repr(plan)
    assert {run.config.tracking.mlflow_uri for run in plan.runs} == {"http://h"}
    assert os.environ["MLFLOW_TRACKING_PASSWORD"] == "S3cret"


def test_without_a_target_a_run_is_done_with_its_last_evaluation_and_report(tmp_path):
    planned = plan_sweep("quickstart", ["seed=0,1", "trainer.steps=4"]).runs[0]
    store = write_run(tmp_path, planned, rewards=[0.1] * 4, accuracies={0: 0.2, 2: 0.9, 3: 0.9})
    assert not is_complete(store, planned.config, 0.0)
    assert is_complete(write_run(tmp_path, planned, rewards=[], accuracies={4: 0.2}), planned.config, 0.0)


@pytest.mark.parametrize(
    ("grid", "word"),
    [
        (["learner.lr=1e-6"], "nothing to sweep"),
        (["learner.lr=1e-6,1e-6"], "two arms are named learner.lr=1e-6"),
        (["learner.lr=1e-6,"], "no empty value"),
        (["tracking.mlflow_uri=http://h,http://bob:S3cret@h", "seed=0,1"], "one server for all runs"),
        (["learner.lrs=1,2"], "arm learner.lrs=1: learner.lrs: no such key"),
        (["seed=0,a"], "seeds 0,a"),
    ],
)
def test_a_wrong_grid_is_refused_by_name(grid, word):
    with pytest.raises(ConfigError, match=word):
        plan_sweep("quickstart", grid)


# ---- which runs are done ----------------------------------------------------------------------------------------


def write_run(root, planned, *, rewards, accuracies):
    """The objects of a run as far as the plan looks at them; every version is durable."""
    url = run_url(str(root), planned.run_id)
    create_run(url, planned.config, flow_run_id="f", mlflow=None)
    store = open_store(url)
    for step, reward in enumerate([None, *rewards]):
        commit = make_commit(step)
        durable = replace(commit.manifest, key=f"weights/{step:08d}.2")
        metrics = {} if reward is None else {"reward/mean": reward, "progress/samples": 8.0 * step}
        put_record(store, commit_key(step, 2), commit.model_copy(update={"manifest": durable, "metrics": metrics}))
    for version, accuracy in accuracies.items():
        record = EvalRecord(version=version, num_prompts=10, accuracy=accuracy, mean_tokens=5, errors=0, seconds=1)
        put_record(store, eval_key(version), record)
    store.put(REPORT_JSON_KEY, json.dumps({"ess_mean": 0.9}).encode())
    return store


def test_a_run_is_done_when_trained_evaluated_and_reported(tmp_path):
    plan = plan_of(seeds=(0,))
    planned = plan.runs[0]
    assert len(incomplete_runs(plan, str(tmp_path))) == 2
    store = write_run(tmp_path, planned, rewards=[0.1] * 3, accuracies={0: 0.2, 1: 0.2, 2: 0.2, 3: 0.2})
    assert not is_complete(store, planned.config, 0.5), "three steps of four"
    store = write_run(tmp_path, planned, rewards=[0.1] * 4, accuracies={0: 0.2, 1: 0.2})
    assert not is_complete(store, planned.config, 0.5), "versions 3 and 4 are not evaluated"
    write_run(tmp_path, planned, rewards=[0.1] * 4, accuracies={4: 0.3})
    assert is_complete(store, planned.config, 0.5)
    assert [run.arm for run in incomplete_runs(plan, str(tmp_path))] == ["drain"]
    store.delete([REPORT_JSON_KEY])
    assert not is_complete(store, planned.config, 0.5)


def test_a_run_that_was_stopped_past_the_target_is_done_for_that_target_alone(tmp_path):
    settings = {"seeds": (0,), "overrides": ("trainer.steps=50",)}
    plan = plan_of(**settings, target=0.5)
    rewards, accuracies = [0.3, *[0.61] * 10], {version: 0.1 * version for version in range(7)}
    store = write_run(tmp_path, plan.runs[0], rewards=rewards, accuracies=accuracies)
    assert is_complete(store, plan.runs[0].config, 0.5)
    assert not is_complete(store, plan.runs[0].config, 0.6)


def test_a_run_that_was_stopped_below_the_target_is_not_done_and_continues_to_a_higher_reward(tmp_path):
    plan = plan_of(seeds=(0,), overrides=("trainer.steps=50",), target=0.5)
    store = write_run(tmp_path, plan.runs[0], rewards=[0.61] * 10, accuracies=dict.fromkeys(range(11), 0.4))
    assert not is_complete(store, plan.runs[0].config, 0.5)
    rewards = plan.rewards_to_stop()
    assert rewards[:3] == pytest.approx([0.57, 0.62, 0.67])
    assert rewards[-2] < 1 < rewards[-1], "at last every run continues to its last step"


def test_a_run_with_two_versions_past_the_target_is_done_whatever_its_training_reward(tmp_path):
    plan = plan_of(seeds=(0,), overrides=("trainer.steps=50",), target=0.5)
    store = write_run(tmp_path, plan.runs[0], rewards=[0.3] * 4, accuracies={1: 0.2, 2: 0.5, 3: 0.4, 4: 0.6})
    assert is_complete(store, plan.runs[0].config, 0.5)


def test_evaluations_without_a_reward_have_no_accuracy_and_the_best_is_of_one_version(tmp_path):
    plan = plan_sweep("quickstart", ["seed=0,1", "trainer.steps=4"])
    store = write_run(tmp_path, plan.runs[0], rewards=[0.1] * 4, accuracies={4: 0.0})
    values = {"num_prompts": 10, "mean_tokens": 5, "errors": 0, "seconds": 1}
    put_record(store, eval_key(4), EvalRecord(version=4, accuracy=0.0, **{**values, "errors": 10}))
    for version, accuracy, half, last in ((1, 0.9, 0.1, 3), (2, 0.7, 0.5, 2), (3, 0.6, 0.1, 3)):
        ends = {"low": accuracy - half, "high": accuracy + half, "last_version": last}
        put_record(store, eval_key(version), EvalRecord(version=version, accuracy=accuracy, **ends, **values))
    (entry,) = Results(plan, str(tmp_path)).write([])["runs"]
    assert (entry["figures"]["last_accuracy"], entry["figures"]["best_accuracy"]) == (None, 0.6)


def test_a_run_that_was_trained_further_has_the_figures_of_the_planned_steps(tmp_path):
    plan = plan_sweep("quickstart", ["seed=0,1", "trainer.steps=4"])
    write_run(tmp_path, plan.runs[0], rewards=[0.1] * 6, accuracies={4: 0.2, 6: 0.9})
    document = Results(plan, str(tmp_path)).write([])
    figures = document["runs"][0]["figures"]
    assert (figures["steps"], figures["last_accuracy"], figures["best_accuracy"]) == (4, 0.2, 0.2)
    assert any("was trained further, to step 6" in line for line in notes(document))


def test_the_result_is_written_from_finished_runs_and_remembers_how_long_runs_took(tmp_path):
    plan = plan_of(seeds=(0, 1))
    accuracies = {0: 0.2, 1: 0.3, 2: 0.4, 3: 0.6, 4: 0.7}
    for planned in plan.runs[:2]:
        write_run(tmp_path, planned, rewards=[0.3] * 4, accuracies=accuracies)
    results = Results(plan, str(tmp_path))
    results.add_seconds(plan.runs[0], 40.0)
    document = results.write(list(plan.runs[2:]))
    # committed 0.8 s apart: 0.5 is half way between versions 2 and 3
    assert document["arms"]["keep"]["time_to_target_seconds"]["mean"] == pytest.approx(2.0)
    assert document["arms"]["drain"]["over_reference"]["time_to_target_seconds"]["mean"] == pytest.approx(1.0)
    assert (document["seeds"], document["dropped"]) == ([0], ["seed 1 dropped: budget"])
    assert document["runs"][0]["ended"] == "last step"
    assert json.loads(results.store.get(JSON_KEY)) == document
    assert results.store.exists(SVG_KEY)
    assert results.store.exists(HTML_KEY)
    assert Results(plan, str(tmp_path)).spent() == [("keep", 40.0)]


# ---- budget -----------------------------------------------------------------------------------------------------


def budget_of(seconds, *, spent=(), begun=(0,), limit=1):
    clock = ManualClock()
    return Budget(seconds, spent, begun=begun, limit=limit, clock=clock), clock


def test_without_an_earlier_run_everything_is_begun():
    budget, _ = budget_of(10)
    runs = list(plan_of(seeds=(0, 1)).runs)
    assert budget.trim(runs) == runs
    assert budget.expected_seconds(runs) is None


def test_an_arm_is_expected_to_take_its_mean_time_and_a_new_arm_the_mean_of_all():
    budget, _ = budget_of(1000, spent=[("keep", 100), ("keep", 120)])
    keep, drain = plan_of(seeds=(0,)).runs
    assert budget.expected_seconds([keep, drain]) == 110 + 110
    budget.note("drain", 20)
    assert budget.expected_seconds([keep, drain]) == 110 + 20
    assert budget_of(1000, spent=[("keep", 100)], limit=2)[0].expected_seconds([keep, drain]) == 100


def test_whole_seeds_are_left_out_from_the_last():
    budget, clock = budget_of(500)
    runs = list(plan_of(seeds=(0, 1, 2)).runs)
    _, *pending = budget.trim(runs)
    clock.now += 100
    budget.note("keep", 100)  # five runs of 100 s are pending, 400 s are left: seed 2 goes
    pending = budget.trim(pending)
    assert [(run.arm, run.seed) for run in pending] == [("drain", 0), ("keep", 1), ("drain", 1)]
    assert dropped_lines(budget.dropped, 2) == ["seed 2 dropped: budget"]
    clock.now += 250  # this one took longer: 150 s are left for seed 1's 200
    assert budget.trim(pending[1:]) == []
    assert dropped_lines(budget.dropped, 2) == ["seeds 1, 2 dropped: budget"]


def test_a_seed_that_is_begun_goes_on_while_its_next_run_fits():
    budget, clock = budget_of(450, spent=[("keep", 100), ("drain", 100)])
    runs = list(plan_of(seeds=(0, 1)).runs)
    kept = budget.trim(runs)
    assert len(kept) == 4
    clock.now += 300
    pending = budget.trim(kept[2:])
    assert pending == [], "150 s are left for a seed of 200 s"
    budget, clock = budget_of(450, spent=[("keep", 100), ("drain", 100)], begun=(0, 1))
    clock.now += 300
    pending = budget.trim(kept[2:])
    assert [run.arm for run in pending] == ["keep", "drain"]
    clock.now += 100
    assert budget.trim(pending[1:]) == []
    assert dropped_lines(budget.dropped, 2) == ["seed 1: drain dropped: budget"]


# ---- docs/results/schedules.md ----------------------------------------------------------------------------------


def test_a_section_is_replaced_between_its_marks_and_added_without_them():
    page = "# Results\n\n<!-- bench learning -->\nold\n<!-- /bench learning -->\n\nafter\n"
    replaced = replace_section(page, "bench learning", "new\n")
    assert replaced == "# Results\n\n<!-- bench learning -->\nnew\n<!-- /bench learning -->\n\nafter\n"
    added = replace_section("# Results\n", "bench learning", "new")
    assert added == "# Results\n\n<!-- bench learning -->\nnew\n<!-- /bench learning -->\n"
    assert replace_section(added, "bench learning", "new") == added
