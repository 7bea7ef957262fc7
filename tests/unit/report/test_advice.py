"""The bottleneck by hand, and what the advice says to set. N = 16 groups of 8, so a step has 128 rollouts."""

import pytest

from pipelinerl_core.report import utilization
from pipelinerl_core.report.advice import (
    Evidence,
    advice,
    bottleneck,
    clipped_advice,
    quarantine_advice,
    refused_advice,
)
from pipelinerl_core.report.live_view import status_of
from pipelinerl_core.run.follow import RunFollower
from pipelinerl_core.run.records import Commit
from pipelinerl_core.types import LengthTotals
from tests.builders import commit_record
from tests.synthetic_run import Shape, build_report, make_commit, write_run


def config(**schedule) -> dict:
    return {
        "engine": {"concurrency": 96, "pace": False},
        "schedule": {"max_lag": 4, **schedule},
        "trainer": {"groups_per_step": 16},
        "rollouts": {"group_size": 8},
        "placement": {"actors": 2},
    }


def evidence(trainer_idle: float, actor_idle: float, delay_seconds: float = 0.0, spread=None, **waits) -> Evidence:
    return Evidence(
        trainer_idle=trainer_idle, actor_idle=actor_idle, delay_seconds=delay_seconds, waits=waits, spread=spread
    )


def text_of(measured: Evidence, **schedule) -> str:
    return advice(measured, {}, config(**schedule))["advice"]


@pytest.mark.parametrize(
    ("measured", "kind"),
    [
        (evidence(0.03, 0.02, 0.010), "trainer"),  # paced: full slots, held back
        (evidence(0.03, 0.40), "trainer"),  # not paced: the window keeps slots empty
        (evidence(0.10, 0.05), "balanced"),
        # Where the hub did not measure, empty slots decide.
        (evidence(0.40, 0.02), "engine"),
        (evidence(0.25, 0.33), "window"),
        # Where it did, its word counts: slots may stand empty for other reasons than the window.
        (evidence(0.31, 0.30, engine=0.28, window=0.03), "engine"),
        (evidence(0.30, 0.10, engine=0.20, window=0.10), "window"),  # a third of the slots stood empty meanwhile
        (evidence(0.30, 0.10, engine=0.05, window=0.05, stale_wait=0.20), "stale_wait"),
        (evidence(0.30, 0.10, engine=0.15, window=0.05, stale_wait=0.10), "engine"),
    ],
)
def test_the_bottleneck_is_the_side_that_nobody_waits_for(measured, kind):
    assert bottleneck(measured, takes_turns=False) == kind
    assert bottleneck(measured, takes_turns=True) == "turns"


def test_engines_that_are_waited_for_are_multiplied():
    # Generation must be 1 / (1 - 0.4) = 1.67 times as fast: ceil(2 * 1.67) = 4 actors, whose 384 sequences need
    # max_lag 1 + ceil(384 * 2 / 128) = 7.
    text = text_of(evidence(0.40, 0.02, spread=2.0, engine=0.38, window=0.02))
    assert "waited 40% of the time (38% for the engines, 2% with slots empty for a full window), 2% of" in text
    assert "with generation 1.7 times as fast: set placement.actors=4 (now 2) with schedule.max_lag=7 (now 4)" in text
    # With completions of one length 4 actors are full at 1 + ceil(384 / 128) = 4, which is set already.
    assert "schedule.max_lag" not in text_of(evidence(0.40, 0.02, spread=1.0, engine=0.40))


@pytest.mark.parametrize(
    ("environment", "setting"),
    [
        ({"path": "mine.py:Game"}, "environment.workers=2 (now 1)"),
        ({"kind": "command", "command": ["a"], "programs": 4, "reward": "posted"}, "environment.programs=8 (now 4)"),
    ],
)
def test_a_window_full_of_episodes_that_wait_for_their_environment(environment, setting):
    run_config = {**config(max_lag=9), "environment": environment, "prompts": {"kind": "file", "path": "tasks.jsonl"}}
    text = advice(evidence(0.89, 0.95, spread=1.0, engine=0.07, window=0.82), {}, run_config)["advice"]
    assert f"the episodes of the window wait for their environment. Set {setting} if cores are idle" in text


