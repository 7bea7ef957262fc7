"""What a replay may change, its limit, its ranking and its page."""

import json
from dataclasses import replace

import pytest

from pipelinerl_core.comparison.whatif.document import document_of, ranking
from pipelinerl_core.comparison.whatif.limit import last_valid, limit_step
from pipelinerl_core.comparison.whatif.page import lead, lines, page
from pipelinerl_core.comparison.whatif.plan import (
    RECORDED,
    name_of,
    open_arm,
    parse_study_arm,
    plan_arms,
    studied_config,
    whatif_store,
)
from pipelinerl_core.comparison.whatif.study import plan_replay, plan_study
from pipelinerl_core.config import load_config
from pipelinerl_core.config.arm import Arm
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.run.context import open_run
from pipelinerl_core.run.jobs import resume_job
from pipelinerl_core.run.records import REPLAY_KEY, EvalRecord, ReplayRecord, eval_key
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.testing.synthetic_run import put_record
from pipelinerl_core.tools.gc import collect_whatif
from tests.builders import put_commit, put_epoch, put_run

STEPS = 8
RECORDED_CONFIG = load_config("quickstart", ["trainer.steps=8"])


@pytest.fixture
def run(tmp_path):
    store = open_store(str(tmp_path / "sums-1"))
    put_run(store, RECORDED_CONFIG, run_id="sums-1")
    fill(store, dict.fromkeys(range(STEPS + 1), 0.8), {0: 0.1, 8: 0.5})
    return open_run(store.url)


def fill(store, ess, accuracies):
    """Commits with ess_sequence, and evaluations."""
    put_epoch(store, 1)
    for step, share in ess.items():
        metrics = {"train/loss": 0.1 * step, "importance/kl": 0.0, "importance/ess_sequence": share}
        put_commit(store, step, metrics=metrics)
    for version, accuracy in accuracies.items():
        record = EvalRecord(
            version=version, num_prompts=100, accuracy=accuracy, low=accuracy - 0.05, high=accuracy + 0.05,
            mean_tokens=5.0, errors=0, seconds=1.0,
        )  # fmt: skip
        put_record(store, eval_key(version), record)


def trained(planned, ess, accuracies, difference=2):
    """An arm as its training and its evaluation leave it."""
    open_arm(planned, None)
    fill(planned.store, ess, accuracies)
    record = ReplayRecord(first_difference=difference, cpu_seconds=3.0, seconds=2.0, finished_at=1.0)
    put_record(planned.store, REPLAY_KEY, record)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("rollouts.group_size=4", "needs other rollouts .* filter needs groups that were not recorded"),
        ("rollouts.filter_zero_variance=true", "filter needs groups that were not recorded"),
        ("schedule.max_lag=1", "groups that the schedule would have chosen"),
        ("prompts.kind=sums", "rollouts of other prompts"),
        ("trainer.groups_per_step=8", "steps of other groups"),
        ("placement.actors=2", "needs more than the recorded rollouts"),
        ("seed=3", "rollouts of another seed"),
        ("learner.lr=2e-4", "the run was recorded with these settings"),
        ("learner.lora_rank=8", "learner.lora_rank: a replay starts from a recorded checkpoint"),
        ("loss.advantage=value", "a checkpoint has a value head or has none"),
        ("loss.knid=ppo", "no such key"),
    ],
)
def test_what_needs_more_than_the_recorded_rollouts_is_refused_in_one_line(override, says):
    with pytest.raises(ConfigError, match=says) as raised:
        studied_config(RECORDED_CONFIG, [override])
    assert "\n" not in str(raised.value)


def test_the_value_head_of_a_recorded_run_cannot_be_removed():
    recorded = load_config("quickstart", ["loss.advantage=value"])
    with pytest.raises(ConfigError, match="recorded with value"):
        studied_config(recorded, ["loss.advantage=leave_one_out"])


