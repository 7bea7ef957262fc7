"""The metrics of the parts of a mixture."""

from dataclasses import replace

import pytest

from pipelinerl_core.config.interleave import Interleave
from pipelinerl_core.messages import FateRecord
from pipelinerl_core.telemetry.parts import MIN_GROUPS, PartMetrics, parts_of, untrained_parts
from pipelinerl_core.types import Outcome, RewardComponent
from tests.rollout_rows import build_group

WEIGHTS = {"math": 2.0, "guess": 1.0}  # math math guess, math math guess, ...
CONFIG = {"mixture": {name: {"weight": weight} for name, weight in WEIGHTS.items()}}


def group(group_id, rewards):
    rows = build_group(0, group_id=group_id, size=len(rewards))
    return [
        replace(row, reward=reward, outcome=Outcome.SCORED if reward is not None else Outcome.ERROR,
                reward_components=(RewardComponent("near", 2.0),) if reward is not None else ())
        for row, reward in zip(rows, rewards, strict=True)
    ]  # fmt: skip


def fate(group_id, name):
    return FateRecord(group_id=group_id, attempt=0, fate=name, num_tokens=1)


def test_a_step_counts_rewards_and_fates_by_part_and_a_resume_continues_the_totals():
    metrics = PartMetrics(Interleave(WEIGHTS), WEIGHTS)
    first = metrics.step([group(0, [1.0, 0.0]), group(1, [1.0, None])], [fate(2, "failed"), fate(3, "filtered")])
    assert first["part/math/reward"] == pytest.approx(2 / 3)
    assert (first["part/math/rollouts"], first["part/math/error_fraction"]) == (4, 0.25)
    assert first["part/math/component/near"] == 2
    assert "part/guess/reward" not in first
    resumed = PartMetrics(Interleave(WEIGHTS), WEIGHTS)
    resumed.adopt(first)
    second = resumed.step([group(4, [1.0, 1.0])], [fate(5, "failed")])
    assert {key: value for key, value in second.items() if "groups_" in key} == {
        "part/math/groups_trained": 3, "part/math/groups_filtered": 1, "part/math/groups_failed": 0,
        "part/math/groups_dropped_stale": 0, "part/math/groups_quarantined": 0, "part/guess/groups_quarantined": 0,
        "part/guess/groups_trained": 0, "part/guess/groups_filtered": 0,
        "part/guess/groups_failed": 2, "part/guess/groups_dropped_stale": 0,
    }  # fmt: skip


def test_a_part_without_a_trained_group_is_named_after_enough_groups():
    def named(**groups):
        metrics = {f"part/guess/groups_{name}": float(num) for name, num in groups.items()}
        return untrained_parts(parts_of(CONFIG, {**metrics, "part/math/groups_trained": 99.0})).get("guess")

    assert named(failed=MIN_GROUPS - 1) is None
    assert named(failed=MIN_GROUPS, trained=1) is None
    assert named(failed=MIN_GROUPS).startswith("mixture.guess: all 8 groups failed, none is trained")
    assert "none of 8 groups is trained (6 filtered, 2 failed)" in named(failed=2, filtered=6)


def test_without_a_mixture_there_are_no_parts():
    assert parts_of({"seed": 0}, {"reward/mean": 1.0}) == {}
    assert parts_of({"mixture": {}}, {}) == {}