def test_a_window_that_is_too_small_for_the_lengths_is_opened_by_the_formula():
    # 192 sequences, longest 2.8 times the mean: 1 + ceil(192 * 2.8 / 128) = 1 + ceil(4.2) = 6.
    text = text_of(evidence(0.25, 0.33, spread=2.8, window=0.15, engine=0.10))
    assert "Set schedule.max_lag=6 (now 4): 1 + ceil(192 sequences * 2.8 longest over mean length / (8 * 16))" in text


def test_a_window_that_is_large_enough_was_taken_by_bursts():
    # 1 + ceil(192 * 1.5 / 128) = 4: full engines have room.
    text = text_of(evidence(0.25, 0.33, spread=1.5, window=0.15, engine=0.10))
    assert "schedule.max_lag=4 is enough for full engines" in text
    assert "Set engine.pace=true, or schedule.max_lag=5 (now 4)." in text


def test_waiting_for_old_groups_is_named():
    text = text_of(evidence(0.30, 0.05, spread=1.5, stale_wait=0.28, engine=0.02), stale="wait")
    assert "28% for groups that would become stale" in text
    assert "Set schedule.max_lag=5 (now 4), or schedule.stale=mask" in text


def test_a_slow_trainer_needs_fewer_actors():
    # 60 % of the slots stood empty: 2 * 0.4 = 0.8 actors do the work; a trainer 1 / 0.4 times as fast would use both.
    text = text_of(evidence(0.02, 0.60))
    assert "a faster trainer does, up to 2.5 times as fast. placement.actors=1 (now 2) is enough." in text
    assert "the engines paused 10.0 ms after each decode step" in text_of(evidence(0.02, 0.01, 0.010))


def test_turns_are_by_design_and_their_price_is_named():
    # Generation takes 60 % of the time, 48 % with full slots, training 40 %: overlapped at most 1 / 0.48 = 2.1 times
    # as fast. Phases of 8 steps need max_lag 7.
    text = text_of(evidence(0.60, 0.50, engine=0.48, window=0.12), kind="conventional", steps_per_phase=4, max_lag=4)
    assert text.startswith("schedule.kind=conventional takes turns by design: the trainer waited 60% of the time")
    assert "12% of the time was lost to empty slots while the last rollouts of a phase ended" in text
    assert "schedule.steps_per_phase=8 (now 4) with schedule.max_lag=7 (now 4) about halves that" in text
    assert "schedule.kind=pipeline keeps the slots full and overlaps the turns: at most 2.1 times as fast" in text
    short = text_of(evidence(0.60, 0.50, engine=0.58, window=0.02), kind="conventional", steps_per_phase=4)
    assert "steps_per_phase" not in short, "a small loss is not worth a change"


def test_april_is_told_the_alpha_that_keeps_its_slots_full():
    # 1 + 192 * 2 / 128 = 4, which needs max_lag 3.
    measured = evidence(0.60, 0.30, spread=2.0, engine=0.50, window=0.10)
    text = text_of(measured, kind="april", alpha=1.5, max_lag=2)
    assert "10% of the time was lost to slots that were empty before a step had its groups" in text
    assert "schedule.alpha=4 (now 1.5) with schedule.max_lag=3 (now 2) keeps them full" in text
    assert "schedule.alpha=" not in text_of(measured, kind="april", alpha=4, max_lag=3)


def tokens(num: int, length: int) -> LengthTotals:
    return LengthTotals(num_tokens=num, length_sum=num * length)