def test_an_arm_is_named_by_its_settings_or_by_its_user():
    assert parse_study_arm("learner.lr=1e-4") == Arm("lr-1e-4", ("learner.lr=1e-4",))
    assert parse_study_arm("fast: learner.lr=1e-3 loss.kind=ppo") == Arm("fast", ("learner.lr=1e-3", "loss.kind=ppo"))
    assert name_of(("loss.kind=ppo", "learner.lr=1e-4")) == "kind-ppo-lr-1e-4"
    with pytest.raises(ConfigError, match="not an arm"):
        parse_study_arm("fast")


def test_the_same_command_finds_the_same_arm_and_a_changed_one_makes_another(run):
    arms = [Arm(RECORDED, ()), Arm("ppo", ("loss.kind=ppo",))]
    first, again = plan_arms(run, arms, None, None), plan_arms(run, arms, None, None)
    assert [one.store.url for one in first] == [one.store.url for one in again]
    assert first[1].store.url.startswith(f"{whatif_store(run).url}/arms/ppo-")
    assert (first[1].origin.first, first[1].origin.last) == (1, STEPS)
    (shorter,) = plan_arms(run, arms[1:], 2, None)
    assert shorter.store.url != first[1].store.url
    with pytest.raises(ConfigError, match="its settings are those of arm ppo"):
        plan_study(run, [arms[1], Arm("same", ("loss.kind=ppo",))], None, None)
    with pytest.raises(ConfigError, match="two arms are named ppo"):
        plan_study(run, [arms[1], Arm("ppo", ("learner.lr=1e-3",))], None, None)
    with pytest.raises(ConfigError, match="nothing to study"):
        plan_study(run, [], None, None)
    with pytest.raises(ConfigError, match="--ess-share 2"):
        plan_study(run, arms[1:], None, None, 2.0)
    with pytest.raises(ConfigError, match="--from-step 9 is beyond the last step to replay, 8"):
        plan_study(run, arms[1:], 9, None)


def test_an_arm_is_a_run_that_is_not_replayed_or_resumed_and_gc_removes_it(run, tmp_path):
    (planned,) = plan_arms(run, [Arm("ppo", ("loss.kind=ppo",))], None, None)
    before = {key: run.store.get(key) for key in run.store.list("")}
    trained(planned, {1: 0.8}, {})
    arm = open_run(planned.store.url)
    assert (arm.record.replay_of.run_id, arm.config.loss.kind) == ("sums-1", "ppo")
    with pytest.raises(ConfigError, match=r"an arm of a replay of sums-1 .* Replay sums-1 instead"):
        plan_replay(arm, ["learner.lr=1e-3"], None, None)
    with pytest.raises(ConfigError, match="Resume sums-1 instead"):
        resume_job(planned.store.url, (), "")
    listed = collect_whatif(run.store, run.run_id, dry_run=True)
    assert planned.is_trained
    assert collect_whatif(run.store, run.run_id, dry_run=False) == listed
    assert not planned.is_trained
    assert {key: run.store.get(key) for key in run.store.list("")} == before


def test_the_limit_is_where_the_mean_of_five_steps_falls_below_the_share_of_the_run():
    recorded = dict.fromkeys(range(1, 11), 0.8)
    arm = dict(enumerate([0.8, 0.6, 0.2, 0.1, 0.0, 0.0], 1))
    # Means 0.8, 0.7, 0.533, 0.425, 0.34, then of steps 2 to 6: 0.18.
    assert limit_step(arm, recorded, 0.5) == 5
    assert limit_step(arm, recorded, 0.3) == 6
    assert limit_step(arm, recorded, 0.2) is None
    assert limit_step({}, recorded, 0.5) is None
    assert limit_step(dict.fromkeys(range(1, 11), 0.01), dict.fromkeys(range(1, 11), 0.02), 0.4) is None
    assert (last_valid(None, 10), last_valid(5, 10)) == (10, 4)


def curve(limit, *points):
    return {"limit": limit, "accuracy": [{"version": v, "accuracy": a} for v, a in points]}


