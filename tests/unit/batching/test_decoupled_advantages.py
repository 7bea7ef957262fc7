"""loss.advantage=decoupled: the rows of a step against the formulas, worked out in float64."""

from dataclasses import replace

import numpy as np
import pytest

from pipelinerl_core.batching.assemble import assemble_rows
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.types import RewardComponent
from tests.rollout_rows import build_group

WEIGHTS = {"correct": 2.0, "short": 0.5}
OVERRIDES = ("loss.advantage=decoupled", "reward.function=mine.py:score", "reward.weights={correct=2.0, short=0.5}")


def groups_of(*tables):
    """Groups of rollouts with these components; a component without a weight is a metric."""
    for group_id, table in enumerate(tables):
        group = build_group(0, group_id=group_id, size=len(table))
        yield [
            replace(
                rollout,
                reward=sum(weight * row[name] for name, weight in WEIGHTS.items()),
                reward_components=(
                    *(RewardComponent(name, value) for name, value in row.items()), RewardComponent("metric", 7.0)
                ),
            )
            for rollout, row in zip(group, table, strict=True)
        ]  # fmt: skip


def expected(tables, penalties=None):
    sums = []
    for place, table in enumerate(tables):
        columns = [(weight, np.array([row[name] for row in table])) for name, weight in WEIGHTS.items()]
        columns += [(1.0, np.array(penalties[place]))] if penalties else []
        sums.append(sum(weight * (c - c.mean()) / (c.std(ddof=1) + 1e-4) for weight, c in columns))
    flat = np.concatenate(sums)
    return (flat - flat.mean()) / (flat.std(ddof=1) + 1e-4)


TABLES = (
    [{"correct": 1.0, "short": 0.2}, {"correct": 0.0, "short": 0.9}, {"correct": 0.0, "short": 0.2}],
    [{"correct": 1.0, "short": 0.0}, {"correct": 1.0, "short": 0.3}],
)


def test_each_component_is_standardized_in_its_group_and_the_sum_over_the_step():
    rows = assemble_rows(1, list(groups_of(*TABLES)), load_config("quickstart", OVERRIDES)).rows
    assert [row.advantage for row in rows] == pytest.approx(expected(TABLES).tolist(), rel=1e-6)


def test_the_rounding_of_stored_rewards_is_no_component():
    tables = (
        [{"correct": 1000.3, "short": 0.7}, {"correct": 1000.1, "short": 0.1}, {"correct": 1000.2, "short": 0.4}],
    )
    stored = [[replace(rollout, reward=float(np.float32(rollout.reward))) for rollout in group]
              for group in groups_of(*tables)]  # fmt: skip
    assert any(left.reward != right.reward for left, right in zip(stored[0], next(groups_of(*tables)), strict=True))
    rows = assemble_rows(1, stored, load_config("quickstart", OVERRIDES)).rows
    assert [row.advantage for row in rows] == pytest.approx(expected(tables).tolist(), abs=1e-6)


def test_an_overlong_penalty_is_one_more_component():
    config = load_config("quickstart", [*OVERRIDES, "rollouts.max_tokens=12", "reward.overlong_tokens=4"])
    groups = list(groups_of(*TABLES))
    groups[0][1] = replace(groups[0][1], **shortened(groups[0][1], 6))
    rows = assemble_rows(1, groups, config).rows
    penalties = [[-1.0, 0.0, -1.0], [-1.0, -1.0]]
    assert [row.advantage for row in rows] == pytest.approx(expected(TABLES, penalties).tolist(), rel=1e-5)


def shortened(rollout, num_tokens):
    """The fields of the rollout with its first tokens only."""
    return {
        "completion_token_ids": rollout.completion_token_ids[:num_tokens],
        "rollout_logprobs": rollout.rollout_logprobs[:num_tokens],
        "loss_mask": rollout.loss_mask[:num_tokens],
        "weight_spans": tuple(
            span._replace(end=min(span.end, num_tokens)) for span in rollout.weight_spans if span.start < num_tokens
        ),
    }


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["loss.advantage=decoupled"], "reward.weights is empty"),
        ([*OVERRIDES, "rollouts.filter_zero_variance=true"], "gradient with loss.advantage=decoupled"),
    ],
)
def test_settings_that_do_not_go_with_it_are_refused(overrides, says):
    with pytest.raises(ConfigError, match=says):
        load_config("quickstart", overrides)