@pytest.mark.parametrize(
    ("lost", "cure"),
    [
        ("masked_stale", "schedule.max_lag higher (now 4)"),
        ("dropped_stale", "schedule.stale=mask"),
        ("superseded", "placement.lease_seconds higher (now 10)"),
        ("failed", "reward.timeout_seconds higher (now 5)"),
        ("filtered", "rollouts.filter_zero_variance=false"),
    ],
)
def test_a_length_bias_is_named_with_the_class_that_takes_the_long_completions(lost, cure):
    # 60 tokens of completions of 10 trained, 20 of 40 lost, 20 of 10 ready: (80 * 10 + 20 * 40) / 100 = 16 in all.
    lengths = {"generated": tokens(80, 10) + tokens(20, 40), "trained": tokens(60, 10), lost: tokens(20, 40)}
    text = advice(evidence(0.1, 0.1), lengths, config())["advice"]
    assert "shorter completions than generated ones (mean 10.0 against 16.0 tokens, 0.62)" in text
    assert f"20% of the tokens ended as {lost}, from completions of 40.0." in text
    assert cure in text


def test_a_quarantine_is_named_with_its_steps():
    commits = [
        commit_record(step, 1, metrics={"train/quarantined_groups": number}, tokens={"quarantined": 120 * (step > 1)})
        for step, number in enumerate((0, 0, 4, 0, 8))
    ]
    assert "not finite at step 2, 4: 120 tokens were quarantined" in quarantine_advice(commits)
    assert quarantine_advice(commits[:2]) == quarantine_advice([]) == ""


def clipped(*shares):
    return [commit_record(step, 1, metrics={"importance/ratio_clipped_fraction": share} if share is not None else {})
            for step, share in enumerate(shares)]  # fmt: skip


def test_bounds_that_cut_many_tokens_are_named_whatever_the_lengths_allow():
    run_config = {**config(), "loss": {"kind": "gspo", "negative_kl_max": 0.1}, "rollouts": {"max_tokens": 4000}}
    text = clipped_advice(clipped(None, 0.2, 0.4), run_config)
    assert text.startswith("30% of the trained tokens are beyond a bound of loss.kind=gspo")
    assert "loss.clip_low (now 0.02), loss.clip_high (now 0.02), loss.negative_kl_max (now 0.1), until" in text
    assert text.endswith("schedule.max_lag lower (now 4)")
    # The share of the newest 20 steps counts.
    assert clipped_advice(clipped(*[0.9] * 30, *[0.1] * 20), run_config) == ""
    assert [clipped_advice(few, run_config) for few in (clipped(0.2), clipped(None), [])] == ["", "", ""]
    assert clipped_advice(clipped(0.9), {"engine": {"warp": 9}}) == ""


def halves(*shares):
    """Commits with these refused shares of long and of short rollouts."""
    names = ("train/long_refused_fraction", "train/short_refused_fraction")
    lags = {"lag/long_mean": 5.9, "lag/short_mean": 0.75}
    return [commit_record(step, 1, metrics=dict(zip(names, values, strict=True)) | lags)
            for step, values in enumerate(shares)]  # fmt: skip


def test_long_rollouts_that_are_refused_three_times_as_often_as_short_ones_are_named():
    run_config = {**config(), "loss": {"kind": "ppo", "sequence_ratio_max": 1.1}}
    text = refused_advice(halves((0.3, 0.1), (0.6, 0.1)), run_config)
    assert "refuses 45% of the tokens of long rollouts and 10% of short ones" in text
    assert "(mean lag 5.9 and 0.8 steps)" in text
    assert "loss.sequence_ratio_max (now 1.1) wider, or schedule.max_lag higher (now 4)" in text
    assert refused_advice(halves((0.29, 0.1)), run_config) == "", "less than three times"
    assert refused_advice(halves((0.04, 0.0)), run_config) == "", "few tokens"
    assert refused_advice([], run_config) == refused_advice(clipped(0.9), run_config) == ""