def test_arms_are_ranked_at_one_version_that_lies_within_their_limits():
    entries = {
        RECORDED: curve(None, (0, 0.1), (5, 0.3), (10, 0.4)),
        "good": curve(None, (0, 0.1), (5, 0.4), (10, 0.6)),
        "gone": curve(8, (0, 0.1), (5, 0.5), (10, 0.9)),
    }
    found = ranking(entries, 10, True)
    assert found["ranked_version"] == 10
    assert [one["arm"] for one in found["ranking"]] == ["good", RECORDED]
    assert found["unranked"] == {"gone": "its limit is step 8, and version 10 is not before it"}
    both = ranking(entries | {"good": curve(9, (0, 0.1), (5, 0.4), (10, 0.6))}, 10, True)
    assert (both["ranked_version"], [one["arm"] for one in both["ranking"]]) == (5, ["gone", "good", RECORDED])
    assert ranking(entries | {"gone": curve(11, (5, 0.5))}, 10, True)["ranked_version"] == 5
    for nothing in (ranking(entries, 10, False), ranking({**entries, "new": curve(None, (0, 0.1))}, 10, True)):
        assert nothing["ranking"] == []
        assert nothing["unranked"].keys() >= entries.keys()


def test_a_page_is_grey_beyond_the_limit_and_says_so(run):
    planned = plan_study(run, [Arm("fast", ("learner.lr=1e-2",)), Arm("slow", ("learner.lr=1e-5",))], None, None)
    recorded, fast, slow = planned.arms
    steps = range(1, STEPS + 1)
    trained(recorded, dict.fromkeys(steps, 0.8), {0: 0.1, 8: 0.5}, difference=None)
    trained(fast, {step: 0.8 if step < 4 else 0.0 for step in steps}, {0: 0.1, 8: 0.9})
    trained(slow, dict.fromkeys(steps, 0.8), {0: 0.1, 8: 0.3})
    document = planned.write()
    assert json.loads(planned.store.get("whatif.json")) == document
    assert document["exact"]
    # Means 0.8 of three steps, 0.6, 0.48, then of steps 2 to 6: 0.32, 0.16.
    assert document["arms"]["fast"]["limit"] == 7
    assert [one["arm"] for one in document["ranking"]] == [RECORDED, "slow"]
    html = planned.store.get("whatif.html").decode()
    assert html.count('class="shade"') == 0, "slow holds up to the end"
    assert html.count('class="beyond') == 4
    assert "from step 7 the recorded rollouts no longer" in html
    assert lead(document) == "Held-out accuracy of version 8, best first: recorded 0.500, slow 0.300."
    assert "the recorded objective came out bit for bit" in lines(document)


def test_the_area_in_which_no_changed_arm_holds_is_grey(run):
    planned = plan_replay(run, ["learner.lr=1e-2"], None, None)
    ess = {step: 0.8 if step < 4 else 0.0 for step in range(1, STEPS + 1)}
    trained(planned.arms[0], ess, {0: 0.1, 8: 0.9})
    document = planned.write()
    html = planned.store.get("whatif.html").decode()
    assert html.count('class="shade"') == 4
    assert document["ranking"] == []
    assert "Nothing is ranked: no version was evaluated in every arm within the limits" in html


def test_nothing_is_ranked_if_the_recorded_objective_differs(run):
    planned = plan_study(run, [Arm("slow", ("learner.lr=1e-5",))], None, None)
    for arm in planned.arms:
        trained(arm, {1: 0.8}, {8: 0.3}, difference=1)
    document = document_of(run, planned.arms, 0.3, planned.recorded, planned.store.url)
    assert (document["exact"], document["ranking"]) == (False, [])
    assert "Nothing is ranked: the recorded objective did not come out bit for bit." in page(document)
    unfinished = replace(planned, arms=planned.arms)
    unfinished.arms[1].store.delete([REPLAY_KEY])
    assert unfinished.write()["missing"] == ["slow"]