def test_status_and_report_show_the_share_that_was_measured(store):
    write_run(store, Shape(steps=6))
    for key in store.list("commits"):
        record = Commit.model_validate_json(store.get(key))
        metrics = {**record.metrics, "importance/ratio_clipped_fraction": 0.25, **halves((0.4, 0.1))[0].metrics}
        store.delete([key])
        store.put(key, record.model_copy(update={"metrics": metrics}).model_dump_json().encode())
    follower = RunFollower(store)
    follower.refresh()
    for text in (status_of(follower, None)["warning"], build_report(store)["advice"]):
        assert "25% of the trained tokens are beyond a bound of loss.kind=reinforce" in text
        assert "loss.ratio_max (now 5)" in text
        assert "he lag rule or a bound of the loss refuses 40% of the tokens of long rollouts and 10% of" in text


def test_masked_tokens_are_named_although_the_lengths_show_no_bias():
    # 14 of 18 tokens are masked, and the trained ones come from longer completions than the generated: 1.2.
    lengths = {"generated": tokens(18, 10), "trained": tokens(4, 12), "masked_stale": tokens(14, 9)}
    text = advice(evidence(0.1, 0.1), lengths, config())["advice"]
    assert "78% of the tokens of trained groups were masked because of their lag" in text
    assert "Set schedule.max_lag higher (now 4), or engine.concurrency lower (now 96)" in text
    lengths = {"generated": tokens(18, 10), "trained": tokens(18, 10), "masked_stale": tokens(2, 10)}
    assert "masked" not in advice(evidence(0.1, 0.1), lengths, config())["advice"]


def test_lengths_that_are_about_the_same_are_not_mentioned():
    lengths = {"generated": tokens(80, 10) + tokens(20, 14), "trained": tokens(60, 10)}  # 10 over 10.8: 0.93
    assert "completions" not in advice(evidence(0.1, 0.1), lengths, config())["advice"]


def test_long_completions_that_are_still_ready_are_not_lost():
    lengths = {"generated": tokens(60, 10) + tokens(40, 40), "trained": tokens(60, 10), "ready": tokens(40, 40)}
    assert "the long completions have not been trained yet" in advice(evidence(0.1, 0.1), lengths, config())["advice"]


def test_a_run_that_was_too_short_or_is_of_another_release_gets_none():
    assert advice(None, {}, config()) == {"bottleneck": None, "advice": None}
    assert advice(evidence(0.1, 0.1), {}, {"engine": {"warp": 9}}) == {"bottleneck": None, "advice": None}


def test_shares_of_the_waits_are_over_the_time_between_first_and_last_step():
    # Committed at 0.7 and 16.7: 16 s. The trainer waited 4 s for engines; 8 s were lost on two actors.
    commits = [make_commit(step, reserved_at=at) for step, at in ((1, 0.0), (2, 16.0))]
    actors = {"a/1": None, "a/2": None, "b/1": None}
    waits = ({"engine": 1.0, "window": 0.5, "actors": 2.0}, {"engine": 5.0, "window": 0.5, "actors": 10.0})
    commits = [
        commit.model_copy(update={"waits": w, "actors": actors}) for commit, w in zip(commits, waits, strict=True)
    ]
    assert utilization.wait_shares(commits) == pytest.approx({"engine": 0.25, "window": 0.0, "actors": 0.25})
    assert utilization.wait_shares(commits[:1]) is None
    assert utilization.wait_shares([make_commit(1), make_commit(2)]) is None, "an older hub did not measure"


def test_a_report_has_the_figures_that_the_advice_uses(store):
    write_run(store, Shape(steps=12))
    report = build_report(store)
    # Eleven times 0.15 s over 8.8 s; the actors' 0.04 s on two actors.
    assert report["wait_fractions"] == pytest.approx(
        {"engine": 0.1875, "window": 0.0625, "stale_wait": 0.0, "actors": 0.025}
    )
    assert report["group_spread"] > 1
    assert report["length_bias"]["classes"]["trained"]["num_tokens"] == report["tokens_trained"]
    assert "(19% for the engines, 6% with slots empty for a full window)" in report["advice"]
